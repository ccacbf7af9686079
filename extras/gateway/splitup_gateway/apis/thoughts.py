"""What a model thinks before it answers, told apart from its answer.

The model's chat template names the marks around a thought, and may have begun one at the end of the
prompt. Only the beginning of an answer is a thought: later marks are text about marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Final

from splitup.client.text.grammar import Grammar
from splitup.client.text.tokenizer import ModelTokenizer

_SPACE: Final = " \t\r\n"  # around a thought: templates put it there, and take it away
_SPACES: Final = 8  # under a grammar: a model could go on with white space for ever
_TAG: Final = re.compile(r"</?((?:[a-z]{1,20}:)?think(?:ing)?)>")
_MARKS: Final = (  # of templates without such a tag
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
)


@dataclass(frozen=True, slots=True)
class Thought:
    """A part of what a model thought."""

    text: str


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """The marks around a thought; ``specials`` are those of their tokens that texts leave out."""

    begin: str
    end: str
    specials: Mapping[int, str] = field(default_factory=dict)
    is_begun: bool = False  # by the prompt

    def allow(self, answer: Grammar) -> Grammar:
        """Return the grammar of an answer that follows its own after a thought."""
        inner = {
            "json_schema": f"%json {answer.text}",
            "lark": f"%lark {{\n{answer.text}\n}}",
            "regex": "/" + re.sub(r"\\.|/", _escape, answer.text, flags=re.DOTALL) + "/",
        }
        begin = "" if self.is_begun else f"SPACE {self._write(self.begin)}"
        lazy = "" if any(name in self.end for name in self.specials.values()) else "[lazy]"
        return Grammar(
            "lark",
            f"start: {'thought' if self.is_begun else 'thought?'} SPACE answer\n"
            f"thought: {begin} rest\nrest{lazy}: TEXT {self._write(self.end)}\nTEXT: /(.|\\n)*/\n"
            f"SPACE: /[ \\t\\r\\n]{{0,{_SPACES}}}/\nanswer: {inner[answer.kind]}",
        )

    def _write(self, mark: str) -> str:
        """Return a mark as grammars have it: special tokens are no text there."""
        tokens = {name: f"<[{token}]>" for token, name in self.specials.items()}
        names = "|".join(map(re.escape, tokens)) or "(?!)"
        parts = filter(None, re.split(f"({names})", mark))
        return " ".join(tokens.get(part) or json.dumps(part) for part in parts)


def _escape(found: re.Match[str]) -> str:
    return r"\/" if found[0] == "/" else found[0]


def name_marks(template: str) -> tuple[str, str] | None:
    """Return the marks that a chat template names, None for none."""
    if (tag := _TAG.search(template)) is not None:
        return f"<{tag[1]}>", f"</{tag[1]}>"
    return next((marks for marks in _MARKS if marks[0] in template), None)


async def find_marks(template: str, prompt: str, tokenizer: ModelTokenizer) -> ThoughtMarks | None:
    """Return the marks of a template, whose prompt may have begun a thought."""
    if (named := name_marks(template)) is None:
        return None
    begin, end = named
    specials = await tokenizer.run(partial(_find_specials, begin + end, tokenizer))
    return ThoughtMarks(begin, end, specials, prompt.rstrip(_SPACE).endswith(begin))


def _find_specials(marks: str, tokenizer: ModelTokenizer) -> dict[int, str]:
    """Return the names of the special tokens within marks, by their ids. Blocks."""
    found = {}
    for token in tokenizer.encode(marks, add_special_tokens=False):
        name = tokenizer.decode([token], skip_special_tokens=False)
        if name and name in marks and not tokenizer.decode([token]):
            found[token] = name
    return found


class _Place(Enum):
    BEFORE = auto()  # nothing but white space has come, or a part of the mark
    WITHIN = auto()
    AFTER = auto()  # nothing but white space has followed
    BEYOND = auto()


class ThoughtParser:
    """Splits an answer piece by piece; what may begin a mark is held back."""

    def __init__(self, marks: ThoughtMarks) -> None:
        self._marks = marks
        self._place = _Place.WITHIN if marks.is_begun else _Place.BEFORE
        self._held = ""
        self._plain = ""  # what came before it was clear whether this is a thought
        self._is_blank = True  # the thought has no text yet
        self.tokens = 0  # of the thought, its marks included

    def push(self, token: int, text: str) -> Iterator[str | Thought]:
        """Take the next token and its text; yield what is certain now."""
        if self._place is _Place.BEYOND:
            yield text
            return
        self._held += text + self._marks.specials.get(token, "")
        if self._place is not _Place.AFTER:
            self.tokens += 1
        if self._place is _Place.BEFORE:
            self._plain += text
            yield from self._find_begin()
        if self._place is _Place.WITHIN:
            yield from self._find_end()
        if self._place is _Place.AFTER and (rest := self._held.lstrip(_SPACE)):
            self._place, self._held = _Place.BEYOND, ""
            yield rest

    def finish(self) -> Iterator[str | Thought]:
        """Yield the rest, when no token follows: a thought that has no end is one all the same."""
        if self._place is _Place.BEFORE:
            yield from self._leave()
        elif self._place is _Place.WITHIN:
            yield from self._think(self._held.rstrip(_SPACE))

    def _find_begin(self) -> Iterator[str]:
        held, begin = self._held.lstrip(_SPACE), self._marks.begin
        if held.startswith(begin):
            self._place, self._held = _Place.WITHIN, held.removeprefix(begin)
        elif not begin.startswith(held):
            yield from self._leave()

    def _leave(self) -> Iterator[str]:
        """Give what came as it came: it is no thought."""
        self._place, self._held, self.tokens = _Place.BEYOND, "", 0
        if self._plain:
            yield self._plain

    def _find_end(self) -> Iterator[Thought]:
        end = self._marks.end
        thought, found, rest = self._held.partition(end)
        if found:
            self._place, self._held = _Place.AFTER, rest
            yield from self._think(thought.rstrip(_SPACE))
            return
        lengths = range(min(len(end) - 1, len(thought)), 0, -1)
        begun = next((size for size in lengths if end.startswith(thought[-size:])), 0)
        size = len(thought[: len(thought) - begun].rstrip(_SPACE))
        self._held = thought[size:]
        yield from self._think(thought[:size])

    def _think(self, text: str) -> Iterator[Thought]:
        text = text.lstrip(_SPACE) if self._is_blank else text
        if text:
            self._is_blank = False
            yield Thought(text)
