"""What strangers can take of a server, and what they cannot."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from splitup.core import event_loop, tuning
from splitup.crypto.jws import sign_jws
from splitup.crypto.keys import Identity, generate_identity
from splitup.messages import api
from splitup.net.admission import get_group
from splitup.net.http_server import Server, get_admission, make_app, read_json, serve_app
from splitup.net.links import Link, LinkAcceptor
from tests.builders import HANG_S

FLOODING, OTHER = "127.0.0.2", "127.0.0.3"  # loopback has many addresses


async def hang(request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def greet(request: web.Request) -> web.Response:
    return web.json_response({})


async def greet_known(request: web.Request) -> web.Response:
    get_admission(request).vouch(request, request.query.get("key", "a key"))
    return web.json_response({})


async def parse(request: web.Request) -> web.Response:
    return web.json_response(await read_json(request))


@pytest.fixture(autouse=True)
def stop_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "HTTP_SHUTDOWN_S", 0.0)


@asynccontextmanager
async def serve() -> AsyncIterator[Server]:
    app = make_app()
    app.add_routes(
        [
            web.get("/hang", hang),
            web.get("/greet", greet),
            web.get("/known", greet_known),
            web.post("/parse", parse),
        ]
    )
    server = await serve_app(app, "127.0.0.1", 0)
    try:
        yield server
    finally:
        await server.close()


@dataclass
class Raw:
    """A connection without an HTTP client's retries."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, path: str, body: bytes = b"") -> bytes:
        """Return the status line, b"" when the server closes the connection instead."""
        verb = "POST" if body else "GET"
        head = f"{verb} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
            await self.reader.readexactly(int(length))
        except (ConnectionError, asyncio.IncompleteReadError):
            return b""
        return head.partition(b"\r")[0]

    async def is_closed(self) -> bool:
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True


@dataclass
class Host:
    """One address from which connections are opened."""

    port: int
    address: str
    opened: list[Raw] = field(default_factory=list)

    async def connect(self) -> Raw:
        local = (self.address, 0)
        raw = Raw(*await asyncio.open_connection("127.0.0.1", self.port, local_addr=local))
        self.opened.append(raw)
        return raw

    async def close(self) -> None:
        for raw in self.opened:
            raw.writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await raw.writer.wait_closed()


@pytest.mark.parametrize(
    ("host", "group"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::1", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_an_ipv6_address_counts_as_its_64(host: str, group: str) -> None:
    assert get_group(host) == group


async def test_s11_connections_are_shared_by_address_and_known_parties_keep_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "STRANGERS", 8)
    async with serve() as server, asyncio.timeout(HANG_S):
        customer, flood, other = (
            Host(server.port, address) for address in (FLOODING, FLOODING, OTHER)
        )
        known = await customer.connect()
        assert b" 200 " in await known.ask("/known")
        for _ in range(8):
            idle = await flood.connect()
            assert b" 200 " in await idle.ask("/greet")  # the known connection takes no place
        assert await (await flood.connect()).is_closed()  # the newest one
        stranger = await other.connect()
        assert b" 200 " in await stranger.ask("/greet")
        assert await idle.is_closed()  # for which the newest one of the largest address went
        assert b" 200 " in await known.ask("/greet")  # although it shares the flood's address
        for host in (customer, flood, other):
            await host.close()


async def test_s11_requests_of_strangers_wait_for_their_turn_and_known_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "STRANGERS_PER_S", 1e-3)
    monkeypatch.setattr(tuning, "STRANGERS_BURST", 3)  # two connections and a request
    async with serve() as server, asyncio.timeout(HANG_S):
        flood, customer = Host(server.port, FLOODING), Host(server.port, FLOODING)
        known, raw = await customer.connect(), await flood.connect()
        assert b" 200 " in await known.ask("/known")
        connections = [raw] + [await flood.connect() for _ in range(4)]
        waiting = [asyncio.create_task(raw.ask("/greet")) for raw in connections]
        for _ in range(20):
            assert b" 200 " in await known.ask("/greet")
        assert not any(task.done() for task in waiting)
        for host in (flood, customer):
            await host.close()
        assert await asyncio.gather(*waiting) == [b""] * len(waiting)


