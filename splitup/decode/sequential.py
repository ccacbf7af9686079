"""Sequential decoding: one token per step, the prompt streamed ahead of it.

A decoder is a machine without I/O: ``next_step`` says what to feed, ``receive_logits`` takes what
came out and returns the tokens that are now certain. Steps may be in flight together: the
prompt's steps are all handed out before the first logits are back. Other decoders join behind the
same two calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splitup.decode.sampler import Sampler
from splitup.errors import InvalidInput

INACTIVE = -1  # position of a row that carries no token


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one step feeds: ``tokens`` and ``positions``, both as wide as the model's rows.

    A row with position -1 is inactive: the model computes it and keeps nothing of it.
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]


class SequentialDecoder:
    """Generate up to ``max_tokens`` after ``prompt``, stopping at a token of ``eos_ids``.

    ``width`` is T, the model's rows per step; ``context`` the number of positions it has. Raises
    InvalidInput for an empty prompt or one that leaves no position to generate into.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        *,
        max_tokens: int,
        eos_ids: Sequence[int],
        vocab: int,
        context: int,
        width: int = 1,
    ) -> None:
        if not prompt:
            raise InvalidInput("the prompt has no token; give at least one")
        if max_tokens < 1:
            raise InvalidInput(f"max_tokens is {max_tokens}; give at least 1")
        if len(prompt) > context:
            raise InvalidInput(
                f"the prompt has {len(prompt)} tokens and the model only {context} positions; "
                "shorten it"
            )
        unknown = next((token for token in prompt if not 0 <= token < vocab), None)
        if unknown is not None:
            raise InvalidInput(
                f"token {unknown} of the prompt is outside the vocabulary of {vocab}"
            )
        self._sampler = sampler
        self._eos = frozenset(eos_ids)
        self._width = width
        self._pending = list(prompt)  # certain tokens that were not fed yet
        self._fed = 0  # tokens handed out so far, which is the next token's position
        self._last_row: dict[int, tuple[int, int]] = {}  # step -> (row, position) to sample from
        self._steps = 0
        # the token sampled after the last position needs no position of its own
        self._remaining = min(max_tokens, context - len(prompt) + 1)
        self._finished = False

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def max_steps(self) -> int:
        """How many steps may be needed at most from here on: what an execution has to pay for."""
        return -(-len(self._pending) // self._width) + self._remaining - 1

    def next_step(self) -> StepInput | None:
        """Return the next step's rows, or None while logits are awaited or all is done."""
        if self._finished or not self._pending:
            return None
        tokens, self._pending = self._pending[: self._width], self._pending[self._width :]
        positions = list(range(self._fed, self._fed + len(tokens)))
        self._fed += len(tokens)
        if not self._pending:
            self._last_row[self._steps] = (len(tokens) - 1, positions[-1])
        self._steps += 1
        idle = self._width - len(tokens)
        return StepInput(tuple(tokens + [0] * idle), tuple(positions + [INACTIVE] * idle))

    def receive_logits(self, step: int, logits: npt.NDArray[np.float32]) -> list[int]:
        """Take the logits of ``step``, float32 [T, vocab]; return the tokens they make certain.

        An end token finishes the machine and is not returned. Logits inside the prompt give
        nothing.
        """
        row = self._last_row.pop(step, None)
        if row is None or self._finished:
            return []
        token = self._sampler.choose(logits[row[0]], row[1])
        if token in self._eos:
            self._finished = True
            return []
        self._remaining -= 1
        if self._remaining == 0:
            self._finished = True
        else:
            self._pending.append(token)
        return [token]
