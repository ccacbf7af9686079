"""Streams that last: the first byte, signs of life, cut connections, retries, early ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from gateway_tests.serve.apis.scripted_server import NAME, PRICE, ScriptedModel, serve_script
from splitup_gateway.api_keys import ApiKeys

from splitup.core import tuning
from splitup.core.errors import (
    ChainRejected,
    ChainUnavailable,
    ExecutionFailed,
    PeerFault,
    SplitUpError,
    StorageUnavailable,
    Unavailable,
)
from tests.builders import HANG_S

USER = {"role": "user", "content": "weather?"}
CHAT: dict[str, Any] = {"model": NAME, "messages": [USER], "temperature": 0, "max_tokens": 60}
SAID = "a web library for file"
STEPS = 6  # a token for each word, and the end
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": NAME, "prompt": "weather?", "temperature": 0, "max_tokens": 60},
    "/v1/responses": {"model": NAME, "input": "weather?", "temperature": 0},
    "/v1/messages": CHAT,
    "/api/chat": {"model": NAME, "messages": [USER], "options": {"temperature": 0}},
}
STREAMED = {**CHAT, "stream": True}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch, model: ScriptedModel) -> Iterator[None]:
    """Tell progress often, and let every test begin with a model that answers at once."""
    monkeypatch.setattr(tuning, "STREAM_QUIET_S", 0.05)
    model.free_steps = model.fails = model.broken = None
    model.stepped = asyncio.Event()
    model.say(SAID)
    yield
    model.release(None)


async def read_events(reply: aiohttp.ClientResponse, count: int | None = None) -> list[str]:
    """Read so many events, all without a count."""
    found, rest = [], ""
    async with asyncio.timeout(HANG_S):
        while count is None or len(found) < count:
            data = await reply.content.readany()
            if not data:
                break
            rest += data.decode()
            *more, rest = rest.split("\n\n")
            found += more
    return found[:count]


def get_id(event: str) -> str:
    return event.partition("\n")[0].removeprefix("id: ")


def get_text(events: list[str]) -> str:
    """Return what the chunks of a chat say."""
    lines = [line for event in events for line in event.split("\n") if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@contextlib.asynccontextmanager
async def connect(
    model: ScriptedModel, keys: ApiKeys | None = None, streams: Path | None = None
) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    async with serve_script(model, keys, streams) as url, aiohttp.ClientSession() as http:
        yield url, http


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[ApiKeys]:
    with contextlib.closing(ApiKeys.open(f"sqlite:///{tmp_path / 'keys.sqlite'}")) as opened:
        yield opened


# ---- the first byte ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "first", "alive"),
    [
        ("/v1/chat/completions", '"role":"assistant"', "\n: fed 0 of"),
        ("/v1/completions", ": fed 0 of", "\n: fed 0 of"),
        ("/v1/responses", "event: response.created", "event: response.in_progress"),
        ("/v1/messages", "event: message_start", "event: ping"),
        ("/api/chat", '"content": ""}, "done": false', '"done": false'),
    ],
)
async def test_a_stream_begins_before_the_nodes_answer(
    path: str, first: str, alive: str, model: ScriptedModel
) -> None:
    model.free_steps = 0
    async with connect(model) as (url, http), asyncio.timeout(HANG_S):
        async with http.post(url + path, json={**BODIES[path], "stream": True}) as reply:
            assert reply.status == 200 and reply.headers["x-splitup-stream"].startswith("strm_")
            seen = ""
            while first not in seen:
                seen += (await reply.content.readany()).decode()
            before = seen.count(alive)
            while seen.count(alive) < before + 2:  # nothing else is sent
                seen += (await reply.content.readany()).decode()
            model.release(None)
            seen += (await reply.read()).decode()
    assert "file" in seen and "error" not in seen.replace('"error":null', "")


async def test_official_clients_read_over_signs_of_life(model: ScriptedModel) -> None:
    async def release_slowly() -> None:
        while model.free_steps is not None:
            await asyncio.sleep(3 * tuning.STREAM_QUIET_S)
            model.release(1)

    async with serve_script(model) as url, asyncio.timeout(HANG_S):
        ours = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        theirs = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        texts = []
        for kind in ("chat", "response", "message"):
            model.say("rain and wind")
            model.free_steps = 0
            releasing = asyncio.create_task(release_slowly())
            if kind == "chat":
                chat = await ours.chat.completions.create(**STREAMED)
                texts.append("".join([c.choices[0].delta.content or "" async for c in chat]))
            elif kind == "response":
                async with ours.responses.stream(model=NAME, input="x", temperature=0) as response:
                    texts.append((await response.get_final_response()).output_text)
            else:
                fields = {"model": NAME, "max_tokens": 60, "messages": [USER]}
                cold = {"extra_body": {"temperature": 0}}
                async with theirs.messages.stream(**fields, **cold) as message:  # type: ignore[arg-type]
                    texts.append(await message.get_final_text())
            releasing.cancel()
        await ours.close()
        await theirs.close()
    assert texts == ["rain and wind"] * 3


@pytest.mark.parametrize("path", BODIES)
async def test_what_cannot_be_served_is_refused_before_the_stream(
    path: str, model: ScriptedModel
) -> None:
    body = {**BODIES[path], "stream": True}
    model.fails = Unavailable("no live node serves task 0")
    async with connect(model) as (url, http):
        for sent, status in (({**body, "surprise": 1}, 400), ({**body, "model": "x"}, 404)):
            async with http.post(url + path, json=sent) as reply:
                assert reply.status == status and reply.content_type == "application/json"
        for _ in range(2):  # the second one does not wait for an opening
            async with http.post(url + path, json=body) as reply:
                assert reply.status == 503 and "no live node" in await reply.text()
                assert reply.headers["Retry-After"]


@pytest.mark.parametrize("kind", [ChainUnavailable, StorageUnavailable, ChainRejected, PeerFault])
async def test_clients_are_not_told_what_the_server_depends_on(
    kind: type[SplitUpError], model: ScriptedModel, caplog: pytest.LogCaptureFixture
) -> None:
    model.fails = kind("10.1.2.3:8545 does not answer; start your network with: splitup up")
    async with connect(model) as (url, http):
        for path, body in BODIES.items():
            async with http.post(url + path, json=body) as reply:
                said = await reply.text()
                assert reply.status == 503 and reply.headers["Retry-After"]
            assert "10.1.2.3" not in said and "splitup up" not in said
    assert "10.1.2.3:8545 does not answer" in caplog.text


# ---- cut streams ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["post", "header", "after"])
async def test_a_cut_stream_goes_on(way: str, model: ScriptedModel) -> None:
    model.free_steps = 2
    before = model.steps
    async with connect(model) as (url, http):
        async with http.post(f"{url}/v1/chat/completions", json=STREAMED) as reply:
            begun = await read_events(reply, 3)  # the role and two tokens
            stream = reply.headers["x-splitup-stream"]
        last = get_id(begun[-1])
        assert last == f"{stream}:3"
        headers = {} if way == "after" else {"Last-Event-ID": last}
        after = "?after=3" if way == "after" else ""
        async with (
            http.post(f"{url}/v1/chat/completions", json=STREAMED, headers=headers)
            if way == "post"
            else http.get(f"{url}/v1/streams/{stream}{after}", headers=headers)
        ) as reply:
            assert reply.status == 200 and reply.content_type == "text/event-stream"
            model.release(None)  # it is read while it runs
            rest = await read_events(reply)
        async with http.get(f"{url}/v1/streams/{stream}") as reply:  # it has ended
            assert get_text(await read_events(reply)) == SAID
    assert get_text(begun + rest) == SAID and rest[-1].endswith("data: [DONE]")
    assert model.steps - before == STEPS


async def test_what_nobody_reads_stops_soon(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "STREAM_GRACE_S", 0.1)
    model.free_steps = 2
    async with connect(model) as (url, http):
        async with http.post(f"{url}/v1/chat/completions", json=STREAMED) as reply:
            await read_events(reply, 3)
            stream = reply.headers["x-splitup-stream"]
        steps = model.steps
        await asyncio.sleep(0.2)
        async with http.get(f"{url}/v1/streams/{stream}") as reply:
            events = await read_events(reply)
        model.release(None)
    failed = json.loads(events[-1].partition("data: ")[2])
    assert failed["error"]["code"] == "stopped" and failed["choices"][0]["finish_reason"] == "error"
    assert model.steps == steps


async def test_a_whole_answer_that_nobody_can_come_back_for_stops_at_once(
    model: ScriptedModel,
) -> None:
    model.free_steps = 0
    before = model.steps
    async with connect(model) as (url, http), asyncio.timeout(HANG_S):
        asking = asyncio.create_task(
            http.post(f"{url}/v1/chat/completions", json=CHAT).__aenter__()
        )
        await model.stepped.wait()
        asking.cancel()
        model.free_steps = None  # had it gone on, the next request would have waited for its lease
        model.say("wind")
        async with http.post(f"{url}/v1/chat/completions", json=CHAT) as reply:
            assert (await reply.json())["choices"][0]["message"]["content"] == "wind"
    assert model.steps == before + 4, "one of the first, three of the second"


async def test_a_stream_can_be_stopped(model: ScriptedModel) -> None:
    model.free_steps = 1
    async with connect(model) as (url, http), asyncio.timeout(HANG_S):
        async with http.post(f"{url}/v1/chat/completions", json=STREAMED) as reply:
            await read_events(reply, 2)
            stream = f"{url}/v1/streams/{reply.headers['x-splitup-stream']}"
            async with http.delete(stream) as stopped:
                assert (await stopped.json())["status"] == "stopped"
            events = await read_events(reply)
    assert '"finish_reason":"error"' in events[-1] and '"stop"' not in "".join(events)


async def test_s35_a_stream_is_read_by_its_key_alone(model: ScriptedModel, keys: ApiKeys) -> None:
    ann, bob = (
        {"Authorization": f"Bearer {keys.create(name, group='shop')}"} for name in ("ann", "bob")
    )
    async with connect(model, keys) as (url, http):
        once = {"Idempotency-Key": "one"}
        async with http.post(
            f"{url}/v1/chat/completions", json=STREAMED, headers=ann | once
        ) as reply:
            events = await read_events(reply)
            stream = f"{url}/v1/streams/{reply.headers['x-splitup-stream']}"
        for headers, status in ((ann, 200), (bob, 404), ({}, 401)):
            async with http.get(stream, headers=headers) as reply:
                assert reply.status == status
            async with http.delete(stream, headers=headers) as reply:
                assert reply.status == status
            last = {"Last-Event-ID": get_id(events[0])}
            async with http.post(
                f"{url}/v1/chat/completions", json=STREAMED, headers=headers | last
            ) as reply:
                assert reply.status == status
        model.say("other")
        async with http.post(
            f"{url}/v1/chat/completions", json=STREAMED, headers=bob | once
        ) as reply:
            assert get_text(await read_events(reply)) == "other"


# ---- retries -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_retry_with_a_key_is_the_same_request(
    is_streamed: bool, model: ScriptedModel, keys: ApiKeys
) -> None:
    secret = keys.create("ann", budget_micro_usdc=100_000)
    headers = {"Authorization": f"Bearer {secret}", "Idempotency-Key": "one"}
    body = {**CHAT, "stream": is_streamed}
    model.free_steps = 0
    before = model.steps
    async with connect(model, keys) as (url, http), asyncio.timeout(HANG_S):
        ask = partial(http.post, f"{url}/v1/chat/completions", headers=headers)

        async def read() -> str:
            async with ask(json=body) as reply:
                assert reply.status == 200
                if is_streamed:
                    return get_text(await read_events(reply))
                return str((await reply.json())["choices"][0]["message"]["content"])

        lost = asyncio.create_task(read())
        await model.stepped.wait()
        lost.cancel()
        joined = [asyncio.create_task(read()) for _ in range(2)]
        await asyncio.sleep(0.05)
        model.release(None)
        assert [await one for one in joined] == [SAID] * 2
        assert await read() == SAID  # it has ended
        async with ask(json={**body, "max_tokens": 3}) as reply:
            assert reply.status == 422
            assert (await reply.json())["error"]["code"] == "idempotency_key_reused"
    assert model.steps - before == STEPS, "each step was run once"
    assert keys.list()[0].spent_micro_usdc == PRICE * STEPS


async def test_the_official_clients_retry_joins(model: ScriptedModel) -> None:
    model.free_steps = 0
    before = model.steps

    async def release_later() -> None:
        await asyncio.sleep(0.7)  # the first attempt was given up by then
        model.release(None)

    async with serve_script(model) as url, asyncio.timeout(HANG_S):
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=2, timeout=0.5
        ) as client:
            releasing = asyncio.create_task(release_later())
            answer = await client.chat.completions.create(**CHAT)
            await releasing
    assert answer.choices[0].message.content == SAID
    assert model.steps - before == STEPS


# ---- early ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/chat/completions", '"finish_reason":"error"'),
        ("/v1/completions", '"finish_reason":"error"'),
        ("/v1/responses", "event: response.failed"),
        ("/v1/messages", "event: error"),
        ("/api/chat", '{"error": '),
    ],
)
async def test_a_stream_that_breaks_off_says_so(
    path: str, told: str, model: ScriptedModel, keys: ApiKeys
) -> None:
    model.free_steps = 2
    headers = {"Authorization": f"Bearer {keys.create('ann', budget_micro_usdc=100_000)}"}
    async with connect(model, keys) as (url, http), asyncio.timeout(HANG_S):
        body = {**BODIES[path], "stream": True}
        async with http.post(url + path, json=body, headers=headers) as reply:
            seen = ""
            while " web" not in seen:
                seen += (await reply.content.readany()).decode()
            model.break_off(ExecutionFailed("a node failed", execution_id="0x"))
            seen += (await reply.read()).decode()
    assert told in seen and "the nodes did not finish the answer" in seen
    assert "a node failed" not in seen  # errors name nodes and money: that is for the log
    assert not any(end in seen for end in ("[DONE]", '"stop"', "end_turn", '"done": true'))
    assert keys.list()[0].spent_micro_usdc == 4 * PRICE, "the last on another lease"


async def test_a_text_goes_on_when_its_execution_fails(model: ScriptedModel, keys: ApiKeys) -> None:
    model.free_steps = 2
    headers = {"Authorization": f"Bearer {keys.create('ann', budget_micro_usdc=100_000)}"}
    async with connect(model, keys) as (url, http), asyncio.timeout(HANG_S):
        path = "/v1/chat/completions"
        async with http.post(url + path, json=STREAMED, headers=headers) as reply:
            events = await read_events(reply, 3)
            model.say(SAID, told=2)
            model.break_once(ExecutionFailed("a node failed", execution_id="0x"))
            model.release(None)
            events += await read_events(reply)
    assert get_text(events) == SAID and events[-1].endswith("data: [DONE]")
    assert keys.list()[0].spent_micro_usdc == (STEPS + 1) * PRICE


async def test_official_clients_raise_when_a_stream_breaks_off(model: ScriptedModel) -> None:
    async with serve_script(model) as url, asyncio.timeout(HANG_S):
        ours = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        theirs = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        model.free_steps = 1
        with pytest.raises(openai.APIError, match="the nodes did not finish the answer"):
            async for chunk in await ours.chat.completions.create(**STREAMED):
                if chunk.choices[0].delta.content:
                    model.break_off(ExecutionFailed("a node failed", execution_id="0x"))
        model.say(SAID)
        model.release(1)
        fields: Any = {"model": NAME, "max_tokens": 60, "messages": [USER]}
        with pytest.raises(anthropic.APIStatusError, match="the nodes did not finish the answer"):
            async with theirs.messages.stream(**fields, extra_body={"temperature": 0}) as message:
                async for _ in message.text_stream:
                    model.break_off(ExecutionFailed("a node failed", execution_id="0x"))
        await ours.close()
        await theirs.close()


async def test_impatient_clients_do_not_pay_for_what_they_do_not_get(
    model: ScriptedModel,
) -> None:
    """Thirty that wait for a second, of a network that needs three for all of them."""
    patience_s, steps_per_s, tokens, clients = 1.0, 100, 10, 30
    model.say(" ".join(["rain"] * clients * tokens * 3))
    model.free_steps = 0

    async def pace() -> None:
        while True:
            await asyncio.sleep(1 / steps_per_s)
            model.free_steps = 0
            model.release(1)

    async def ask(client: openai.AsyncOpenAI) -> int:
        try:
            await client.completions.create(
                model=NAME, prompt="weather?", max_tokens=tokens, temperature=0
            )
        except openai.APITimeoutError:
            return 0
        except openai.RateLimitError as error:
            assert int(error.response.headers["Retry-After"]) >= 1
            return 0
        return tokens

    before, pacing = model.steps, asyncio.create_task(pace())
    async with (
        serve_script(model) as url,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=patience_s, max_retries=2
        ) as client,
        asyncio.timeout(2 * HANG_S),
    ):
        delivered = sum(await asyncio.gather(*(ask(client) for _ in range(clients))))
    pacing.cancel()
    assert delivered and model.steps - before <= 1.5 * delivered


# ---- a server that is started anew --------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "text", "last"),
    [
        ("/v1/chat/completions", '"content":"a', '"finish_reason":"error"'),
        ("/v1/completions", '"text":"a', '"finish_reason":"error"'),
        ("/v1/responses", '"delta":"a', "event: response.failed"),
        ("/v1/messages", '"text":"a', "event: error"),
        ("/api/chat", '"content": "a', '{"error": '),
    ],
)
async def test_a_stream_outlives_its_server(
    path: str,
    text: str,
    last: str,
    model: ScriptedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second server finds what the first one, which never ends its streams, leaves behind.

    It does not go on with an answer whose request was too large to be kept.
    """
    monkeypatch.setattr(tuning, "STREAM_REQUEST_BYTES", 1)
    model.free_steps = 2
    async with connect(model, streams=tmp_path) as (url, http), asyncio.timeout(HANG_S):
        async with http.post(url + path, json={**BODIES[path], "stream": True}) as reply:
            seen = ""
            while text not in seen:
                seen += (await reply.content.readany()).decode()
            stream = reply.headers["x-splitup-stream"]
            async with connect(model, streams=tmp_path) as (second, _):
                async with http.get(f"{second}/v1/streams/{stream}") as again:
                    told = (await again.read()).decode()
                    assert again.content_type == reply.content_type
    assert told.startswith(seen), "all that was told, and maybe more"
    ended = told.rstrip().rpartition("\n\n" if "\n\n" in told else "\n")[2]
    assert last in ended and "started anew" in ended and "[DONE]" not in told
    if path not in ("/v1/messages", "/api/chat"):
        data = json.loads(ended.partition("data: ")[2])
        usage = data.get("usage") or data["response"]["usage"]
        steps = usage["splitup"]["steps"]
        assert steps in (1, 2) and usage["splitup"]["cost_micro_usdc"] == PRICE * steps


