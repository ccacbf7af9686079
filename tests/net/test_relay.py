from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from splitup.core import limits, tuning
from splitup.core.errors import PeerFault, Refused, Throttled, Unavailable
from splitup.core.places import Places
from splitup.core.throughput import Allowance
from splitup.crypto.jws import sign_jws
from splitup.crypto.keys import Identity, generate_identity
from splitup.messages import api
from splitup.net.http import SignedClient
from splitup.net.http_server import make_app, read_json, serve_app
from splitup.net.links import Link, LinkPool
from splitup.net.relay import RelayKind, _Node, decode_control, encode_control
from splitup.net.tunnel import Tunnel
from tests.builders import HANG_S, wait_open
from tests.net.relays import BreakingProxy, Receiver, RelayServer


class HiddenNode(Receiver):
    """A node's data plane and HTTP server, reached through a relay."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[object] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self.up: asyncio.Queue[str] = asyncio.Queue()
        self.serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        app = make_app()
        app.router.add_get("/v1/ping", self._ping)
        app.router.add_post(api.PLAN_CERTIFICATE.path, self._plan)
        self.server = await serve_app(app, "127.0.0.1", 0)
        self.tunnel = Tunnel(self.identity, self.acceptor, self.server.url)

    async def join(self, relay: RelayServer) -> str:
        """Register at a relay and return the endpoint there."""
        relay.keys[self.identity.address] = self.identity.signing_key_hex
        endpoint = self.tunnel.make_endpoint(relay.url)

        async def on_up() -> None:
            self.up.put_nowait(endpoint)

        self.serving = asyncio.create_task(self.tunnel.serve(relay.url, on_up))
        async with asyncio.timeout(HANG_S):
            waiting = asyncio.create_task(self.up.get())
            await asyncio.wait({waiting, self.serving}, return_when=asyncio.FIRST_COMPLETED)
            if self.serving.done():
                waiting.cancel()
                await self.serving
            return await waiting

    async def stop(self) -> None:
        await self.acceptor.close()
        if self.serving is not None:
            self.serving.cancel()
            await asyncio.gather(self.serving, return_exceptions=True)
        await self.tunnel.close()
        await self.server.close()

    async def _ping(self, _: web.Request) -> web.Response:
        await self.reading.wait()
        return web.json_response({})

    async def _plan(self, request: web.Request) -> web.Response:
        value = await read_json(request)
        if "bad" in value:
            raise PeerFault("a bad plan")
        self.posted.append(value)
        return web.json_response({"taken": len(self.posted)})


@pytest_asyncio.fixture
async def relay() -> AsyncIterator[RelayServer]:
    relay = RelayServer()
    await relay.start()
    yield relay
    await relay.stop()


@pytest_asyncio.fixture
async def node() -> AsyncIterator[HiddenNode]:
    node = HiddenNode()
    await node.start()
    yield node
    await node.stop()


@pytest_asyncio.fixture
async def http() -> AsyncIterator[SignedClient]:
    async with SignedClient(allow_loopback=True) as http:
        yield http


def open_pool(answers: asyncio.Queue[bytes] | None = None) -> LinkPool:
    def on_frame(link: Link, data: bytes) -> None:
        if answers is not None:
            answers.put_nowait(data)

    return LinkPool(generate_identity(), on_frame, allow_loopback=True)


# ---- what goes through -------------------------------------------------------------------------


async def test_requests_reach_a_node_that_only_dialled_out(
    relay: RelayServer, node: HiddenNode, http: SignedClient
) -> None:
    endpoint = await node.join(relay)
    assert relay.nodes == [node.identity.address]
    assert await http.get_json(f"{endpoint}/v1/ping") == {}
    plan = {"plan": "x" * 100_000}
    assert await http.post_json(api.PLAN_CERTIFICATE.url(endpoint), plan) == {"taken": 1}
    assert node.posted == [plan]
    with pytest.raises(Refused, match="a bad plan"):  # errors are passed on unchanged
        await http.post_json(api.PLAN_CERTIFICATE.url(endpoint), {"bad": 1})


async def test_frames_go_both_ways_and_in_order(relay: RelayServer, node: HiddenNode) -> None:
    answers = asyncio.Queue[bytes]()
    pool = open_pool(answers)
    link = pool.open(node.identity.address, await node.join(relay), "0x" + "ab" * 32)
    frames = [bytes([number]) * 10_000 for number in range(50)] + [bytes(limits.MAX_FRAME_BYTES)]
    for frame in frames:
        link.send(frame)
    assert [await node.take() for _ in frames] == frames
    link.send(b"last")
    accepted, data = await node.received.get()
    assert (accepted.execution_id, data) == ("0x" + "ab" * 32, b"last")
    accepted.send(b"answer")
    async with asyncio.timeout(HANG_S):
        assert await answers.get() == b"answer"
    await pool.close()


async def test_a_fault_and_a_refusal_are_told_to_the_one_at_fault(
    relay: RelayServer, node: HiddenNode
) -> None:
    endpoint = await node.join(relay)
    node.fault = True
    pool = open_pool()
    link = pool.open(node.identity.address, endpoint)
    link.send(b"nonsense")
    async with asyncio.timeout(HANG_S):
        while not link.closed:
            link.connected.clear()
            await link.connected.wait()
    assert "found a fault" in str(link.error)
    other = pool.open("0x" + "11" * 20, endpoint)  # the token names another audience
    with pytest.raises(PeerFault, match="refused the connection"):
        await wait_open(other, HANG_S)
    await pool.close(flush_s=0)


async def test_f11_a_lost_relay_is_replaced_and_links_follow(
    relay: RelayServer, node: HiddenNode
) -> None:
    pool = open_pool()
    link = pool.open(node.identity.address, await node.join(relay))
    link.send(b"one")
    assert await node.take() == b"one"
    await relay.stop()
    other = RelayServer()
    await other.start()
    assert pool.open(node.identity.address, await node.join(other)) is link
    link.send(b"two")
    assert [await node.take() for _ in range(2)] == [b"one", b"two"]
    await pool.close(flush_s=0)
    await other.stop()
    await relay.start()  # for the fixture's end


async def test_f10_no_frame_is_lost_on_a_way_to_the_relay_that_lags_and_breaks(
    relay: RelayServer, node: HiddenNode
) -> None:
    await node.join(relay)
    budgets = [0, 100, 9_000, 60_000, 1_500, 150_000, 30_000]  # some break within the handshake
    proxy = BreakingProxy(relay.port, budgets)
    endpoint = f"http://127.0.0.1:{await proxy.start()}{api.RELAY.path}/{node.identity.address}"
    pool = open_pool()
    link = pool.open(node.identity.address, endpoint)
    frames = [bytes([number]) * 10_000 for number in range(40)]
    for frame in frames:
        link.send(frame)
    arrived: dict[bytes, None] = {}  # in the order of their first arrival
    while len(arrived) < len(frames):
        arrived[await node.take()] = None
    assert list(arrived) == frames
    assert proxy.connections <= len(budgets) + 1, "it comes back once for every break"
    await pool.close()
    await proxy.stop()


async def test_the_newest_connection_of_a_node_counts(
    relay: RelayServer, node: HiddenNode, http: SignedClient
) -> None:
    await node.join(relay)
    first = node.serving
    endpoint = await node.join(relay)
    assert first is not None
    async with asyncio.timeout(HANG_S):
        await first
    assert await http.get_json(f"{endpoint}/v1/ping") == {}


# ---- who is let in -----------------------------------------------------------------------------


async def register(relay: RelayServer, make_token: object) -> aiohttp.WSMessage:
    """Answer the relay's nonce with ``make_token(nonce)``; return its next message."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(relay.url + api.RELAY.path) as socket,
        asyncio.timeout(HANG_S),
    ):
        nonce = await socket.receive_str()
        await socket.send_str(make_token(nonce))  # type: ignore[operator]
        return await socket.receive()


