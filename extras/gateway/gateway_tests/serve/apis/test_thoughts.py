"""What a model thinks before it answers: in every API, by the official clients."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import ollama
import openai
import pytest
from gateway_tests.serve.apis.scripted_server import (
    FILE,
    LIBRARY,
    NAME,
    ScriptedModel,
    serve_script,
)
from splitup_gateway.apis.ollama import show_model
from splitup_gateway.apis.thoughts import (
    Thought,
    ThoughtMarks,
    ThoughtParser,
    find_marks,
    name_marks,
)

from splitup.client.text.grammar import Grammar, Grammars
from splitup.client.text.tokenizer import ModelTokenizer
from tests.builders import HANG_S

# as that of Qwen 3: thoughts of earlier turns are left out, and an empty one switches thinking off;
# ``opens`` begins the thought, as templates of models do that always think
TEMPLATE = r"""{%- for tool in tools or [] %}{{- tool.function.name ~ ': <tool_call>\n{"name": ' }}
{%- endfor %}{%- for message in messages %}{{- message.role ~ ':\n' }}
{%- if message.reasoning_content and loop.index0 > (messages | length) - 3 %}
{{- '<think>\n' ~ message.reasoning_content ~ '\n</think>\n\n' }}{%- endif %}
{{- message.content }}{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{{- call.function.arguments | tojson ~ '}\n</tool_call>' }}{%- endfor %}{{- '\n' }}{%- endfor %}
{{- 'assistant:\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}
{%- elif opens %}{{- '<think>\n' }}{%- endif %}"""
THOUGHT, ANSWER = "They ask for rain.\n\nSo <b>.", "It rains & <think> is a mark."
SAID = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
USER: Any = {"role": "user", "content": "weather?"}
COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red"]}}, "required": ["colour"]}
CALL = '<tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call>'
TOOL: Any = {"type": "function", "function": {"name": "paint", "parameters": COLOUR}}
OPENS = {"chat_template_kwargs": {"opens": True}}
MARKS = ThoughtMarks("<think>", "</think>")
HARMONY = (
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
)
BEGUN = ThoughtMarks("<think>", "</think>", is_begun=True)


@pytest.fixture(scope="module")
def thinker() -> Iterator[ScriptedModel]:
    with closing(ScriptedModel(TEMPLATE)) as running:
        yield running


@asynccontextmanager
async def connect(model: ScriptedModel) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serve_script(model) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [USER], "temperature": 0, "max_tokens": 200, **fields}


# ---- the parser --------------------------------------------------------------------------------


def split(marks: ThoughtMarks, pieces: list[str]) -> tuple[str, str]:
    """Return the thought and the text of an answer that comes in these pieces."""
    parser = ThoughtParser(marks)
    parts = [part for piece in pieces for part in parser.push(-1, piece)]
    parts += parser.finish()
    kinds = [type(part) for part in parts]
    assert kinds == sorted(kinds, key=lambda kind: kind is str), "no thought follows a text"
    assert all(part.text for part in parts if isinstance(part, Thought)), "none is empty"
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    return thought, "".join(part for part in parts if isinstance(part, str))


@pytest.mark.parametrize(
    ("marks", "said", "thought", "text"),
    [
        (MARKS, SAID, THOUGHT, ANSWER),
        (MARKS, f"\n {SAID}", THOUGHT, ANSWER),
        (MARKS, "<think>\n\n</think>\n\nyes", "", "yes"),
        (MARKS, "<think>so", "so", ""),
        (MARKS, "<think>so </thi", "so </thi", ""),
        (MARKS, "<think>so \n", "so", ""),
        (MARKS, "<think>so</think>\n ", "so", ""),
        (MARKS, "<thin", "", "<thin"),
        (MARKS, "\n yes <think>no</think>", "", "\n yes <think>no</think>"),
        (MARKS, "yes</think>", "", "yes</think>"),
        (MARKS, "", "", ""),
        (BEGUN, "so </ </b> 2 </think>\nyes</think>", "so </ </b> 2", "yes</think>"),
        (BEGUN, "</think>yes", "", "yes"),
        (BEGUN, "yes", "yes", ""),
    ],
)
def test_every_split_gives_the_same_thought(
    marks: ThoughtMarks, said: str, thought: str, text: str
) -> None:
    assert split(marks, [said]) == split(marks, list(said)) == (thought, text)
    for first in range(len(said) + 1):
        for second in range(first, len(said) + 1):
            pieces = [said[:first], said[first:second], said[second:]]
            assert split(marks, pieces) == (thought, text), pieces
    draw = random.Random(1)
    for _ in range(50):
        places = [0, *sorted(draw.choices(range(len(said) + 1), k=6)), len(said)]
        pieces = [said[at:end] for at, end in itertools.pairwise(places)]
        assert split(marks, pieces) == (thought, text), pieces


def test_what_is_certain_is_told_at_once() -> None:
    parser = ThoughtParser(MARKS)
    assert list(parser.push(-1, "<think>\nso ")) == [Thought("so")]
    assert list(parser.push(-1, "2 </")) == [Thought(" 2")]
    assert list(parser.push(-1, "b>")) == [Thought(" </b>")]
    assert list(parser.push(-1, "</think>\nyes ")) == ["yes "]
    assert list(parser.push(-1, "<think>")) == ["<think>"]
    assert parser.tokens == 4


@pytest.mark.parametrize(
    ("template", "marks"),
    [
        (TEMPLATE, ("<think>", "</think>")),
        ("{{ content.split('</think>')[-1] }}", ("<think>", "</think>")),
        ("{{ '<seed:think>' }}", ("<seed:think>", "</seed:think>")),
        ("[THINK]{{ thought }}[/THINK]", ("[THINK]", "[/THINK]")),
        (r"{{ '<|channel>thought\n<channel|>' }}", ("<|channel>thought", "<channel|>")),
        ("{{ '<|start|>assistant<|channel|>analysis<|message|>' }}", HARMONY),
        ("{{ messages }}", None),
    ],
)
def test_the_template_names_the_marks(template: str, marks: tuple[str, str] | None) -> None:
    assert name_marks(template) == marks


async def test_the_prompt_says_whether_a_thought_is_begun() -> None:
    with closing(ModelTokenizer(FILE, NAME)) as tokenizer:
        for prompt, is_begun in [
            ("user: <think>\nassistant: ", False),
            ("assistant: <think>\n", True),
            ("assistant: <think>\n\n</think>\n\n", False),
        ]:
            assert await find_marks(TEMPLATE, prompt, tokenizer) == ThoughtMarks(
                "<think>", "</think>", {}, is_begun
            )


# ---- marks that are special tokens, which texts leave out ---------------------------------------

SPECIALS = {1: "<|mask|>", 2: "<|pad|>"}
CHANNEL = ThoughtMarks("<|mask|>thought", "<|pad|>", SPECIALS)


def test_marks_may_be_special_tokens() -> None:
    assert {LIBRARY.token_to_id(name): name for name in SPECIALS.values()} == SPECIALS
    names = {1: "<|channel|>", 2: "<|message|>", 3: "<|end|>", 4: "<|start|>"}
    analysis = [(1, ""), (9, "analysis"), (2, ""), (8, "so"), (3, ""), (4, ""), (9, "assistant")]
    final = [(1, ""), (9, "final"), (2, ""), (8, "yes")]
    for marks, said, thought, text in [
        (CHANNEL, [(1, ""), (9, "thought"), (8, "\nso "), (2, ""), (7, "yes")], "so", "yes"),
        (CHANNEL, [(1, ""), (9, "final"), (8, " yes"), (1, "")], "", "final yes"),
        (ThoughtMarks(*HARMONY, names), analysis + final, "so", "yes"),
    ]:
        parser = ThoughtParser(marks)
        parts = [part for token in said for part in parser.push(*token)]
        parts += parser.finish()
        assert "".join(part.text for part in parts if isinstance(part, Thought)) == thought
        assert "".join(part for part in parts if isinstance(part, str)) == text


# ---- grammars ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    with closing(Grammars(FILE, NAME, 2_048, [0])) as running:
        yield running


@pytest.mark.parametrize(
    ("marks", "said", "is_allowed"),
    [
        (MARKS, "<think>\nno {\n</think>\n\nx/12", True),
        (MARKS, "x/12", True),
        (MARKS, "<think>no", False),
        (MARKS, "<think>no</think>no", False),
        (MARKS, "no", False),
        (BEGUN, "no</think>x/12", True),
        (BEGUN, "x/12", False),
        (CHANNEL, "<|mask|>thought\nno<|pad|>x/12", True),
        (CHANNEL, "x/12", True),
        (CHANNEL, "<|pad|>x/12", False),
    ],
)
@pytest.mark.parametrize(
    "answer",
    [
        Grammar("regex", r"x/[0-9]+|y\/"),
        Grammar("lark", 'start: "x/" NUMBER\nNUMBER: /[0-9]+/'),
        Grammar("json_schema", '{"enum": [12]}'),
    ],
    ids=lambda answer: answer.kind,
)
async def test_a_thought_may_come_before_a_format(
    grammars: Grammars, marks: ThoughtMarks, said: str, is_allowed: bool, answer: Grammar
) -> None:
    said = said.replace("x/", "") if answer.kind == "json_schema" else said
    text = await grammars.open(marks.allow(answer))
    for token in [*LIBRARY.encode(said, add_special_tokens=False).ids, 0]:
        if not (found := bool(text.get_mask()[token])):
            break
        text.accept(token)
        if token:
            await text.ready()
    assert found == is_allowed


# ---- chats -------------------------------------------------------------------------------------


@pytest.mark.parametrize("opens", [False, True])
async def test_chats_have_reasoning_content(thinker: ScriptedModel, opens: bool) -> None:
    said = SAID.removeprefix("<think>\n") if opens else SAID
    asked = ask(extra_body=OPENS if opens else {})
    async with connect(thinker) as client:
        thinker.say(said)
        whole = await client.chat.completions.create(**asked)
        thinker.say(said)
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
        ]
    [choice] = whole.choices
    assert choice.finish_reason == "stop" and choice.message.content == ANSWER
    assert choice.message.reasoning_content == THOUGHT
    usage, told = whole.usage, chunks[-1].usage
    thought = said.partition("</think>")[0] + "</think>"
    count = len(LIBRARY.encode(thought, add_special_tokens=False).ids)
    assert abs(usage.completion_tokens_details.reasoning_tokens - count) <= 1, "tokens may overlap"
    assert usage.completion_tokens_details == told.completion_tokens_details
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == THOUGHT and sum(map(bool, thoughts)) > 5
    assert "".join(delta.content or "" for delta in deltas) == ANSWER


async def test_a_thought_that_is_cut_has_no_content(thinker: ScriptedModel) -> None:
    async with connect(thinker) as client:
        thinker.say(SAID)
        cut = await client.chat.completions.create(**ask(max_tokens=9))
        thinker.say(SAID)
        response = await client.responses.create(
            model=NAME, input="weather?", temperature=0, max_output_tokens=9
        )
    [choice] = cut.choices
    assert choice.finish_reason == "length" and choice.message.content == ""
    assert THOUGHT.startswith(choice.message.reasoning_content)
    assert cut.usage.completion_tokens_details.reasoning_tokens == 9
    assert response.status == "incomplete" and response.output_text == ""
    [item] = response.output
    assert item.type == "reasoning" and item.status == "incomplete"


async def test_thinking_is_switched_off(thinker: ScriptedModel) -> None:
    for off in (
        {"reasoning_effort": "none"},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ):
        async with connect(thinker) as client:
            thinker.say(ANSWER)
            answer = await client.chat.completions.create(**ask(**off))
            message = answer.choices[0].message
            assert message.content == ANSWER and not hasattr(message, "reasoning_content")
            assert answer.usage.completion_tokens_details.reasoning_tokens == 0
            assert thinker.prompts[-1].endswith("<think>\n\n</think>\n\n")


async def test_tools_are_called_after_a_thought(thinker: ScriptedModel) -> None:
    async with connect(thinker) as client:
        for choice in ("auto", "required"):
            thinker.say(f"<think>\n{CALL}?\n</think>\n\n{CALL}")
            answer = await client.chat.completions.create(**ask(tools=[TOOL], tool_choice=choice))
            message = answer.choices[0].message
            assert answer.choices[0].finish_reason == "tool_calls", choice
            assert message.reasoning_content == f"{CALL}?" and not message.content
            [call] = message.tool_calls
            assert json.loads(call.function.arguments) == {"colour": "red"}
        result = {"role": "tool", "tool_call_id": call.id, "content": "painted"}
        thinker.say(ANSWER)
        again = ask(messages=[USER, message.model_dump(exclude_none=True), result], tools=[TOOL])
        answer = await client.chat.completions.create(**again)
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached > len(LIBRARY.encode(CALL).ids), "the thought and the call are still there"
    assert answer.choices[0].message.content == ANSWER


async def test_json_comes_after_a_thought(thinker: ScriptedModel) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "c", "schema": COLOUR}}
    async with connect(thinker) as client:
        thinker.say('Red {?\n</think>\n\n{"colour": "red"} and more')
        answer = await client.chat.completions.create(
            **ask(response_format=schema, extra_body=OPENS)
        )
    [choice] = answer.choices
    assert json.loads(choice.message.content) == {"colour": "red"}
    assert choice.message.reasoning_content == "Red {?" and choice.finish_reason == "stop"


async def test_a_history_without_thoughts_is_cached_up_to_the_answer(
    thinker: ScriptedModel,
) -> None:
    history = [USER, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "so?"}]
    async with connect(thinker) as client:
        thinker.say(SAID)
        first = await client.chat.completions.create(**ask())
        thinker.say(SAID)
        again = await client.chat.completions.create(**ask(messages=history))
    assert again.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1


# ---- other APIs --------------------------------------------------------------------------------


async def test_messages_have_thinking_blocks(thinker: ScriptedModel) -> None:
    paint = {"name": "paint", "input_schema": COLOUR}
    asked: Any = {"model": NAME, "max_tokens": 200, "messages": [USER], "tools": [paint]}
    asked["extra_body"] = {"temperature": 0}
    async with (
        serve_script(thinker) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        thinker.say(f"{SAID}\n{CALL}")
        whole = await client.messages.create(**asked)
        thinker.say(f"{SAID}\n{CALL}")
        async with client.messages.stream(**asked) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_message()
        thinker.say("Done.")
        result = {"type": "tool_result", "tool_use_id": final.content[2].id, "content": "painted"}
        turns = [{"role": "assistant", "content": final.content}, {**USER, "content": [result]}]
        again = await client.messages.create(**{**asked, "messages": [USER, *turns]})
    for message in (whole, final):
        assert message.stop_reason == "tool_use"
        thought, text, call = message.content
        assert (thought.type, thought.thinking, thought.signature) == ("thinking", THOUGHT, "")
        assert (text.text, call.input) == (ANSWER, {"colour": "red"})
        assert message.usage.output_tokens_details.thinking_tokens > 9
    assert whole.usage.output_tokens == final.usage.output_tokens
    assert [event.type for event in events if event.type.startswith("content_block_st")] == [
        *("content_block_start", "content_block_stop") * 3
    ]
    assert "signature" in [event.type for event in events]
    assert again.content[0].text == "Done."
    told = len(LIBRARY.encode(SAID, add_special_tokens=False).ids)
    assert again.usage.cache_read_input_tokens >= told, "the thought was told again"


async def test_responses_have_a_reasoning_item(thinker: ScriptedModel) -> None:
    asked: Any = {"model": NAME, "input": "weather?", "temperature": 0, "max_output_tokens": 200}
    async with connect(thinker) as client:
        thinker.say(SAID)
        whole = await client.responses.create(**asked)
        thinker.say(SAID)
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        thinker.say("Yes.")
        items = [{"role": "user", "content": "weather?"}, *whole.output]
        again = await client.responses.create(**{**asked, "input": items})
    for response in (whole, final):
        thought, message = response.output
        assert thought.type == "reasoning" and message.type == "message"
        assert [part.text for part in thought.summary] == [THOUGHT]
        assert response.output_text == ANSWER and response.status == "completed"
        assert response.usage.output_tokens_details.reasoning_tokens > 9
    names = [event.type.removeprefix("response.") for event in events]
    assert [name for at, name in enumerate(names) if names[at - 1 : at] != [name]] == [
        *("created", "in_progress", "output_item.added", "reasoning_summary_part.added"),
        *("reasoning_summary_text.delta", "reasoning_summary_text.done"),
        *("reasoning_summary_part.done", "output_item.done", "output_item.added"),
        *("content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
        *("output_item.done", "completed"),
    ]
    told = len(LIBRARY.encode(SAID, add_special_tokens=False).ids)
    assert again.usage.input_tokens_details.cached_tokens >= told, "the thought was told again"


async def test_ollamas_client_gets_the_thought(thinker: ScriptedModel) -> None:
    options = {"temperature": 0, "num_predict": 200}
    async with serve_script(thinker) as url, AsyncExitStack() as stack:
        client = ollama.AsyncClient(host=url)
        stack.push_async_callback(client._client.aclose)
        thinker.say(SAID)
        whole = await client.chat(NAME, [USER], think=True, options=options)
        thinker.say(SAID)
        lines = [
            line async for line in await client.chat(NAME, [USER], options=options, stream=True)
        ]
        thinker.say(SAID)
        text = await client.generate(NAME, "weather?", think="low", options=options)
    assert (whole.message.thinking, whole.message.content) == (THOUGHT, ANSWER)
    assert "".join(line.message.thinking or "" for line in lines) == THOUGHT
    assert "".join(line.message.content or "" for line in lines) == ANSWER
    assert (text.thinking, text.response) == (THOUGHT, ANSWER)
    assert "thinking" in show_model(thinker.model)["capabilities"]


async def test_completions_are_told_as_they_are(thinker: ScriptedModel) -> None:
    async with connect(thinker) as client:
        thinker.say(SAID)
        answer = await client.completions.create(
            model=NAME, prompt="weather? <think>", temperature=0, max_tokens=200
        )
    assert answer.choices[0].text == SAID
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("told", [3, 12, 28])  # within the thought, within the text
async def test_another_server_goes_on_with_a_thought(
    thinker: ScriptedModel, tmp_path: Path, told: int
) -> None:
    body = {**ask(), "stream": True}
    thinker.say(SAID)
    async with (
        serve_script(thinker, streams=tmp_path) as url,
        aiohttp.ClientSession() as http,
        asyncio.timeout(HANG_S),
    ):
        thinker.free_steps = told
        async with http.post(f"{url}/v1/chat/completions", json=body) as reply:
            stream, kept = reply.headers["x-splitup-stream"], b""
            while kept.count(b'"is":"token"') + kept.count(b'"is": "token"') < told:
                await reply.content.readany()
                kept = (tmp_path / stream).read_bytes()
            thinker.lose()
            thinker.say(SAID, told=told)
            thinker.release(None)
            async with serve_script(thinker, streams=tmp_path) as second:
                async with http.get(f"{second}/v1/streams/{stream}") as again:
                    lines = (await again.text()).splitlines()
            (tmp_path / stream).write_bytes(kept)  # it was its own
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THOUGHT
    assert "".join(delta.get("content") or "" for delta in deltas) == ANSWER
