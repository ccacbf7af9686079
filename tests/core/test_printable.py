"""Strangers' words for terminals and logs."""

from __future__ import annotations

import io
import logging

import pytest

from splitup.core.printable import OneLine, printable, printable_lines

TEXT = "gone\x1b[2J\n2026-11-27 INFO splitup: all is well\u2028\x85\ud800"


def test_s65_nobody_else_begins_a_line_of_a_log() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    handler.addFilter(OneLine())
    logger = logging.Logger("splitup.test")
    logger.addHandler(handler)
    logger.warning("it said: %s", TEXT)
    try:
        raise ValueError(TEXT)
    except ValueError:
        logger.exception("a request failed")
    assert isinstance(stream.buffer, io.BytesIO)
    written = stream.buffer.getvalue().decode()
    first, second, *trace = written.splitlines()
    assert (first[:7], second) == ("WARNING", "ERROR: a request failed")
    assert all(line.startswith("  ") for line in trace) and "all is well" in trace[-1]
    assert "\x1b" not in written


@pytest.mark.parametrize("text", ["", "0F:AB:12 [bold]", "Größe → µs", "日本"])
def test_what_can_be_shown_stays(text: str) -> None:
    assert printable(text) == printable_lines(text) == text
    assert printable_lines(f"{text}\n\t{text}") == f"{text}\n\t{text}"
