"""Defaults that the client and its command line share. Imports nothing, so that help is fast."""

from __future__ import annotations

from typing import Final

DEADLINE_S: Final = 30.0  # after it an execution has failed and its money can be fetched back
DEADLINE_STEP_S: Final = 2.0  # more for each step: nobody waits for a text that is slower
MAX_DEADLINE_S: Final = 600.0  # the money of an execution that fails is locked until then
RECEIPT_TIMEOUT_S: Final = 120.0
MAX_TOKENS: Final = 64


def get_deadline_s(steps: int) -> float:
    """Return the seconds that an execution of so many steps gets when nobody names others."""
    return min(DEADLINE_S + DEADLINE_STEP_S * steps, MAX_DEADLINE_S)
