"""The streams of a server: who joins what, what is kept of them, and for how long."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from gateway_tests.serve.streaming.told_streams import ask, read, say, wait_for_ever
from splitup_gateway.errors import ApiError
from splitup_gateway.streaming.stream import Head, Stream, StreamedCall
from splitup_gateway.streaming.streams import Streams

from splitup.core import tuning
from splitup.core.errors import Throttled


async def test_a_refused_request_is_forgotten(streams: Streams) -> None:
    async def refuse(_: Stream) -> None:
        raise ApiError("no")

    stream = streams.join_or_start(ask(key="k"), refuse)
    with pytest.raises(ApiError, match="no"):
        await read(stream)
    again = streams.join_or_start(ask(key="k"), say(b"yes"))
    assert again is not stream and await read(again) == b"yes"
    with pytest.raises(ApiError):
        streams.find(stream.id, "ann")


async def test_what_failed_is_tried_again_and_can_still_be_read(streams: Streams) -> None:
    async def fail(stream: Stream) -> None:
        await say(b"half ")(stream)
        raise ApiError("no")

    stream = streams.join_or_start(ask(key="k"), fail)
    assert await read(stream) == b"half failed"
    assert streams.join_or_start(ask(key="k"), say(b"")) is not stream
    assert streams.find(stream.id, "ann") is stream


async def test_a_retry_without_a_key_joins_only_what_its_client_lost(streams: Streams) -> None:
    first = streams.join_or_start(ask(), wait_for_ever)
    retry = StreamedCall("ann", b"1", retries=1)
    with first.attach():
        assert streams.join_or_start(retry, wait_for_ever) is not first, "somebody reads it"
    lost = streams.join_or_start(StreamedCall("ann", b"2", retries=0), wait_for_ever)
    with lost.attach():
        await lost.wait_for_head()
    assert streams.join_or_start(StreamedCall("ann", b"2", retries=1), wait_for_ever) is lost
    assert streams.join_or_start(StreamedCall("ann", b"2", retries=0), wait_for_ever) is not lost
    assert streams.join_or_start(StreamedCall("bob", b"2", retries=1), wait_for_ever) is not lost
    assert streams.join_or_start(StreamedCall("ann", b"3", retries=1), wait_for_ever) is not lost


@pytest.mark.parametrize("bound", ["STREAMS_OF_ONE", "STREAMS"])
async def test_s35_few_ended_streams_are_kept(
    bound: str, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, bound, 2)
    first = streams.join_or_start(ask("bob"), say(b"b"))
    await read(first)
    kept = [streams.join_or_start(ask(), say(b"a")) for _ in range(3)]
    for stream in kept:
        await read(stream)
    with pytest.raises(ApiError):
        streams.find(kept[0].id, "ann")
    assert [streams.find(one.id, "ann") for one in kept[1:]] == kept[1:]
    if bound == "STREAMS_OF_ONE":  # one key's do not push out another's
        assert streams.find(first.id, "bob") is first


async def test_s35_few_bytes_are_kept(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "STREAMS_BYTES_OF_ONE", 15)
    kept = [streams.join_or_start(ask(), say(bytes(10))) for _ in range(3)]
    for stream in kept:
        await read(stream)
    with pytest.raises(ApiError):
        streams.find(kept[1].id, "ann")
    assert streams.find(kept[2].id, "ann") is kept[2]


async def test_s35_what_is_forgotten_leaves_memory(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "STREAMS_OF_ONE", 1)

    async def end_alone(stream: Stream) -> None:
        stream.begin(Head("text/event-stream", {}, is_streamed=True))
        with stream.attach():
            await stream.append([b"a"])

    begun = [streams.join_or_start(ask(), end_alone) for _ in range(2)]
    await asyncio.gather(*(one.task for one in begun if one.task is not None))
    first = weakref.ref(begun[0])
    begun.clear()
    gc.collect()
    assert first() is None, "no timer holds it"


async def test_s35_ended_streams_are_kept_for_some_time(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "STREAM_KEEP_S", 0)
    stream = streams.join_or_start(ask(), say(b"a"))
    assert await read(stream) == b"a"
    await asyncio.sleep(0.01)
    with pytest.raises(ApiError, match="keeps no such stream"):
        streams.find(stream.id, "ann")


async def test_s35_few_streams_of_a_key_run(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "STREAMS_UNREAD", 1)
    monkeypatch.setattr(tuning, "STREAMS_RUNNING", 4)
    left = []
    for number in range(3):
        left.append(streams.join_or_start(ask(digest=bytes([number])), wait_for_ever))
        with left[-1].attach():
            await left[-1].wait_for_head()
    streams.join_or_start(ask(digest=b"x"), wait_for_ever)
    for stream in left[:2]:  # nobody reads them, and there is one more of these
        assert await read(stream) == b"failed"
    assert not left[2].is_ended
    for number in range(2):
        streams.join_or_start(ask(digest=bytes([9, number])), wait_for_ever)
    with pytest.raises(Throttled):
        streams.join_or_start(ask(digest=b"y"), wait_for_ever)
    streams.join_or_start(ask("bob"), wait_for_ever)
