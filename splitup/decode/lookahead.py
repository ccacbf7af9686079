"""Lookahead decoding: several tokens per step from the model alone (arXiv 2402.02057).

A step feeds the last certain token and, beside it,

    a window   of ``columns`` columns and ``length - 1`` levels of tokens that may come: the logits
               of its last level extend every column, by Jacobi iteration, to an n-gram;
    guesses    n-grams seen before that begin with the last certain token, as a tree.

The n-grams that appear, and those of the certain text, go into pools from which guesses are taken,
the text's own first: what was said once is likelier to come again than what was never said.
Tokens are drawn exactly as the sequential decoder draws them, one after another from the logits
of the row that stands at their place, for as long as the tree holds a row for the token drawn.
A row's logits are the same bytes as in a step of its own, so the text is the same too, at every
temperature; and because noise depends on the position alone, the window guesses with the noise
that will decide.

Where guesses do not pay, extra rows only cost: the decoder counts the tokens per step, goes on
with single rows when they are too few, and tries again later.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from splitup.core.errors import InvalidInput
from splitup.decode.prompt import TextRequest, split_prompt
from splitup.decode.sampler import Sampler
from splitup.decode.step import StepInput, make_causal_step

LEAST_GAIN: Final = 1.15  # tokens per step; below, fixed costs of wide steps eat it up
TRIAL_STEPS: Final = 16  # a gain is judged over this many wide steps
FIRST_PAUSE: Final = 32  # single tokens before the next trial; every pause is twice the last
_POOL_KEYS: Final = 4096  # tokens that n-grams are remembered for


@dataclass(frozen=True, slots=True)
class LookaheadOptions:
    """W, N and G of the paper: window columns, length of n-grams, guesses in one step.

    Raises InvalidInput for what no step can hold; ``check_chunk`` for what this model's cannot.
    """

    columns: int = 7
    length: int = 4
    guesses: int = 7

    def __post_init__(self) -> None:
        if self.columns < 0 or self.length < 2 or self.guesses < 1:
            raise InvalidInput(
                f"lookahead with {self.columns} columns, n-grams of {self.length} and "
                f"{self.guesses} guesses is not possible; give at least 0, 2 and 1"
            )

    def check_chunk(self, chunk: int) -> None:
        """Raise InvalidInput unless a step of ``chunk`` rows holds the window and a guess.

        The decoder leaves out what finds no room: right text, but not what was asked for.
        """
        rows = 1 + (self.columns + 1) * (self.length - 1)
        if rows > chunk:
            raise InvalidInput(
                f"lookahead with a window of {self.columns} columns and n-grams of {self.length} "
                f"takes {rows} rows a step with its token and one guess, and the model takes "
                f"{chunk}; give fewer columns or shorter n-grams"
            )
        if self.guesses >= chunk:
            raise InvalidInput(
                f"lookahead with {self.guesses} guesses takes a row for each, and the model takes "
                f"{chunk} a step with the token itself; give fewer"
            )


class NgramPool:
    """What followed a token: for each, the last few different continuations, newest first."""

    def __init__(self, guesses: int) -> None:
        self._guesses = guesses
        self._known: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def add(self, ngram: tuple[int, ...]) -> None:
        """Remember that ``ngram[1:]`` followed ``ngram[0]``."""
        rest = self._known.setdefault(ngram[0], OrderedDict())
        rest[ngram[1:]] = None
        rest.move_to_end(ngram[1:])
        if len(rest) > self._guesses:
            rest.popitem(last=False)
        self._known.move_to_end(ngram[0])
        if len(self._known) > _POOL_KEYS:
            self._known.popitem(last=False)

    def get_guesses(self, token: int) -> list[tuple[int, ...]]:
        """Return the continuations of a token, newest first."""
        return list(reversed(self._known.get(token, OrderedDict())))


@dataclass(slots=True)
class _Rows:
    """A step while it is put together. Row 0 is the last certain token."""

    tokens: list[int]
    depths: list[int]  # positions, counted from row 0's
    sees: list[tuple[int, ...]]
    children: dict[tuple[int, int], int] = field(default_factory=dict)  # (row, token) -> row
    tips: list[int] = field(default_factory=list)  # the window's last level

    def add(self, token: int, depth: int, seen: tuple[int, ...]) -> int:
        self.tokens.append(token)
        self.depths.append(depth)
        self.sees.append((*seen, len(self.sees)))
        return len(self.sees) - 1


class LookaheadDecoder:
    """Generates what ``SequentialDecoder`` generates, in fewer steps."""

    def __init__(self, request: TextRequest, options: LookaheadOptions | None = None) -> None:
        self._request = request
        self._options = options or LookaheadOptions()
        self._prompt = split_prompt(request.prompt, request.chunk)
        self._text = list(request.prompt)  # all that is certain
        self._fed = 0  # cache rows that count before the next step
        self._kept: tuple[int, ...] = ()
        self._flying: _Rows | None = None
        self._last_step = -1
        self._steps = 0
        self._remaining = request.max_tokens
        self._finished = False
        self._said = NgramPool(self._options.guesses)  # n-grams of the certain text
        self._pooled = 0  # how many of them
        self._thought = NgramPool(self._options.guesses)  # those that the window gave
        self._window = self._start_window()
        self._trial: deque[int] = deque(maxlen=TRIAL_STEPS)
        self._pause = 0  # single tokens to go until the next trial
        self._next_pause = FIRST_PAUSE

    @property
    def finished(self) -> bool:
        """Say whether no token follows."""
        return self._finished

    @property
    def sampler(self) -> Sampler:
        """Return what chooses the tokens."""
        return self._request.sampler

    @property
    def max_steps(self) -> int:
        """Return how many steps may be needed at most: as many as without any guess."""
        is_due = not self._prompt and self._last_step < 0
        return len(self._prompt) + self._remaining - 1 + is_due

    def next_step(self) -> StepInput | None:
        """Return the next step's rows, or None while logits are awaited or all is done."""
        if self._finished or (not self._prompt and self._last_step >= 0):
            return None
        number, self._steps = self._steps, self._steps + 1
        if self._prompt:
            step = make_causal_step(self._prompt.pop(0), self._fed)
            self._fed += len(step.tokens)
            if not self._prompt:
                self._last_step = number
            return step
        rows = self._flying = self._put_together()
        self._last_step = number
        wanted = [0, *self._list_guesses(rows), *rows.tips]
        return StepInput(
            tokens=tuple(rows.tokens),
            positions=tuple(self._fed + depth for depth in rows.depths),
            start=self._fed,
            sees=tuple(rows.sees),
            outputs=tuple(wanted),
            kept=self._kept,
        )

    def receive_logits(self, step: int, logits: npt.NDArray[np.float32]) -> list[int]:
        """Take the logits of ``step``, float32 [R, vocab]; return the tokens they make certain.

        An end token finishes the machine and is not returned. Logits inside the prompt give
        nothing.
        """
        if step != self._last_step or self._finished:
            return []
        self._last_step = -1
        if self._flying is None:  # the prompt's last chunk
            return self._accept([self._choose(logits[0], self._fed - 1)])
        rows, self._flying = self._flying, None
        place = {row: at for at, row in enumerate([0, *self._list_guesses(rows), *rows.tips])}
        row, path, drawn = 0, [0], []
        while True:
            drawn.append(self._choose(logits[place[row]], self._fed + len(path) - 1))
            child = rows.children.get((row, drawn[-1]))
            if child is None:
                break
            row = child
            path.append(row)
        self._move_window(rows, [logits[place[tip]] for tip in rows.tips], len(path))
        self._fed += len(path)
        self._kept = tuple(path)
        self._judge(len(drawn), is_wide=len(rows.tokens) > 1)
        return self._accept(drawn)

    # ---- choosing ------------------------------------------------------------------------------

    def _choose(self, logits: npt.NDArray[np.float32], position: int) -> int:
        return self._request.sampler.choose(logits, position)

    def _accept(self, drawn: list[int]) -> list[int]:
        tokens: list[int] = []
        for token in drawn:
            if token in self._request.eos_ids:
                self._finished = True
                break
            tokens.append(token)
            self._remaining -= 1
            if self._remaining == 0:
                self._finished = True
                break
        self._text += tokens
        length = self._options.length
        while self._pooled + length <= len(self._text):
            self._said.add(tuple(self._text[self._pooled : self._pooled + length]))
            self._pooled += 1
        return tokens

    def _judge(self, count: int, *, is_wide: bool) -> None:
        """Go on with single rows when wide steps gave too few tokens; try again after a pause."""
        if not is_wide:
            self._pause = max(self._pause - count, 0)
            return
        self._trial.append(count)
        if len(self._trial) < TRIAL_STEPS:
            return
        if sum(self._trial) < LEAST_GAIN * TRIAL_STEPS:
            self._pause, self._next_pause = self._next_pause, 2 * self._next_pause
            self._trial.clear()
        else:
            self._next_pause = FIRST_PAUSE

    # ---- the step ------------------------------------------------------------------------------

    def _put_together(self) -> _Rows:
        rows = _Rows([self._text[-1]], [0], [(0,)])
        # rows beyond the context have no place in the cache; tokens beyond the last are no use
        space = min(self._request.chunk, self._request.context - self._fed) - 1
        if self._pause or self._remaining == 1:
            return rows
        depths = self._options.length - 1
        window = depths * self._options.columns
        if space >= window and self._options.columns + depths < self._request.context - self._fed:
            self._add_window(rows)
            space -= window
        token = self._text[-1]
        guesses = [*self._said.get_guesses(token), *self._thought.get_guesses(token)]
        for guess in list(dict.fromkeys(guesses))[: self._options.guesses]:
            space -= self._add_guess(rows, guess[: self._remaining - 1], space)
        return rows

    def _add_window(self, rows: _Rows) -> None:
        below: list[int] = [0]  # the certain token and the first level up to a column
        for column in range(self._options.columns):
            path = below
            for level, tokens in enumerate(self._window):
                row = rows.add(tokens[column], 1 + column + level, tuple(path))
                path = [*path, row]
                if level == 0:
                    below = path
            rows.tips.append(row)

    def _add_guess(self, rows: _Rows, guess: tuple[int, ...], space: int) -> int:
        """Add what is new of a guess to the tree; return the number of rows."""
        row, added = 0, 0
        path: tuple[int, ...] = (0,)
        for depth, token in enumerate(guess, 1):
            child = rows.children.get((row, token))
            if child is None:
                if added == space:
                    break
                child = rows.children[row, token] = rows.add(token, depth, path)
                added += 1
            row, path = child, rows.sees[child]
        return added

    @staticmethod
    def _list_guesses(rows: _Rows) -> list[int]:
        return sorted(rows.children.values())

    # ---- the window ----------------------------------------------------------------------------

    def _start_window(self) -> list[list[int]]:
        """Return levels of columns, filled with the prompt's own tokens for want of better ones."""
        prompt, columns = self._request.prompt, self._options.columns
        return [
            [prompt[(column + level) % len(prompt)] for column in range(columns)]
            for level in range(self._options.length - 1)
        ]

    def _move_window(self, rows: _Rows, tips: list[npt.NDArray[np.float32]], moved: int) -> None:
        """Extend every column by a token, remember it as an n-gram, and move on by ``moved``.

        Level l of a column stood l behind its first token; one level is dropped for the new one,
        which is a move by one position. Further moves drop columns in front.
        """
        if not tips:
            return
        levels = len(self._window)
        fresh = []
        for column, logits in enumerate(tips):
            fresh.append(self._choose(logits, self._fed + 1 + column + levels - 1))
            self._thought.add((*(level[column] for level in self._window), fresh[-1]))
        self._window = [*self._window[1:], fresh]
        drop = min(moved - 1, self._options.columns)
        for level in self._window:
            level[:] = level[drop:] + level[:drop]
