from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from splitup.devnet import disk
from splitup.devnet.network import Devnet, DevnetOptions
from splitup.devnet.processes import spawn
from splitup.devnet.restarts import HEALTHY_S, LONGEST_PAUSE_S, Restarts
from splitup.devnet.state import read_runtime


def test_pauses_double_up_to_a_minute() -> None:
    restarts, now, pauses = Restarts(), 0.0, []
    for _ in range(8):
        pause_s = restarts.process_end("node-0", now)
        pauses.append(pause_s)
        assert restarts.list_due(now + pause_s - 0.1) == []
        now += pause_s
        assert restarts.list_due(now) == ["node-0"]
        restarts.process_start("node-0", now)
        assert restarts.list_due(now + 1e6) == []
        now += 1.0  # it ends again soon
    assert pauses == [1, 2, 4, 8, 16, 32, 60, LONGEST_PAUSE_S]


def test_a_process_that_ran_for_long_is_started_again_at_once() -> None:
    restarts = Restarts()
    for _ in range(4):
        restarts.process_end("node-0", 0.0)
        restarts.process_start("node-0", 0.0)
    assert restarts.process_end("node-0", HEALTHY_S) == 1
    assert restarts.process_end("node-1", HEALTHY_S) == 1, "each process has pauses of its own"


async def test_up_starts_a_process_again_and_says_so_in_a_line(tmp_path: Path) -> None:
    said: list[str] = []
    restarted = asyncio.Event()
    net = Devnet(DevnetOptions(tmp_path), said.append)
    first = spawn("node-0", [sys.executable, "-c", "raise SystemExit(3)"], log=tmp_path / "log")
    first.process.wait()
    net._groups.append([first])
    sleep = "import time; time.sleep(600)"
    net._commands["node-0"] = [sys.executable, "-c", sleep]
    start_again = net._start_again

    def note(name: str) -> None:
        start_again(name)
        restarted.set()

    net._start_again = note  # type: ignore[method-assign]
    watching = asyncio.create_task(net.watch(restart=True))
    try:
        await restarted.wait()
        [second] = net.children
        assert second.is_running() and second.pid != first.pid
        assert [process.pid for process in read_runtime(tmp_path).processes] == [second.pid]
        assert said == [f"{first.describe_exit()}; starting it again in 1 s"]
        assert "\n" not in said[0] and "ended with exit code 3" in said[0]
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await net.stop()


def test_a_low_disk_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = disk.LEAST_FREE_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    said: list[str] = []
    net = Devnet(DevnetOptions(tmp_path), said.append)
    net._check_disk()
    assert not said
    free -= 10**9
    for _ in range(3):
        net._check_disk()
    assert len(said) == 1 and "1.0 GB are free" in said[0] and "--dir" in said[0]
