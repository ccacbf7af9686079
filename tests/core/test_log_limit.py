"""A stranger fills no disk: warnings of one kind are limited, and counted."""

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


def test_many_strangers_cause_few_lines(written: Written, clock: Clock) -> None:
    log = logging.getLogger("limited")
    for number in range(10_000):
        log.warning("fault of %s: %s", f"0x{number:040x}", "not active in the registry")
    assert len(written.take()) == tuning.LOG_WARNINGS
    log.warning("another kind: %s", 7)
    assert written.take() == ["another kind: 7"]
    clock.now += tuning.LOG_PERIOD_S
    log.warning("fault of %s: %s", "0xab", "100 %")
    left_out = 10_000 - tuning.LOG_WARNINGS
    assert written.take() == [f"fault of 0xab: 100 % ({left_out} such lines were left out)"]
    log.warning("fault of %s: %s", "0xcd", "late")
    assert written.take() == ["fault of 0xcd: late"]


def test_a_daemon_s_own_lines_are_never_left_out(written: Written) -> None:
    log = logging.getLogger("limited")
    for number in range(2 * tuning.LOG_WARNINGS):
        log.info("block %d", number)
    assert len(written.take()) == 2 * tuning.LOG_WARNINGS
    for _ in range(2 * tuning.LOG_WARNINGS):
        try:
            raise ValueError("internal")
        except ValueError:
            log.exception("%s failed", "GET /")
    assert written.take().count("ValueError: internal") == 2 * tuning.LOG_WARNINGS
