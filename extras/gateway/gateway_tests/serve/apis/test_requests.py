"""Requests of the OpenAI API: defaults, limits, and errors that name the field."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from splitup_gateway.access import Access
from splitup_gateway.apis.encoding import EmbeddingRequest
from splitup_gateway.apis.requests import ChatRequest, CompletionRequest, parse_request
from splitup_gateway.apis.response_requests import ResponseRequest
from splitup_gateway.errors import ApiError
from splitup_gateway.quotes import Quotes
from splitup_gateway.replies import TEXTS, Replies

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
TEXT = {"model": "m", "prompt": "hello"}
PNG = "data:image/png;base64,eA=="
IMAGE = {"type": "image_url", "image_url": {"url": PNG}}
EPHEMERAL = {"type": "ephemeral"}
CACHED = {"type": "text", "text": "hello", "cache_control": EPHEMERAL}
BODIES = {
    ChatRequest: CHAT,
    CompletionRequest: TEXT,
    ResponseRequest: {"model": "m", "input": "x"},
    EmbeddingRequest: {"model": "m", "input": "x"},
}


def test_defaults_are_those_of_the_api() -> None:
    chat = parse_request(ChatRequest, CHAT)
    [sampler] = chat.make_samplers()
    assert (sampler.temperature, sampler.top_k, sampler.top_p, sampler.min_p) == (1.0, 0, 1.0, 0.0)
    assert chat.limit is None and chat.recorded_logprobs is None and not chat.stop_strings
    assert chat.make_adjustments(None).is_empty
    assert chat.make_samplers()[0].seed != sampler.seed, "without a seed texts differ"


def test_choices_have_seeds_of_their_own() -> None:
    asked = parse_request(CompletionRequest, {**TEXT, "n": 3, "seed": 7, "temperature": 0})
    assert [sampler.seed for sampler in asked.make_samplers()] == [7, 8, 9]
    assert parse_request(ChatRequest, {**CHAT, "seed": -1}).make_samplers()[0].seed == 2**63 - 1


def test_s20_biases_are_counted() -> None:
    biases = {str(token): 1 for token in range(1025)}
    with pytest.raises(ApiError, match="at most 1024"):
        parse_request(CompletionRequest, {**TEXT, "logit_bias": biases})
    del biases["7"]
    parse_request(CompletionRequest, {**TEXT, "logit_bias": biases})


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_a_prompt_is_a_text_or_tokens_or_several(prompt: Any, prompts: Any) -> None:
    assert parse_request(CompletionRequest, {**TEXT, "prompt": prompt}).prompts == prompts


def test_parts_of_a_message_are_joined_and_developers_are_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = parse_request(
        ChatRequest, {**CHAT, "messages": [{"role": "developer", "content": parts}]}
    )
    assert asked.messages[0].to_template() == {"role": "system", "content": "ab"}


def test_images_keep_their_places_in_a_message() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": PNG, "detail": "high"}},
        {"type": "text", "text": "b"},
    ]
    chat = parse_request(ChatRequest, {**CHAT, "messages": [{"role": "user", "content": parts}]})
    items = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": PNG}]
    items.append({"type": "input_text", "text": "b"})
    asked = [{"role": "user", "content": items}]
    response = parse_request(ResponseRequest, {"model": "m", "input": asked}).convert()
    template = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    for messages in ([chat.messages[0].to_template()], response.template_messages):
        assert messages == [{"role": "user", "content": template}]
    assert chat.list_images() == response.list_images() == (b"x",)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.org/cat.png", "is no data URL, and this server fetches nothing"),
        ("file:///etc/passwd", "is no data URL"),
        ("data:image/png,eA==", "is no data URL"),
        ("data:image/png;base64", "is no data URL"),
        ("data:image/png;base64,e", "is not base64"),
        ("data:image/png;base64,eA==\n", "is not base64"),
    ],
)
def test_only_images_that_are_sent_are_read(url: str, message: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    asked = parse_request(ChatRequest, {**CHAT, "messages": [{"role": "user", "content": [part]}]})
    with pytest.raises(ApiError, match=message) as caught:
        asked.list_images()
    assert caught.value.param == "image_url"


def test_too_many_images_are_refused_before_they_are_read() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "no URL"}}] * 17
    asked = parse_request(ChatRequest, {**CHAT, "messages": [{"role": "user", "content": parts}]})
    with pytest.raises(ApiError, match="at most 16 images"):
        asked.list_images()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatRequest, {"user": "u", "metadata": {}, "store": False, "verbosity": "low"}),
        (ChatRequest, {"modalities": ["text"], "reasoning": {"summary": "auto"}}),
        (ChatRequest, {"messages": [{"role": "user", "content": [CACHED]}]}),
        (ChatRequest, {"messages": [{**CHAT["messages"][0], "cache_control": EPHEMERAL}]}),
        (ResponseRequest, {"include": ["reasoning.encrypted_content"], "truncation": "auto"}),
        (ResponseRequest, {"text": {"verbosity": "high"}, "reasoning": {"summary": "auto"}}),
        (EmbeddingRequest, {"user": "u"}),
    ],
)
def test_fields_that_change_nothing_are_taken(kind: Any, fields: dict[str, Any]) -> None:
    plain, more = parse_request(kind, BODIES[kind]), parse_request(kind, {**BODIES[kind], **fields})
    if isinstance(plain, ChatRequest | ResponseRequest):
        plain, more = plain.convert(), more.convert()
        assert more.template_messages == plain.template_messages and more.make_variables() == {}
        assert more.recorded_logprobs is None


@pytest.mark.parametrize("kind", [ChatRequest, ResponseRequest])
@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"chat_template_kwargs": {"a": [1]}}, {"a": [1]}),
        ({"reasoning": {"effort": "low"}}, {"enable_thinking": True, "reasoning_effort": "low"}),
        ({"reasoning": {"effort": "none"}}, {"enable_thinking": False, "reasoning_effort": "none"}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        (
            {
                "reasoning": {"effort": "high"},
                "chat_template_kwargs": {"enable_thinking": False},
            },
            {"enable_thinking": False, "reasoning_effort": "high"},
        ),
    ],
)
def test_thinking_and_templates_are_told_what_was_asked(
    kind: Any, fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    assert parse_request(kind, {**BODIES[kind], **fields}).convert().make_variables() == variables
    asked = parse_request(kind, {**BODIES[kind], "chat_template_kwargs": {"tools": []}}).convert()
    with pytest.raises(ApiError, match="gives the chat template 'tools'"):
        asked.make_variables()


def test_the_effort_of_a_chat_has_a_field_of_its_own() -> None:
    asked = parse_request(ChatRequest, {**CHAT, "reasoning_effort": "none"})
    assert asked.make_variables() == {"enable_thinking": False, "reasoning_effort": "none"}


@pytest.mark.parametrize(
    ("kind", "change", "param"),
    [
        (ChatRequest, {"messages": []}, "messages"),
        (ChatRequest, {"messages": [{"role": "robot", "content": ""}]}, "messages.0.role"),
        (ChatRequest, {"tools": []}, "tools"),
        (ChatRequest, {"response_format": {"type": "xml"}}, "response_format"),
        (
            ChatRequest,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "", "schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            ChatRequest,
            {"response_format": {"type": "grammar", "syntax": "gbnf", "definition": "x"}},
            "response_format.syntax",
        ),
        (ChatRequest, {"messages": CHAT["messages"] * 2_049}, "messages"),
        (ChatRequest, {"temperature": 3}, "temperature"),
        (ChatRequest, {"top_logprobs": 21}, "top_logprobs"),
        (ChatRequest, {"max_tokens": 0}, "max_tokens"),
        (ChatRequest, {"n": 17}, "n"),
        (CompletionRequest, {"echo": True}, "echo"),
        (CompletionRequest, {"best_of": 2}, "best_of"),
        (CompletionRequest, {"frequency_penalty": 2.1}, "frequency_penalty"),
        (CompletionRequest, {"repetition_penalty": 0}, "repetition_penalty"),
        (CompletionRequest, {"logit_bias": {"5": "much"}}, "logit_bias.5"),
        (CompletionRequest, {"model": 5}, "model"),
        (CompletionRequest, {"prompt": {}}, "prompt"),
        (CompletionRequest, {"prompt": [True, False]}, "prompt.0"),
        (CompletionRequest, {"prompt": [[1], [True]]}, "prompt.1.0"),
        (EmbeddingRequest, {"input": [True, False]}, "input.0"),
        (EmbeddingRequest, {"input": [["a"]]}, "input.0.0"),
        (EmbeddingRequest, {"truncate": "END"}, "truncate"),
        (ChatRequest, {"modalities": ["audio"]}, "modalities.0"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{**CACHED, "surprise": 1}]}]},
            "messages.0.content.0.surprise",
        ),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages.0.content.0.text",
        ),
        (ResponseRequest, {"input": [{"role": "user"}]}, "input.0.content"),
        (ResponseRequest, {"input": [{"type": "computer_call"}]}, "input.0"),
        (ResponseRequest, {"input": [{"type": ["x"]}]}, "input.0"),
        (ChatRequest, {"messages": [{"role": "tool", "content": ""}]}, "messages.0"),
        (ChatRequest, {"messages": [{"role": "user"}]}, "messages.0"),
        (ChatRequest, {"messages": [{"role": "assistant", "content": [IMAGE]}]}, "messages.0"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{**IMAGE, "image_url": PNG}]}]},
            "messages.0.content.0.image_url",
        ),
        (
            ResponseRequest,
            {
                "input": [
                    {
                        "role": "assistant",
                        "content": [{"type": "input_image", "image_url": PNG}],
                    }
                ]
            },
            "input.0",
        ),
        (ChatRequest, {"tools": [{"type": "function"}]}, "tools.0.function"),
        (ChatRequest, {"tool_choice": "any"}, "tool_choice"),
        (CompletionRequest, {"top_p": 0}, "top_p"),
    ],
)
def test_a_field_that_cannot_be_served_is_named(kind: Any, change: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(kind, {**BODIES[kind], **change})
    assert caught.value.param == param and caught.value.status == 400


@pytest.mark.parametrize("body", [None, [], "text", 5])
def test_a_body_that_is_no_object_is_refused(body: Any) -> None:
    with pytest.raises(ApiError, match="no JSON object"):
        parse_request(ChatRequest, body)


@pytest.mark.parametrize("token", ["x", "-1", "1.5", "²", "9" * 12])
def test_a_bias_is_of_a_token(token: str) -> None:
    with pytest.raises(ApiError, match="no token id"):
        parse_request(ChatRequest, {**CHAT, "logit_bias": {token: 1}}).make_adjustments(None)


def test_too_many_prompts_are_refused() -> None:
    with pytest.raises(ApiError, match="1 to 16 prompts"):
        _ = parse_request(CompletionRequest, {**TEXT, "prompt": ["a"] * 17}).prompts


def test_a_response_request_is_a_conversation() -> None:
    asked = parse_request(
        ResponseRequest,
        {
            "model": "m",
            "instructions": "be brief",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {
                    **{
                        "type": "message",
                        "role": "assistant",
                        "id": "msg_1",
                        "status": "completed",
                    },
                    "content": [{"type": "output_text", "text": "hello", "annotations": []}],
                },
                {"role": "developer", "content": "more"},
            ],
        },
    ).convert()
    assert [(each["role"], each["content"]) for each in asked.template_messages] == [
        ("system", "be brief"),
        ("user", "hi"),
        ("assistant", "hello"),
        ("system", "more"),
    ]
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    known = {**thought, "content": [{"type": "reasoning_text", "text": "2 + 3"}]}
    said = {"role": "assistant", "content": "5"}
    for items, wanted in (
        ([thought, said], said),
        ([known, said], {**said, "reasoning_content": "2 + 3"}),
    ):
        asked = parse_request(ResponseRequest, {"model": "m", "input": items}).convert()
        assert asked.template_messages == [wanted]
    with pytest.raises(ApiError, match="previous_response_id"):
        parse_request(
            ResponseRequest, {"model": "m", "input": "x", "previous_response_id": "resp_1"}
        )


@pytest.mark.parametrize("path", TEXTS)
def test_s121_a_request_is_converted_where_it_is_parsed(path: str) -> None:
    models: Any = SimpleNamespace(get=lambda _: None)
    read, _ = Replies(Access(None), models, Quotes()).list_by_path()[path]
    asked = {"prompt": "x"} if path in ("/v1/completions", "/api/generate") else CHAT
    if path == "/v1/responses":
        asked = {"input": "x"}
    more = {"max_tokens": 1} if path == "/v1/messages" else {}
    _, plain = read(json.dumps({**asked, "model": "m", **more}).encode())
    assert isinstance(plain, CompletionRequest) or "template_messages" in vars(plain)
