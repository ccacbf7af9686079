"""Grammars: an answer gets the form that was asked for, because no other token may follow.

A grammar is a stranger's, and so is the vocabulary. Native code (llguidance) reads both, within
bounds of its own, in a confined process beside the tokenizer's: when it takes too long or too much
memory it is ended, and the texts of others continue in a new one.

    {"load": true, "vocab": n, "ends": […]} and the file    tokenizer.json
    {"open": n, "kind": …, "tokens": […]} and the grammar   -> the mask after these tokens
    {"next": n, "token": t}                                 -> the mask after one token more

A mask has a bit for each token, the lowest first; {"is_known": false} means that the process no
longer has the text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from splitup.core import limits, tuning
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.core.extras import require
from splitup.sandbox.child import Answer, Buffers, Child, ChildDied, ChildFailed, serve
from splitup.sandbox.confinement import confine

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MODULE: Final = "splitup.client.text.grammar"
_MAX_LEXER_STATES: Final = 20_000  # of one grammar, ≈ 1 KB each


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of a text: a JSON schema, a regular expression, or a grammar in Lark's syntax.

    Which keywords and constructs there are is said by llguidance's documentation.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str


class Grammars:
    """The parent's side, for one model. Its process starts with the first grammar."""

    def __init__(self, data: bytes, name: str, vocab: int, eos_ids: Sequence[int]) -> None:
        """Take a tokenizer.json; ``name`` says in errors whose it is.

        ``vocab`` is the number of logits, ``eos_ids`` are the tokens that end a text.
        """
        self._data = data
        self._name = name
        self._vocab = vocab
        self._eos_ids = tuple(eos_ids)
        self._numbers = itertools.count()
        self._child: Child | None = None
        self._starting = asyncio.Lock()

    async def open(self, grammar: Grammar) -> GrammarText:
        """Return a text that is to follow a grammar, still empty.

        Raises InvalidInput for a grammar that is invalid, too large or too complex.
        """
        size = len(grammar.text.encode(errors="replace"))
        if size > tuning.MAX_GRAMMAR_BYTES:
            raise InvalidInput(f"it has {size} bytes; at most {tuning.MAX_GRAMMAR_BYTES} are taken")
        if not self._eos_ids:
            raise InvalidInput(f"{self._name} has no token that ends a text, so none can follow it")
        text = GrammarText(self, grammar, next(self._numbers))
        await text.ready()
        return text

    async def compute_mask(
        self, question: Mapping[str, Any], buffers: Buffers = ()
    ) -> npt.NDArray[np.bool_] | None:
        """Return which tokens may follow, bool [vocab]; None when the process has no such text.

        Raises InvalidInput when the process refuses, ChildDied when it ends.
        """
        child = await self._get_child()
        try:
            head, found = await child.ask_apart(
                question,
                buffers,
                timeout_s=tuning.GRAMMAR_CALL_S,
                max_bytes=limits.MAX_TOKENIZER_BYTES,
            )
        except ChildFailed as error:
            raise InvalidInput(str(error)) from None
        if head.get("is_known") is False:
            return None
        if len(found) != 1 or 8 * len(found[0]) < self._vocab:
            raise InvalidModel(f"the vocabulary of {self._name} gave no mask of its tokens")
        bits = np.unpackbits(np.frombuffer(found[0], np.uint8), bitorder="little")
        return bits[: self._vocab].astype(np.bool_)

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.close()

    async def _get_child(self) -> Child:
        async with self._starting:
            if self._child is None or not self._child.is_running:
                self.close()
                self._child = await asyncio.to_thread(self._start)
            return self._child

    def _start(self) -> Child:
        require("llguidance")
        child = Child(_MODULE, [str(tuning.TOKENIZER_MEMORY_BYTES)])
        question = {"load": True, "vocab": self._vocab, "ends": self._eos_ids}
        try:
            child.ask(question, [self._data], timeout_s=tuning.TOKENIZER_LOAD_S, max_bytes=0)
        except (ChildFailed, ChildDied) as error:
            child.close()
            raise InvalidModel(
                f"the tokenizer of {self._name} gives no vocabulary for grammars: {error}"
            ) from None
        return child