@pytest.mark.parametrize(
    "change", ["nothing", "key", "nonce", "audience", "typ", "unknown", "address", "extra", "text"]
)
async def test_a15_registration_is_proved_over_the_relays_nonce(
    relay: RelayServer, change: str
) -> None:
    identity = generate_identity()
    relay.keys[identity.address] = identity.signing_key_hex
    if change == "unknown":
        relay.keys.clear()

    def make_token(nonce: str) -> str:
        body = {"node": identity.address, "nonce": nonce}
        if change == "nonce":
            body["nonce"] = "00" * 32  # another connection's: a replay
        if change == "address":
            body["node"] = "http://elsewhere"
        if change == "extra":
            body["more"] = "1"
        token = sign_jws(
            generate_identity() if change == "key" else identity,
            typ=api.DATA.typ if change == "typ" else api.RELAY.typ,
            audience="http://other:1" if change == "audience" else relay.url,
            body=body,
            now_s=int(time.time()),
        )
        return "no token" if change == "text" else token

    answer = await register(relay, make_token)
    if change == "nothing":
        assert answer.data == "registered"
    else:
        assert answer.data == aiohttp.WSCloseCode.POLICY_VIOLATION
        assert relay.nodes == []


async def test_a_node_that_the_relay_refuses_hears_why(
    relay: RelayServer, node: HiddenNode
) -> None:
    async def never() -> None:
        raise AssertionError

    with pytest.raises(Unavailable, match="not the key of an active node"):
        await node.tunnel.serve(relay.url, never)
    with pytest.raises(Unavailable, match="cannot be reached"):
        await node.tunnel.serve("http://127.0.0.1:1", never)


