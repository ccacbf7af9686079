"""Lookahead decoding: several tokens per step from the model alone (arXiv 2402.02057).

A step feeds the last certain token and, beside it,

    a window   of ``columns`` columns and ``length - 1`` levels of possible next tokens: the logits
               of its last level extend every column, by Jacobi iteration, to an n-gram;
    guesses    earlier n-grams that begin with the last certain token, as a tree.

These n-grams, and those of the certain text, are kept in two pools. Guesses are taken from them,
those of the text first, because text repeats itself. Tokens are drawn exactly as the sequential
decoder draws them, one after another from the logits of the row at their position, until a drawn
token has no row in the tree. A row's logits are the same bytes as in a step of its own, so the text
is the same too, at every temperature. Noise depends on the position alone, so the window's tokens
are drawn with the noise that the final ones will have.

Extra rows cost time. The decoder counts the tokens per step, continues with single rows when a wide
step gives too few, and tries again later.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from splitup.core.errors import InvalidInput
from splitup.decode.prompt import TextRequest, split_prompt
from splitup.decode.step import Decoder, StepInput, make_causal_step

LEAST_GAIN: Final = 1.15  # tokens per step; below it, wide steps cost more than they save
TRIAL_STEPS: Final = 16  # wide steps over which the gain is measured
FIRST_PAUSE: Final = 32  # single tokens before the next trial; every pause doubles
_POOL_KEYS: Final = 4096  # first tokens of n-grams in a pool


@dataclass(frozen=True, slots=True)
class LookaheadOptions:
    """W, N and G of the paper: window columns, length of n-grams, guesses in one step.

    Raises InvalidInput for impossible numbers; ``check_chunk`` for more than the model's chunk.
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

        Without this check the decoder would leave out what has no room: the text would be right,
        but the options would not be those asked for.
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
    """The last few different continuations of every token, newest first."""

    def __init__(self, guesses: int) -> None:
        self._guesses = guesses
        self._known: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def add(self, ngram: tuple[int, ...]) -> None:
        """Add ``ngram[1:]`` to the continuations of ``ngram[0]``."""
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
    """The rows of a step. Row 0 is the last certain token."""

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


class LookaheadDecoder(Decoder):
    """Generates what ``SequentialDecoder`` generates, in fewer steps."""

    def __init__(self, request: TextRequest, options: LookaheadOptions | None = None) -> None:
        super().__init__(request)
        self._options = options or LookaheadOptions()
        self._prompt = split_prompt(request)
        self._text = list(request.prompt)  # prompt and certain tokens
        self._fed = request.cached  # valid cache rows before the next step
        self._kept: tuple[int, ...] = ()
        self._pending_step: _Rows | None = None
        self._last_step = -1
        self._steps = 0
        self._remaining = request.max_tokens
        self._text_pool = NgramPool(self._options.guesses)  # n-grams of the certain text
        self._pooled = 0  # how many of them
        self._window_pool = NgramPool(self._options.guesses)  # n-grams of the window
        self._window = self._start_window()
        self._trial: deque[int] = deque(maxlen=TRIAL_STEPS)
        self._pause = 0  # single tokens to go until the next trial
        self._next_pause = FIRST_PAUSE

    @property
    def max_steps(self) -> int:
        """Return the largest number of steps that may be needed: that without any guess."""
        is_due = not self._prompt and self._last_step < 0
        return len(self._prompt) + self._remaining - 1 + is_due

    def next_step(self) -> StepInput | None:
        """Return the next step's rows, or None while logits are awaited or all is done."""
        if self.finished or (not self._prompt and self._last_step >= 0):
            return None
        number, self._steps = self._steps, self._steps + 1
        if self._prompt:
            step = make_causal_step(self._prompt.pop(0), self._fed)
            self._fed += len(step.tokens)
            if not self._prompt:
                self._last_step = number
            return step
        rows = self._pending_step = self._make_rows()
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
        """Take the logits of ``step``, float32 [R, vocab]; return the tokens they make certain."""
        if step != self._last_step or self.finished:
            return []
        self._last_step = -1
        if self._pending_step is None:  # the prompt's last chunk
            return self._accept([self._choose(logits[0], self._fed - 1)])
        rows, self._pending_step = self._pending_step, None
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
        self._measure_gain(len(drawn), is_wide=len(rows.tokens) > 1)
        return self._accept(drawn)

    # ---- choosing ------------------------------------------------------------------------------

    def _choose(self, logits: npt.NDArray[np.float32], position: int) -> int:
        return self.request.sampler.choose(logits, position)

    def _accept(self, drawn: list[int]) -> list[int]:
        tokens: list[int] = []
        for token in drawn:
            if token in self.request.eos_ids:
                self.finished = True
                break
            tokens.append(token)
            self._remaining -= 1
            if self._remaining == 0:
                self.finished = True
                break
        self._text += tokens
        length = self._options.length
        while self._pooled + length <= len(self._text):
            self._text_pool.add(tuple(self._text[self._pooled : self._pooled + length]))
            self._pooled += 1
        return tokens

    def _measure_gain(self, count: int, *, is_wide: bool) -> None:
        """Continue with single rows if wide steps give too few tokens; try again after a pause."""
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

    def _make_rows(self) -> _Rows:
        rows = _Rows([self._text[-1]], [0], [(0,)])
        # the cache has no rows beyond the context; tokens beyond the last are not needed
        space = min(self.request.chunk, self.request.context - self._fed) - 1
        if self._pause or self._remaining == 1:
            return rows
        depths = self._options.length - 1
        window = depths * self._options.columns
        if space >= window and self._options.columns + depths < self.request.context - self._fed:
            self._add_window(rows)
            space -= window
        token = self._text[-1]
        guesses = [*self._text_pool.get_guesses(token), *self._window_pool.get_guesses(token)]
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
        """Add the tokens of a guess that the tree lacks; return the number of new rows."""
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
        """Return levels of columns, filled with tokens of the prompt at first."""
        prompt, columns = self.request.prompt, self._options.columns
        return [
            [prompt[(column + level) % len(prompt)] for column in range(columns)]
            for level in range(self._options.length - 1)
        ]

    def _move_window(self, rows: _Rows, tips: list[npt.NDArray[np.float32]], moved: int) -> None:
        """Extend every column by a token, add it to the pool as an n-gram, and move by ``moved``.

        Level l of a column is l positions after its first token. The first level is dropped for the
        new one, which moves the window by one position. Further moves drop the first columns.
        """
        if not tips:
            return
        levels = len(self._window)
        fresh = []
        for column, logits in enumerate(tips):
            fresh.append(self._choose(logits, self._fed + 1 + column + levels - 1))
            self._window_pool.add((*(level[column] for level in self._window), fresh[-1]))
        self._window = [*self._window[1:], fresh]
        drop = min(moved - 1, self._options.columns)
        for level in self._window:
            level[:] = level[drop:] + level[:drop]
