"""OpenAI's own client and a model that is told what to say: counts, cut calls, agents' fields."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from gateway_tests.serve.apis.scripted_server import NAME, PRICE, ScriptedModel, serve_script

from splitup.client.text.tokenizer import ModelTokenizer

ASKED: dict[str, Any] = {
    "model": NAME,
    "messages": [{"role": "user", "content": "weather?"}],
    "temperature": 0,
}
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
PAINT: dict[str, Any] = {"name": "paint", "parameters": COLOUR}
TOOLS: list[Any] = [
    {"type": "function", "function": PAINT},
    {"type": "function", "function": {"name": "stop"}},
]
CALL = '<tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call>'


@asynccontextmanager
async def connect(model: ScriptedModel) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serve_script(model) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("stop", "limit", "text", "reason"),
    [
        (None, 90, "rain and wind", "stop"),  # the end token takes a step, too
        ([" wind"], 90, "rain and", "stop"),
        (["rain"], 90, "", "stop"),
        ([" never"], 90, "rain and wind", "stop"),
        (None, 2, None, "length"),
    ],
)
@pytest.mark.parametrize("logprobs", [False, True])
async def test_usage_counts_the_steps(
    model: ScriptedModel,
    stop: list[str] | None,
    limit: int,
    text: str | None,
    reason: str,
    logprobs: bool,
) -> None:
    options: dict[str, Any] = {"stop": stop, "max_tokens": limit, "logprobs": logprobs}
    async with connect(model) as client:
        model.say("rain and wind")
        answer = await client.chat.completions.create(**ASKED, **options)
        model.say("rain and wind")
        usage = None
        async for chunk in await client.chat.completions.create(
            **ASKED, **options, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
    [choice] = answer.choices
    assert choice.finish_reason == reason and (text is None or choice.message.content == text)
    assert answer.usage is not None and usage is not None
    cost = answer.usage.model_extra["splitup"]
    assert answer.usage.completion_tokens == cost["steps"], "the prompt takes one step"
    assert cost["cost_micro_usdc"] == PRICE * cost["steps"]
    assert usage.completion_tokens == answer.usage.completion_tokens


async def test_a_cut_call_leaves_no_content(model: ScriptedModel) -> None:
    limit = len(model.model.tokenizer.encode(CALL)) + 4
    options = {**ASKED, "tools": TOOLS, "tool_choice": "required", "max_tokens": limit}
    async with connect(model) as client:
        model.say(f"{CALL}\n{CALL}")
        [choice] = (await client.chat.completions.create(**options)).choices
        model.say(f"{CALL}\n{CALL}")
        streamed = ""
        async for chunk in await client.chat.completions.create(**options, stream=True):
            streamed += chunk.choices[0].delta.content or ""
        flat = [{"type": "function", **PAINT}]
        model.say(f"{CALL}\n{CALL}")
        response = await client.responses.create(
            model=NAME, input="x", tools=flat, tool_choice="required", max_output_tokens=limit
        )
    assert choice.finish_reason == "length" and choice.message.content is None and streamed == ""
    [call] = choice.message.tool_calls or ()
    assert json.loads(call.function.arguments) == {"colour": "red"}
    assert [item.type for item in response.output] == ["function_call"]
    assert response.status == "incomplete"


async def test_what_agents_send_is_taken(model: ScriptedModel) -> None:
    some = {"mode": "required", "tools": [{"type": "function", "function": {"name": "stop"}}]}
    async with connect(model) as client:
        model.say('<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>')
        chat = await client.chat.completions.create(
            **ASKED,
            tools=TOOLS,
            tool_choice={"type": "allowed_tools", "allowed_tools": some},
            parallel_tool_calls=False,
            reasoning_effort="low",
            verbosity="low",
            modalities=["text"],
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        assert chat.choices[0].message.tool_calls[0].function.name == "stop"
        assert "think: False low" in model.prompts[-1]
        model.say("ok")
        response = await client.responses.create(
            model=NAME,
            input="hello",
            reasoning={"effort": "none", "summary": "auto"},
            include=["reasoning.encrypted_content"],
            text={"verbosity": "low"},
            truncation="auto",
            store=False,
        )
    assert response.output_text == "ok" and "think: False none" in model.prompts[-1]


async def test_the_template_is_loaded_before_the_first_chat(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered, render = [], ModelTokenizer.render_chat

    def note(*args: Any, **options: Any) -> str:
        rendered.append(args)
        return render(*args, **options)

    monkeypatch.setattr(ModelTokenizer, "render_chat", note)
    async with serve_script(model):
        assert rendered