async def test_s117_a_strangers_body_costs_turns_by_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of 64 KiB took ten times the time of a request, and cost as much as one."""
    monkeypatch.setattr(tuning, "STRANGERS_PER_S", 1e-3)
    monkeypatch.setattr(tuning, "STRANGERS_BURST", 16)
    long, short = make_body(tuning.HTTP_SMALL_BODY_BYTES), make_body(2 * tuning.STRANGER_BYTES)
    async with serve() as server, asyncio.timeout(HANG_S):
        host = Host(server.port, FLOODING)
        known, first, second = [await host.connect() for _ in range(3)]
        assert b" 200 " in await known.ask("/known")
        assert b" 200 " in await first.ask("/parse", short)
        waiting = asyncio.create_task(second.ask("/parse", long))
        for _ in range(20):
            assert b" 200 " in await known.ask("/parse", long)
        assert not waiting.done()
        await host.close()
        assert await waiting == b""


async def test_s117_large_bodies_of_a_known_party_wait_for_each_other_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is parsed while nothing else is done: one node kept a member busy."""
    monkeypatch.setattr(tuning, "LARGE_MESSAGE_REST", 1e9)
    large, small = make_body(tuning.HTTP_SMALL_BODY_BYTES + 1), make_body(10)
    async with serve() as server, asyncio.timeout(HANG_S):
        host = Host(server.port, FLOODING)
        first, second, other = [await host.connect() for _ in range(3)]
        for raw, key in ((first, "a"), (second, "a"), (other, "b")):
            assert b" 200 " in await raw.ask(f"/known?key={key}")
        assert b" 200 " in await first.ask("/parse", large)
        waiting = asyncio.create_task(second.ask("/parse", large))
        assert b" 200 " in await other.ask("/parse", large)
        for _ in range(20):
            assert b" 200 " in await first.ask("/parse", small)
        assert not waiting.done()
        await host.close()
        assert await waiting == b""


def make_body(size: int) -> bytes:
    return b'{"x":"' + b"x" * (size - 8) + b'"}'


