"""What a node's owner is told: each problem once."""

from __future__ import annotations

import logging
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from splitup_node.health import Health

from splitup.chain.clock import ChainClock
from splitup.storage.journal import Journal

_Usage = namedtuple("_Usage", "total used free")


async def test_a_low_disk_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = iter([4096, 2048, 1024, 10**9])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(10**9, 0, next(free)))
    with Journal.open(tmp_path) as journal, caplog.at_level(logging.INFO):
        health = Health(journal, tmp_path, ChainClock())
        for _ in range(3):
            await health.look()
            assert "less than 16 MiB left" in health.trouble
        await health.look()
        assert not health.trouble
    said = [record.getMessage() for record in caplog.records if record.name.endswith("health")]
    assert len(said) == 2 and said[1] == "all earlier problems are solved"


async def test_unreachable_members_are_a_warning(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        health = Health(journal, tmp_path, ChainClock())
        health.note_heartbeats({"member A does not answer"}, 4)
        assert "none of the 4 committee members" in health.warnings[0]
        health.check()  # work that is under way goes on
        health.note_heartbeats(set(), 4)
        assert not health.warnings


async def test_a_device_that_is_gone_is_a_warning_until_it_is_back(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        health = Health(journal, tmp_path, ChainClock())
        health.note_workers("worker 1: the device does not answer any more")
        assert "worker 1: the device does not answer any more" in health.warnings[0]
        health.check()  # the other devices go on
        health.note_workers("")
        assert not health.warnings
