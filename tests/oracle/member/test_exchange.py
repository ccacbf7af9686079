"""What the members' tests rest on: a cut is silent both ways, and nobody else feels it."""

from __future__ import annotations

import asyncio
import os
import sys

from tests.builders import HANG_S
from tests.oracle.exchange import Exchange

_CALLER = """
import socket, sys
for line in sys.stdin:
    link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    link.sendall(b"hello")
    print(link.recv(5).decode(), flush=True)
"""


async def test_a_cut_process_reaches_nobody_and_nobody_else_is_held_up() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(5))
        await writer.drain()
        writer.close()

    async def call(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(b"hello")
            return await reader.read(5)
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    exchange = Exchange()
    port = await exchange.open(0, server.sockets[0].getsockname()[1])
    arguments = (sys.executable, "-c", _CALLER, str(port))
    caller = await asyncio.create_subprocess_exec(*arguments, stdin=-1, stdout=-1)
    assert caller.stdin and caller.stdout
    try:
        async with asyncio.timeout(HANG_S):
            caller.stdin.write(b"\n")
            assert await caller.stdout.readline() == b"hello\n"
            exchange.cut(1, caller.pid)
            caller.stdin.write(b"\n")  # it calls, and hears nothing
            assert await asyncio.gather(*(call(port) for _ in range(50))) == [b"hello"] * 50
            answer = asyncio.ensure_future(caller.stdout.readline())
            assert await call(port) == b"hello"
            assert not answer.done()
            await exchange.heal(1)
            assert await answer == b"\n", "what was open is lost"
            caller.stdin.write(b"\n")
            assert await caller.stdout.readline() == b"hello\n"
            exchange.cut(0, os.getpid())
            silent = asyncio.ensure_future(call(port))
            done, _ = await asyncio.wait([silent], timeout=0.2)
            assert not done
            await exchange.heal(0)
            assert await silent == b""
    finally:
        caller.kill()
        await caller.wait()
        await exchange.close()
        server.close()
