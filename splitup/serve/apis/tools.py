"""Tools: functions that a model may ask its caller to call.

The model's chat template shows them to the model, and so it decides the syntax of a call:

    Hermes, Qwen   <tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>
    Llama 3        {"name": …, "parameters": {…}}

A call that must be is written under a grammar; any other is found in the text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator

from splitup.client.text.grammar import Grammar
from splitup.core.codec import parse_json, parse_json_prefix
from splitup.serve.apis.formats import Fields, write_schema
from splitup.serve.errors import ApiError

MAX_TOOLS: Final = 128
MAX_CALLS: Final = 32  # of one answer under a grammar
_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}

FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class Function(Fields):
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


class Tool(Fields):
    """A tool, as chats name it."""

    type: Literal["function"]
    function: Function


class FlatTool(Function):
    """A tool, as responses name it."""

    type: Literal["function"]


class FunctionChoice(Fields):
    """The name of the function to call."""

    name: FunctionName


class ToolChoice(Fields):
    """The tool to call, as chats name it."""

    type: Literal["function"]
    function: FunctionChoice


class FlatToolChoice(FunctionChoice):
    """The tool to call, as responses name it."""

    type: Literal["function"]


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


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in an answer; ``arguments`` is JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


Part = str | ToolCall


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request, and whether they must be called."""

    functions: tuple[Function, ...]
    syntax: Syntax
    must_call: tuple[Function, ...]  # one of these; none: as the model likes
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
        if self.is_parallel and not any(function.strict for function in self.functions):
            return None
        if self.syntax is LLAMA:
            return self._make_grammar("call | OTHER?\nOTHER: /[^{ \\t\\r\\n](.|\\n)*/")
        calls = "begun* TEXT" if self.is_parallel else "begun | TEXT"
        lead = f'lead[lazy]: TEXT "{self.syntax.begin}"\nbegun: lead body\nTEXT: /(.|\\n)*/'
        return self._make_grammar(f"{calls}\n{lead}")

    def _make_grammar(self, start: str) -> Grammar:
        allowed = self.must_call or self.functions
        begin, end = self.syntax.begin, self.syntax.end
        line = "\n" if begin else ""
        rules = [f"start: {start}", f"call: {json.dumps(begin)} body" if begin else "call: body"]
        rules.append("body: " + " | ".join(f"body_{at}" for at in range(len(allowed))))
        for at, function in enumerate(allowed):
            head = f'{line}{{"name": "{function.name}", "{self.syntax.arguments}": '
            tail = f"}}{line}{end}"
            schema = write_schema(function.schema_, strict=bool(function.strict))
            rules.append(f"body_{at}: {json.dumps(head)} arguments_{at} {json.dumps(tail)}")
            rules.append(f"arguments_{at}: %json {schema}")
        return Grammar("lark", "\n".join(rules))


def make_toolbox(
    functions: Sequence[Function],
    choice: str | None,
    *,
    is_parallel: bool,
    template: str,
) -> Toolbox | None:
    """Return the tools of a request, None when it has or wants none.

    ``choice`` is "none", "auto", "required" or "=" and a name. Raises ApiError.
    """
    if not functions:
        if choice not in (None, "none", "auto"):
            raise ApiError("there are no tools to choose from", param="tool_choice")
        return None
    names = [function.name for function in functions]
    if len(set(names)) != len(names):
        raise ApiError("two tools have the same name", param="tools")
    if choice == "none":
        return None
    must_call: tuple[Function, ...] = ()
    if choice == "required":
        must_call = tuple(functions)
    elif choice is not None and choice.startswith("="):
        must_call = tuple(one for one in functions if one.name == choice[1:])
        if not must_call:
            raise ApiError(f"there is no tool '{choice[1:]}'", param="tool_choice")
        is_parallel = False
    syntax = find_syntax(template)
    if syntax is None:
        reason = "does not show tools to the model"
        if re.search(r"\btools\b", template):
            reason = "has another syntax of calls than those of Hermes, Qwen and Llama 3"
        raise ApiError(f"this model cannot call tools: its chat template {reason}", param="tools")
    return Toolbox(tuple(functions), syntax, must_call, is_parallel)


def find_syntax(template: str) -> Syntax | None:
    """Return the syntax of calls that a chat template explains to the model, None for no known."""
    return next((syntax for syntax, mark in _MARKS if mark.search(template)), None)


class CallParser:
    """Finds the calls in an answer, piece by piece; text that may begin a call is held back."""

    def __init__(self, toolbox: Toolbox) -> None:
        self._syntax = toolbox.syntax
        self._names = {function.name for function in toolbox.functions}
        self._held = ""
        self._has_called = False
        self._is_text = False  # of a syntax without marks: the answer has begun as another text

    def push(self, text: str) -> list[Part]:
        """Take the next piece; return what is certain now."""
        self._held += text
        return self._find_marked() if self._syntax.begin else self._find_bare()

    def finish(self) -> list[Part]:
        """Return the rest, when no piece follows."""
        parts = self.push("")
        rest, self._held = self._held, ""
        return parts + self._make_text(rest)

    def _find_marked(self) -> list[Part]:
        begin, end = self._syntax.begin, self._syntax.end
        parts: list[Part] = []
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

    def _find_bare(self) -> list[Part]:
        parts: list[Part] = []
        while not self._is_text and (text := self._held.lstrip(" \t\r\n;")):
            if not text.startswith("{"):
                self._is_text = not self._has_called
                break
            if not text.endswith("}"):
                break  # do not read it again for every piece
            try:
                _, length = parse_json_prefix(text)
            except ValueError:
                break
            found = self._read_call(text[:length])
            if found is None:
                self._is_text = True
                break
            parts.append(found)
            self._held = text[length:]
        if self._is_text:
            parts += self._make_text(self._held)
            self._held = ""
        return parts

    def _make_text(self, text: str) -> list[Part]:
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
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
