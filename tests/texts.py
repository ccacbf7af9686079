"""Texts of a certain length, for tests and benchmarks of what happens in the middle of one."""

from __future__ import annotations

from dataclasses import replace

from splitup.decode.sequential import SequentialDecoder
from splitup.decode.step import Decoder


def go_on(decoder: Decoder) -> None:
    """Let a text go on where the model would end it, up to the number of tokens asked for."""
    assert isinstance(decoder, SequentialDecoder)
    decoder._request = replace(decoder._request, eos_ids=frozenset())
