"""What tests start ends with their process, however that ends."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import HANG_S

SLEEP = [sys.executable, "-c", f"import time; time.sleep({HANG_S})"]
NETWORK = f"""
import sys, time
from pathlib import Path
from splitup.devnet.processes import spawn
print(spawn("member", {SLEEP!r}, log=Path(sys.argv[1])).pid, flush=True)
time.sleep({HANG_S})
"""
# What a worker of pytest does: it loads conftest.py, and a test starts things.
WORKER = f"""
import asyncio, subprocess, sys, time
import conftest

async def test():
    plain = subprocess.Popen({SLEEP!r}, start_new_session=True)
    other = await asyncio.create_subprocess_exec(*{SLEEP!r})
    command = [sys.executable, "-c", {NETWORK!r}, sys.argv[1]]
    network = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    print(plain.pid, other.pid, network.pid, int(network.stdout.readline()), flush=True)
    time.sleep({HANG_S})

asyncio.run(test())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_a_tree_of_processes_ends_with_a_killed_worker(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(tmp_path / "log")]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        running = [os.pidfd_open(int(pid)) for pid in worker.stdout.readline().split()]
        assert len(running) == 4 and not select.select(running, [], [], 0)[0]
        worker.kill()
        for descriptor in running:
            assert select.select([descriptor], [], [], HANG_S)[0]
            os.close(descriptor)