async def test_unknown_nodes_paths_and_tickets_are_refused(
    relay: RelayServer, node: HiddenNode, http: SignedClient
) -> None:
    endpoint = await node.join(relay)
    nobody = f"{relay.url}{api.RELAY.path}/0x{'11' * 20}"
    with pytest.raises(Unavailable, match="not registered"):
        await http.get_json(f"{nobody}/v1/ping")
    for url in (f"{endpoint}/v1/status", f"{endpoint}/v1/ping/../plan-certificate", endpoint):
        with pytest.raises(Refused) as caught:
            await http.get_json(url)
        assert caught.value.status in (404, 405)
    with pytest.raises(Refused, match="ticket is unknown"):
        await http.get_json(api.RELAY_STREAM.url(relay.url, ticket="0" * 32))


@pytest.mark.parametrize("message", [b"", b"\x09" + bytes(6), b"\x01" + bytes(6), "text", 302])
async def test_a25_a_node_that_sends_nonsense_is_sent_away(
    relay: RelayServer, message: bytes | str | int
) -> None:
    identity = generate_identity()
    relay.keys[identity.address] = identity.signing_key_hex
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(relay.url + api.RELAY.path) as socket,
        asyncio.timeout(HANG_S),
    ):
        await socket.send_str(prove(identity, relay.url, await socket.receive_str()))
        assert await socket.receive_str() == "registered"
        if isinstance(message, int):  # a redirect is no reply
            message = encode_control(RelayKind.REPLY, 0, message, b"")
        await (socket.send_str if isinstance(message, str) else socket.send_bytes)(message)  # type: ignore[operator]
        assert (await socket.receive()).data == aiohttp.WSCloseCode.POLICY_VIOLATION


