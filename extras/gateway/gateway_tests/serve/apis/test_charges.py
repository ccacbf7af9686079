"""What requests cost whose server is killed: once what was told, or ordered and settled."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_tests.serve.apis.scripted_server import LIBRARY, NAME, PRICE, ScriptedModel
from gateway_tests.serve.apis.scripted_server import serve_script as serve
from splitup_gateway import charges
from splitup_gateway.api_keys import ApiKey, ApiKeys
from splitup_gateway.charges import Charges

from splitup.core import tuning
from splitup.core.errors import Unavailable
from tests.builders import HANG_S

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": NAME, "prompt": "weather?", "temperature": 0, "max_tokens": 60}
SAID = "a web library for file"
STEPS = 6  # a token for each word, and the end
BUDGET = 100 * PRICE


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch, model: ScriptedModel) -> Iterator[None]:
    """Look at executions often, and let every test begin with a model that answers at once."""
    monkeypatch.setattr(charges, "LOOK_S", 0.01)
    model.free_steps = model.settled = None
    model.stepped = asyncio.Event()
    model.say(SAID)
    yield
    model.release(None)


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[ApiKeys]:
    with contextlib.closing(ApiKeys.open(f"sqlite:///{tmp_path / 'keys.sqlite'}")) as opened:
        yield opened


@contextlib.asynccontextmanager
async def connect(
    model: ScriptedModel, keys: ApiKeys, folder: Path, secret: str
) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    headers = {"Authorization": f"Bearer {secret}"}
    async with serve(model, keys, folder) as url, aiohttp.ClientSession(headers=headers) as http:
        yield url, http


def spent(keys: ApiKeys) -> int:
    return keys.list()[0].spent_micro_usdc


async def wait_closed(keys: ApiKeys, server: str) -> None:
    async with asyncio.timeout(HANG_S):
        while keys.list_charges(server):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def find_server(folder: Path) -> str:
    return folder.with_name(f"{folder.name}.name").read_text()


# ---- streams -------------------------------------------------------------------------------------


async def test_a_stream_whose_servers_are_killed_twice_is_charged_once(
    model: ScriptedModel, keys: ApiKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is killed after it was charged for feeding the prompt again, and before a word."""
    monkeypatch.setattr(tuning, "STREAM_QUIET_S", HANG_S)
    fed = len(LIBRARY.encode("weather?").ids)
    monkeypatch.setattr(model, "model", replace(model.model, chunk=1))
    secret, folder = keys.create("ann", budget_micro_usdc=BUDGET), tmp_path / "streams"

    def say(told: int) -> None:
        """Let steps that feed what is known have no say."""
        model.say(SAID, told=told)
        rest = list(model._script)
        model._script = iter([1] * (fed + told - 1) + rest)

    say(0)
    model.free_steps = fed + 1
    async with (
        connect(model, keys, folder, secret) as (url, http),
        asyncio.timeout(HANG_S),
        http.post(url + PATH, json={**BODY, "stream": True}) as reply,
    ):
        seen = ""
        while " web" not in seen:
            seen += (await reply.content.readany()).decode()
        stream = reply.headers["x-splitup-stream"]
        most = spent(keys)
        model.lose()
        say(2)
        model.free_steps = 0
        model.stepped.clear()
        async with connect(model, keys, folder, secret) as (second, other):
            async with other.get(f"{second}/v1/streams/{stream}") as waiting:
                await model.stepped.wait()
                assert spent(keys) == most + (fed + 1) * PRICE, "it feeds what is known again"
                kept = (folder / stream).read_bytes()
                model.lose()
                say(2)
                model.release(None)
                async with (
                    connect(model, keys, folder, secret) as (third, last),
                    last.get(f"{third}/v1/streams/{stream}") as again,
                ):
                    told = (await again.read()).decode()
                assert "[DONE]" in told and " file" in told
                waiting.close()
            assert spent(keys) == (fed + 1 + fed + 2 + 3) * PRICE, "what was told, fed twice"
            (folder / stream).write_bytes(kept)
    assert spent(keys) == (fed + 1 + fed + 2 + 3) * PRICE


# ---- answers in one piece ------------------------------------------------------------------------


async def test_an_answer_whose_server_is_killed_costs_what_is_settled(
    model: ScriptedModel, keys: ApiKeys, tmp_path: Path
) -> None:
    """The execution has served another request before, which has paid its own steps."""
    secret, folder = keys.create("ann", budget_micro_usdc=BUDGET), tmp_path / "streams"
    async with connect(model, keys, folder, secret) as (url, http), asyncio.timeout(HANG_S):
        async with http.post(url + PATH, json=BODY) as reply:
            assert reply.status == 200
        await wait_closed(keys, find_server(folder))
        assert spent(keys) == STEPS * PRICE
        model.say(SAID)
        model.free_steps = 3
        model.steps = 0
        asking = asyncio.create_task(http.post(url + PATH, json=BODY))
        while model.steps < 4:
            model.stepped.clear()
            await model.stepped.wait()
        most = spent(keys)
        assert most == (STEPS + 60) * PRICE
        [left] = keys.list_charges(find_server(folder))
        while not left.orders:
            await asyncio.sleep(0.01)
            [left] = keys.list_charges(find_server(folder))
        async with connect(model, keys, folder, secret):
            await asyncio.sleep(0.1)
            assert spent(keys) == most and keys.list_charges(find_server(folder)) == (left,)
            model.settled = STEPS + 4
            await wait_closed(keys, find_server(folder))
            assert spent(keys) == (STEPS + 4) * PRICE
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert spent(keys) == (STEPS + 4) * PRICE, "nothing is given back twice"