class GrammarText:
    """A text that follows a grammar: a ``splitup.decode.adjusted_sampler.TokenFilter``."""

    def __init__(self, grammars: Grammars, grammar: Grammar, number: int) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._number = number
        self._tokens: list[int] = []
        self._mask: npt.NDArray[np.bool_] | None = None

    async def ready(self) -> None:
        """Compute the mask of the next token. Raises InvalidInput."""
        if self._mask is not None:
            return
        if self._tokens:
            question = {"next": self._number, "token": self._tokens[-1]}
            with contextlib.suppress(ChildDied):  # perhaps by the grammar of another text
                self._mask = await self._grammars.compute_mask(question)
        if self._mask is None:
            opening = {"open": self._number, "kind": self._grammar.kind, "tokens": self._tokens}
            text = self._grammar.text.encode(errors="replace")
            try:
                self._mask = await self._grammars.compute_mask(opening, [text])
            except ChildDied as error:
                raise InvalidInput(f"it is too complex ({error}); simplify it") from None

    def get_mask(self) -> npt.NDArray[np.bool_]:
        """Return which tokens may follow, bool [vocab], after ``ready``."""
        assert self._mask is not None, "ready() comes before every token"
        return self._mask

    def accept(self, token: int) -> None:
        """Continue the text by a token."""
        self._tokens.append(token)
        self._mask = None


class _Library:
    """The child's side."""

    def __init__(self) -> None:
        self._texts: dict[int, LLMatcher] = {}  # the one used last is the last
        self._compiled: dict[tuple[str, bytes], LLMatcher] = {}  # likewise

    def answer(self, question: Mapping[str, Any], buffers: Sequence[memoryview]) -> Answer:
        from llguidance import LLTokenizer

        try:
            if "load" in question:
                self._tokenizer = LLTokenizer(
                    str(buffers[0], "utf-8"), n_vocab=question["vocab"], eos_token=question["ends"]
                )
                return {}, ()
            if "open" in question:
                number = question["open"]
                text = self._compile(question["kind"], bytes(buffers[0])).deep_copy()
                text.consume_tokens(question["tokens"])
            else:
                number = question["next"]
                found = self._texts.pop(number, None)
                if found is None:
                    return {"is_known": False}, ()
                text = found
                text.consume_token(question["token"])
            mask = b"" if text.is_error() else text.compute_bitmask()
            _check(text)
            _keep(self._texts, number, text, tuning.GRAMMAR_TEXTS)
            return {}, [mask]
        except InvalidInput:
            raise
        except Exception as error:  # a foreign library's
            raise InvalidInput(f"it cannot be used: {error}") from None

    def _compile(self, kind: str, grammar: bytes) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        known = self._compiled.pop((kind, grammar), None)
        if known is None:
            text = grammar.decode()
            if kind == "json_schema":
                text = LLMatcher.grammar_from_json_schema(text)
            elif kind == "regex":
                text = LLMatcher.grammar_from_regex(text)
            else:
                text = LLMatcher.grammar_from_lark(text)
            bounds = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
            known = LLMatcher(self._tokenizer, text, log_level=0, limits=bounds)
            _check(known)
        _keep(self._compiled, (kind, grammar), known, tuning.GRAMMARS)
        return known


def _check(text: LLMatcher) -> None:
    if text.is_error():
        said = text.get_error().strip()
        raise InvalidInput(said or "no text follows it")


def _keep(entries: dict[Any, LLMatcher], key: object, entry: LLMatcher, most: int) -> None:
    """Keep an entry as the last one used; remove the one that was not used for longest."""
    entries[key] = entry
    if len(entries) > most:
        del entries[next(iter(entries))]


def main() -> None:
    confine()
    bound = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    serve(_Library().answer)


if __name__ == "__main__":
    main()
