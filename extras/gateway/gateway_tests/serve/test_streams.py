"""The logs of answers: who reads them, what is kept of them, and for how long."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from splitup_gateway.errors import ApiError
from splitup_gateway.streams import Head, Stream, StreamedCall, Streams, Work

from splitup.core import tuning
from splitup.core.errors import Throttled
from tests.builders import HANG_S

HEAD = Head("application/x-ndjson", {}, is_streamed=True, describe_error=lambda _: b"failed")


def ask(owner: str = "ann", digest: bytes = b"1", key: str = "") -> StreamedCall:
    return StreamedCall(owner, digest, key)


def say(*events: bytes) -> Work:
    async def work(stream: Stream) -> None:
        stream.begin(HEAD)
        await stream.append(events)

    return work


async def wait_for_ever(stream: Stream) -> None:
    stream.begin(HEAD)
    await asyncio.Event().wait()


async def read(stream: Stream, after: int = 0) -> bytes:
    async with asyncio.timeout(HANG_S):
        with stream.attach(after) as reader:
            await stream.wait_for_head()
            return b"".join([events async for events in reader])


@pytest.fixture
async def streams() -> AsyncIterator[Streams]:
    opened = Streams()
    yield opened
    await opened.close()


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


# ---- files: a second ``Streams`` is that of a server started after the first was killed ----------

TOLD = Head("application/x-ndjson", {"x": "y"}, is_streamed=True, describe_error=lambda e: b"cut")


def say_and_wait(*events: bytes) -> Work:
    async def work(stream: Stream) -> None:
        stream.begin(TOLD)
        for event in events:
            await stream.append([event])
        await asyncio.Event().wait()

    return work


async def cut(folder: Path, *events: bytes, key: str = "") -> str:
    """Let a server die after these events; return their stream's id."""
    dead = Streams(folder)
    stream = dead.join_or_start(ask(key=key), say_and_wait(*events))
    with stream.attach() as reader:
        await stream.wait_for_head()
        async with asyncio.timeout(HANG_S):
            seen = b""
            async for some in reader:
                seen += some
                if seen == b"".join(events):
                    break
        kept = (folder / stream.id).read_bytes()
        await dead.close()
        (folder / stream.id).write_bytes(kept)  # without the last lines of a server that ends
    return stream.id


async def test_a_stream_that_was_cut_goes_on_and_says_so(tmp_path: Path) -> None:
    cut_id = await cut(tmp_path, b"a", b"b", b"c", key="k")
    streams = Streams(tmp_path)
    stream = streams.find(cut_id, "ann")
    assert stream.head is not None and stream.head.headers == TOLD.headers
    assert await read(stream) == b"abccut" and await read(stream, 2) == b"ccut"
    assert await read(stream, 9) == b"cut", "never an end without a reason"
    with pytest.raises(ApiError):
        streams.find(cut_id, "bob")
    again = streams.join_or_start(ask(key="k"), say(b"x"))
    assert again is not stream and await read(again) == b"x"


async def test_a_stream_that_ended_is_the_same(tmp_path: Path) -> None:
    first = Streams(tmp_path)
    ended = first.join_or_start(ask(key="k"), say(b"a", b"b"))
    assert await read(ended) == b"ab"
    streams = Streams(tmp_path)
    again = streams.join_or_start(ask(key="k"), say(b"x"))
    assert again.id == ended.id and await read(again) == b"ab" and await read(again, 2) == b""
    with pytest.raises(ApiError, match="another request"):
        streams.join_or_start(ask(key="k", digest=b"2"), say(b"x"))


async def test_a_line_that_was_cut_off_is_not_read(tmp_path: Path) -> None:
    cut_id = await cut(tmp_path, b"a", b"b")
    path = tmp_path / cut_id
    path.write_bytes(path.read_bytes()[:-5])
    assert await read(Streams(tmp_path).find(cut_id, "ann")) == b"acut"
    path.write_bytes(b"{")
    assert not Streams(tmp_path)._streams and not path.exists()


async def test_s35_files_of_streams_are_private_and_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "streams" / "127.0.0.1:8000"
    monkeypatch.setattr(tuning, "STREAMS_OF_ONE", 2)
    streams = Streams(folder)
    for _ in range(3):
        await read(streams.join_or_start(ask(), say(b"a")))
    assert folder.stat().st_mode & 0o777 == 0o700
    left = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert [path.stat().st_mode & 0o777 for path in left] == [0o600] * 2
    monkeypatch.setattr(tuning, "STREAMS_OF_ONE", 1)
    assert list(Streams(folder)._streams) == [left[1].name] and not left[0].exists()
    long_ago = left[1].stat().st_mtime - tuning.STREAM_KEEP_S
    os.utime(left[1], (long_ago, long_ago))
    assert not Streams(folder)._streams and not left[1].exists()


async def test_s35_a_long_stream_has_a_short_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "STREAM_BYTES", 50)
    monkeypatch.setattr(tuning, "STREAM_FILE_BYTES", 1_000)
    cut_id = await cut(tmp_path, *(b"%03d" % number for number in range(200)))
    assert (tmp_path / cut_id).stat().st_size < 2_000
    stream = Streams(tmp_path).find(cut_id, "ann")
    assert (await read(stream, 190)).startswith(b"190191")
    with pytest.raises(ApiError) as gone:
        await read(stream, 2)
    assert gone.value.status == 410


async def test_a_stream_goes_on_without_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    streams = Streams(tmp_path / "streams")
    (tmp_path / "streams").rmdir()
    with caplog.at_level(logging.WARNING):
        stream = streams.join_or_start(ask(), say(b"a", b"b"))
        assert await read(stream) == b"ab"
    assert caplog.text.count("outlive this server") == 1