def drop_times(told: str) -> str:
    """Remove what differs from one answer to the other: ids, times, and signs of life."""
    told = re.sub(r"strm_[\w-]+|(resp|item|chatcmpl|cmpl|msg|call)[_-]\w{12,}|: fed .*\n", "", told)
    told = re.sub(r'"(created|created_at|\w+_duration)": ?("[^"]*"|\d+)', "", told)
    told = re.sub(r"id: :\d+\n", "", told)
    return re.sub(r"event: ping\ndata: .*\n.*\n\n", "", told)


@pytest.mark.parametrize("path", BODIES)
async def test_another_server_goes_on_with_a_stream(
    path: str,
    model: ScriptedModel,
    keys: ApiKeys,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All events are those of a server that lives, and what was paid is paid once."""
    monkeypatch.setattr(tuning, "STREAM_QUIET_S", HANG_S)
    ann = {"Authorization": f"Bearer {keys.create('ann', budget_micro_usdc=10_000)}"}
    body = {**BODIES[path], "stream": True}
    folder = tmp_path / "streams"
    async with connect(model, keys) as (url, http):
        async with http.post(url + path, json=body, headers=ann) as reply:
            whole = (await reply.read()).decode()
    assert keys.list()[0].spent_micro_usdc == STEPS * PRICE
    model.say(SAID)
    async with connect(model, keys, folder) as (url, http), asyncio.timeout(HANG_S):
        model.free_steps = 2
        async with http.post(url + path, json=body, headers=ann) as reply:
            seen = ""
            while " web" not in seen:
                seen += (await reply.content.readany()).decode()
            stream = reply.headers["x-splitup-stream"]
            model.lose()
            model.say(SAID, told=2)
            model.release(None)
            kept = (folder / stream).read_bytes()
            async with connect(model, keys, folder) as (second, _):
                async with http.get(f"{second}/v1/streams/{stream}", headers=ann) as again:
                    told = (await again.read()).decode()
                    assert again.content_type == reply.content_type
                assert keys.list()[0].spent_micro_usdc == 2 * STEPS * PRICE
            (folder / stream).write_bytes(kept)  # it was its own
    assert told.startswith(seen) and len(told) > len(seen)
    assert drop_times(told) == drop_times(whole)


async def test_a_text_that_nobody_comes_back_for_costs_what_was_told(
    model: ScriptedModel, keys: ApiKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "STREAM_GRACE_S", 0.0)
    ann = {"Authorization": f"Bearer {keys.create('ann', budget_micro_usdc=10_000)}"}
    folder = tmp_path / "streams"
    model.free_steps = 2
    async with connect(model, keys, folder) as (url, http), asyncio.timeout(HANG_S):
        async with http.post(f"{url}/v1/chat/completions", json=STREAMED, headers=ann) as reply:
            await read_events(reply, 3)
            stream = reply.headers["x-splitup-stream"]
            model.lose()
            async with connect(model, keys, folder) as (second, _):
                async with http.get(f"{second}/v1/streams/{stream}", headers=ann) as again:
                    told = (await again.read()).decode()
                assert '"finish_reason":"error"' in told and "[DONE]" not in told
                assert keys.list()[0].spent_micro_usdc == 2 * PRICE


async def test_a_client_reads_on_from_another_server(model: ScriptedModel, tmp_path: Path) -> None:
    async with connect(model, streams=tmp_path) as (url, http):
        async with http.post(f"{url}/v1/chat/completions", json=STREAMED) as reply:
            whole = await read_events(reply)
    headers = {"Last-Event-ID": get_id(whole[3])}
    async with connect(model, streams=tmp_path) as (url, http):
        async with http.post(f"{url}/v1/chat/completions", json=STREAMED, headers=headers) as reply:
            assert await read_events(reply) == whole[4:]
