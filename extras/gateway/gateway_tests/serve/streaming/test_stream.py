"""The log of an answer: who tells it, and who reads it."""

from __future__ import annotations

import asyncio

import pytest
from gateway_tests.serve.streaming.told_streams import HEAD, ask, read, say
from splitup_gateway.errors import ApiError
from splitup_gateway.streaming.stream import Stream
from splitup_gateway.streaming.streams import Streams

from splitup.core import tuning


async def test_any_number_of_readers_read_the_same(streams: Streams) -> None:
    stream = streams.join_or_start(ask(), say(b"a", b"b", b"c"))
    assert await asyncio.gather(*(read(stream) for _ in range(3))) == [b"abc"] * 3
    assert await read(stream, 2) == b"c" and await read(stream, 9) == b""


async def test_a_text_that_nobody_reads_pauses_until_its_client_comes_back(
    streams: Streams,
) -> None:
    told: list[int] = []

    async def work(stream: Stream) -> None:
        stream.begin(HEAD)
        for number in range(9):
            await stream.append([b"x"])
            told.append(number)
            await asyncio.sleep(0)

    stream = streams.join_or_start(ask(), work)
    with stream.attach() as reader:
        assert await anext(aiter(reader))
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(told) < 5, "no step is computed for nobody"
    assert await read(stream) == b"x" * 9


async def test_a_slow_reader_holds_the_producer_and_no_other_reader(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "STREAM_BYTES", 4)
    told: list[int] = []

    async def work(stream: Stream) -> None:
        stream.begin(HEAD)
        for number in range(9):
            await stream.append([b"x"])
            told.append(number)

    stream = streams.join_or_start(ask(), work)
    with stream.attach() as slow:
        whole = asyncio.create_task(read(stream))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(told) == 4, "as much as is kept"
        other = streams.join_or_start(ask("bob"), say(b"y"))
        assert await read(other) == b"y"
        assert b"".join([events async for events in slow]) == b"x" * 9
        assert await whole == b"x" * 9
    with pytest.raises(ApiError, match="no longer kept") as gone:
        await read(stream)
    assert gone.value.status == 410 and stream.size <= 4 + 1
