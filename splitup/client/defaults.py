"""Defaults that the client and its command line share. Imports nothing, so that help is fast."""

from __future__ import annotations

from typing import Final

DEADLINE_S: Final = 30.0  # after it an execution has failed and its money can be fetched back
RECEIPT_TIMEOUT_S: Final = 120.0
MAX_TOKENS: Final = 64
