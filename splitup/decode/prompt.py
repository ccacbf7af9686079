"""What every decoder is asked for, and how a prompt enters the cache: in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitup.decode.sampler import Sampler
from splitup.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class TextRequest:
    """Up to ``max_tokens`` tokens after ``prompt``, until one of ``eos_ids``.

    ``chunk`` is the largest number of rows of one step, ``context`` the number of positions.
    Raises InvalidInput for an empty prompt or one that leaves no position to generate into.
    """

    prompt: tuple[int, ...]
    sampler: Sampler
    max_tokens: int
    eos_ids: frozenset[int]
    vocab: int
    context: int
    chunk: int

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InvalidInput("the prompt has no token; give at least one")
        if self.max_tokens < 1:
            raise InvalidInput(f"max_tokens is {self.max_tokens}; give at least 1")
        if len(self.prompt) > self.context:
            raise InvalidInput(
                f"the prompt has {len(self.prompt)} tokens and the model only {self.context} "
                "positions; shorten it"
            )
        unknown = next((token for token in self.prompt if not 0 <= token < self.vocab), None)
        if unknown is not None:
            raise InvalidInput(
                f"token {unknown} of the prompt is outside the vocabulary of {self.vocab}"
            )

    @property
    def most_tokens(self) -> int:
        """Return how many tokens there can be.

        The token sampled after the last position needs no position of its own.
        """
        return min(self.max_tokens, self.context - len(self.prompt) + 1)


def split_prompt(prompt: Sequence[int], chunk: int) -> list[tuple[int, ...]]:
    """Return the prompt in pieces of at most ``chunk`` tokens."""
    return [tuple(prompt[start : start + chunk]) for start in range(0, len(prompt), chunk)]
