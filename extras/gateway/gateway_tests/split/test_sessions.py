"""Split inference on a model's real tasks: sessions, positions, hostile input, keys."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
from gateway_tests.split.local_nodes import CHUNK, NAME, LocalNodes, serve_split
from splitup_gateway.access import Access
from splitup_gateway.api_keys import ApiKeys
from splitup_gateway.http_server import ApiServer
from splitup_gateway.split.sessions import DeviceSession, SessionOptions
from splitup_gateway.timelines import Timelines
from splitup_private.split import messages as split

from splitup.client.leases import LeaseOptions
from splitup.core import tuning
from splitup.core.errors import InvalidInput
from splitup.crypto.keys import generate_identity
from tests.builders import HANG_S

WIDTH, CONTEXT = 256, 256
ROWS = np.random.default_rng(0).normal(0, 1, (24, WIDTH)).astype("<f4")


class Device:
    """Speaks the protocol by hand, over one WebSocket."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def ask(self, message: Any) -> dict[str, Any]:
        """Send JSON, or text or bytes as they are; return the answer's fields."""
        if isinstance(message, bytes):
            await self.socket.send_bytes(message)
        else:
            await self.socket.send_str(message if isinstance(message, str) else json.dumps(message))
        answer = await self.socket.receive()
        if answer.type == aiohttp.WSMsgType.BINARY:
            header, tensor = split.split_binary(answer.data)
            return {**header, "tensor": tensor}
        fields: dict[str, Any] = json.loads(answer.data)
        if "pre_activations" in fields:
            fields["tensor"] = base64.b64decode(fields["pre_activations"])
        return fields


def forward(
    rows: np.ndarray, position: int = 0, session: str | None = None, **fields: Any
) -> dict[str, Any]:
    """Return a forward in JSON; fields that are None are left out."""
    found = {
        "type": "forward",
        "model": NAME,
        "hidden_states": base64.b64encode(rows.tobytes()).decode(),
        "seq_len": len(rows),
        "hidden_dim": WIDTH,
        "session_id": session,
        "incremental": position > 0,
        "position": position,
        **fields,
    }
    return {name: value for name, value in found.items() if value is not None}


@asynccontextmanager
async def connect(
    url: str, key: str = "", *, protocols: tuple[str, ...] = ()
) -> AsyncIterator[Device]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with asyncio.timeout(HANG_S), aiohttp.ClientSession(headers=headers) as http:
        async with http.ws_connect(
            f"{url}{split.PATH}/stream", protocols=protocols, max_msg_size=2**24
        ) as socket:
            yield Device(socket)


@asynccontextmanager
async def run_device(nodes: LocalNodes, **options: Any) -> AsyncIterator[Device]:
    async with serve_split(nodes, **options) as url, connect(url) as device:
        yield device


async def test_incremental_steps_give_what_feeding_everything_again_gives(
    nodes: LocalNodes,
) -> None:
    async with run_device(nodes) as device:
        whole = await device.ask(forward(ROWS))
        assert whole["cached_seq_len"] == len(ROWS) and whole["steps"] == 3
        assert whole["he_active"] is False and not whole["incremental"]
        parts, place, name = [], 0, None
        for count in (5, 1, 11, 7):
            answer = await device.ask(forward(ROWS[place : place + count], place, name))
            assert answer["type"] == "forward", answer
            place, name = place + count, answer["session_id"]
            assert answer["cached_seq_len"] == place
            parts.append(answer["tensor"])
        assert b"".join(parts) == whole["tensor"]
        again = await device.ask(forward(ROWS, 0, name))  # the same session, from its beginning
        assert again["tensor"] == whole["tensor"] and again["session_id"] == name


