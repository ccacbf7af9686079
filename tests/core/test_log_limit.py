"""A stranger fills no disk: warnings and errors of one kind are limited, and counted."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from splitup.core import tuning
from splitup.core.log_limit import WarningLimit


class Written(io.StringIO):
    def take(self) -> list[str]:
        lines = self.getvalue().splitlines()
        self.seek(0)
        self.truncate()
        return lines


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def written(clock: Clock) -> Iterator[Written]:
    stream, logger = Written(), logging.getLogger("limited")
    handler = logging.StreamHandler(stream)
    handler.addFilter(WarningLimit(clock))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield stream
    logger.removeHandler(handler)


def fault(peer: str, reason: str) -> None:
    logging.getLogger("limited").warning(f"fault of {peer}: {reason}")  # no constant format string


def fail(path: str) -> None:
    try:
        raise ValueError("internal")
    except ValueError:
        logging.getLogger("limited").exception("%s failed", path)


def test_many_strangers_cause_few_lines(written: Written, clock: Clock) -> None:
    for number in range(10_000):
        fault(f"0x{number:040x}", "not active in the registry")
    assert len(written.take()) == tuning.LOG_WARNINGS
    logging.getLogger("limited").warning("another kind: %s", 7)
    assert written.take() == ["another kind: 7"]
    clock.now += tuning.LOG_PERIOD_S
    fault("0xab", "100 %")
    left_out = 10_000 - tuning.LOG_WARNINGS
    assert written.take() == [f"fault of 0xab: 100 % ({left_out} such lines were left out)"]
    fault("0xcd", "late")
    assert written.take() == ["fault of 0xcd: late"]


def test_a_fault_that_a_stranger_repeats_writes_few_tracebacks(written: Written) -> None:
    for number in range(1_000):
        fail(f"GET /{number}")
    assert written.take().count("ValueError: internal") == tuning.LOG_WARNINGS


def test_lines_below_a_warning_are_never_left_out(written: Written) -> None:
    for number in range(2 * tuning.LOG_WARNINGS):
        logging.getLogger("limited").info("block %d", number)
    assert len(written.take()) == 2 * tuning.LOG_WARNINGS
