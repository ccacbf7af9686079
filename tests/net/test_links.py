from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from splitup.core import limits, tuning
from splitup.core.errors import BadSignature, PeerFault, Unavailable
from splitup.crypto.jws import sign_jws
from splitup.crypto.keys import generate_identity
from splitup.messages import api
from splitup.messages.base import CLIENT
from splitup.messages.frames import FrameKind, Seal
from splitup.net.http_server import Server, make_app, serve_app
from splitup.net.links import Link, LinkPool
from splitup.net.signed_frames import make_message_frame, seal_frame, verify_seal
from tests.builders import HANG_S, decode_frame, make_tensor_frame, wait_open
from tests.net.relays import Receiver

EXECUTION = "0x" + "ab" * 32


class Peer(Receiver):
    """A node's data plane on a port of its own."""

    server: Server | None = None
    port = 0

    async def start(self) -> None:
        app = make_app()
        app.router.add_get(api.DATA.path, self.acceptor.handle)
        self.server = await serve_app(app, "127.0.0.1", self.port)
        self.port = self.server.port

    async def stop(self) -> None:
        await self.acceptor.close()
        assert self.server is not None
        await self.server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest_asyncio.fixture
async def peer() -> AsyncIterator[Peer]:
    peer = Peer()
    await peer.start()
    yield peer
    await peer.stop()


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[LinkPool]:
    pool = LinkPool(generate_identity(), lambda link, data: None, allow_loopback=True)
    yield pool
    await pool.close(flush_s=0)


async def test_frames_arrive_in_order_on_one_connection(peer: Peer, pool: LinkPool) -> None:
    link = pool.open(peer.identity.address, peer.url, EXECUTION)
    assert pool.open(peer.identity.address, peer.url, EXECUTION) is link
    frames = [bytes([number]) * 1000 for number in range(100)]
    for frame in frames:
        link.send(frame)  # before it is connected
    assert [await peer.take() for _ in frames] == frames
    await link.drain()
    assert link.queued_bytes == 0


async def test_accepted_link_knows_the_key_and_sends_back(peer: Peer) -> None:
    identity, answers = generate_identity(), asyncio.Queue[bytes]()
    pool = LinkPool(identity, lambda link, data: answers.put_nowait(data), allow_loopback=True)
    pool.open(peer.identity.address, peer.url, EXECUTION).send(b"question")
    link, _ = await peer.received.get()
    assert (link.peer, link.execution_id) == (identity.signing_key_hex, EXECUTION)
    link.send(b"answer")
    async with asyncio.timeout(HANG_S):
        assert await answers.get() == b"answer"
    await pool.close()
    async with asyncio.timeout(HANG_S):
        assert await peer.closed.get() is link
    with pytest.raises(Unavailable, match="closed"):
        link.send(b"too late")


async def test_f09_f11_link_reconnects_and_sends_again_what_may_be_lost(
    peer: Peer, pool: LinkPool
) -> None:
    link = pool.open(peer.identity.address, peer.url)
    link.send(b"one")
    assert await peer.take() == b"one"
    await peer.stop()
    link.send(b"two")
    await peer.start()
    assert [await peer.take() for _ in range(2)] == [b"one", b"two"]


async def test_f26_opener_learns_that_nobody_listens_where_its_peer_was(peer: Peer) -> None:
    """Not before the first connection: the peer may be starting."""
    told: asyncio.Queue[str] = asyncio.Queue()
    pool = LinkPool(
        generate_identity(),
        lambda link, data: None,
        on_up=lambda link: told.put_nowait("up"),
        on_down=lambda link: told.put_nowait("down"),
        on_refused=lambda link: told.put_nowait("refused"),
        allow_loopback=True,
    )
    await peer.stop()
    link = pool.open(peer.identity.address, peer.url)
    async with asyncio.timeout(HANG_S):
        while link.error is None:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)
        await peer.start()
        assert await told.get() == "up"
        await peer.stop()
        assert [await told.get(), await told.get()] == ["down", "refused"]
    await pool.close(flush_s=0)


async def test_f09_bulk_goes_behind_frames_and_is_not_sent_again(
    peer: Peer, pool: LinkPool
) -> None:
    link = pool.open(peer.identity.address, peer.url)
    link.send_bulk(b"before there is a connection")
    await wait_open(link, 5)
    link.send_bulk(b"three")
    link.send_bulk(b"four")
    link.send(b"one")
    link.send(b"two")
    assert [await peer.take() for _ in range(4)] == [b"one", b"two", b"three", b"four"]
    async with asyncio.timeout(5):
        await link.drain_bulk()
    await peer.stop()
    await peer.start()
    assert [await peer.take() for _ in range(2)] == [b"one", b"two"]
    link.send(b"five")
    assert await peer.take() == b"five" and link.bulk_bytes == 0


