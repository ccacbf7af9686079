"""Files of streams: a second ``Streams`` is that of a server started after the first was killed."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest
from gateway_tests.serve.streaming.told_streams import ask, read, say
from splitup_gateway.errors import ApiError
from splitup_gateway.streaming.stream import Head, Stream
from splitup_gateway.streaming.streams import Streams, Work

from splitup.core import tuning
from tests.builders import HANG_S

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


async def test_s105_a_long_answer_in_one_piece_has_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "STREAM_FILE_BYTES", 1_000)
    streams = Streams(tmp_path)
    for length, files in ((1_000, 1), (1_001, 1)):
        stream = streams.join_or_start(ask(), say(b"a" * length))
        assert len(await read(stream)) == length
        assert len(os.listdir(tmp_path)) == files


async def test_a_stream_goes_on_without_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    streams = Streams(tmp_path / "streams")
    (tmp_path / "streams").rmdir()
    with caplog.at_level(logging.WARNING):
        stream = streams.join_or_start(ask(), say(b"a", b"b"))
        assert await read(stream) == b"ab"
    assert caplog.text.count("outlive this server") == 1
