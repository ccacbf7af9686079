"""Text generation over a session: prompt streamed ahead, then a token per step, sampled here."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from splitup.client.outcome import Array
from splitup.client.session import Session
from splitup.decode.sequential import SequentialDecoder, StepInput
from splitup.errors import InvalidInput, InvalidModel
from splitup.graph.manifest import Manifest, TextInfo

OnStep = Callable[[dict[str, Array], Array], None]  # (inputs by name, logits [T, vocab])


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; ``text`` may be empty while a character is still incomplete."""

    id: int
    text: str

    def __str__(self) -> str:
        return self.text


def get_text_info(manifest: Manifest, model: str) -> TextInfo:
    """Return how the model reads text; raise InvalidInput for a model that does not."""
    if manifest.text is None:
        raise InvalidInput(
            f"model {model} is not a text model; run it with: "
            f"splitup run {model} --input NAME=FILE.npy"
        )
    return manifest.text


def get_width(manifest: Manifest) -> int:
    """Return T, the token rows of one step."""
    return next(port.shape[0] for port in manifest.inputs if port.name == "tokens")


def load_tokenizer(data: bytes) -> Tokenizer:
    """Parse a tokenizer.json; raise InvalidModel when the library refuses it."""
    try:
        return Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises plain Exception
        raise InvalidModel(f"the model's tokenizer cannot be read: {error}") from None


def encode_prompt(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> list[int]:
    """Return the prompt's tokens; a sequence of token ids is taken as it is."""
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt).ids)
    return [int(token) for token in prompt]


async def generate_tokens(
    session: Session,
    decoder: SequentialDecoder,
    tokenizer: Tokenizer,
    *,
    on_step: OnStep | None = None,
) -> AsyncIterator[Token]:
    """Drive the decoder over the session; yields tokens as they become certain.

    Steps are submitted as soon as the decoder has them and their logits taken in order, so that
    prompt steps overlap in the pipeline of nodes. ``on_step`` sees every step's inputs and logits.
    """
    stream = DecodeStream(skip_special_tokens=True)
    in_flight: deque[tuple[dict[str, Array], asyncio.Future[dict[str, Array]]]] = deque()
    number = 0
    while not decoder.finished:
        while (step := decoder.next_step()) is not None:
            arrays = _to_arrays(step)
            in_flight.append((arrays, session.submit(arrays)))
        arrays, future = in_flight.popleft()
        logits = (await future)["logits"]
        if on_step is not None:
            on_step(arrays, logits)
        for token in decoder.receive_logits(number, logits):
            yield Token(token, stream.step(tokenizer, token) or "")
        number += 1


def _to_arrays(step: StepInput) -> dict[str, Array]:
    return {
        "tokens": np.array(step.tokens, dtype=np.int32),
        "positions": np.array(step.positions, dtype=np.int32),
    }
