"""The raw relay, between real sockets: half-close, back-pressure, upgrades, limits, TLS."""

from __future__ import annotations

import asyncio
import hashlib
import re
import signal
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from splitup_gateway.tcp_relay import HostPort, TcpRelay, make_certificate

from splitup.core.errors import ConfigurationError, InvalidInput
from splitup.devnet.processes import find_program
from tests.builders import HANG_S

HOST = "127.0.0.1"
FREE = HostPort(HOST, 0)
_Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def relay_to(serve: _Serve, **limits: Any) -> AsyncIterator[TcpRelay]:
    """Run a server and a relay to it."""
    server = await asyncio.start_server(serve, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    async with (
        server,
        asyncio.timeout(HANG_S),
        TcpRelay(FREE, HostPort(HOST, port), **limits) as relay,
    ):
        yield relay


async def answer_digest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the SHA-256 of all that comes, which is known only after its end."""
    digest = hashlib.sha256()
    while data := await reader.read(65_536):
        digest.update(data)
    writer.write(digest.digest())
    writer.close()


async def test_the_end_of_one_side_leaves_the_other_open() -> None:
    data = bytes(range(256)) * 4_096
    async with relay_to(answer_digest) as relay:
        reader, writer = await asyncio.open_connection(HOST, relay.port)
        writer.write(data)
        writer.write_eof()
        assert await reader.read() == hashlib.sha256(data).digest()
        writer.close()


async def test_a_slow_reader_slows_the_sender() -> None:
    size, go = 32 * 2**20, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await answer_digest(reader, writer)

    async with relay_to(serve) as relay:
        reader, writer = await asyncio.open_connection(HOST, relay.port)

        async def send() -> None:
            writer.write(bytes(size))
            writer.transport.set_write_buffer_limits(0)
            await writer.drain()
            writer.write_eof()

        sending = asyncio.create_task(send())
        done, _ = await asyncio.wait([sending], timeout=0.5)
        assert not done, "the relay took everything although nobody read it"
        go.set()
        await sending
        assert await reader.read() == hashlib.sha256(bytes(size)).digest()
        writer.close()


async def test_a_broken_connection_does_not_look_like_the_end() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"half of the ans")
        await reader.read(1)  # the other side has the half
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        writer.transport.abort()

    async with relay_to(serve) as relay:
        reader, writer = await asyncio.open_connection(HOST, relay.port)
        assert await reader.readexactly(15) == b"half of the ans"
        writer.write(b"x")
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()


async def test_there_are_so_many_connections_and_no_more() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"in")
        await reader.read()
        writer.close()

    async with relay_to(serve, connections=9, per_address=2) as relay:
        two = [await asyncio.open_connection(HOST, relay.port) for _ in range(2)]
        for reader, _ in two:
            assert await reader.readexactly(2) == b"in"
        refused, writer = await asyncio.open_connection(HOST, relay.port)
        assert await refused.read() == b""
        writer.close()
        two[0][1].write_eof()
        assert await two[0][0].read() == b""
        two[0][1].close()
        while relay.connections > 1:  # noqa: ASYNC110  (the end of a task of the relay)
            await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection(HOST, relay.port)
        assert await reader.readexactly(2) == b"in"
        writer.close()
        two[1][1].close()


async def test_s24_a_network_of_ipv6_counts_as_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"in")
        await reader.read()
        writer.close()

    accept, hosts = asyncio.get_running_loop().sock_accept, iter(("2001:db8::1", "2001:db8::2"))

    async def accept_ipv6(listening: socket.socket) -> tuple[socket.socket, tuple[str, int]]:
        connection, (_, port) = await accept(listening)
        return connection, (next(hosts), port)

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_accept", accept_ipv6)
    async with relay_to(serve, connections=9, per_address=1) as relay:
        for wanted in (b"in", b""):
            reader, writer = await asyncio.open_connection(HOST, relay.port)
            assert await reader.read(2) == wanted
            writer.close()


async def test_a_silent_connection_is_closed() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"in")
        await reader.read()
        writer.close()

    async with relay_to(serve, idle_s=0.2) as relay:
        reader, writer = await asyncio.open_connection(HOST, relay.port)
        assert await reader.readexactly(2) == b"in"
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()


async def test_a_target_that_does_not_listen_closes_the_connection() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match="cannot listen on"):
            async with TcpRelay(HostPort(HOST, port), FREE):
                pass
    async with TcpRelay(FREE, HostPort(HOST, port)) as relay:
        reader, writer = await asyncio.open_connection(HOST, relay.port)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()


@pytest.mark.parametrize("has_tls", [False, True])
async def test_websockets_pass_also_through_tls(has_tls: bool) -> None:
    async def echo(request: web.Request) -> web.WebSocketResponse:
        websocket = web.WebSocketResponse()
        await websocket.prepare(request)
        async for message in websocket:
            await websocket.send_bytes(message.data)
        return websocket

    app = web.Application()
    app.router.add_get("/", echo)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    target = HostPort(HOST, runner.addresses[0][1])
    context, fingerprint = make_certificate([HOST, "localhost"])
    pin = aiohttp.Fingerprint(bytes.fromhex(fingerprint.replace(":", "")))
    data = bytes(range(256)) * 4_096
    async with (
        asyncio.timeout(HANG_S),
        TcpRelay(FREE, target, tls=context if has_tls else None) as relay,
        aiohttp.ClientSession() as http,
    ):
        url = f"{'https' if has_tls else 'http'}://{HOST}:{relay.port}/"
        async with http.ws_connect(url, ssl=pin if has_tls else True) as socket_:
            for _ in range(3):
                await socket_.send_bytes(data)
                assert (await socket_.receive()).data == data
    await runner.cleanup()


@pytest.mark.parametrize("text", ["", "1234", "host:", ":1", "host:65536", "host:-1", "host:٣"])
def test_an_address_is_a_host_and_a_port(text: str) -> None:
    with pytest.raises(InvalidInput, match="HOST:PORT"):
        HostPort.parse(text)
    assert HostPort.parse("[::1]:80") == HostPort("::1", 80)
    assert str(HostPort("::1", 80)) == "[::1]:80"


async def test_the_command_shows_where_phones_connect_and_which_certificate_they_see() -> None:
    async with (
        asyncio.timeout(HANG_S),
        await asyncio.start_server(answer_digest, HOST, 0) as server,
    ):
        port = server.sockets[0].getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            *(find_program("splitup"), "relay", "--tls", "--listen", f"{HOST}:0"),
            *("--to", f"{HOST}:{port}"),
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        said = ""
        while " -> " not in said:
            said += (await process.stderr.readline()).decode()
        found = re.search(
            r"SHA-256\): ([0-9A-F:]{95})\n(.*)https://127.0.0.1:(\d+)/ ->", said, re.S
        )
        assert found and found[2].count("█") > 100, "a QR code"
        pem = await asyncio.to_thread(ssl.get_server_certificate, (HOST, int(found[3])))
        shown = hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()
        assert shown.upper() == found[1].replace(":", "")
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
