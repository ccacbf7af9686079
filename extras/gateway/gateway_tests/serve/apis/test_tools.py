"""Tools: which models have them, their grammars, and the calls that an answer contains."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from splitup_gateway.apis import tools
from splitup_gateway.apis.requests import ChatRequest, parse_request
from splitup_gateway.apis.response_requests import ResponseRequest
from splitup_gateway.apis.tools import HERMES, LLAMA, CallParser, Toolbox, ToolCall
from splitup_gateway.errors import ApiError
from splitup_gateway.names import AnswerNames
from tokenizers import Tokenizer

from splitup.client.text.grammar import Grammar, Grammars
from splitup.client.text.tokenizer import ModelTokenizer
from splitup.core.codec import parse_json_prefix
from splitup.demo.models import find_example
from splitup.graph.manifest import ChatInfo

# excerpts of the templates of Qwen 2.5, Hermes 3 and Llama 3.1
QWEN = r"""{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}{{- "\n" }}
{{- tool | tojson }}{%- endfor %}{{- "\n</tools>\n\nFor each function call, return a json object
with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\":
 <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}{%- endif %}
{%- for message in messages %}{{- message.role ~ ': ' ~ message.content }}
{%- for call in message.tool_calls or [] %}{{- '\n<tool_call>\n{"name": "' ~ call.function.name ~
'", "arguments": ' ~ call.function.arguments | tojson ~ '}\n</tool_call>' }}{%- endfor %}
{{- '\n' }}{%- endfor %}"""
LLAMA_3 = r"""{%- if tools is not none %}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of arguments}.\n\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}{%- endif %}"""
OTHER = "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "weather?"}]}
COLOURS = {
    "type": "object",
    "properties": {"colour": {"$ref": "#/$defs/colour"}},
    "required": ["colour"],
    "additionalProperties": False,
    "$defs": {"colour": {"enum": ["red", "blue"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "paint", "parameters": COLOURS}},
    {"type": "function", "function": {"name": "stop-now_2", "description": "stops"}},
]
FILE = (find_example() / "tokenizer.json").read_bytes()
LIBRARY = Tokenizer.from_str(FILE.decode())


def make(template: str = QWEN, **fields: Any) -> Toolbox:
    asked = parse_request(ChatRequest, {**CHAT, "tools": TOOLS, **fields})
    toolbox = asked.make_toolbox(template)
    assert toolbox is not None
    return toolbox


def parse(toolbox: Toolbox, text: str, size: int) -> list[Any]:
    """Parse a text that comes in pieces; return texts, and names with arguments."""
    parser, parts = CallParser(toolbox, AnswerNames()), []
    for start in range(0, len(text), size):
        parts += parser.push(text[start : start + size])
    found: list[Any] = []
    for part in parts + parser.finish():
        if isinstance(part, ToolCall):
            found.append((part.name, json.loads(part.arguments)))
        elif found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


@pytest.mark.parametrize(("template", "syntax"), [(QWEN, HERMES), (LLAMA_3, LLAMA)])
def test_the_template_decides_the_syntax(template: str, syntax: Any) -> None:
    assert make(template).syntax is syntax


@pytest.mark.parametrize(("template", "words"), [(OTHER, "another syntax"), ("", "does not show")])
def test_a_model_without_tools_is_named(template: str, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        make(template)
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a\n"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": 'x"'}}]}, "tools.0.function.name"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "x", "parameters": {"type": "a"}}}
                ]
            },
            "tools.0.function.parameters",
        ),
        ({"tools": TOOLS * 65}, "tools"),
    ],
)
def test_tools_that_cannot_be_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        make(**fields)
    assert caught.value.param == param


def test_no_tools_are_none() -> None:
    asked = parse_request(ChatRequest, {**CHAT, "tools": TOOLS, "tool_choice": "none"})
    assert asked.make_toolbox(OTHER) is None
    response = parse_request(ResponseRequest, {"model": "m", "input": "x", "tools": []})
    assert response.convert().make_toolbox("") is None


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_tools_are_allowed_and_all_are_shown(mode: str) -> None:
    named = {"type": "function", "function": {"name": "paint"}}
    some = {"mode": mode, "tools": [named]}
    toolbox = make(tool_choice={"type": "allowed_tools", "allowed_tools": some})
    flat = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "paint"}]}
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    fields = {"model": "m", "input": "x", "tools": tools, "tool_choice": flat}
    same = parse_request(ResponseRequest, fields).convert().make_toolbox(QWEN)
    assert same is not None and same.make_grammar(None) == toolbox.make_grammar(None)
    assert [one.name for one in same.allowed] == ["paint"]
    assert [tool["function"]["name"] for tool in toolbox.list_for_template()] == [
        *("paint", "stop-now_2"),
    ]
    grammar = toolbox.make_grammar(None)
    assert (grammar is None) == (mode == "auto")
    assert grammar is None or ("paint" in grammar.text and "stop-now_2" not in grammar.text)
    call = '<tool_call>{"name": "stop-now_2", "arguments": {}}</tool_call>'
    assert parse(toolbox, call, 9) == [call], "no call of a tool that is not allowed"


@pytest.mark.parametrize(
    ("template", "whole", "cut"),
    [
        (QWEN, '<tool_call>\n{"name": "paint", "arguments": {}}\n</tool_call>', "\n<tool_call>\n{"),
        (QWEN, "", "<tool_ca"),
        (LLAMA_3, '{"name": "paint", "parameters": {}}', '; {"name": "pa'),
    ],
)
def test_where_a_call_must_be_a_cut_one_is_no_text(template: str, whole: str, cut: str) -> None:
    toolbox = make(template, tool_choice="required")
    for size in (1, 3, 1_000):
        assert parse(toolbox, whole + cut, size) == ([("paint", {})] if whole else [])


@pytest.mark.parametrize("size", [1, 3, 1_000])
@pytest.mark.parametrize(
    ("template", "text", "parts"),
    [
        (QWEN, "just < text", ["just < text"]),
        (
            QWEN,
            'I paint.\n<tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n'
            '</tool_call>\n<tool_call>{"arguments": {}, "name": "stop-now_2"}</tool_call>\n',
            ["I paint.", ("paint", {"colour": "red"}), ("stop-now_2", {})],
        ),
        (QWEN, '<tool_call>\n{"name": "paint"', ['<tool_call>\n{"name": "paint"']),
        (QWEN, "<tool_call>x</tool_call>", ["<tool_call>x</tool_call>"]),
        (QWEN, '<tool_call>{"name": []}</tool_call>', ['<tool_call>{"name": []}</tool_call>']),
        (
            QWEN,
            '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
            ['<tool_call>{"name": "other", "arguments": {}}</tool_call>'],
        ),
        (LLAMA_3, "just {text}", ["just {text}"]),
        (
            LLAMA_3,
            '{"name": "paint", "parameters": {"colour": "}"}}; '
            '{"name": "stop-now_2", "parameters": {}}',
            [("paint", {"colour": "}"}), ("stop-now_2", {})],
        ),
        (LLAMA_3, '{"answer": {"a": 1}} and on', ['{"answer": {"a": 1}} and on']),
        (LLAMA_3, '{"name": "paint", ', ['{"name": "paint", ']),
        (LLAMA_3, "", []),
    ],
)
def test_calls_are_found_in_pieces(template: str, text: str, parts: list[Any], size: int) -> None:
    assert parse(make(template), text, size) == parts


@pytest.mark.parametrize("template", [QWEN, LLAMA_3])
def test_deep_nesting_is_text(template: str) -> None:
    """A model may write brackets without end; Python's parser would overflow the stack."""
    text = '<tool_call>{"name":' + "[" * 200_000 + "}</tool_call>"
    assert parse(make(template), text, 100_000) == [text]
    bare = '{"name":' + "[" * 200_000 + "}"
    assert parse(make(template), bare, 100_000) == [bare]


