"""Logs that are too short are waited for once, and not long after the deadline."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from splitup.core import tuning
from splitup.messages.base import CLIENT
from splitup.net.object_transfer import NotStored
from splitup.storage import log_store
from splitup.storage.log_store import LogIncomplete, LogPatience, iter_tensors

DEADLINE_S, TASKS, READERS, NODE = 1_000, 8, 5, "0x" + "ab" * 20
REQUEST: Any = SimpleNamespace(
    execution_id="0x" + "01" * 32, client="0x" + "33" * 20, deadline=DEADLINE_S
)
SPEC: Any = SimpleNamespace(accepts=lambda length: True)


class Clock:
    """Time that passes while somebody sleeps, and a store that has nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chain_s: float = 0.0) -> None:
        self.now_s, self._chain_s = 0.0, chain_s
        monkeypatch.setattr(log_store, "asyncio", SimpleNamespace(sleep=self.sleep))

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)

    async def read(self, *_: object) -> bytes:
        raise NotStored("there is no such object")

    def make_patience(self, *, is_drawn: bool = True) -> LogPatience:
        return LogPatience(
            is_drawn=is_drawn,
            now_s=lambda: self._chain_s + self.now_s,
            monotonic=lambda: self.now_s,
        )

    async def miss(self, patience: LogPatience, source: int = CLIENT) -> float:
        """Read a log; return for how long that was waited for."""
        store: Any = self
        began = self.now_s
        with pytest.raises(LogIncomplete, match="ends before step 1; it has 0"):
            reading = iter_tensors(store, REQUEST, (source, 0), [NODE], SPEC, 1, patience)
            await anext(reading)
        return self.now_s - began


async def test_an_execution_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    patience = clock.make_patience()
    waited = [await clock.miss(patience) for _ in range(TASKS)]
    assert waited[0] == pytest.approx(tuning.LOG_LATE_S, abs=tuning.LOG_POLL_S)
    assert waited[1:] == [0.0] * (TASKS - 1)


async def test_one_reader_after_the_other_waits_no_longer_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Members ask the next validator when one could not read the inputs of a killed client."""
    clock = Clock(monkeypatch, DEADLINE_S - tuning.AGREE_MARGIN_S)
    for _ in range(READERS):
        await clock.miss(clock.make_patience())
    most_s = tuning.AGREE_MARGIN_S + tuning.LOG_LATE_S + tuning.LOG_POLL_S
    assert clock.now_s <= most_s


async def test_what_executors_lack_after_the_draw_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    assert await clock.miss(clock.make_patience(), 0) == 0.0
    before = clock.make_patience(is_drawn=False)
    assert await clock.miss(before, 0) > 0.0
    assert await clock.miss(before) == 0.0


def test_many_executions_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MAX_FINISHED", 3)
    patience = LogPatience(is_drawn=True)
    for number in range(9):
        request: Any = SimpleNamespace(execution_id=hex(number), deadline=DEADLINE_S)
        patience.begin(request, (CLIENT, 0))
    assert list(patience._ends) == ["0x6", "0x7", "0x8"]
