"""Processes with one key use it one after the other."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from splitup.chain import account_lock
from splitup.chain.account_lock import AccountLock
from splitup.core.errors import Unavailable

ADDRESS = "0x" + "ab" * 20
HOLD = """
import asyncio, sys
from splitup.chain.account_lock import AccountLock

async def hold():
    async with AccountLock(1, {address!r}, "spend").hold():
        print("held", flush=True)
        sys.stdin.readline()
        print("released", flush=True)

asyncio.run(hold())
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


async def wait_for(condition: Callable[[], bool]) -> None:
    """Let the other tasks run until the condition holds."""
    while True:
        if condition():
            return
        await asyncio.sleep(0)


@contextmanager
def other_process() -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the account until it reads a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(address=ADDRESS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


async def test_the_second_process_waits_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(account_lock, "_SILENT_S", 0.0)
    said = asyncio.Event()

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.set()

    log, ear = logging.getLogger("splitup.chain.account_lock"), Ear()
    log.addHandler(ear)
    try:
        with other_process() as process:
            lock = AccountLock(1, ADDRESS, "spend")
            waiting = asyncio.create_task(lock.acquire())
            await said.wait()
            assert caplog.messages == ["another command is using this account; waiting…"]
            assert not waiting.done()
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            await waiting
            lock.release()
    finally:
        log.removeHandler(ear)


async def test_who_has_to_give_up_is_told_to_try_again() -> None:
    with other_process():
        lock = AccountLock(1, ADDRESS, "spend")
        with pytest.raises(Unavailable, match=r"^another command is using this account; try again"):
            await lock.acquire(timeout_s=0.0)
        async with AccountLock(1, "0x" + "cd" * 20, "spend").hold():
            pass  # another account is free
        async with AccountLock(1, ADDRESS, "send").hold():
            pass  # and so is this one for another purpose


async def test_a_process_that_is_killed_releases_the_account() -> None:
    lock = AccountLock(1, ADDRESS, "spend")
    with other_process() as process:
        process.kill()
        process.wait()
        await lock.acquire()
    lock.release()


async def test_tasks_of_one_process_share_the_account() -> None:
    lock, other = AccountLock(1, ADDRESS, "spend"), AccountLock(1, ADDRESS, "spend")
    async with lock.hold(), lock.hold():
        with pytest.raises(Unavailable):
            await other.acquire(timeout_s=0.0)
    async with other.hold():
        assert other.take_note_of_use()
        assert not other.take_note_of_use()
    async with lock.hold():
        assert lock.take_note_of_use(), "the other one used it"


async def test_a_turn_ends_when_another_process_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account_lock, "_TURN_S", -1.0)
    first, second = AccountLock(1, ADDRESS, "spend"), AccountLock(1, ADDRESS, "spend")
    await first.acquire()
    await first.acquire()  # nobody waits: the turn goes on
    order: list[str] = []

    async def take(lock: AccountLock, name: str) -> None:
        async with lock.hold():
            order.append(name)

    waiting = asyncio.create_task(take(second, "second"))
    await wait_for(first._is_wanted)
    again = asyncio.create_task(take(first, "first"))
    await wait_for(first._entering.locked)
    first.release()
    first.release()
    await asyncio.gather(waiting, again)
    assert order == ["second", "first"]


async def test_without_a_place_for_the_lock_commands_still_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"splitup-{os.getuid()}").write_text("not a directory")
    lock = AccountLock(1, ADDRESS, "spend")
    async with lock.hold():
        assert not lock.take_note_of_use()


@pytest.mark.parametrize("is_link", [False, True])
async def test_s75_a_directory_of_another_user_holds_no_locks(
    is_link: bool, tmp_path: Path
) -> None:
    """Its name is known: who makes it first could hold all locks of a user for ever."""
    folder = account_lock._get_directory()
    other = tmp_path / "other" if is_link else folder
    other.mkdir()
    if is_link:
        folder.symlink_to(other)
    else:
        folder.chmod(0o777)
    path = folder / f"1-{ADDRESS}.spend"
    path.touch()
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        lock = AccountLock(1, ADDRESS, "spend")
        await lock.acquire(timeout_s=0)
        lock.release()
