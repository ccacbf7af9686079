"""Jacobi decoding (arXiv 2305.10427), beside which the benchmark puts the product's decoders."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from splitup.decode.prompt import TextRequest
from splitup.decode.sequential import SequentialDecoder
from splitup.decode.step import StepInput, make_causal_step

_GUESSES = 7


class JacobiDecoder(SequentialDecoder):
    """Guesses the next tokens; a step's predictions are the next step's guesses."""

    def __init__(self, request: TextRequest) -> None:
        super().__init__(request)
        self._guesses: list[int] = []
        self._kept: tuple[int, ...] = ()
        self._in_prompt = True

    def next_step(self) -> StepInput | None:
        """Return the next step: one token and the guesses behind it."""
        if self._in_prompt or not self._pending:
            return super().next_step()
        [token] = self._pending.pop(0)
        room = min(self.request.chunk, self.request.context - self._fed, self._remaining)
        self._guesses = (self._guesses + [token] * _GUESSES)[: min(_GUESSES, room - 1)]
        self._last_step = self._steps
        self._steps += 1
        tokens = (token, *self._guesses)
        step = make_causal_step(tokens, self._fed, range(len(tokens)))
        return replace(step, kept=self._kept)

    def receive_logits(self, step: int, logits: npt.NDArray[np.float32]) -> list[int]:
        """Take the logits of every row; return the tokens up to the first wrong guess."""
        if step != self._last_step or self.finished:
            return []
        if self._in_prompt:
            self._in_prompt = False
            return super().receive_logits(step, logits)
        choose = self.request.sampler.choose
        drawn = [choose(row, self._fed + place) for place, row in enumerate(logits)]
        right = next((n for n, guess in enumerate(self._guesses) if guess != drawn[n]), None)
        accepted = drawn[: (len(self._guesses) if right is None else right) + 1]
        self._guesses = drawn[len(accepted) :]
        self._kept = tuple(range(len(accepted)))
        self._fed += len(accepted)
        for place, token in enumerate(accepted):
            if token in self.request.eos_ids:
                self.finished = True
                return accepted[:place]
        self._remaining -= len(accepted)
        self.finished = self._remaining <= 0
        self._pending.append((accepted[-1],))
        return accepted