async def test_the_binary_form_gives_the_same(nodes: LocalNodes) -> None:
    async with run_device(nodes) as device:
        wanted = await device.ask(forward(ROWS))
        fields = forward(ROWS)
        fields.pop("hidden_states")
        request = split.Forward.from_value(fields)
        found = await device.ask(split.encode_binary(request, ROWS.tobytes()))
        assert found["tensor"] == wanted["tensor"]
        for message in ({"type": "ping"}, split.encode_binary(split.Ping(type="ping"))):
            assert (await device.ask(message))["type"] == "pong"
        config = await device.ask({"type": "config"})
        assert config["model"]["hidden_dim"] == WIDTH and config["model"]["chunk"] == CHUNK
        assert config["max_sessions"] == 32 and config["session_ttl_s"] == 300


HOSTILE: list[tuple[Any, str]] = [
    ("{", "bad_message"),
    ("[" * 100_000, "bad_message"),
    ('{"a":' * 100_000, "bad_message"),
    ("[]", "bad_message"),
    ('{"type": "\ud800"}'.encode("utf-8", "surrogatepass"), "bad_message"),
    ({"type": ["forward"]}, "bad_message"),
    ({"type": "generate"}, "bad_message"),
    ({"type": "tokenize", "text": "hello"}, "tokenize_on_device"),
    ({"type": "config", "model": "other"}, "model_unknown"),
    ({"type": "ping", "hidden_states": ""}, "bad_message"),
    ({"type": "end", "session_id": "short"}, "bad_message"),
    ({"type": "end", "session_id": "x" * 40}, "session_unknown"),
    (b"", "bad_message"),
    (b"\xff\xff\xff\xff{}", "bad_message"),
    (b"\x02\0\0\0{}", "bad_message"),
]
LIES: list[tuple[dict[str, Any], str]] = [
    ({"hidden_states": "no base64!"}, "bad_tensor"),
    ({"hidden_states": 5}, "bad_tensor"),
    ({"hidden_states": None}, "bad_tensor"),
    ({"hidden_states": base64.b64encode(ROWS[:1].astype("<f8").tobytes()).decode()}, "bad_tensor"),
    ({"hidden_states": base64.b64encode(ROWS[:1].tobytes()[:-1]).decode()}, "bad_tensor"),
    ({"seq_len": 2}, "bad_tensor"),
    ({"seq_len": 0}, "bad_message"),
    ({"seq_len": -1}, "bad_message"),
    ({"seq_len": 2**70}, "bad_message"),
    ({"seq_len": 1.0}, "bad_message"),
    ({"seq_len": "1"}, "bad_message"),
    ({"hidden_dim": 128, "seq_len": 2}, "bad_tensor"),
    ({"hidden_dim": True}, "bad_message"),
    ({"model": "other"}, "model_unknown"),
    ({"use_he": True}, "adapter_host"),
    ({"expert_name": "poems"}, "adapter_host"),
    ({"session_id": "guess"}, "bad_message"),
    ({"session_id": "x" * 40}, "session_unknown"),
    ({"session_id": None}, "session_unknown"),
    ({"position": 3}, "bad_position"),
    ({"position": 5}, "bad_position"),
    ({"position": 0}, "bad_position"),
    ({"incremental": False}, "bad_position"),
    ({"text": "hello"}, "bad_message"),
]


async def test_hostile_input_has_a_clear_error_and_leaves_the_session(nodes: LocalNodes) -> None:
    async with run_device(nodes) as device:
        whole = await device.ask(forward(ROWS[:5]))
        name = (await device.ask(forward(ROWS[:4])))["session_id"]
        for number, bad in enumerate((np.nan, np.inf, -np.inf)):
            rows = ROWS[4:5].copy()
            rows[0, number] = bad
            assert (await device.ask(forward(rows, 4, name)))["code"] == "bad_tensor"
        room = np.zeros((CONTEXT - 3, WIDTH), "<f4")
        assert (await device.ask(forward(room, 4, name)))["code"] == "beyond_context"
        messages = HOSTILE + [(forward(ROWS[4:5], 4, name) | lie, code) for lie, code in LIES]
        for message, code in messages:
            found = await device.ask(message)
            assert (found["type"], found["code"]) == ("error", code), (message, found)
            assert len(found["message"]) < 500
        steps = nodes.opened[0].steps + (nodes.opened[1].steps if len(nodes.opened) > 1 else 0)
        assert steps == 2, "nothing of all this reached the nodes"
        found = await device.ask(forward(ROWS[4:5], 4, name))
        assert found["tensor"] == whole["tensor"][-WIDTH * 4 :]


