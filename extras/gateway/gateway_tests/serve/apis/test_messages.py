"""Anthropic's Messages API, spoken to by its official client."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import pytest
from gateway_tests.serve.apis.scripted_server import CONTEXT, NAME, ScriptedModel, serve_script
from splitup_gateway.api_keys import ApiKeys
from splitup_gateway.apis.messages import MessagesRequest
from splitup_gateway.apis.requests import parse_request
from splitup_gateway.errors import ApiError

from tests.builders import HANG_S

NPM = Path(__file__).resolve().parents[5] / "tests/npm"
USER = {"role": "user", "content": "weather?"}
COLDEST = {"temperature": 0}  # which the client's own types no longer know
ASKED: dict[str, Any] = {"model": NAME, "max_tokens": 60, "messages": [USER], "extra_body": COLDEST}
BODY = {name: value for name, value in ASKED.items() if name != "extra_body"} | COLDEST
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"name": "paint", "description": "paints", "input_schema": COLOUR},
    {"name": "stop", "input_schema": {"type": "object", "properties": {}}},
]
CALL = '<tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call>'
EPHEMERAL = {"type": "ephemeral"}


@asynccontextmanager
async def connect(
    model: ScriptedModel, key: str = "none", keys: ApiKeys | None = None
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        serve_script(model, keys) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("said", "fields", "text", "reason", "stop", "tokens"),
    [
        ("rain and wind", {}, "rain and wind", "end_turn", None, None),
        ("rain and wind", {"stop_sequences": [" and"]}, "rain", "stop_sequence", " and", None),
        ("rain and wind", {"max_tokens": 1}, None, "max_tokens", None, 1),
        ("x" * 999, {"max_tokens": 9_999}, None, "model_context_window_exceeded", None, None),
    ],
)
async def test_an_answer_is_the_same_in_a_stream(
    model: ScriptedModel,
    said: str,
    fields: dict[str, Any],
    text: str | None,
    reason: str,
    stop: str | None,
    tokens: int | None,
) -> None:
    async with connect(model) as client:
        model.say(said)
        whole = await client.messages.create(**ASKED | fields)
        assert (whole.stop_reason, whole.stop_sequence) == (reason, stop)
        assert whole.role == "assistant" and whole.model == NAME
        [block] = whole.content
        assert block.type == "text" and said.startswith(block.text)
        assert text is None or block.text == text
        usage = whole.usage
        cost = usage.model_extra["splitup"]
        assert usage.output_tokens == (tokens or cost["steps"]), "the prompt takes one step"
        if reason == "model_context_window_exceeded":
            assert usage.input_tokens + usage.output_tokens == CONTEXT + 1
        model.say(said)
        async with client.messages.stream(**ASKED | fields) as stream:
            events = [event.type async for event in stream]
            final = await stream.get_final_message()
    assert final.content[0].text == block.text and final.stop_reason == reason
    assert final.usage.output_tokens == usage.output_tokens
    assert final.usage.cache_read_input_tokens > 0, "the first answer left its prompt in the cache"
    assert sum((final.usage.input_tokens, final.usage.cache_read_input_tokens)) == (
        usage.input_tokens
    )
    raw = [event for event in events if event not in ("text", "input_json")]
    assert raw[:2] == ["message_start", "content_block_start"]
    assert raw[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_the_events_have_their_order_and_names(model: ScriptedModel) -> None:
    async with serve_script(model) as url, aiohttp.ClientSession() as http:
        model.say(f"I paint.\n{CALL}")
        asked = {**BODY, "stream": True, "tools": TOOLS}
        async with http.post(f"{url}/v1/messages", json=asked) as reply:
            assert reply.content_type == "text/event-stream"
            lines = (await reply.text()).split("\n\n")
    assert lines.pop() == ""
    ids, lines = zip(*(line.split("\n", 1) for line in lines), strict=True)
    assert [int(each.rpartition(":")[2]) for each in ids] == list(range(1, len(ids) + 1))
    names = [line.partition("\n")[0].removeprefix("event: ") for line in lines]
    events = [json.loads(line.partition("\ndata: ")[2]) for line in lines]
    assert names == [event["type"] for event in events]
    assert [name for place, name in enumerate(names) if names[place - 1 : place] != [name]] == [
        *("message_start", "ping", "content_block_start", "content_block_delta"),
        *("content_block_stop", "content_block_start", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert [event["index"] for event in events if "index" in event] == sorted(
        event["index"] for event in events if "index" in event
    )
    assert "splitup" not in events[0]["message"]["usage"], "the cost is known at the end"
    assert events[-2]["usage"]["splitup"]["steps"] == events[-2]["usage"]["output_tokens"]
    json_delta = next(event["delta"] for event in events if event.get("index") == 1
                      and "delta" in event)  # fmt: skip
    assert json_delta == {"type": "input_json_delta", "partial_json": '{"colour": "red"}'}


@pytest.mark.parametrize("choice", [None, {"type": "any"}, {"type": "tool", "name": "paint"}])
async def test_three_tools_are_called_one_after_the_other(
    model: ScriptedModel, choice: dict[str, Any] | None
) -> None:
    fields = {**ASKED, "tools": TOOLS}
    if choice is not None:
        fields["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
    history: list[Any] = [USER]
    async with connect(model) as client:
        for turn in range(3):
            model.say(CALL if choice else f"I paint.\n{CALL}")
            async with client.messages.stream(**{**fields, "messages": history}) as stream:
                answer = await stream.get_final_message()
            assert answer.stop_reason == "tool_use"
            *texts, call = answer.content
            assert [text.text for text in texts] == ([] if choice else ["I paint."])
            assert call.type == "tool_use" and (call.name, call.input) == (
                "paint",
                {"colour": "red"},
            )
            result = {"type": "tool_result", "tool_use_id": call.id, "content": f"wall {turn}"}
            history += [
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": [{**result, "cache_control": EPHEMERAL}]},
            ]
        model.say("done")
        last = await client.messages.create(**{**ASKED, "tools": TOOLS, "messages": history})
    assert [block.text for block in last.content] == ["done"] and last.stop_reason == "end_turn"
    assert "tool: wall 2" in model.prompts[-1]


async def test_a_call_that_is_cut_is_no_text(model: ScriptedModel) -> None:
    async with connect(model) as client:
        model.say(f"{CALL}\n{CALL}")
        options = {"tools": TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 50}
        tokens = len(model.model.tokenizer.encode(CALL)) + 5
        answer = await client.messages.create(**ASKED | options | {"max_tokens": tokens})
    assert answer.stop_reason == "max_tokens"
    assert [block.type for block in answer.content] == ["tool_use"]


async def test_what_was_thought_and_said_is_told_to_the_template(model: ScriptedModel) -> None:
    history = [
        {"role": "user", "content": [{"type": "text", "text": "2 + 3", "citations": None}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "a sum", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "5", "cache_control": EPHEMERAL},
            ],
        },
        {"role": "user", "content": [{"type": "text", "text": "and"}, USER_TEXT]},
    ]
    fields: dict[str, Any] = {
        "messages": history,
        "system": [{"type": "text", "text": "be brief", "cache_control": EPHEMERAL}],
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "none"},
        "metadata": {"user_id": "u"},
    }
    async with connect(model) as client:
        asked = {**ASKED, **fields}
        del asked["max_tokens"], asked["extra_body"], asked["metadata"]
        counted = await client.messages.count_tokens(**asked)
        model.say("ok")
        answer = await client.messages.create(**ASKED | fields)
    assert answer.usage.input_tokens == counted.input_tokens
    assert model.prompts[-1] == (
        "think: False none\nsystem: be brief\nuser: 2 + 3\nassistant: (a sum)5\nuser: and more\n"
    )


USER_TEXT = {"type": "text", "text": " more"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[" * 500_000,
        b'{"model": "m", "max_tokens": 1e400, "messages": []}',
        b'{"model": "m", "max_tokens": 1, "messages": [{"role": ["user"], "content": "x"}]}',
        b'{"model": "m", "max_tokens": 1, "messages": [5]}',
        json.dumps({**BODY, "messages": [USER] * 2_049}).encode(),
        json.dumps({**BODY, "chat_template_kwargs": {"self": 1}}).encode(),
        json.dumps({**BODY, "surprise": 1}).encode(),
    ],
)
async def test_bodies_that_are_no_request_are_errors_of_the_api(
    model: ScriptedModel, body: bytes
) -> None:
    async with serve_script(model) as url, aiohttp.ClientSession() as http:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            async with asyncio.timeout(HANG_S), http.post(f"{url}{path}", data=body) as reply:
                found = await reply.json()
            assert reply.status == 400 and found["type"] == "error", path
            assert found["error"]["type"] == "invalid_request_error" and found["error"]["message"]


async def test_a_prompt_that_is_too_long_is_counted_and_refused(model: ScriptedModel) -> None:
    long = [{"role": "user", "content": "one two " * CONTEXT}]
    async with connect(model) as client:
        counted = await client.messages.count_tokens(model=NAME, messages=long)
        assert counted.input_tokens > CONTEXT
        with pytest.raises(anthropic.BadRequestError, match=f"{counted.input_tokens} in the"):
            await client.messages.create(**{**ASKED, "messages": long})


async def test_an_answer_is_json_by_a_schema(model: ScriptedModel) -> None:
    async with connect(model) as client:
        model.say('{"colour": "red"} and more')
        answer = await client.messages.create(
            **ASKED, output_config={"format": {"type": "json_schema", "schema": COLOUR}}
        )
    assert json.loads(answer.content[0].text) == {"colour": "red"}
    assert answer.stop_reason == "end_turn"


async def test_keys_and_errors_have_their_form(model: ScriptedModel, tmp_path: Path) -> None:
    keys = ApiKeys.open(f"sqlite:///{tmp_path / 'keys.sqlite'}")
    secret = keys.create("ann", budget_micro_usdc=100_000)
    try:
        async with connect(model, "sk-splitup-wrong", keys) as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.messages.create(**ASKED)
            assert refused.value.body["error"]["type"] == "authentication_error"
        async with connect(model, secret, keys) as client:
            assert [one.id async for one in client.models.list()] == [NAME]
            model.say("ok")
            assert (await client.messages.create(**ASKED)).content[0].text == "ok"
            with pytest.raises(anthropic.NotFoundError) as missing:
                await client.messages.create(**{**ASKED, "model": "other"})
            assert missing.value.body["type"] == "error"
            assert missing.value.body["error"]["type"] == "not_found_error"
    finally:
        keys.close()


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{**USER_TEXT, "colour": 1}]}]},
            "messages.0.content.0.colour",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "so"}]}, "messages.1"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools.0.type",
        ),
        ({"tools": [{**TOOLS[0], "name": "a b"}]}, "tools.0.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"container": "c"}, "container"),
        ({"temperature": 2}, "temperature"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)
def test_what_cannot_be_served_is_named(change: dict[str, Any], param: str) -> None:
    fields = {name: value for name, value in (BODY | change).items() if value is not None}
    with pytest.raises(ApiError) as caught:
        parse_request(MessagesRequest, fields).convert().make_variables()
    assert (caught.value.param or "").startswith(param)


async def test_the_package_for_node_runs_unchanged(model: ScriptedModel) -> None:
    package = NPM / "node_modules" / "@anthropic-ai" / "sdk"
    assert package.is_dir(), f"run: cd {NPM} && npm ci --ignore-scripts"
    node = shutil.which("node")
    assert node is not None
    model.say(f"I paint.\n{CALL}")
    async with serve_script(model) as url, asyncio.timeout(HANG_S):
        done = await asyncio.create_subprocess_exec(
            *(node, NPM / "ask_messages.mjs", url, NAME),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await done.communicate()
    assert done.returncode == 0, errors.decode()
    found = json.loads(output)
    assert found["model"] == NAME and found["counted"] > 0 and found["tokens"] > 9
    assert found["reason"] == "tool_use"
    assert found["content"] == [
        {"type": "text", "text": "I paint."},
        {"type": "tool_use", "name": "paint", "input": {"colour": "red"}},
    ]
    assert found["error"] == ["NotFoundError", 404, "not_found_error"]
