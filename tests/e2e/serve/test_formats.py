"""Structured answers, tools and quotes before a real network, spoken to by official clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

import aiohttp
import ollama
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.builders import HANG_S
from tests.e2e.conftest import MODEL

NPM = Path(__file__).resolve().parents[2] / "npm"
CHAT = [{"role": "user", "content": "library for"}]


class Package(BaseModel):
    """A Debian package."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["tool", "library"]
    size: int = Field(ge=0, le=99)


PAINT = {
    "name": "paint",
    "description": "paints the wall",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    },
}
TOOLS = [
    {"type": "function", "function": PAINT},
    {"type": "function", "function": {"name": "stop"}},
]


def test_answers_are_of_their_schema(client: openai.OpenAI) -> None:
    longest = 200  # with the most white space that the grammar allows
    parsed = client.chat.completions.parse(
        model=MODEL, messages=CHAT, max_tokens=longest, seed=0, response_format=Package
    )
    [choice] = parsed.choices
    assert isinstance(choice.message.parsed, Package) and choice.finish_reason == "stop"
    response = client.responses.parse(
        model=MODEL, input="library for", max_output_tokens=longest, text_format=Package
    )
    assert isinstance(response.output_parsed, Package) and response.status == "completed"


def test_an_answer_is_json(client: openai.OpenAI) -> None:
    some = client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        max_tokens=9,
        temperature=0,
        response_format={"type": "json_object"},
    )
    assert some.choices[0].message.content[0] == "{"


def test_grammars_choices_and_probabilities(client: openai.OpenAI) -> None:
    grammar = {"type": "grammar", "syntax": "regex", "definition": "(yes|no), [0-9]{3}"}
    answer = client.completions.create(
        model=MODEL,
        prompt="library for",
        max_tokens=20,
        n=2,
        seed=1,
        logprobs=1,
        extra_body={"response_format": grammar},
    )
    for choice in answer.choices:
        assert choice.text[:-3] in ("yes, ", "no, ") and choice.text[-3:].isdigit()
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None
        assert "".join(choice.logprobs.tokens or ()) == choice.text
    again = client.completions.create(
        model=MODEL,
        prompt="library for",
        max_tokens=20,
        seed=1,
        stream=True,
        extra_body={"response_format": grammar},
    )
    assert "".join(chunk.choices[0].text for chunk in again) == answer.choices[0].text


def test_a_model_calls_a_tool_and_gets_its_result(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "tools": TOOLS,
        "max_tokens": 90,
        "seed": 3,
        "parallel_tool_calls": False,
    }
    chosen = {"type": "function", "function": {"name": "paint"}}
    answer = client.chat.completions.create(messages=CHAT, tool_choice=chosen, **options)
    [choice] = answer.choices
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.function.name == "paint"
    assert json.loads(call.function.arguments)["colour"] in ("red", "blue")
    history = [*CHAT, choice.message]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
    last = client.chat.completions.create(
        messages=history, **{**options, "max_tokens": 5, "tools": TOOLS[:1]}
    )
    assert last.choices[0].message.content and not last.choices[0].message.tool_calls
    with client.chat.completions.stream(messages=CHAT, tool_choice=chosen, **options) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in events
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    assert final.finish_reason == "tool_calls"