async def test_a_huge_message_closes_the_connection_and_leaves_the_session(
    nodes: LocalNodes,
) -> None:
    async with serve_split(nodes) as url:
        async with connect(url) as device:
            name = (await device.ask(forward(ROWS[:4])))["session_id"]
            # who still sends when the server closes may see a reset instead of the reason
            with contextlib.suppress(ConnectionError):
                await device.socket.send_bytes(bytes(split.MAX_MESSAGE_BYTES + 1))
            closed = await device.socket.receive()
            if closed.type is aiohttp.WSMsgType.CLOSE:
                assert closed.data == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
            assert device.socket.closed
        async with connect(url) as device:
            assert (await device.ask(forward(ROWS[4:5], 4, name)))["cached_seq_len"] == 5
        async with aiohttp.ClientSession() as http:
            body = io.BytesIO(bytes(split.MAX_MESSAGE_BYTES + 1))
            async with http.post(f"{url}{split.PATH}/forward", data=body) as answer:
                assert answer.status == 413


async def test_the_least_recent_session_makes_room_and_its_device_is_told(
    nodes: LocalNodes,
) -> None:
    async with run_device(nodes, most=2) as device:
        first, second = [(await device.ask(forward(ROWS[:3])))["session_id"] for _ in range(2)]
        await device.ask(forward(ROWS[3:4], 3, first))  # now the second is the least recent
        third = (await device.ask(forward(ROWS[:2])))["session_id"]
        found = await device.ask(forward(ROWS[3:4], 3, second))
        assert found["code"] == "session_evicted" and "position 0" in found["message"]
        assert (await device.ask(forward(ROWS[4:5], 4, first)))["cached_seq_len"] == 5
        assert (await device.ask(forward(ROWS[2:3], 2, third)))["cached_seq_len"] == 3
        fed_again = await device.ask(forward(ROWS[:4], 0, second))
        assert fed_again["session_id"] == second and fed_again["cached_seq_len"] == 4
        assert (await device.ask(forward(ROWS[4:5], 4, second)))["cached_seq_len"] == 5


async def test_an_unused_session_ends_and_gives_its_execution_back(nodes: LocalNodes) -> None:
    leases = LeaseOptions(most=1, warm=1)
    async with run_device(nodes, ttl_s=0.3, most=1, leases=leases) as device:
        name = (await device.ask(forward(ROWS[:3])))["session_id"]
        # the one execution is lent: this waits until it comes back
        answers = [await device.ask(forward(ROWS[:3])) for _ in range(1)]
        assert answers[0]["execution_id"] == nodes.opened[0].execution_id
        assert (await device.ask(forward(ROWS[3:4], 3, name)))["code"] == "session_evicted"


async def test_ended_and_replayed_sessions_are_refused(nodes: LocalNodes) -> None:
    async with run_device(nodes) as device:
        name = (await device.ask(forward(ROWS[:3])))["session_id"]
        step = forward(ROWS[3:4], 3, name)
        assert (await device.ask(step))["cached_seq_len"] == 4
        assert (await device.ask(step))["code"] == "bad_position"  # a replay
        end = {"type": "end", "session_id": name}
        assert await device.ask(end) == {"type": "end", "session_id": name}
        for message in (forward(ROWS[4:5], 4, name), forward(ROWS[:3], 0, name)):
            assert (await device.ask(message))["code"] == "session_ended"


