"""Tools: functions that a model may ask its caller to call.

The model's chat template shows them to the model, and so it decides the syntax of a call:

    Hermes, Qwen   <tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>
    Llama 3        {"name": …, "parameters": {…}}

A call that must be is written under a grammar; any other is found in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator

from splitup.client.text.grammar import Grammar
from splitup.core.codec import parse_json, parse_json_prefix
from splitup_gateway.apis.formats import RequestFields, write_schema
from splitup_gateway.apis.thoughts import Thought
from splitup_gateway.errors import ApiError
from splitup_gateway.names import AnswerNames

MAX_TOOLS: Final = 128
MAX_CALLS: Final = 32  # of one answer under a grammar
_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}

ToolMode = Literal["none", "auto", "required"]
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,128}$")]


class Function(RequestFields):
    """A function that may be called; ``parameters`` is the JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _check(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("type", "object") != "object":
            raise ValueError('the arguments of a function are an object: "type": "object"')
        return value

    @property
    def schema_(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        return {"type": "object", **(self.parameters or _NO_PARAMETERS)}


class Tool(RequestFields):
    """A tool, as chats name it."""

    type: Literal["function"]
    function: Function


class FlatTool(Function):
    """A tool, as responses name it."""

    type: Literal["function"]


class FunctionChoice(RequestFields):
    """The name of the function to call."""

    name: FunctionName


class ToolChoice(RequestFields):
    """The tool to call, as chats name it."""

    type: Literal["function"]
    function: FunctionChoice


class FlatToolChoice(FunctionChoice):
    """The tool to call, as responses name it."""

    type: Literal["function"]


class AllowedTools(RequestFields):
    """The tools that the model may, or must, call; the others are shown to it all the same.

    ``tools`` has the form of the choice of one tool.
    """

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice | FlatToolChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(RequestFields):
    """Some of the tools, as chats name them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class FlatAllowedChoice(AllowedTools):
    """Some of the tools, as responses name them."""

    type: Literal["allowed_tools"]


@dataclass(frozen=True, slots=True)
class Syntax:
    """How a model writes a call: ``begin``, an object with "name" and ``arguments``, ``end``."""

    begin: str
    arguments: str
    end: str
    between: str  # two calls


HERMES: Final = Syntax("<tool_call>", "arguments", "</tool_call>", "\n")
LLAMA: Final = Syntax("", "parameters", "", "; ")
_MARKS: Final = (  # of a template that explains a syntax to the model
    (HERMES, re.compile(r"<tool_call>(?:\\n|\s){0,9}\{")),
    (LLAMA, re.compile(r"\{\\?\"name\\?\": ?[^{}\n]{1,200}\\?\"parameters\\?\"")),
)


_BRACES: Final = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}]', re.DOTALL)  # and strings


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in an answer; ``arguments`` is JSON."""

    name: str
    arguments: str
    id: str


AnswerPart = str | Thought | ToolCall


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request, and whether they must be called."""

    functions: tuple[Function, ...]
    syntax: Syntax
    allowed: tuple[Function, ...]  # those that may be called
    must_call: bool
    is_parallel: bool

    def list_for_template(self) -> list[dict[str, Any]]:
        """Return the tools as chat templates take them."""
        return [
            {
                "type": "function",
                "function": {
                    "name": function.name,
                    "description": function.description or "",
                    "parameters": function.schema_,
                },
            }
            for function in self.functions
        ]

    def make_grammar(self, answer: Grammar | None) -> Grammar | None:
        """Return the grammar of the whole answer, None when nothing is asked of it.

        ``answer`` is that of an answer without a call.
        """
        if self.must_call:
            more = f" ({json.dumps(self.syntax.between)} call){{0,{MAX_CALLS - 1}}}"
            return self._make_grammar("call" + more * self.is_parallel)
        if answer is not None:
            if answer.kind != "json_schema" or not self.syntax.begin:
                raise ApiError(
                    "an answer in this format cannot be told from a call of this model; leave out "
                    "the tools or the format, or set tool_choice to 'required' or 'none'",
                    param="response_format",
                )
            rules = f"call | answer\nanswer: %json {answer.text}"
            return self._make_grammar(rules)
        if self.is_parallel and not any(function.strict for function in self.allowed):
            return None
        if self.syntax is LLAMA:
            return self._make_grammar("call | OTHER?\nOTHER: /[^{ \\t\\r\\n](.|\\n)*/")
        calls = "begun* TEXT" if self.is_parallel else "begun | TEXT"
        lead = f'lead[lazy]: TEXT "{self.syntax.begin}"\nbegun: lead body\nTEXT: /(.|\\n)*/'
        return self._make_grammar(f"{calls}\n{lead}")

    def _make_grammar(self, start: str) -> Grammar:
        begin, end = self.syntax.begin, self.syntax.end
        line = "\n" if begin else ""
        rules = [f"start: {start}", f"call: {json.dumps(begin)} body" if begin else "call: body"]
        rules.append("body: " + " | ".join(f"body_{at}" for at in range(len(self.allowed))))
        for at, function in enumerate(self.allowed):
            head = f'{line}{{"name": "{function.name}", "{self.syntax.arguments}": '
            tail = f"}}{line}{end}"
            schema = write_schema(function.schema_, strict=bool(function.strict))
            rules.append(f"body_{at}: {json.dumps(head)} arguments_{at} {json.dumps(tail)}")
            rules.append(f"arguments_{at}: %json {schema}")
        return Grammar("lark", "\n".join(rules))


def make_toolbox(
    functions: Sequence[Function],
    choice: str | ToolChoice | AllowedChoice | None,
    *,
    is_parallel: bool,
    template: str,
) -> Toolbox | None:
    """Return the tools of a request, None when it has or wants none. Raises ApiError."""
    mode, names = _read_choice(choice)
    if not functions:
        if mode == "required" or names:
            raise ApiError("there are no tools to choose from", param="tool_choice")
        return None
    known = {function.name: function for function in functions}
    if len(known) != len(functions):
        raise ApiError("two tools have the same name", param="tools")
    if mode == "none":
        return None
    for name in names:
        if name not in known:
            raise ApiError(f"there is no tool '{name}'", param="tool_choice")
    allowed = tuple(known[name] for name in dict.fromkeys(names)) or tuple(functions)
    if isinstance(choice, ToolChoice):
        is_parallel = False
    syntax = find_syntax(template)
    if syntax is None:
        reason = "does not show tools to the model"
        if re.search(r"\btools\b", template):
            reason = "has another syntax of calls than those of Hermes, Qwen and Llama 3"
        raise ApiError(f"this model cannot call tools: its chat template {reason}", param="tools")
    return Toolbox(tuple(functions), syntax, allowed, mode == "required", is_parallel)


def _read_choice(choice: str | ToolChoice | AllowedChoice | None) -> tuple[str, list[str]]:
    """Return "none", "auto" or "required", and the names of what may be called, if not all."""
    match choice:
        case None:
            return "auto", []
        case str():
            return choice, []
        case ToolChoice():
            return "required", [choice.function.name]
        case AllowedChoice(allowed_tools=some):
            named = [one.function if isinstance(one, ToolChoice) else one for one in some.tools]
            return some.mode, [one.name for one in named]


def find_syntax(template: str) -> Syntax | None:
    """Return the syntax of calls that a chat template explains to the model, None for no known."""
    return next((syntax for syntax, mark in _MARKS if mark.search(template)), None)


class CallParser:
    """Finds the calls in an answer, piece by piece; text that may begin a call is held back."""

    def __init__(self, toolbox: Toolbox, names: AnswerNames) -> None:
        self._made = names
        self._syntax = toolbox.syntax
        self._names = {function.name for function in toolbox.allowed}
        self._must_call = toolbox.must_call
        self._held = ""
        self._has_called = False
        self._read = self._depth = 0  # of the object that the held text begins with
        self._is_text = False  # of a syntax without marks: the answer has begun as another text

    def push(self, text: str) -> list[AnswerPart]:
        """Take the next piece; return what is certain now."""
        self._held += text
        return self._find_marked() if self._syntax.begin else self._find_bare(is_end=False)

    def finish(self) -> list[AnswerPart]:
        """Return the rest, when no piece follows.

        Where a call must be, the rest is one that was cut off, and nobody's text.
        """
        parts = self._find_marked() if self._syntax.begin else self._find_bare(is_end=True)
        rest, self._held = self._held, ""
        return parts if self._must_call else parts + self._make_text(rest)

    def _find_marked(self) -> list[AnswerPart]:
        begin, end = self._syntax.begin, self._syntax.end
        parts: list[AnswerPart] = []
        while (start := self._held.find(begin)) >= 0:
            stop = self._held.find(end, start)
            if stop < 0:
                break
            found = self._read_call(self._held[start + len(begin) : stop])
            stop += len(end)
            if found is None:
                parts += [self._held[:stop]]
            else:
                parts += [*self._make_text(self._held[:start].rstrip()), found]
            self._held = self._held[stop:]
        if start < 0:
            start = len(self._held)
            for length in range(min(len(begin) - 1, start), 0, -1):
                if begin.startswith(self._held[-length:]):
                    start -= length
                    break
        start = len(self._held[:start].rstrip())  # white space before a call belongs to it
        parts += self._make_text(self._held[:start])
        self._held = self._held[start:]
        return parts

    def _find_bare(self, *, is_end: bool) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        while not self._is_text and (text := self._held.lstrip(" \t\r\n;")):
            if not text.startswith("{"):
                self._is_text = not self._has_called
                break
            if not is_end and not self._has_end(text):
                break
            try:
                _, length = parse_json_prefix(text)
            except ValueError:
                self._is_text = not is_end  # it is closed, and no JSON
                break
            found = self._read_call(text[:length])
            if found is None:
                self._is_text = True
                break
            parts.append(found)
            self._held, self._read, self._depth = text[length:], 0, 0
        if self._is_text:
            parts += self._make_text(self._held)
            self._held = ""
        return parts

    def _has_end(self, text: str) -> bool:
        """Return whether the object has its end that a growing text begins with.

        What is before the last string is read once, whatever the number of pieces.
        """
        for part in _BRACES.finditer(text, self._read) if text.endswith("}") else ():
            if part[0] == '"':  # of a string that goes on
                break
            self._read = part.end()
            self._depth += (part[0] == "{") - (part[0] == "}")
            if not self._depth:
                return True
        return False

    def _make_text(self, text: str) -> list[AnswerPart]:
        return [text] if text and not (self._has_called and text.isspace()) else []

    def _read_call(self, text: str) -> ToolCall | None:
        try:
            value = parse_json(text)
        except ValueError:
            return None
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get(self._syntax.arguments, {})
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        self._has_called = True
        text = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(name, text, self._made.make_id("call_"))