@pytest.mark.parametrize("run", [asyncio.run, event_loop.run], ids=["asyncio", "uvloop"])
def test_s11_turns_go_round_by_address(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    monkeypatch.setattr(tuning, "STRANGERS_PER_S", 50.0)
    monkeypatch.setattr(tuning, "STRANGERS_BURST", 1)

    async def flood_and_ask() -> None:
        async with serve() as server, asyncio.timeout(HANG_S):
            flood, other = Host(server.port, FLOODING), Host(server.port, OTHER)
            waiting = [
                asyncio.create_task((await flood.connect()).ask("/greet")) for _ in range(40)
            ]
            assert b" 200 " in await (await other.connect()).ask("/greet")
            assert sum(task.done() for task in waiting) <= 4
            assert b" 200 " in await waiting[0]
            for host in (flood, other):
                await host.close()
            await asyncio.gather(*waiting)

    run(flood_and_ask())


async def test_s11_waits_for_others_are_shared_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large bodies that do not arrive hold no place that another address needs."""
    monkeypatch.setattr(tuning, "HTTP_LARGE_BODIES", 4)
    async with serve() as server, asyncio.timeout(HANG_S):
        flood, other = Host(server.port, FLOODING), Host(server.port, OTHER)
        head = b"POST /parse HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
        dribbling = [await flood.connect() for _ in range(4)]
        for raw in dribbling:
            raw.writer.write(head + b"{")
            await raw.writer.drain()
        honest = await other.connect()
        honest.writer.write(head + b"{}".rjust(100_000))
        assert b" 200 " in await honest.reader.readline()
        assert await dribbling[-1].is_closed()
        for host in (flood, other):
            await host.close()


# ---- data connections --------------------------------------------------------------------------


@dataclass
class Node:
    """A node's data route; its plans name the keys in ``named``."""

    identity: Identity = field(default_factory=generate_identity)
    named: set[tuple[str, str]] = field(default_factory=set)
    opened: list[Link] = field(default_factory=list)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        self.acceptor = LinkAcceptor(
            self.identity.address,
            lambda link, data: None,
            may_open=lambda *name: name in self.named,
            on_opened=self.opened.append,
        )
        app = make_app()
        app.router.add_get(api.DATA.path, self.acceptor.handle)
        server = await serve_app(app, "127.0.0.1", 0)
        try:
            yield server.url
        finally:
            await self.acceptor.close()
            await server.close()

    def make_header(self, key: Identity, execution_id: str = "") -> dict[str, str]:
        token = sign_jws(
            key,
            typ=api.DATA.typ,
            audience=self.identity.address,
            body={"execution_id": execution_id},
            now_s=int(time.time()),
        )
        return {"Authorization": f"Bearer {token}"}


async def test_s11_throwaway_keys_take_no_data_connection() -> None:
    """They are refused before their signatures are checked; who is in a plan is let in."""
    node, client = Node(), generate_identity()
    node.named = {(client.signing_key_hex, "0xours"), (client.signing_key_hex, "")}
    async with node.serve() as url, aiohttp.ClientSession() as http, AsyncExitStack() as stack:

        async def get_status(headers: dict[str, str]) -> int:
            async with http.get(
                url + api.DATA.path,
                headers={"Connection": "Upgrade", "Upgrade": "websocket", **headers},
            ) as response:
                return response.status

        for _ in range(20):
            assert await get_status(node.make_header(generate_identity())) == 503
        assert await get_status(node.make_header(client, "0xothers")) == 503
        forged = node.make_header(generate_identity())
        forged["Authorization"] = forged["Authorization"][:-8] + "AAAAAAAA"
        assert await get_status(forged) == 503  # not 401: nobody looked at the signature
        for execution_id in ("0xours", ""):
            header = node.make_header(client, execution_id)
            socket = http.ws_connect(url + api.DATA.path, headers=header)
            await stack.enter_async_context(socket)
        assert [link.execution_id for link in node.opened] == ["0xours", ""]


async def test_s11_a_party_has_one_connection_for_each_purpose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second one replaces the first; when all places are taken, who has no plan any more goes."""
    monkeypatch.setattr(tuning, "MAX_LINKS", 2)
    node, keys = Node(), [generate_identity() for _ in range(3)]
    node.named = {(key.signing_key_hex, "") for key in keys}
    async with node.serve() as url, aiohttp.ClientSession() as http, asyncio.timeout(HANG_S):

        async def connect(key: Identity) -> aiohttp.ClientWebSocketResponse[bool]:
            return await http.ws_connect(url + api.DATA.path, headers=node.make_header(key))

        first = await connect(keys[0])
        again = await connect(keys[0])
        assert (await first.receive()).data == aiohttp.WSCloseCode.GOING_AWAY
        second = await connect(keys[1])
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await connect(keys[2])
        node.named.remove((keys[0].signing_key_hex, ""))
        third = await connect(keys[2])
        assert (await again.receive()).data == aiohttp.WSCloseCode.GOING_AWAY
        for socket in (first, again, second, third):
            await socket.close()


async def test_s11_a_flood_of_handshakes_and_bodies_leaves_no_memory_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many refused handshakes, and more bodies that never end than there are places."""
    monkeypatch.setattr(tuning, "STRANGERS", 200)
    monkeypatch.setattr(tuning, "STRANGERS_PER_S", 10_000.0)
    node = Node()
    async with node.serve() as url, aiohttp.ClientSession() as http:
        header = node.make_header(generate_identity())

        async def flood(count: int) -> None:
            for _ in range(count):
                async with http.get(url + api.DATA.path, headers=header) as response:
                    assert response.status == 503

        await flood(100)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await asyncio.gather(*(flood(200) for _ in range(4)))
        stranger = Host(int(url.rpartition(":")[2]), OTHER)
        for _ in range(tuning.STRANGERS + 50):
            raw = await stranger.connect()
            raw.writer.write(b"POST /v1/data HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n{")
        await flood(1)  # answered after all earlier connections were accepted
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        await stranger.close()
    assert grown_kib < 64 * 1024
    assert not node.opened