async def test_a_session_computes_one_forward_at_a_time(nodes: LocalNodes) -> None:
    async with serve_split(nodes, most=1) as url, connect(url) as one, connect(url) as other:
        name = (await one.ask(forward(ROWS[:3])))["session_id"]
        nodes.gate.clear()
        running = asyncio.create_task(one.ask(forward(ROWS[3:4], 3, name)))
        while nodes.opened[0].steps < 2:  # noqa: ASYNC110  (the server's task has no event)
            await asyncio.sleep(0)
        assert (await other.ask(forward(ROWS[3:4], 3, name)))["code"] == "session_busy"
        assert (await other.ask({"type": "end", "session_id": name}))["code"] == "session_busy"
        assert (await other.ask(forward(ROWS[:1])))["code"] == "too_many_sessions"
        nodes.gate.set()
        assert (await running)["cached_seq_len"] == 4


async def test_a_device_that_leaves_in_the_middle_finds_its_session_as_it_was(
    nodes: LocalNodes,
) -> None:
    async with serve_split(nodes) as url, connect(url) as device:
        wanted = await device.ask(forward(ROWS[:4]))
        name = (await device.ask(forward(ROWS[:3])))["session_id"]
        nodes.gate.clear()
        async with aiohttp.ClientSession() as http:
            post = http.post(f"{url}{split.PATH}/forward", json=forward(ROWS[3:4], 3, name))
            leaving = asyncio.ensure_future(post)
            while sum(one.steps for one in nodes.opened) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        while (await device.ask(forward(ROWS[:1], 99, name)))["code"] == "session_busy":
            pass  # the server has not noticed yet
        nodes.gate.set()
        found = await device.ask(forward(ROWS[3:4], 3, name))
        assert found["tensor"] == wanted["tensor"][-WIDTH * 4 :], found


async def test_a_failed_execution_is_told_and_the_rows_are_fed_again(nodes: LocalNodes) -> None:
    async with run_device(nodes) as device:
        name = (await device.ask(forward(ROWS[:3])))["session_id"]
        nodes.fails = 1
        found = await device.ask(forward(ROWS[3:4], 3, name))
        assert found["code"] == "execution_failed" and "position 0" in found["message"]
        assert (await device.ask(forward(ROWS[3:4], 3, name)))["code"] == "session_evicted"
        assert (await device.ask(forward(ROWS[:4], 0, name)))["cached_seq_len"] == 4


async def test_a_session_outlives_its_execution_s_steps_by_an_eviction(nodes: LocalNodes) -> None:
    async with run_device(nodes, leases=LeaseOptions(steps=4)) as device:
        name = (await device.ask(forward(ROWS[:8])))["session_id"]
        for place in range(8, 11):
            found = await device.ask(forward(ROWS[place : place + 1], place, name))
            assert found["cached_seq_len"] == place + 1
        assert (await device.ask(forward(ROWS[11:12], 11, name)))["code"] == "session_evicted"
        assert (await device.ask(forward(ROWS[:12], 0, name)))["cached_seq_len"] == 12
        assert nodes.opened[0].steps == 4


async def test_a_session_ends_in_time_for_its_execution_to_be_paid(nodes: LocalNodes) -> None:
    leases = LeaseOptions(seconds=0.8, warm=0)
    async with run_device(nodes, leases=leases) as device:
        name = (await device.ask(forward(ROWS[:3])))["session_id"]
        await nodes.has_ended.wait()
        assert (await device.ask(forward(ROWS[3:4], 3, name)))["code"] == "session_evicted"
        assert (await device.ask(forward(ROWS[:4], 0, name)))["cached_seq_len"] == 4


