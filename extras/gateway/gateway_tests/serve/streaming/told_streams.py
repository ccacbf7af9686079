"""Requests and answers of streams that tests tell and read."""

from __future__ import annotations

import asyncio

from splitup_gateway.streaming.stream import Head, Stream, StreamedCall
from splitup_gateway.streaming.streams import Work

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
