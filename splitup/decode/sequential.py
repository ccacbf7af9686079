"""Sequential decoding: the prompt in chunks, then one token per step.

A decoder is a state machine without I/O: ``next_step`` returns what to feed, ``receive_logits``
takes the logits and returns the tokens that are now certain. Several steps may run at once: all
steps of the prompt are returned before the first logits are back.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from splitup.decode.prompt import TextRequest, split_prompt
from splitup.decode.step import Decoder, StepInput, make_causal_step


class SequentialDecoder(Decoder):
    """One token per step. Every other decoder has to generate the same text."""

    def __init__(self, request: TextRequest) -> None:
        super().__init__(request)
        self._pending = split_prompt(request)  # certain, not fed yet
        self._fed = request.cached  # the position of the next token to feed
        self._last_step = -1  # the step whose logits give a token
        self._steps = 0
        self._remaining = request.max_tokens

    @property
    def max_steps(self) -> int:
        """Return the largest number of steps that may be needed, which the client pays for."""
        return len(self._pending) + self._remaining - 1

    def next_step(self) -> StepInput | None:
        """Return the next step's rows, or None while logits are awaited or all is done."""
        if self.finished or not self._pending:
            return None
        step = make_causal_step(self._pending.pop(0), self._fed, images=self.request.images)
        self._fed += len(step.tokens)
        if not self._pending:
            self._last_step = self._steps
        self._steps += 1
        return step

    def receive_logits(self, step: int, logits: npt.NDArray[np.float32]) -> list[int]:
        """Take the logits of ``step``, float32 [1, vocab]; return the tokens they make certain."""
        if step != self._last_step or self.finished:
            return []
        token = self.request.sampler.choose(logits[0], self._fed - 1)
        if token in self.request.eos_ids:
            self.finished = True
            return []
        self._remaining -= 1
        if self._remaining == 0:
            self.finished = True
        else:
            self._pending.append((token,))
        return [token]
