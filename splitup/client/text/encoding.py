"""Embeddings and relevance over a session: texts packed into steps, a row of numbers for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from splitup.client.execution.session import Session
from splitup.client.market.receipts import PendingReceipt
from splitup.client.outcome import Array
from splitup.client.text.generation import get_chunk
from splitup.client.text.tokenizer import ModelTokenizer
from splitup.core.errors import InvalidInput
from splitup.decode.texts import EncodedText, make_text_arrays, pack_texts
from splitup.graph.manifest import Manifest, TextInfo
from splitup.messages.plans import Plan

_MOST_CHARS = 32  # of a token on average; a longer text is refused before it is encoded


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors float32 [texts, width], in the order of the texts; ``tokens`` of all texts."""

    vectors: Array
    tokens: int
    execution_id: str
    plan: Plan
    receipt: PendingReceipt


@dataclass(frozen=True, slots=True)
class EncoderModel:
    """A registered model that gives a vector or a score of each text."""

    name: str
    manifest: Manifest
    info: TextInfo
    tokenizer: ModelTokenizer

    @property
    def is_ranker(self) -> bool:
        """Return whether it gives a score of a pair of texts, and not a vector of a text."""
        return self.manifest.kind == "text-ranking"

    @property
    def width(self) -> int:
        """Return the number of elements of a vector."""
        return self.manifest.user_outputs[0].shape[1]

    def encode(
        self, text: str | Sequence[int], pair: str | None = None, *, cuts: bool = False
    ) -> EncodedText:
        """Return the tokens of a text or pair; a sequence of tokens is taken as it is. Blocks.

        With ``cuts`` a text loses the end for which the model has no room. Raises InvalidInput for
        an empty text, for one that is too long, and for tokens outside the vocabulary.
        """
        if isinstance(text, str):
            if cuts:
                text = text[: _MOST_CHARS * self.info.context]
            length = len(text) + len(pair or "")
            if length > _MOST_CHARS * self.info.context:
                raise self._refuse_length(f"{length} characters")
            found = self.tokenizer.encode_typed(
                text, pair, most=self.info.context if cuts else None
            )
        else:
            found = EncodedText(tuple(text[: self.info.context] if cuts else text))
        if not text or not found.tokens:
            raise InvalidInput("the text is empty; give at least one character or token")
        if len(found.tokens) > self.info.context:
            raise self._refuse_length(f"{len(found.tokens)} tokens")
        if not all(0 <= token < self.info.vocab for token in found.tokens):
            raise InvalidInput(f"a token is outside the vocabulary of {self.info.vocab}")
        if not all(kind <= 1 for kind in found.types):  # a foreign tokenizer gives what it likes
            raise InvalidInput(f"the tokenizer of model {self.name} gives token types beyond 1")
        return found

    async def encode_all(self, texts: Sequence[str | Sequence[int]]) -> list[EncodedText]:
        """Return what ``encode`` does of each text; an error names the text, counted from 0."""
        encoded = []
        for place, text in enumerate(texts):
            try:
                encoded.append(await self.tokenizer.run(partial(self.encode, text)))
            except InvalidInput as error:
                raise InvalidInput(f"text {place}: {error}") from None
        return encoded

    def pack(self, texts: Sequence[EncodedText]) -> list[list[int]]:
        """Return the texts of each step, by number."""
        return pack_texts([len(text.tokens) for text in texts], get_chunk(self.manifest))

    def _refuse_length(self, length: str) -> InvalidInput:
        return TextTooLong(
            f"model {self.name} takes texts of up to {self.info.context} tokens, and this one has "
            f"{length}; shorten it or divide it"
        )


class TextTooLong(InvalidInput):
    """A text has more tokens than the model's context."""


def get_encoder_info(manifest: Manifest, model: str) -> TextInfo:
    """Return an encoder's text settings; raise InvalidInput for another model."""
    if not manifest.is_encoder or manifest.text is None:
        raise InvalidInput(
            f"model {model} gives no embeddings: it is of kind {manifest.kind}; see the models "
            "and their kinds with: splitup models"
        )
    return manifest.text


async def run_texts(session: Session, model: EncoderModel, texts: Sequence[EncodedText]) -> Array:
    """Return float32 [texts, width], computed in as many steps as ``EncoderModel.pack`` says."""
    [output] = model.manifest.user_outputs
    result = np.empty((len(texts), output.shape[1]), np.float32)
    steps = model.pack(texts)
    futures = [session.submit(make_text_arrays([texts[one] for one in step])) for step in steps]
    for step, future in zip(steps, futures, strict=True):
        result[step] = (await future)[output.name]
    return result