@pytest.fixture(scope="module")
def process() -> Iterator[Any]:
    with closing(Grammars(FILE, "model packages", 2_048, [0])._start()) as running:
        yield running


PIECES = [LIBRARY.decode([token]) for token in range(LIBRARY.get_vocab_size())]


async def write(process: Any, grammar: Grammar | None, seed: int, bias: str = "") -> str:
    """Return a random text of a grammar, preferring tokens that begin ``bias``."""
    assert grammar is not None
    grammars = Grammars(FILE, "model packages", 2_048, [0])
    grammars._child = process
    text, tokens, choices = await grammars.open(grammar), [], random.Random(seed)
    while len(tokens) < 400:
        await text.ready()
        allowed = np.flatnonzero(text.get_mask())
        said = LIBRARY.decode(tokens)
        fitting = []
        if bias.startswith(said):
            fitting = [t for t in allowed if t and bias.startswith(said + PIECES[t])]
        token = int(choices.choice(fitting or list(allowed)))
        if token == 0:
            break
        text.accept(token)
        tokens.append(token)
    return LIBRARY.decode(tokens)


@pytest.mark.parametrize("template", [QWEN, LLAMA_3])
async def test_a_call_that_must_be_is_one(process: Any, template: str) -> None:
    seen = set()
    for seed in range(6):
        toolbox = make(template, tool_choice="required", parallel_tool_calls=False)
        text = await write(process, toolbox.make_grammar(None), seed)
        [(name, arguments)] = parse(toolbox, text, 1_000)
        seen.add(name)
        assert arguments == {} or arguments["colour"] in ("red", "blue")
    assert len(seen) == 2
    named = make(template, tool_choice={"type": "function", "function": {"name": "paint"}})
    [(name, _)] = parse(named, await write(process, named.make_grammar(None), 1), 1_000)
    assert name == "paint"
    several = make(template, tool_choice="required")
    calls = parse(several, await write(process, several.make_grammar(None), 4), 1_000)
    assert all(isinstance(call, tuple) for call in calls)


