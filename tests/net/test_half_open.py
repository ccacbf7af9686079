"""Half-open connections, which carry nothing, are found by a time-out and replaced."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from splitup.chain.rpc import Rpc
from splitup.core import tuning
from splitup.crypto.keys import generate_identity
from splitup.messages import api
from splitup.messages.storage import Grant
from splitup.net.http_server import make_app, serve_app
from splitup.net.links import Link, LinkAcceptor, LinkPool
from splitup.storage.download import download_object
from tests.builders import HANG_S, anybody
from tests.chain.proxy import Proxy


class Node:
    """A node's data plane behind a proxy."""

    def __init__(self) -> None:
        self.identity = generate_identity()
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        self.opened: asyncio.Queue[Link] = asyncio.Queue()
        self.closed: asyncio.Queue[Link] = asyncio.Queue()
        self.acceptor = LinkAcceptor(
            self.identity.address,
            lambda link, data: self.frames.put_nowait(bytes(data)),
            on_opened=self.opened.put_nowait,
            may_open=anybody,
            on_closed=self.closed.put_nowait,
        )


@pytest_asyncio.fixture
async def node() -> AsyncIterator[tuple[Node, Proxy]]:
    node = Node()
    app = make_app()
    app.router.add_get(api.DATA.path, node.acceptor.handle)
    server = await serve_app(app, "127.0.0.1", 0)
    proxy = await Proxy.open(0, server.port)
    yield node, proxy
    await proxy.close()
    await node.acceptor.close()
    await server.close()


async def test_f11_both_ends_of_a_half_open_link_find_out_and_the_slot_is_freed(
    node: tuple[Node, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "LINK_PING_S", 0.4)
    monkeypatch.setattr(tuning, "LINK_RETRY_MAX_S", 0.2)
    peer, proxy = node
    downs: asyncio.Queue[Link] = asyncio.Queue()
    pool = LinkPool(
        generate_identity(),
        lambda link, data: None,
        on_down=downs.put_nowait,
        allow_loopback=True,
    )
    link = pool.open(peer.identity.address, f"http://127.0.0.1:{proxy.port}")
    frames = [bytes([n]) * 100_000 for n in range(8)]
    async with asyncio.timeout(HANG_S):
        link.send(frames[0])
        assert await peer.frames.get() == frames[0]
        accepted = await peer.opened.get()
        proxy.freeze()
        for frame in frames[1:]:
            link.send(frame)  # nothing arrives
        assert await peer.closed.get() is accepted
        assert await downs.get() is link
        seen = []
        while len(seen) < len(frames) - 1:
            frame = await peer.frames.get()
            if frame != frames[0] and frame not in seen:  # what may be lost is sent again
                seen.append(frame)
        assert seen == frames[1:]
    await pool.close(flush_s=0)


async def test_f11_silent_link_is_opened_anew_when_its_peer_owes_a_sign_of_life(
    node: tuple[Node, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that answers is left alone; after one that does not, the next one has twice the time."""
    monkeypatch.setattr(tuning, "ANSWER_S", 0.05)
    peer, proxy = node
    ups: asyncio.Queue[Link] = asyncio.Queue()
    pool = LinkPool(
        generate_identity(), lambda link, data: None, on_up=ups.put_nowait, allow_loopback=True
    )
    link = pool.open(peer.identity.address, f"http://127.0.0.1:{proxy.port}")
    async with asyncio.timeout(HANG_S):
        await link.check()  # not connected yet
        assert await ups.get() is link
        link.send(b"one")
        assert await peer.frames.get() == b"one"
        await link.check()
        while link._asked_at is not None:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)
        assert ups.empty() and link._patience_s >= 0.05
        patience_s, frozen_at = link._patience_s, time.monotonic()
        proxy.freeze()
        link.send(b"two")  # is lost
        while ups.empty():
            await link.check()
            await asyncio.sleep(0.005)
        assert time.monotonic() >= frozen_at + patience_s
        assert [await peer.frames.get() for _ in range(2)] == [b"one", b"two"]
        assert link._patience_s == 2 * patience_s
    await pool.close(flush_s=0)


async def test_f11_download_that_stalls_goes_on_over_another_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "TRANSFER_STALL_S", 0.3)
    data = bytes(range(256)) * 256
    half = len(data) // 2
    starts: list[int] = []
    stalled = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        start = int(request.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        starts.append(start)
        place = f"bytes {start}-{len(data) - 1}/{len(data)}"
        length = str(len(data) - start)
        response = web.StreamResponse(
            status=206, headers={"Content-Range": place, "Content-Length": length}
        )
        await response.prepare(request)
        await response.write(data[start : start + half])
        if start == 0:
            await stalled.wait()
        await response.write(data[start + half :])
        return response

    app = web.Application()
    app.router.add_get("/blob", handle)
    server = await serve_app(app, "127.0.0.1", 0)

    async def grant() -> Grant:
        return Grant(
            method="GET",
            key="blob",
            url=f"{server.url}/blob",
            headers={},
            length_bytes=None,
            expires_at_s=int(time.time()) + 60,
        )

    async with aiohttp.ClientSession() as session, asyncio.timeout(HANG_S):
        await download_object(
            session,
            await grant(),
            grant,
            tmp_path / "blob",
            length_bytes=len(data),
            digest=hashlib.sha256(data).hexdigest(),
            deadline_s=60,
        )
    stalled.set()
    assert (tmp_path / "blob").read_bytes() == data and starts == [0, half]
    await server.close()


async def test_f11_call_to_the_chain_that_hangs_is_made_over_another_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "RPC_TIMEOUT_S", 0.3)

    async def handle(request: web.Request) -> web.Response:
        call = await request.json()
        return web.json_response({"jsonrpc": "2.0", "id": call["id"], "result": "0x1"})

    app = web.Application()
    app.router.add_post("/", handle)
    server = await serve_app(app, "127.0.0.1", 0)
    proxy = await Proxy.open(0, server.port)
    async with Rpc(f"http://127.0.0.1:{proxy.port}") as rpc, asyncio.timeout(HANG_S):
        assert await rpc.request("eth_chainId") == "0x1"
        proxy.freeze()
        assert await rpc.request("eth_chainId") == "0x1"
    assert proxy.connections == 2
    await proxy.close()
    await server.close()
