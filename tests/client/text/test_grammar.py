"""Grammars in a process of their own: what follows one, and grammars that are made to do harm."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tokenizers import Tokenizer

from splitup.client.text.grammar import Grammar, Grammars, GrammarText
from splitup.client.text.grammar_process import _keep
from splitup.core import limits, tuning
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.demo.models import find_example
from splitup.sandbox.child import Child

FILE = (find_example() / "tokenizer.json").read_bytes()
VOCAB = 2_048
LIBRARY = Tokenizer.from_str(FILE.decode())
POINT = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["tool", "library"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with closing(Grammars(FILE, "model packages", VOCAB, [0])._start()) as running:
        yield running


@pytest.fixture
def grammars(child: Child) -> Iterator[Grammars]:
    with closing(Grammars(FILE, "model packages", VOCAB, [0])) as running:
        running._child = child  # all tests share a process, but those that end it
        yield running
        running._child = None if running._child is child else running._child


@pytest.fixture
def own_grammars() -> Iterator[Grammars]:
    with closing(Grammars(FILE, "model packages", VOCAB, [0])) as running:
        yield running


def make(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


async def write(text: GrammarText, seed: int, most: int = 200) -> str:
    """Continue a text by allowed tokens, at random, until one ends it."""
    tokens, choices = [], random.Random(seed)
    while len(tokens) < most:
        await text.ready()
        token = int(choices.choice(np.flatnonzero(text.get_mask())))
        if token == 0:
            break
        text.accept(token)
        tokens.append(token)
    return LIBRARY.decode(tokens)


async def test_every_text_is_of_the_schema(grammars: Grammars) -> None:
    for seed in range(8):
        value = json.loads(await write(await grammars.open(make(POINT)), seed))
        assert set(value) == {"kind", "size"}
        assert value["kind"] in ("tool", "library") and 0 <= value["size"] <= 99


async def test_expressions_and_grammars(grammars: Grammars) -> None:
    assert await write(await grammars.open(Grammar("regex", "(yes|no)")), 1) in ("yes", "no")
    lark = 'start: "a" NUMBER\nNUMBER: /[0-9]{3}/'
    said = await write(await grammars.open(Grammar("lark", lark)), 1)
    assert said[0] == "a" and said[1:].isdigit() and len(said) == 4


async def test_texts_at_once_do_not_mix(grammars: Grammars) -> None:
    opened = [await grammars.open(Grammar("regex", f"{name}{{20}}")) for name in "abc"]
    said = await asyncio.gather(*(write(text, 0) for text in opened))
    assert said == ["a" * 20, "b" * 20, "c" * 20]


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (make({"type": "strange"}), "strange"),
        (make({"$ref": "http://127.0.0.1/schema"}), "not fetch"),
        (make({"$ref": "#"}), "NoExtension"),
        (make({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "NoExtension"),
        (make({"type": "integer", "minimum": 5, "maximum": 4}), "Unsatisfiable"),
        (make({"type": "integer", "minimum": 10**400}), "out of range"),
        (make({"type": "string", "pattern": "^(?=a)b"}), "look-ahead"),
        (make({"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(6)]}
                         for i in range(8)]}), "too large"),
        (Grammar("json_schema", "{"), "expected"),
        (Grammar("regex", "["), "regex"),
        (Grammar("lark", "start: unknown"), "unknown"),
        (Grammar("regex", "a" * (tuning.MAX_GRAMMAR_BYTES + 1)), "at most"),
        (Grammar("regex", "a\ud800("), "regex"),
    ],
)  # fmt: skip
async def test_a_grammar_that_cannot_be_followed_is_refused(
    grammars: Grammars, grammar: Grammar, words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        await grammars.open(grammar)
    assert await write(await grammars.open(Grammar("regex", "ok")), 0) == "ok"


@pytest.mark.parametrize(
    "pattern",
    [r"^(\w{1,500}|\d{3,700}){1,300}a{500}$", "^(a|b)*a(a|b){24}$", "^(.{0,1000}x){0,1000}$"],
)
async def test_an_expression_that_grows_is_bounded(grammars: Grammars, pattern: str) -> None:
    """It either has bounded states or is refused, at once or on the way; others go on."""
    other = await grammars.open(Grammar("regex", "ok"))
    try:
        said = await write(await grammars.open(make({"type": "string", "pattern": pattern})), 1, 40)
    except InvalidInput as error:
        assert "lexer" in str(error)
    else:
        assert said
    assert await write(other, 0) == "ok"


async def test_texts_survive_the_end_of_the_process(own_grammars: Grammars) -> None:
    text = await own_grammars.open(Grammar("regex", "a{30}"))
    said = await write(text, 0, most=5)
    assert own_grammars._child is not None
    os.kill(own_grammars._child.pid, signal.SIGKILL)
    assert said + await write(text, 0) == "a" * 30


async def test_a_process_that_takes_too_long_is_ended(
    own_grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    await own_grammars.open(Grammar("regex", "a"))
    assert own_grammars._child is not None
    os.kill(own_grammars._child.pid, signal.SIGSTOP)  # as good as an endless loop
    monkeypatch.setattr(tuning, "GRAMMAR_CALL_S", 0.2)
    with pytest.raises(InvalidInput, match=r"too complex.*no answer within"):
        await own_grammars.open(Grammar("regex", "b"))
    monkeypatch.undo()
    assert await write(await own_grammars.open(Grammar("regex", "ok")), 0) == "ok"


async def test_many_texts_are_read_again(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = tuning.GRAMMAR_TEXTS + 3
    opened = [await grammars.open(Grammar("regex", "a{4}")) for _ in range(many)]
    for _ in range(3):
        for text in opened:
            await text.ready()
            text.accept(int(np.flatnonzero(text.get_mask())[0]))
    assert len({tuple(text._tokens) for text in opened}) == 1


async def test_s104_grammars_of_one_key_hold_up_no_other(grammars: Grammars) -> None:
    done: list[str] = []

    async def open_text(principal: str) -> None:
        await grammars.open(Grammar("regex", "a{4}"), principal)
        done.append(principal)

    await grammars.open(Grammar("regex", "a"))
    async with asyncio.TaskGroup() as group:
        for principal in [*("a" * 20), "b"]:
            group.create_task(open_text(principal))
    assert done.index("b") <= 2


def test_s104_texts_of_one_key_displace_no_others() -> None:
    entries: dict[Any, Any] = {}
    for number in range(9):
        _keep(entries, ("a" if number else "b", number), mock.sentinel.matcher, 4)
    assert [*entries] == [("b", 0), ("a", 6), ("a", 7), ("a", 8)]


async def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "TOKENIZER_MEMORY_BYTES", 24 * limits.MIB)
    with pytest.raises(InvalidModel, match="no vocabulary for grammars"):
        await Grammars(FILE, "model packages", VOCAB, [0]).open(Grammar("regex", "a"))


async def test_a_model_without_an_end_has_no_grammars() -> None:
    with pytest.raises(InvalidInput, match="no token that ends a text"):
        await Grammars(FILE, "model packages", VOCAB, []).open(Grammar("regex", "a"))
