"""Chat templates: a conversation becomes the text that the model was trained to continue.

A template is a Jinja program of the model's developer. It runs in Jinja's immutable sandbox, in the
confined process of the model's tokenizer (``splitup.client.text.tokenizer_process``), which it may
stall or end. The names it may use are those of Hugging Face's ``apply_chat_template``.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from splitup.core.errors import InvalidInput, InvalidModel, describe

# what a template is given in any case; nothing else may have these names
OWN_VARIABLES: Final = frozenset(
    {
        *("messages", "tools", "documents", "bos_token", "eos_token", "add_generation_prompt"),
        *("raise_exception", "strftime_now"),
    }
)
_DEPTH: Final = 1_000  # Python's own default, plenty for templates in the wild


def check_template(template: str) -> None:
    """Raise InvalidModel for a template that Jinja cannot parse."""
    try:
        _compile(template)
    except (TemplateError, RecursionError) as error:
        raise InvalidModel(f"the model's chat template is not valid Jinja: {error}") from None


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    *,
    template: str,
    bos_token: str,
    eos_token: str,
) -> str:
    """Return the text that the assistant's answer continues.

    ``template`` and the two tokens are a ``splitup.graph.manifest.ChatInfo``'s.
    ``messages`` have "role" and "content", and "tool_calls" or "tool_call_id" where tools were
    called; ``tools`` are those on offer. All have the form of OpenAI's API, but that arguments of
    calls are objects. ``variables`` are whatever else the template knows, such as
    ``enable_thinking``, without the ``OWN_VARIABLES``. Raises InvalidInput with the template's own
    words when it refuses them, for example two messages of one role in a row.
    """
    check_template(template)
    try:
        return _compile(template).render(
            messages=[dict(message) for message in messages],
            bos_token=bos_token,
            eos_token=eos_token,
            add_generation_prompt=True,
            tools=tools,
            documents=None,
            **(variables or {}),
        )
    except _Refusal as error:
        raise InvalidInput(f"the model's chat template refuses the messages: {error}") from None
    except MemoryError:
        raise
    except Exception as error:  # the template is a foreign program: it may raise anything
        raise InvalidInput(f"the model's chat template failed: {describe(error)}") from None


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, for training: here it marks nothing."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's content, whose variables stay within."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Refusal(Exception):
    """What a template raises by ``raise_exception``."""


def _refuse(message: str) -> NoReturn:
    raise _Refusal(message)


@functools.lru_cache(16)
def _compile(template: str) -> Template:
    """Compile a template; raise RecursionError for one that nests too deeply.

    Python's compiler recurses in C and relies on the interpreter's recursion limit, which libraries
    raise on import (``splitup.core.codec.parse_json``): far enough for a long expression to
    overflow the stack and kill the process.
    """
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(_DEPTH)
    try:
        return _make_environment().from_string(template)
    finally:
        sys.setrecursionlimit(before)


def _make_environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