async def test_what_cannot_begin_takes_no_place(nodes: LocalNodes) -> None:
    async with run_device(nodes, most=2, leases=LeaseOptions(warm=0)) as device:
        name = (await device.ask(forward(ROWS[:3])))["session_id"]
        nodes.refuses = True
        for _ in range(3):
            found = await device.ask(forward(ROWS[:3]))
            assert found["code"] == "service_unavailable" and "no balance" in found["message"]
        assert (await device.ask(forward(ROWS[3:4], 3, name)))["cached_seq_len"] == 4


# ---- keys --------------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    return ApiKeys.open(f"sqlite:///{tmp_path / 'keys.sqlite'}")


async def test_a_session_belongs_to_its_key(nodes: LocalNodes, keys: ApiKeys) -> None:
    ann, bob = keys.create("ann"), keys.create("bob")
    async with serve_split(nodes, access=Access(keys)) as url:
        async with connect(url, ann) as device:
            name = (await device.ask(forward(ROWS[:3])))["session_id"]
        async with connect(url, bob) as device:
            for message in (
                forward(ROWS[3:4], 3, name),
                forward(ROWS[:3], 0, name),
                {"type": "end", "session_id": name},
            ):
                assert (await device.ask(message))["code"] == "session_foreign"
        protocols = (split.PROTOCOL, split.KEY_PROTOCOL + ann)  # as a browser sends it
        async with connect(url, protocols=protocols) as device:
            assert device.socket.protocol == split.PROTOCOL
            assert (await device.ask(forward(ROWS[3:4], 3, name)))["cached_seq_len"] == 4
            assert (await device.ask({"type": "end", "session_id": name}))["type"] == "end"
        async with connect(url, bob) as device:
            assert (await device.ask(forward(ROWS[:3], 0, name)))["code"] == "session_foreign"
        async with aiohttp.ClientSession() as http:
            for path in ("models", "stream", "files/" + "0" * 64):
                async with http.get(f"{url}{split.PATH}/{path}") as answer:
                    assert answer.status == 401
                    assert (await answer.json())["code"] == "invalid_api_key"
    keys.close()


async def test_a_key_evicts_its_own_sessions_first(nodes: LocalNodes, keys: ApiKeys) -> None:
    ann, bob = keys.create("ann"), keys.create("bob", budget_micro_usdc=0)
    async with serve_split(nodes, access=Access(keys), most=2) as url:
        async with connect(url, ann) as device:
            name = (await device.ask(forward(ROWS[:3])))["session_id"]
        async with connect(url, keys.create("eve")) as device:
            for _ in range(3):
                await device.ask(forward(ROWS[:3]))
            await device.ask(forward(ROWS[:3], 3, incremental=False))  # refused: evicts nobody
        async with connect(url, bob) as device:
            assert (await device.ask(forward(ROWS[:3])))["code"] == "insufficient_quota"
        async with connect(url, ann) as device:
            assert (await device.ask(forward(ROWS[3:4], 3, name)))["cached_seq_len"] == 4
    keys.close()


async def test_s64_a_key_whose_sessions_all_compute_keeps_others_from_none(
    nodes: LocalNodes, keys: ApiKeys
) -> None:
    """It loses its least recent session after the forward that runs, whose rows it still gets."""
    eve, ann = keys.create("eve"), keys.create("ann")
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serve_split(nodes, access=Access(keys), most=4))
        device, second = [await stack.enter_async_context(connect(url, ann)) for _ in range(2)]
        kept = (await device.ask(forward(ROWS[:3])))["session_id"]
        *hogs, more = [await stack.enter_async_context(connect(url, eve)) for _ in range(4)]
        names = [(await hog.ask(forward(ROWS[:3])))["session_id"] for hog in hogs]
        nodes.gate.clear()
        running = [
            asyncio.create_task(hog.ask(forward(ROWS[3:4], 3, name)))
            for hog, name in zip(hogs, names, strict=True)
        ]
        while sum(one.steps for one in nodes.opened) < 7:  # noqa: ASYNC110
            await asyncio.sleep(0)
        # one more session of this key takes no idle one of another key, nor its own that compute
        assert (await more.ask(forward(ROWS[:3])))["code"] == "too_many_sessions"
        newcomer = asyncio.create_task(second.ask(forward(ROWS[:1])))
        while (await more.ask(forward(ROWS[:1], 99, names[0])))["code"] == "session_busy":
            pass  # the server has not seen the newcomer yet
        nodes.gate.set()
        assert [(await one)["cached_seq_len"] for one in running] == [4, 4, 4]
        assert (await newcomer)["cached_seq_len"] == 1
        found = [
            await hog.ask(forward(ROWS[4:5], 4, one)) for hog, one in zip(hogs, names, strict=True)
        ]
        assert [one.get("code") for one in found] == ["session_evicted", None, None]
        assert (await device.ask(forward(ROWS[3:4], 3, kept)))["cached_seq_len"] == 4
    keys.close()


