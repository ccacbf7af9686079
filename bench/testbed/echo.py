"""The floor under a transition: a bare WebSocket exchange between two processes.

    python -m bench.testbed.echo    # serves until stdin ends; prints its URL
    python -m bench.testbed.echo URL    # answers "SIZE COUNT" lines with a median in ms each

It uses the node's HTTP library and event loop, and nothing else.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import uvloop
from aiohttp import web

from bench.testbed.run_python import run_lines
from splitup.net.http_server import make_app, serve_app

_MAX_BYTES = 2**24
_MODULE = "bench.testbed.echo"

Measure = Callable[[int, int], Awaitable[float]]  # (bytes, exchanges) -> median in ms


async def serve() -> None:
    """Send every message back."""

    async def handle(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=_MAX_BYTES, compress=False)
        await socket.prepare(request)
        async for message in socket:
            await socket.send_bytes(message.data)
        return socket

    app = make_app()
    app.router.add_get("/", handle)
    server = await serve_app(app, "127.0.0.1", 0)
    print(server.url, flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def call(url: str) -> None:
    """Answer every line of stdin with the median exchange."""
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(url, max_msg_size=_MAX_BYTES, compress=0) as socket,
    ):
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            size, count = map(int, line.split())
            data, times = bytes(size), []
            for _ in range(count):
                begun = time.perf_counter()
                await socket.send_bytes(data)
                await socket.receive_bytes()
                times.append(time.perf_counter() - begun)
            print(statistics.median(times) * 1000, flush=True)


@asynccontextmanager
async def run_echo() -> AsyncIterator[Measure]:
    """Start both processes; yields the function that measures exchanges between them."""
    async with run_lines(_MODULE) as (url, _), run_lines(_MODULE, url.strip()) as (_, ask):

        async def measure(size: int, count: int) -> float:
            return float(await ask(f"{size} {count}"))

        yield measure


if __name__ == "__main__":
    uvloop.run(call(sys.argv[1]) if sys.argv[1:] else serve())
