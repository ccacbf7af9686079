"""Requests of Ollama's API as requests of OpenAI's."""

from __future__ import annotations

from typing import Any

import pytest
from splitup_gateway.apis.ollama import GenerateRequest, OllamaChatRequest
from splitup_gateway.apis.requests import ChatRequest, CompletionRequest, parse_request
from splitup_gateway.errors import ApiError

CHAT = {"model": "m:latest", "messages": [{"role": "user", "content": "hello"}]}
TEXT = {"model": "m", "prompt": "hello"}


def test_defaults_are_ollamas() -> None:
    asked = parse_request(OllamaChatRequest, CHAT).convert()
    [sampler] = asked.make_samplers()
    assert asked.model == "m" and asked.stream and asked.limit is None
    assert (sampler.temperature, sampler.top_k, sampler.top_p) == (0.8, 40, 0.9)


def test_a_prompt_is_a_chat_where_the_model_has_a_template() -> None:
    asked = parse_request(GenerateRequest, {**TEXT, "system": "s", "stream": False})
    chat = asked.convert(has_template=True)
    assert isinstance(chat, ChatRequest) and not chat.stream
    assert [message.role for message in chat.messages] == ["system", "user"]
    for other in (asked.convert(has_template=False), parse_request(
        GenerateRequest, {**TEXT, "raw": True}).convert(has_template=True)):  # fmt: skip
        assert isinstance(other, CompletionRequest) and other.max_tokens == 128


def test_options_formats_and_calls_are_translated() -> None:
    options = {"num_predict": 7, "seed": 3, "stop": ["x"], "num_ctx": 4096, "repeat_penalty": 1}
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "one", "tool_name": "f"},
        {"role": "tool", "content": "two"},
    ]
    fields = {**CHAT, "messages": messages, "options": options, "format": {"type": "integer"}}
    asked = parse_request(OllamaChatRequest, fields).convert()
    assert (asked.limit, asked.seed, asked.stop_strings) == (7, 3, ("x",))
    assert asked.grammar is not None and "integer" in asked.grammar.text
    said = [message.to_template() for message in asked.messages]
    ids = [made["id"] for made in said[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in said[2:]] == ids and len(set(ids)) == 2
    assert said[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}


def test_thinking_is_switched_off_and_told_again() -> None:
    said = {"role": "assistant", "content": "5", "thinking": "2 + 3"}
    fields = {**CHAT, "think": False, "messages": [*CHAT["messages"], said, *CHAT["messages"]]}
    asked = parse_request(OllamaChatRequest, fields).convert()
    assert asked.make_variables() == {"enable_thinking": False}
    assert asked.template_messages[1]["reasoning_content"] == "2 + 3"
    text = parse_request(GenerateRequest, {**TEXT, "think": False}).convert(has_template=True)
    assert isinstance(text, ChatRequest)
    assert text.make_variables() == {"enable_thinking": False}


def test_images_come_before_the_text() -> None:
    said = {"role": "user", "content": "hello", "images": ["eA==", "eQ=="]}
    template = [{"type": "image"}] * 2 + [{"type": "text", "text": "hello"}]
    chat = parse_request(OllamaChatRequest, {**CHAT, "messages": [said]}).convert()
    text = parse_request(GenerateRequest, {**TEXT, "images": said["images"]})
    for asked in (chat, text.convert(has_template=True)):
        assert isinstance(asked, ChatRequest)
        assert asked.list_images() == (b"x", b"y")
        assert asked.messages[0].to_template()["content"] == template
    with pytest.raises(ApiError, match="with a chat template"):
        text.convert(has_template=False)


@pytest.mark.parametrize(
    "change",
    [
        {"options": {"mirostat": 1}},
        {"options": {"repeat_penalty": 1.1}},
        {"options": {"num_predict": "many"}},
        {"options": {"temperature": 9}},
        {"format": "xml"},
        {"think": "much"},
        {"messages": []},
        {"messages": [{"role": "assistant", "content": "x", "images": ["eA=="]}]},
        {"unknown": 1},
    ],
)
def test_what_is_not_supported_is_an_error(change: dict[str, Any]) -> None:
    with pytest.raises(ApiError):
        parse_request(OllamaChatRequest, {**CHAT, **change}).convert()