@pytest.mark.long  # in small: above, by another front door
def test_a_response_calls_a_tool_and_gets_its_result(client: openai.OpenAI) -> None:
    tools = [{"type": "function", **PAINT}]
    options: dict[str, Any] = {"model": MODEL, "tools": tools, "max_output_tokens": 90}
    options["extra_body"] = {"seed": 2}
    answer = client.responses.create(
        input="library for", tool_choice="required", parallel_tool_calls=False, **options
    )
    [call] = answer.output
    assert call.type == "function_call" and call.name == "paint"
    assert json.loads(call.arguments)["colour"] in ("red", "blue")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    last = client.responses.create(
        input=[{"role": "user", "content": "library for"}, call, result],
        **{**options, "max_output_tokens": 5},
    )
    assert last.output_text
    events = list(
        client.responses.create(
            input="library for",
            stream=True,
            tool_choice={"type": "function", "name": "paint"},
            **options,
        )
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    [done] = [one for one in events if one.type == "response.function_call_arguments.done"]
    assert done.arguments == call.arguments and events[-1].type == "response.completed"
    assert events[-1].response.output[0].arguments == call.arguments


@pytest.mark.long  # in small: the calls that it makes are above, and it talks in test_texts.py
def test_langchain_calls_tools_and_parses(url: str) -> None:
    from langchain_openai import ChatOpenAI  # takes seconds of each process that collects tests

    chat = ChatOpenAI(
        model=MODEL, base_url=url, api_key="none", max_completion_tokens=90, temperature=0
    )
    bound = chat.bind_tools([PAINT], tool_choice="paint", parallel_tool_calls=False)
    [call] = bound.invoke("library for").tool_calls
    assert call["name"] == "paint" and call["args"]["colour"] in ("red", "blue")
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(Package, method=method).invoke("library for")
        assert isinstance(found, Package)


@pytest.mark.long  # in small: gateway_tests/serve/apis/test_messages.py has one
def test_the_package_for_node_runs_unchanged(url: str) -> None:
    assert (NPM / "node_modules" / "openai").is_dir(), f"run: cd {NPM} && npm ci --ignore-scripts"
    node = shutil.which("node")
    assert node is not None
    done = subprocess.run(
        [node, NPM / "ask.mjs", url, MODEL],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["model"] == MODEL and found["cost"] > 0
    assert found["whole"] == found["streamed"] != ""
    assert found["parsed"]["colour"] in ("red", "blue")
    assert found["called"]["name"] == "paint"
    assert json.loads(found["called"]["arguments"])["colour"] in ("red", "blue")
    assert found["response"]["colour"] in ("red", "blue")
    assert found["error"] == ["NotFoundError", 404, "model_not_found", "model"]


def test_a_quote_binds_and_an_answer_names_its_receipt(client: openai.OpenAI, url: str) -> None:
    body = {"model": MODEL, "messages": CHAT, "max_tokens": 6}
    quote = client.post("/quote", body=body, cast_to=dict[str, Any])
    assert quote["max_steps"] >= 6 and quote["prompt_tokens"] > 0
    raw = client.chat.completions.with_raw_response.create(
        **body, extra_headers={"x-splitup-quote": quote["id"]}
    )
    cost = raw.parse().usage.model_extra["splitup"]
    assert 0 < cost["cost_micro_usdc"] <= quote["max_cost_micro_usdc"]
    assert raw.headers["x-splitup-cost"] == str(cost["cost_micro_usdc"])
    assert raw.headers["x-splitup-receipt"] == cost["receipts"][0]
    receipt = client.get(cost["receipts"][0].removeprefix("/v1"), cast_to=dict[str, Any])
    assert receipt["execution_id"] == cost["executions"][0] and receipt["status"] == "open"
    with pytest.raises(openai.NotFoundError):
        client.get(f"/receipts/0x{'0' * 64}", cast_to=dict[str, Any])
    for header in ({"x-splitup-quote": quote["id"]}, {"x-splitup-max-cost": "1"}):
        with pytest.raises(openai.BadRequestError, match="the request may cost"):
            client.chat.completions.create(**{**body, "max_tokens": 60}, extra_headers=header)
    for kind in ({"prompt": "a"}, {"input": "a"}):
        quote = client.post("/quote", body={"model": MODEL, **kind}, cast_to=dict[str, Any])
        assert quote["max_cost_micro_usdc"] > 0


def make_format(schema: Any) -> dict[str, Any]:
    named = {"name": "x", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        (make_format({"$ref": "#"}), "response_format"),
        (make_format({"$ref": "file:///etc/passwd"}), "response_format"),
        (make_format({"type": "string", "pattern": "(a*)*(?!b)"}), "response_format"),
        (make_format({"enum": ["x" * 200_000]}), "response_format"),
        (make_format({"not": {"type": "string"}}), "response_format"),
        (make_format([]), "response_format.json_schema.schema"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
        ({"messages": [{"role": "user", "content": "x" * 9_000}]}, "messages"),
        ({"messages": CHAT * 2_049}, "messages"),
        ({"response_format": {"type": "text", "other": 1}}, "response_format.other"),
    ],
)
async def test_bad_formats_and_tools_cost_nothing(
    url: str, change: dict[str, Any], param: str | None
) -> None:
    body = {"model": MODEL, "messages": CHAT, "max_tokens": 4, **change}
    async with aiohttp.ClientSession() as http:
        for path in ("/chat/completions", "/quote"):
            async with http.post(f"{url}{path}", json=body) as reply:
                error = (await reply.json())["error"]
                assert reply.status == 400 and error["param"] == param, error
                assert "x-splitup-execution" not in reply.headers


@pytest.mark.long  # in small: tests/fuzz/test_costs.py
async def test_a_hostile_schema_delays_nobody(client: openai.OpenAI, url: str) -> None:
    """Its bounds are in the confined process; texts of others go on meanwhile."""
    pattern = r"^(\w{1,500}|\d{3,700}){1,300}a{500}$"
    hostile = {"model": MODEL, "messages": CHAT, "max_tokens": 20}
    hostile |= make_format({"type": "string", "pattern": pattern})
    async with aiohttp.ClientSession() as http, openai.AsyncOpenAI(
        base_url=url, api_key="none", max_retries=0
    ) as others:  # fmt: skip

        async def attack() -> int:
            async with http.post(f"{url}/chat/completions", json=hostile) as reply:
                await reply.read()
                return reply.status

        async def ask(seed: int) -> str | None:
            answer = await others.chat.completions.parse(
                model=MODEL, messages=CHAT, max_tokens=80, seed=seed, response_format=Package
            )
            return answer.choices[0].finish_reason

        statuses, reasons = await asyncio.gather(
            asyncio.gather(*(attack() for _ in range(3))),
            asyncio.gather(*(ask(seed) for seed in range(3))),
        )
    assert set(statuses) <= {200, 400} and set(reasons) == {"stop"}


@pytest.mark.long  # in small: gateway_tests/serve/apis/test_ollama.py
def test_the_client_of_ollama_runs_unchanged(client: openai.OpenAI, url: str) -> None:
    host = ollama.Client(host=url.removesuffix("/v1"))
    with contextlib.closing(host._client):
        assert [model.model for model in host.list().models] == [MODEL]
        assert "tools" in (host.show(MODEL).capabilities or ())
        options = {"num_predict": 8, "seed": 1, "temperature": 0}
        plain = host.chat(MODEL, CHAT, options=options)
        wanted = client.chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=8, temperature=0
        )
        assert plain.message.content == wanted.choices[0].message.content and plain.done
        lines = list(host.generate(f"{MODEL}:latest", "library for", stream=True, options=options))
        assert "".join(line.response for line in lines) == plain.message.content
        assert lines[-1].done_reason == "length" and lines[-1].eval_count == 8
        options["num_predict"] = 80
        found = host.chat(MODEL, CHAT, format=Package.model_json_schema(), options=options)
        assert Package.model_validate_json(found.message.content or "")
        with pytest.raises(ollama.ResponseError, match="not served here"):
            host.chat("unknown", CHAT)