async def test_a09_an_endless_reply_is_cut_off(relay: RelayServer) -> None:
    identity = generate_identity()
    relay.keys[identity.address] = identity.signing_key_hex
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(relay.url + api.RELAY.path) as socket,
        asyncio.timeout(HANG_S),
    ):
        await socket.send_str(prove(identity, relay.url, await socket.receive_str()))
        assert await socket.receive_str() == "registered"
        reply = bytes(limits.RELAY_REPLY_BYTES + 1)
        await socket.send_bytes(encode_control(RelayKind.REPLY, 0, 200, reply))
        assert (await socket.receive()).data == aiohttp.WSCloseCode.MESSAGE_TOO_BIG


async def test_f11_a_node_that_fell_silent_loses_its_place(
    relay: RelayServer, http: SignedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is half-open: it is established, but pings are not answered."""
    monkeypatch.setattr(tuning, "LINK_PING_S", 0.05)
    identity = generate_identity()
    relay.keys[identity.address] = identity.signing_key_hex
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(relay.url + api.RELAY.path, autoping=False) as socket,
        asyncio.timeout(HANG_S),
    ):
        await socket.send_str(prove(identity, relay.url, await socket.receive_str()))
        url = f"{relay.url}{api.RELAY.path}/{identity.address}/v1/ping"
        with pytest.raises(Unavailable, match="left this relay"):  # pending requests fail
            await http.get_json(url)
        assert relay.nodes == []
        with pytest.raises(Unavailable, match="not registered"):
            await http.get_json(url)
        while (await socket.receive()).type is not aiohttp.WSMsgType.CLOSED:
            pass


def prove(identity: Identity, relay_url: str, nonce: str) -> str:
    body = {"node": identity.address, "nonce": nonce}
    now_s = int(time.time())
    return sign_jws(identity, typ=api.RELAY.typ, audience=relay_url, body=body, now_s=now_s)


# ---- floods ------------------------------------------------------------------------------------


async def test_a25_requests_streams_and_nodes_are_bounded(
    relay: RelayServer, node: HiddenNode, http: SignedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "RELAY_REQUESTS_PER_S", 1e-6)
    monkeypatch.setattr(tuning, "RELAY_REQUESTS", 3)
    monkeypatch.setattr(tuning, "MAX_RELAYED", 1)
    endpoint = await node.join(relay)
    for _ in range(3):
        await http.get_json(f"{endpoint}/v1/ping")
    with pytest.raises(Throttled, match="too many requests"):
        await http.get_json(f"{endpoint}/v1/ping")
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        await register(relay, str)
    assert caught.value.status == 503


async def test_a25_streams_to_one_node_are_bounded(
    relay: RelayServer, node: HiddenNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "RELAY_NODE_STREAMS", 2)
    endpoint = await node.join(relay)
    async with aiohttp.ClientSession() as session, contextlib.AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(open_data(session, node, endpoint))
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await stack.enter_async_context(open_data(session, node, endpoint))
        assert caught.value.status == 503


def open_data(
    session: aiohttp.ClientSession, node: HiddenNode, endpoint: str
) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientWebSocketResponse[bool]]:
    token = sign_jws(
        generate_identity(),
        typ=api.DATA.typ,
        audience=node.identity.address,
        body={"execution_id": ""},
        now_s=int(time.time()),
    )
    return session.ws_connect(
        endpoint + api.DATA.path, headers={"Authorization": f"Bearer {token}"}
    )


async def test_a25_bodies_that_wait_for_a_node_are_bounded(
    relay: RelayServer, node: HiddenNode, http: SignedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "RELAY_HELD_BYTES", 1_000)
    endpoint = await node.join(relay)
    with pytest.raises(Unavailable, match="too many requests wait"):
        await http.post_json(api.PLAN_CERTIFICATE.url(endpoint), {"plan": "x" * 1_000})
    assert await http.post_json(api.PLAN_CERTIFICATE.url(endpoint), {"plan": "x"}) == {"taken": 1}


async def test_s29_what_waits_for_one_node_leaves_room_for_the_others(
    relay: RelayServer, node: HiddenNode, http: SignedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that never answers, and strangers who write to it, take half of the room."""
    monkeypatch.setattr(tuning, "RELAY_HELD_BYTES", 3_200)
    endpoint = await node.join(relay)
    silent = relay.relay._nodes[node.identity.address]
    with relay.relay._hold(silent, 1_000):
        with pytest.raises(Unavailable, match="too many requests wait"):
            await http.post_json(api.PLAN_CERTIFICATE.url(endpoint), {"plan": "x" * 1_000})
        other = _Node("0x" + "1" * 40, silent.socket)
        with relay.relay._hold(other, 1_500):
            pass


async def test_s29_the_node_with_the_most_streams_loses_one_for_another_node(
    relay: RelayServer, node: HiddenNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay.relay, "_streams", Places(2))
    endpoint = await node.join(relay)
    other = HiddenNode()
    await other.start()
    try:
        elsewhere = await other.join(relay)
        async with aiohttp.ClientSession() as session, contextlib.AsyncExitStack() as stack:
            first, second = [
                await stack.enter_async_context(open_data(session, node, endpoint))
                for _ in range(2)
            ]
            await stack.enter_async_context(open_data(session, other, elsewhere))
            async with asyncio.timeout(HANG_S):
                assert (await second.receive()).type in (
                    aiohttp.WSMsgType.CLOSE,
                    aiohttp.WSMsgType.CLOSED,
                )
            assert not first.closed
    finally:
        await other.stop()


async def test_a25_who_sends_faster_than_the_node_reads_waits(
    relay: RelayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relay and node take no more of a flood than their buffers hold."""
    identity = generate_identity()
    relay.keys[identity.address] = identity.signing_key_hex
    monkeypatch.setattr(tuning, "RELAY_BYTES_PER_S", 10**9)
    async with aiohttp.ClientSession() as session, contextlib.AsyncExitStack() as stack:
        control = await stack.enter_async_context(session.ws_connect(relay.url + api.RELAY.path))
        await control.send_str(prove(identity, relay.url, await control.receive_str()))
        await control.receive_str()
        url = f"{relay.url}{api.RELAY.path}/{identity.address}{api.DATA.path}"
        opening = asyncio.create_task(session.ws_connect(url))
        kind, _, _, payload = decode_control(await control.receive_bytes())
        assert kind is RelayKind.OPEN
        ticket = payload[:32].decode()
        far = await stack.enter_async_context(
            session.ws_connect(api.RELAY_STREAM.url(relay.url, ticket=ticket))
        )
        near = await stack.enter_async_context(await opening)
        sent = 0

        async def flood() -> None:
            nonlocal sent
            while True:
                await near.send_bytes(bytes(limits.MIB))
                sent += 1

        flooding = asyncio.create_task(flood())
        last = -1
        while sent != last:  # until nothing moves any more
            last = sent
            await asyncio.wait({flooding}, timeout=0.25)
        assert 1 <= sent <= 32
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
        for _ in range(sent):  # and nothing is lost
            assert len(await far.receive_bytes()) == limits.MIB
        await asyncio.gather(near.close(), far.close())


async def test_silent_streams_end(
    relay: RelayServer, node: HiddenNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "RELAY_IDLE_S", 0.05)
    async with (
        aiohttp.ClientSession() as session,
        open_data(session, node, await node.join(relay)) as socket,
        asyncio.timeout(HANG_S),
    ):
        message = await socket.receive()
        assert message.data == aiohttp.WSCloseCode.GOING_AWAY  # the opener may reconnect


def test_an_allowance_refills_and_never_overflows() -> None:
    allowance = Allowance(8.0, 16.0)
    assert allowance.take(16, 100.0)
    assert not allowance.take(1, 100.0)
    assert allowance.take(1, 100.125)
    assert allowance.spend(8, 100.125) == 1.0
    assert not allowance.take(1, 101.0)
    assert allowance.take(16, 1_000.0)
    assert not allowance.take(1, 1_000.0)
