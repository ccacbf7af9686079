"""The floor under a transition: a bare WebSocket exchange between two processes.

    python -m bench.testbed.echo serve URL_FILE
    python -m bench.testbed.echo call URL  # reads "SIZE COUNT" lines, prints a median in ms each

It uses the node's HTTP library and event loop, and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import uvloop
from aiohttp import web

from splitup.devnet.processes import spawn
from splitup.devnet.state import write_json
from splitup.net.http import make_app, serve_app

_MAX_BYTES = 2**24

Measure = Callable[[int, int], Awaitable[float]]  # (bytes, exchanges) -> median in ms


async def serve(file: Path) -> None:
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
    write_json(file, server.url)
    await asyncio.Event().wait()


async def call(url: str) -> None:
    """Answer every line of stdin with the median exchange."""
    loop = asyncio.get_running_loop()
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(url, max_msg_size=_MAX_BYTES, compress=0) as socket,
    ):
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            size, count = map(int, line.split())
            data, times = bytes(size), []
            for _ in range(count):
                begun = time.perf_counter()
                await socket.send_bytes(data)
                await socket.receive_bytes()
                times.append(time.perf_counter() - begun)
            print(statistics.median(times) * 1000, flush=True)


@asynccontextmanager
async def run_echo(directory: Path) -> AsyncIterator[Measure]:
    """Start both processes; yields the function that measures exchanges between them."""
    file = directory / "echo"
    command = [sys.executable, "-m", "bench.testbed.echo", "serve", file]
    server = spawn("echo", command, log=directory / "echo.log")
    caller: asyncio.subprocess.Process | None = None
    try:
        while not file.exists():
            server.check_running()
            await asyncio.sleep(0.02)
        caller = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.testbed.echo", "call", json.loads(file.read_text())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        stdin, stdout = caller.stdin, caller.stdout
        assert stdin is not None and stdout is not None

        async def measure(size: int, count: int) -> float:
            stdin.write(f"{size} {count}\n".encode())
            return float(await stdout.readline())

        yield measure
        stdin.close()
        await caller.wait()
    finally:
        if caller is not None and caller.returncode is None:
            caller.kill()
            await caller.wait()
        server.stop()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        uvloop.run(serve(Path(sys.argv[2])))
    else:
        uvloop.run(call(sys.argv[2]))