@pytest.mark.parametrize(("template", "begin"), [(QWEN, "ok <tool_call>"), (LLAMA_3, '{"')])
async def test_a_call_of_a_strict_tool_is_valid_where_the_model_calls(
    process: Any, template: str, begin: str
) -> None:
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    assert make(template).make_grammar(None) is None, "nothing is asked of the answer"
    toolbox = make(template, tools=strict, parallel_tool_calls=False)
    text = await write(process, toolbox.make_grammar(None), 3, bias=begin)
    assert [part[0] for part in parse(toolbox, text, 1_000) if part != "ok"] == ["paint"]
    said = await write(process, toolbox.make_grammar(None), 3, bias="no call")
    assert said.startswith("no call")


async def test_an_answer_is_json_or_a_call(process: Any) -> None:
    toolbox = make(parallel_tool_calls=False)
    schema = '{"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"]}'
    answer = Grammar("json_schema", schema[:-1] + ', "additionalProperties": false}')
    grammar = toolbox.make_grammar(answer)
    [part] = parse(toolbox, await write(process, grammar, 1, bias='{"x'), 9)
    assert json.loads(part) == {"x": 1}
    [(name, _)] = parse(toolbox, await write(process, grammar, 1, bias="<tool"), 9)
    assert name in ("paint", "stop-now_2")
    for other, form in ((toolbox, Grammar("regex", "a")), (make(LLAMA_3), answer)):
        with pytest.raises(ApiError, match="cannot be told from a call"):
            other.make_grammar(form)


def test_a_template_is_given_tools_calls_and_results() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "paint", "arguments": '{"a": 1}'}}
    history = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    asked = parse_request(ChatRequest, {**CHAT, "messages": history})
    messages = [message.to_template() for message in asked.messages]
    thought = {"role": "assistant", "content": "5", "reasoning_content": "2 + 3"}
    with_thought = parse_request(ChatRequest, {**CHAT, "messages": [*CHAT["messages"], thought]})
    assert with_thought.messages[-1].to_template() == thought
    items = [
        {"role": "user", "content": "weather?"},
        {"type": "function_call", "call_id": "c1", "name": "paint", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
    ]
    response = parse_request(ResponseRequest, {"model": "m", "input": items}).convert()
    assert response.template_messages == messages
    with closing(ModelTokenizer(FILE, "model packages")) as tokenizer:
        chat = ChatInfo(template=QWEN, bos_token="", eos_token="")
        tools = make().list_for_template()
        text = tokenizer.render_chat(chat, messages, tools, context=4_096)
    assert text.endswith(
        'assistant: \n<tool_call>\n{"name": "paint", "arguments": {"a": 1}}\n</tool_call>\n'
        "tool: done\n"
    )
    assert '"name": "stop-now_2", "description": "stops"' in text


def test_s124_a_bare_call_is_read_once_however_many_objects_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = 0

    def parse(text: str) -> Any:
        nonlocal looked
        looked += len(text)
        return parse_json_prefix(text)

    monkeypatch.setattr(tools, "parse_json_prefix", parse)
    pieces = [
        *['{"name": "paint", "parameters": {"a": ["}", "\\"{"'],
        *[', {"b": "a text"}'] * 500,
        "]}}",
    ]
    parser = CallParser(make(template=LLAMA_3), AnswerNames())
    found = [part for piece in pieces for part in parser.push(piece)]
    assert [part.name for part in found if isinstance(part, ToolCall)] == ["paint"]
    assert looked <= sum(map(len, pieces)) * 2
    parser = CallParser(make(template=LLAMA_3), AnswerNames())
    assert parser.push("{a}") + parser.push("{}") + parser.finish() == ["{a}", "{}"]


def test_s121_arguments_of_calls_are_no_larger_together_than_a_message() -> None:
    """8 MiB of small texts, each of which may grow, became 200 MB; and nobody's turn was used."""

    def read(arguments: object, messages: int) -> ChatRequest:
        function = {"name": "f", "arguments": json.dumps(arguments)}
        call = {"id": "c1", "type": "function", "function": function}
        said = {"role": "assistant", "tool_calls": [call] * 128}
        return parse_request(ChatRequest, {**CHAT, "messages": [said] * messages}).convert()

    for usual in ({}, {"city": "Rome"}, {"path": "a.py", "text": "x" * 200}):
        assert len(read(usual, 100).template_messages) == 100
    for many, messages, said in (({}, 1, "become"), ("a long text", 20, "has about")):
        with pytest.raises(ApiError, match=f"the arguments of calls: it.* {said}"):
            read({"a": [many] * 300}, messages)


@pytest.mark.parametrize("arguments", ["{", "[]", "[" * 100_000, "5"])
def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [{"role": "assistant", "tool_calls": [call]}]
    [message] = parse_request(ChatRequest, {**CHAT, "messages": history}).messages
    with pytest.raises(ApiError, match="no JSON object"):
        message.to_template()
