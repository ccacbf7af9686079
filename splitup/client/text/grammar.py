"""Grammars: an answer gets the form that was asked for, because no other token may follow.

A grammar is a stranger's, and so is the vocabulary. Native code (llguidance) reads both, within
bounds of its own, in a confined process beside the tokenizer's: when it takes too long or too much
memory it is ended, and the texts of others continue in a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from splitup.core import limits, tuning
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.core.extras import require
from splitup.core.places import FairLock
from splitup.sandbox.child import Child, ChildDied, ChildFailed
from splitup.sandbox.serving import Buffers

_MODULE: Final = "splitup.client.text.grammar_process"


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
        self._turns = FairLock()

    async def open(self, grammar: Grammar, principal: str = "") -> GrammarText:
        """Return a text of ``principal`` that is to follow a grammar, still empty.

        Raises InvalidInput for a grammar that is invalid, too large or too complex.
        """
        size = len(grammar.text.encode(errors="replace"))
        if size > tuning.MAX_GRAMMAR_BYTES:
            raise InvalidInput(f"it has {size} bytes; at most {tuning.MAX_GRAMMAR_BYTES} are taken")
        if not self._eos_ids:
            raise InvalidInput(f"{self._name} has no token that ends a text, so none can follow it")
        text = GrammarText(self, grammar, next(self._numbers), principal)
        await text.ready()
        return text

    async def compute_mask(
        self, question: Mapping[str, Any], principal: str, buffers: Buffers = ()
    ) -> npt.NDArray[np.bool_] | None:
        """Return which tokens may follow, bool [vocab]; None when the process has no such text.

        Turns go round by ``principal``. Raises InvalidInput when the process refuses, ChildDied
        when it ends.
        """
        async with self._turns.hold(principal):
            child = await self._get_child()
            try:
                head, found = await child.ask_apart(
                    {**question, "of": principal},
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

    def __init__(self, grammars: Grammars, grammar: Grammar, number: int, principal: str) -> None:
        self._grammars = grammars
        self._principal = principal
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
                self._mask = await self._grammars.compute_mask(question, self._principal)
        if self._mask is None:
            opening = {"open": self._number, "kind": self._grammar.kind, "tokens": self._tokens}
            text = self._grammar.text.encode(errors="replace")
            try:
                self._mask = await self._grammars.compute_mask(opening, self._principal, [text])
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
