"""A client that leaves waits for what the store still owes it, and says so."""

from __future__ import annotations

import asyncio
import logging

import pytest

from splitup.client.execution.opening import wait_stored
from splitup.core import tuning

ID = "0x" + "ab" * 32


async def test_a_store_that_takes_long_is_named_and_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "QUIET_S", 0.0)
    stored, said = asyncio.Event(), asyncio.Event()

    async def store() -> None:
        await stored.wait()

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.set()

    ear, log = Ear(), logging.getLogger("splitup.client")
    log.addHandler(ear)
    task = asyncio.create_task(store(), name=ID)
    try:
        waiting = asyncio.create_task(wait_stored([task]))
        await said.wait()
        assert ID in caplog.messages[0]
        assert not waiting.done()
        stored.set()
        await waiting
    finally:
        log.removeHandler(ear)
    assert task.done()


async def test_a_store_that_fails_at_once_ends_the_wait_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def store() -> None:
        raise ValueError

    await wait_stored([asyncio.create_task(store())])
    await wait_stored([])
    assert not caplog.messages
