"""The OpenAI API before a real network, spoken to by its official clients."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any, cast

import aiohttp
import openai
import pytest
from typer.testing import CliRunner

from splitup.cli.verbs import app
from splitup.client.connection import SplitUp
from tests.e2e.conftest import DRAFT, EXAMPLE, MODEL, Network
from tests.e2e.server import run_keys, run_server

RUNNER = CliRunner()
PROMPT = "library for"
CHAT = [{"role": "user", "content": "Package: python3-yaml\nDescription: library for"}]


def test_a_completion_is_the_text_of_the_sdk(client: openai.OpenAI, network: Network) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0)
    with SplitUp.connect_sync(network.config) as net:
        wanted = "".join(token.text for token in net.generate(MODEL, PROMPT, max_tokens=12))
    [choice] = answer.choices
    assert choice.text == wanted and choice.finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 12
    cost = answer.usage.model_extra["splitup"]  # type: ignore[index]
    assert cost["steps"] == 12 and cost["cost_micro_usdc"] > 0


def test_a_second_turn_feeds_only_what_is_new(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=8, seed=3)
    said = first.choices[0].message
    turn = [*CHAT, {"role": "assistant", "content": said.content}, {"role": "user", "content": "x"}]
    second = client.chat.completions.create(model=MODEL, messages=turn, max_tokens=8, seed=3)
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert first.usage is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None and cached >= first.usage.prompt_tokens
    executions = [each.usage.model_extra["splitup"]["executions"] for each in (first, second)]  # type: ignore[union-attr,index]
    assert executions[0] == executions[1], "one execution served both"


def test_a_chat_in_a_terminal_is_that_of_the_api(client: openai.OpenAI, network: Network) -> None:
    said: list[dict[str, str]] = []
    for line in ("library for", "x"):
        said.append({"role": "user", "content": line})
        answer = client.chat.completions.create(
            model=MODEL, messages=said, max_tokens=8, temperature=0
        )
        said.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
    command = ["chat", MODEL, "--max-tokens", "8", "--config", str(network.directory)]
    done = RUNNER.invoke(app, command, input="library for\n\nx\n")
    assert done.exit_code == 0, done.output
    lines = [each["content"] for each in said if each["role"] == "assistant"]
    assert done.stdout == "".join(
        line if line.endswith("\n") or not line else f"{line}\n" for line in lines
    )
    assert re.search(r"\d+ steps, 0\.\d+ USDC", done.stderr)
    silent = RUNNER.invoke(app, command, input="\n")
    assert (silent.exit_code, silent.stdout) == (0, "")
    assert "USDC" not in silent.stderr, "nothing was locked"


def test_models_are_listed_with_their_price(network: Network) -> None:
    done = RUNNER.invoke(app, ["models", "--json", "--config", str(network.directory)])
    assert done.exit_code == 0, done.output
    [model] = [each for each in json.loads(done.stdout)["models"] if each["name"] == MODEL]
    assert (model["state"], model["is_ready"], model["kind"]) == ("ready", True, "text-generation")
    assert model["price_nano_usdc"] == 12_000 and model["context"] > 0


def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": CHAT, "max_tokens": 10, "seed": 5, "n": 2}
    whole = client.chat.completions.create(**options)
    texts, reasons, usage = ["", ""], [None, None], None
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_stop_strings_biases_and_probabilities(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    plain = client.completions.create(**options, logprobs=2).choices[0]
    assert plain.logprobs is not None and plain.logprobs.tokens is not None
    assert plain.logprobs.token_logprobs is not None and plain.logprobs.text_offset is not None
    assert "".join(plain.logprobs.tokens) == plain.text
    assert all(value <= 0 for value in plain.logprobs.token_logprobs)
    second = plain.text[plain.logprobs.text_offset[2] : plain.logprobs.text_offset[4]]
    stopped = client.completions.create(**options, stop=second).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == plain.text[: plain.text.index(second)]


def test_a_response_and_its_stream_are_the_chats_text(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=8, seed=4)
    options = {"model": MODEL, "max_output_tokens": 8, "extra_body": {"seed": 4}}
    answer = client.responses.create(
        **options, input=CHAT[0]["content"], include=["message.output_text.logprobs"]
    )
    assert answer.output_text == chat.choices[0].message.content
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.usage is not None and answer.usage.output_tokens == 8
    [part] = answer.output[0].content  # type: ignore[union-attr]
    assert "".join(entry.token for entry in part.logprobs) == answer.output_text  # type: ignore[union-attr]
    events = list(client.responses.create(**options, input=[*CHAT], stream=True))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == answer.output_text and events[0].type == "response.created"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == answer.output_text


@pytest.mark.long  # in small: tests/decode/test_speculative.py has every sampler
def test_drafts_give_the_same_answers_in_fewer_steps(
    client: openai.OpenAI, network: Network
) -> None:
    """Also with probabilities, penalties, biases, a stop string and a grammar."""
    grammar = {"type": "grammar", "syntax": "regex", "definition": "(yes|no), [0-9]{3}"}
    asked: list[dict[str, Any]] = [
        {"temperature": 0, "max_tokens": 60},
        {"temperature": 0, "max_tokens": 16, "extra_body": {"repetition_penalty": 1.3}},
        {"temperature": 0.8, "seed": 4, "max_tokens": 24, "frequency_penalty": 0.5},
        {"temperature": 0.8, "seed": 4, "max_tokens": 24, "logit_bias": {"300": 4.0}, "stop": "."},
        {"max_tokens": 8, "temperature": 0, "extra_body": {"response_format": grammar}},
    ]
    network.register_model(EXAMPLE.with_name(DRAFT), DRAFT, "--target-vram", "100MB")
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(
            run_server(network, "--lease-steps", "400", "--speculate", f"{MODEL}={DRAFT}")
        )
        drafting = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        stack.callback(drafting.close)
        steps = [0, 0]
        for options in asked:
            found = []
            for place, each in enumerate((client, drafting)):
                answer = each.chat.completions.create(
                    model=MODEL, messages=CHAT, logprobs=True, top_logprobs=2, **options
                )
                assert answer.usage is not None
                steps[place] += answer.usage.model_extra["splitup"]["steps"]  # type: ignore[index]
                [choice] = answer.choices
                assert choice.logprobs is not None
                found.append((choice.message, choice.finish_reason, choice.logprobs))
            assert found[0] == found[1]
    assert steps[1] < steps[0]


def test_requests_at_once_are_served_side_by_side(client: openai.OpenAI, url: str) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as many:
            answers = await asyncio.gather(
                *(
                    many.completions.create(
                        model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0.8, seed=seed % 3
                    )
                    for seed in range(6)
                )
            )
            return [answer.choices[0].text for answer in answers]

    texts = asyncio.run(ask())
    assert texts[:3] == texts[3:] and len(set(texts)) > 1


@pytest.mark.long  # in small: it sits on OpenAI's package, which the other tests use
def test_langchain_runs_unchanged(url: str) -> None:
    from langchain_openai import ChatOpenAI  # takes seconds of each process that collects tests

    chat = ChatOpenAI(
        model=MODEL, base_url=url, api_key="none", max_completion_tokens=6, temperature=0
    )
    answer = chat.invoke("library for")
    assert answer.content and answer.usage_metadata is not None
    assert "".join(str(part.content) for part in chat.stream("library for")) == answer.content


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"model": "unknown"}, 404, "model_not_found"),
        ({"max_tokens": 100_000}, 400, "context_length_exceeded"),
        ({"prompt": []}, 400, None),
        ({"prompt": [10**6]}, 400, None),
        ({"suffix": "x"}, 400, None),
        ({"unknown": 1}, 400, None),
        ({"stop": [""]}, 400, None),
    ],
)
async def test_bad_input_is_an_error_of_the_api_and_costs_nothing(
    url: str, change: dict[str, object], status: int, code: str | None
) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, **change}
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{url}/completions", json=body) as reply:
            error = (await reply.json())["error"]
            assert reply.status == status and error["code"] == code and error["message"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/completions", b"{", 400),
        ("/completions", b"[" * 100_000, 400),
        ("/completions", b" " * 9_000_000, 413),
        ("/nothing", b"{}", 404),
    ],
)
async def test_bodies_that_are_no_request(url: str, path: str, body: bytes, status: int) -> None:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}{path}", data=io.BytesIO(body)) as reply,
    ):
        assert reply.status == status
        assert json.loads(await reply.read())["error"]["message"]


@pytest.mark.long  # in small: gateway_tests/serve/apis/test_streams.py; test_page.py stops a text
async def test_a_client_that_leaves_ends_its_text_and_its_bill(
    network: Network, tmp_path: Path
) -> None:
    """The server that stops pays what was computed, and gets the rest back."""
    database = f"sqlite:///{tmp_path / 'keys.sqlite'}"
    secret = str(run_keys(database, "new", "ann", "--budget", "1")["key"])
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "stream": True}
    flags = ("--leases", "1", "--lease-steps", "60", "--keys", database)
    with run_server(network, *flags) as url:
        headers = {"Authorization": f"Bearer {secret}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            async with http.post(f"{url}/completions", json=body) as reply:
                async for line in reply.content:  # until a token; then it does not come back
                    if line.startswith(b"data:") and json.loads(line[5:])["choices"][0]["text"]:
                        break
            costs = []
            # another 40 steps fit into the same lease only when most of the first were not run
            for count in (1, 40):
                whole = {**body, "max_tokens": count, "stream": False}
                async with http.post(f"{url}/completions", json=whole) as reply:
                    costs.append((await reply.json())["usage"]["splitup"])
    assert costs[0]["executions"] == costs[1]["executions"]
    [key] = cast(list[dict[str, int]], run_keys(database, "list")["keys"])
    known = sum(cost["cost_micro_usdc"] for cost in costs)
    assert known < key["spent_micro_usdc"] < 1.4 * known, "the first text ended, and cost little"
    [execution] = costs[0]["executions"]
    async with SplitUp.connect(network.config) as net:
        receipt = await net.receipt(execution)
    price_micro_usdc = costs[0]["cost_micro_usdc"] // costs[0]["steps"]
    assert receipt.status == "settled" and receipt.refunded_micro_usdc > 0
    assert receipt.steps * price_micro_usdc == key["spent_micro_usdc"]


@pytest.mark.long  # in small: tests/chain/test_shared_account.py
def test_a_lease_longer_than_the_network_allows_is_refused_at_the_start(network: Network) -> None:
    command = ["serve", MODEL, "--lease-seconds", "1801", "--config", str(network.config)]
    done = RUNNER.invoke(app, command)
    said = "--lease-seconds is 1801 s, and an execution on this network may last 5 to 1800 s"
    assert done.exit_code == 2 and said in done.output


@pytest.mark.long  # in small: gateway_tests/serve/test_api_keys.py; test_embeddings.py has a key
def test_a_key_is_needed_and_its_budget_holds(network: Network, tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'keys.sqlite'}"
    secret = str(run_keys(database, "new", "ann", "--budget", "0.0001", "--rate", "60")["key"])
    with run_server(network, "--keys", database, "--lease-steps", "100") as url:
        with openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
        with openai.OpenAI(base_url=url, api_key=secret, max_retries=0) as client:
            text = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6)
            assert text.usage is not None
            with pytest.raises(openai.RateLimitError, match="budget of key 'ann'") as refusal:
                client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=100)
            assert refusal.value.code == refusal.value.type == "insufficient_quota"
    [key] = cast(list[dict[str, int]], run_keys(database, "list")["keys"])
    spent = text.usage.model_extra["splitup"]["cost_micro_usdc"]  # type: ignore[index]
    assert key["spent_micro_usdc"] == spent > 0
