"""When a program says whom it waits for."""

from __future__ import annotations

import asyncio

import pytest

from splitup.core import tuning
from splitup.core.silence import SilenceAlarm


async def test_a_silence_is_told_once_and_progress_begins_it_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "QUIET_S", 0.0)
    told: list[str] = []
    with SilenceAlarm(lambda: told.append("silent")) as alarm:
        alarm.note_progress()
        for _ in range(3):
            await asyncio.sleep(0)
        assert told == ["silent"]
        alarm.note_progress()
    for _ in range(3):
        await asyncio.sleep(0)
    assert told == ["silent"]  # what came in time is not told
