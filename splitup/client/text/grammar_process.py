"""The confined process that reads grammars and computes which tokens may follow.

    {"load": true, "vocab": n, "ends": […]} and the file    tokenizer.json
    {"open": n, "kind": …, "tokens": […]} and the grammar   -> the mask after these tokens
    {"next": n, "token": t}                                 -> the mask after one token more

A mask has a bit for each token, the lowest first; {"is_known": false} means that the process no
longer has the text. With these two goes whose the text is, "of": nobody else uses what was compiled
for it, and who has the most loses the oldest first.

``splitup.client.text.grammar`` starts it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from splitup.core import tuning
from splitup.core.errors import InvalidInput, describe
from splitup.sandbox.confinement import serve_confined
from splitup.sandbox.serving import Answer

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_LEXER_STATES: Final = 20_000  # of one grammar, ≈ 1 KB each


class _Library:
    """The child's side."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, int], LLMatcher] = {}  # the one used last is the last
        self._compiled: dict[tuple[str, str, bytes], LLMatcher] = {}  # likewise

    def answer(self, question: Mapping[str, Any], buffers: Sequence[memoryview]) -> Answer:
        from llguidance import LLTokenizer

        try:
            if "load" in question:
                self._tokenizer = LLTokenizer(
                    str(buffers[0], "utf-8"), n_vocab=question["vocab"], eos_token=question["ends"]
                )
                return {}, ()
            owner = question["of"]
            if "open" in question:
                number = question["open"]
                text = self._compile(owner, question["kind"], bytes(buffers[0])).deep_copy()
                text.consume_tokens(question["tokens"])
            else:
                number = question["next"]
                found = self._texts.pop((owner, number), None)
                if found is None:
                    return {"is_known": False}, ()
                text = found
                text.consume_token(question["token"])
            mask = b"" if text.is_error() else text.compute_bitmask()
            _check(text)
            _keep(self._texts, (owner, number), text, tuning.GRAMMAR_TEXTS)
            return {}, [mask]
        except InvalidInput:
            raise
        except Exception as error:  # a foreign library's
            raise InvalidInput(f"it cannot be used: {describe(error)}") from None

    def _compile(self, owner: str, kind: str, grammar: bytes) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        known = self._compiled.pop((owner, kind, grammar), None)
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
        _keep(self._compiled, (owner, kind, grammar), known, tuning.GRAMMARS)
        return known


def _check(text: LLMatcher) -> None:
    if text.is_error():
        said = text.get_error().strip()
        raise InvalidInput(said or "no text follows it")


def _keep(entries: dict[Any, LLMatcher], key: tuple[Any, ...], entry: LLMatcher, most: int) -> None:
    """Keep an entry as the last one used; remove who has the most's that was not used longest."""
    entries[key] = entry
    if len(entries) > most:
        [(largest, _)] = Counter(owner for owner, *_ in entries).most_common(1)
        del entries[next(each for each in entries if each[0] == largest)]


def main() -> None:
    serve_confined(_Library().answer, memory_bytes=int(sys.argv[1]))


if __name__ == "__main__":
    main()