async def test_what_nobody_computed_costs_nothing(
    model: ScriptedModel, keys: ApiKeys, tmp_path: Path
) -> None:
    secret, folder = keys.create("ann", budget_micro_usdc=BUDGET), tmp_path / "streams"
    model.free_steps = 0
    async with connect(model, keys, folder, secret) as (url, http), asyncio.timeout(HANG_S):
        asking = asyncio.create_task(http.post(url + PATH, json=BODY))
        await model.stepped.wait()
        model.settled = 0  # it was given back
        async with connect(model, keys, folder, secret):
            await wait_closed(keys, find_server(folder))
        assert spent(keys) == 0
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_another_servers_charges_are_left_alone(
    model: ScriptedModel, keys: ApiKeys, tmp_path: Path
) -> None:
    secret = keys.create("ann", budget_micro_usdc=BUDGET)
    model.free_steps, model.settled = 0, 0
    async with connect(model, keys, tmp_path / "one", secret) as (url, http):
        asking = asyncio.create_task(http.post(url + PATH, json=BODY))
        await model.stepped.wait()
        async with connect(model, keys, tmp_path / "two", secret):
            await asyncio.sleep(0.1)
        assert spent(keys) == 60 * PRICE and keys.list_charges(find_server(tmp_path / "one"))
        model.release(None)
        async with await asking as reply:
            assert reply.status == 200
        await wait_closed(keys, find_server(tmp_path / "one"))
    assert spent(keys) == STEPS * PRICE


async def test_what_is_ordered_at_once_is_charged_in_full(
    keys: ApiKeys, model: ScriptedModel
) -> None:
    """As a step of a device's session, whose server is killed before it answers."""
    key, killed = await find_key(keys), Charges(keys, "here")
    async with killed.open(key, 50, is_ordered=True):
        settling = asyncio.create_task(Charges(keys, "here").settle_left(model))
        await wait_closed(keys, "here")
        settling.cancel()
        assert spent(keys) == 50


# ---- a database that fails -----------------------------------------------------------------------


async def find_key(keys: ApiKeys) -> ApiKey:
    keys.create("ann", budget_micro_usdc=BUDGET)
    return keys.list()[0]


async def test_what_cannot_be_given_back_is_given_back_later(
    keys: ApiKeys, model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, mine = await find_key(keys), Charges(keys)

    def fail(*_: object) -> None:
        raise Unavailable("the database failed")

    with monkeypatch.context() as patch, pytest.raises(Unavailable):
        patch.setattr(keys, "close_charge", fail)
        async with mine.open(key, 50) as charge:
            charge.used = 20
    assert spent(keys) == 50
    settling = asyncio.create_task(mine.settle_left(model))
    await wait_closed(keys, mine.server)
    settling.cancel()
    assert spent(keys) == 20


async def test_a_request_that_is_cancelled_while_it_is_charged_pays_nothing(
    keys: ApiKeys, model: ScriptedModel
) -> None:
    """Its thread charges the key although nobody waits for it any more."""
    key, mine = await find_key(keys), Charges(keys)
    keys.charge(key.name, "cancelled", 50, mine.server)
    settling = asyncio.create_task(mine.settle_left(model))
    await wait_closed(keys, mine.server)
    settling.cancel()
    assert spent(keys) == 0


async def test_a_text_goes_on_while_its_orders_cannot_be_kept(
    keys: ApiKeys, model: ScriptedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise Unavailable("the database failed")

    monkeypatch.setattr(keys, "note_orders", fail)
    secret = keys.create("ann", budget_micro_usdc=BUDGET)
    async with connect(model, keys, tmp_path / "streams", secret) as (url, http):
        async with http.post(url + PATH, json=BODY) as reply:
            assert json.loads(await reply.text())["choices"][0]["text"] == SAID
        await wait_closed(keys, find_server(tmp_path / "streams"))
    assert spent(keys) == STEPS * PRICE


# ---- requests that are refused -------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [{"stop": ["x"] * 99}, {"stop": [""]}, {"logit_bias": {"2048": 1}}]
)
async def test_s106_what_cannot_be_answered_opens_no_execution(
    model: ScriptedModel, wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, session = [], model.session

    def note(*args: Any, **terms: Any) -> Any:
        opened.append(args)
        return session(*args, **terms)

    monkeypatch.setattr(model, "session", note)
    async with serve(model) as url, aiohttp.ClientSession() as http:
        for body, status in (({**BODY, **wrong}, 400), (BODY, 200)):
            async with http.post(f"{url}{PATH}", json=body) as response:
                assert response.status == status and len(opened) == (status == 200)