async def test_s64_a_key_with_many_connections_keeps_others_from_none(
    nodes: LocalNodes, keys: ApiKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitup_gateway.split.server.CONNECTIONS", 3)
    eve, ann = keys.create("eve"), keys.create("ann")
    ping = {"type": "ping"}
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serve_split(nodes, access=Access(keys)))
        *first, newest = [await stack.enter_async_context(connect(url, eve)) for _ in range(3)]
        with pytest.raises(aiohttp.WSServerHandshakeError, match="503"):
            await stack.enter_async_context(connect(url, eve))
        device = await stack.enter_async_context(connect(url, ann))
        assert [(await one.ask(ping))["type"] for one in (device, *first)] == ["pong"] * 3
        assert (await newest.socket.receive()).type is aiohttp.WSMsgType.CLOSED
    keys.close()


async def test_s120_a_keys_large_messages_are_parsed_in_turns(
    nodes: LocalNodes, keys: ApiKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a large message its key's next one rests; small ones, and another key's, do not."""
    ann, bob = keys.create("ann"), keys.create("bob")
    monkeypatch.setattr(tuning, "LARGE_MESSAGE_REST", 1e9)
    large = json.dumps({"type": "ping", "a": [":"] * 50_000})
    async with serve_split(nodes, access=Access(keys)) as url:
        async with (
            connect(url, ann) as first,
            connect(url, ann) as second,
            connect(url, bob) as far,
        ):
            assert (await first.ask(large))["type"] == "error"
            waiting = asyncio.create_task(second.ask(large))
            assert (await first.ask({"type": "ping"}))["type"] == "pong"
            assert (await far.ask(large))["type"] == "error"
            assert not waiting.done()
            waiting.cancel()


def test_the_cost_of_a_devices_text_is_rounded_once() -> None:
    """Each token is a request of its own, and a step costs half a micro-USDC."""
    cut: Any = SimpleNamespace(manifest=SimpleNamespace(cost_micro_usdc=lambda n: -(-n // 2)))
    session, costs = DeviceSession("text", None, cut), []
    for session.submitted in (4, *[1] * 9):
        session.steps += session.submitted
        costs.append(session.compute_cost())
    assert sum(costs) == 7 and max(costs) == 2


async def test_steps_are_charged_and_the_rate_counts_texts(
    nodes: LocalNodes, keys: ApiKeys
) -> None:
    price = nodes.cut.manifest.cost_micro_usdc(1)
    secret = keys.create("ann", budget_micro_usdc=6 * price, requests_per_minute=2)
    other = keys.create("bob", models=("another",))
    async with serve_split(nodes, access=Access(keys)) as url:
        async with connect(url, secret) as device:
            found = await device.ask(forward(ROWS[:17]))  # three steps
            assert found["cost_micro_usdc"] == 3 * price
            name = found["session_id"]
            for place in (17, 18):  # more requests than the rate allows, of one text
                await device.ask(forward(ROWS[place : place + 1], place, name))
            assert keys.list()[0].spent_micro_usdc == 5 * price
            found = await device.ask(forward(ROWS[:9], 0, name))  # two steps
            assert found["code"] == "insufficient_quota"
            assert (await device.ask(forward(ROWS[:9])))["code"] == "rate_limit_exceeded"
            found = await device.ask(forward(ROWS[19:20], 19, name))
            assert found["cached_seq_len"] == 20, "the refused ones left the session"
            assert keys.list()[0].spent_micro_usdc == 6 * price
        async with connect(url, other) as device:
            assert (await device.ask(forward(ROWS[:1])))["code"] == "model_unknown"
    keys.close()


async def test_http_takes_the_same_messages_and_limits_of_cost(nodes: LocalNodes) -> None:
    async with serve_split(nodes) as url, aiohttp.ClientSession() as http:
        post = f"{url}{split.PATH}/forward"
        async with http.post(post, json=forward(ROWS)) as answer:
            fields = await answer.json()
            assert answer.status == 200
        async with http.post(
            post, json=forward(ROWS), headers={"x-splitup-max-cost": "1"}
        ) as answer:
            assert (await answer.json())["code"] == "max_cost_exceeded" and answer.status == 400
        step = forward(ROWS[:1], 24, fields["session_id"])
        step.pop("hidden_states")
        body = split.encode_binary(split.Forward.from_value(step), ROWS[:1].tobytes())
        binary = {"Content-Type": "application/octet-stream"}
        async with http.post(post, data=body, headers=binary) as answer:
            header, tensor = split.split_binary(await answer.read())
            assert header["cached_seq_len"] == 25 and len(tensor) == 4 * WIDTH
        async with http.post(post, data=body, headers=binary) as answer:
            assert answer.status == 409 and (await answer.json())["code"] == "bad_position"
        async with http.get(f"{url}/v1/receipts/{fields['execution_id']}") as answer:
            assert answer.status != 404, "receipts of these executions can be asked for"
        foreign = {"Origin": "https://example.com"}
        for path in ("stream", "models"):
            async with http.get(f"{url}{split.PATH}/{path}", headers=foreign) as answer:
                assert answer.status == 403


async def test_there_are_these_endpoints_and_one_takes_a_body(nodes: LocalNodes) -> None:
    api = ApiServer(nodes, LeaseOptions(), Access(None), Timelines(), SessionOptions())
    found = {
        (route.method, route.resource.canonical.removeprefix(split.PATH))
        for route in api.make_app().router.routes()
        if route.resource.canonical.startswith("/api/v1/") and route.method != "HEAD"
    }
    assert found == {
        ("GET", "/models"),
        ("GET", "/files/{digest}"),
        ("GET", "/stream"),
        ("POST", "/forward"),
    }


async def test_who_asks_the_openai_api_for_a_private_model_is_told_where_it_is(
    nodes: LocalNodes,
) -> None:
    async with serve_split(nodes) as url, aiohttp.ClientSession() as http:
        for name, said in (
            (NAME, "is served at /private, to devices"),
            ("x", "is not served here;"),
        ):
            body = {"model": name, "prompt": "a"}
            async with http.post(f"{url}/v1/completions", json=body) as answer:
                error = (await answer.json())["error"]
            assert error["code"] == "model_not_found" and said in error["message"], error


@pytest.mark.parametrize("url", ["adapters", "https://a/path", "https://a; img-src *", "ftp://a"])
def test_an_adapter_host_that_is_no_origin_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="the adapter host '"):
        SessionOptions(adapter_hosts=("https://[::1]:8470", url))


def test_an_adapter_signer_is_a_key_beside_a_host() -> None:
    key = generate_identity().signing_key_hex
    with pytest.raises(InvalidInput, match="give --adapter-host URL"):
        SessionOptions(adapter_signers=(key,))
    with pytest.raises(InvalidInput, match="the adapter signer '0x12' cannot sign: "):
        SessionOptions(adapter_hosts=("https://a",), adapter_signers=(key, "0x12"))
