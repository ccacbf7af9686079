"""The request that every decoder takes, and the prompt in chunks."""

from __future__ import annotations

from dataclasses import dataclass

from splitup.core.errors import InvalidInput
from splitup.decode.sampler import TokenChooser


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a model that writes blocks of tokens was trained; the manifest says it."""

    size: int
    mask_id: int  # the token that stands for one that is not written yet
    are_shifted: bool = False  # the logits of a row are of the next token, not of its own


@dataclass(frozen=True, slots=True)
class TextRequest:
    """Up to ``max_tokens`` tokens after ``prompt``, until one of ``eos_ids``.

    ``chunk`` is the largest number of rows of one step, ``context`` the number of positions.
    ``images`` are the positions of each image in the prompt; one step has to hold all of them.
    ``cached`` leading tokens of the prompt are in the model's cache already and are not fed again.
    ``blocks`` is None for a model that writes one token after the other.
    Raises InvalidInput for an empty prompt, and for more tokens than the model has positions: the
    client would pay for a text that looks complete but was cut off.
    """

    prompt: tuple[int, ...]
    sampler: TokenChooser
    max_tokens: int
    eos_ids: frozenset[int]
    vocab: int
    context: int
    chunk: int
    cached: int = 0
    blocks: Blocks | None = None
    images: tuple[range, ...] = ()

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
        room = self.context - len(self.prompt)
        if self.blocks is None:
            room += 1  # the last token is sampled and not fed back
        if self.max_tokens > room:
            raise InvalidInput(
                f"the model has {self.context} positions: after a prompt of {len(self.prompt)} "
                f"tokens there can be {room} more, not {self.max_tokens}; ask for at most "
                f"{room} (--max-tokens {room})"
            )
        if not 0 <= self.cached < len(self.prompt):
            raise InvalidInput(
                f"{self.cached} tokens of a prompt of {len(self.prompt)} cannot be in the cache; "
                "at least one has to be fed"
            )
        unknown = next((token for token in self.prompt if not 0 <= token < self.vocab), None)
        if unknown is not None:
            raise InvalidInput(
                f"token {unknown} of the prompt is outside the vocabulary of {self.vocab}"
            )


def split_prompt(request: TextRequest) -> list[tuple[int, ...]]:
    """Return the tokens of the prompt that have to be fed, in pieces of at most ``chunk``.

    Each attends to those before it, and no image is divided. Raises InvalidInput for a model that
    writes blocks, and for an image that is larger than ``chunk``.
    """
    if request.blocks is not None:
        raise InvalidInput(
            "the model writes blocks of tokens, not one after the other; its decoder is 'diffusion'"
        )
    pieces, place = [], request.cached
    while place < len(request.prompt):
        end = place + request.chunk
        for image in request.images:
            if image.start < end < image.stop:
                end = image.start
        if end <= place:
            raise InvalidInput(f"an image does not fit a step of {request.chunk} rows")
        pieces.append(request.prompt[place:end])
        place = end
    return pieces