async def test_slow_reader_is_given_up_at_the_bound(peer: Peer, pool: LinkPool) -> None:
    link = pool.open("0x" + "11" * 20, "http://127.0.0.1:1")  # nobody listens there
    chunk = bytes(tuning.LINK_QUEUE_BYTES // 4)
    for _ in range(4):
        link.send(chunk)
    with pytest.raises(Unavailable, match="reads too slowly"):
        link.send(b"x")


async def test_waiting_for_a_dead_node_ends(pool: LinkPool) -> None:
    link = pool.open("0x" + "11" * 20, "http://127.0.0.1:1")
    with pytest.raises(Unavailable, match="did not accept within"):
        await wait_open(link, 0.05)


async def test_fault_closes_the_link_for_good(peer: Peer) -> None:
    closed = asyncio.Queue[Link]()
    pool = LinkPool(
        generate_identity(),
        lambda link, data: None,
        on_closed=closed.put_nowait,
        allow_loopback=True,
    )
    peer.fault = True
    link = pool.open(peer.identity.address, peer.url)
    link.send(b"nonsense")
    async with asyncio.timeout(HANG_S):
        assert await closed.get() is link
    with pytest.raises(PeerFault, match="found a fault"):
        link.send(b"more")
    assert pool.open(peer.identity.address, peer.url) is not link
    await pool.close(flush_s=0)


async def test_node_that_refuses_is_not_asked_again(peer: Peer, pool: LinkPool) -> None:
    link = pool.open("0x" + "11" * 20, peer.url)  # the token names another audience
    with pytest.raises(PeerFault, match="refused the connection"):
        await wait_open(link, HANG_S)


@pytest.mark.parametrize("change", ["audience", "typ", "body", "none", "replay"])
async def test_a15_handshake_is_checked(peer: Peer, change: str) -> None:
    token = sign_jws(
        generate_identity(),
        typ="splitup-other" if change == "typ" else api.DATA.typ,
        audience="0x" + "11" * 20 if change == "audience" else peer.identity.address,
        body={"execution_id": 3} if change == "body" else {"execution_id": ""},
        now_s=int(time.time()),
    )
    headers = {} if change == "none" else {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession() as session:
        if change == "replay":
            await (await session.ws_connect(peer.url + api.DATA.path, headers=headers)).close()
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await session.ws_connect(peer.url + api.DATA.path, headers=headers)
    assert caught.value.status in (400, 401)


async def test_text_and_oversized_messages_close_the_connection(peer: Peer) -> None:
    for send in ("text", "huge"):
        token = sign_jws(
            generate_identity(),
            typ=api.DATA.typ,
            audience=peer.identity.address,
            body={"execution_id": ""},
            now_s=int(time.time()),
        )
        headers = {"Authorization": f"Bearer {token}"}
        async with aiohttp.ClientSession() as session:
            socket = await session.ws_connect(peer.url + api.DATA.path, headers=headers)
            if send == "text":
                await socket.send_str("hello")
            else:
                await socket.send_bytes(bytes(limits.MAX_FRAME_BYTES + 2))
            async with asyncio.timeout(HANG_S):
                message = await socket.receive()
            assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
            await socket.close()
    assert peer.received.empty()


def test_sealed_frame_is_verified_under_its_key_only() -> None:
    identity = generate_identity()
    sealed = seal_frame(identity, make_tensor_frame(EXECUTION, 3, 1, 7, b"tensor"))
    frame, seal = decode_frame(sealed)
    assert (frame.task, frame.port, frame.step, bytes(frame.payload)) == (3, 1, 7, b"tensor")
    verify_seal(seal, identity.signing_key_hex)
    with pytest.raises(BadSignature):
        verify_seal(seal, generate_identity().signing_key_hex)
    other = make_tensor_frame(EXECUTION, 3, 1, 8, b"tensor")
    with pytest.raises(BadSignature):
        verify_seal(Seal(other.signed_bytes(), seal.signature), identity.signing_key_hex)


def test_end_frame_has_no_payload() -> None:
    frame = make_message_frame(FrameKind.END, EXECUTION, CLIENT, 5, None)
    assert (frame.step, frame.length, bytes(frame.payload)) == (5, 0, b"")
