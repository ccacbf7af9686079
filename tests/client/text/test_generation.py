"""Texts that a decoder's tokens become, at their beginning and at their end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from splitup.client.text.generation import Token, generate_tokens
from splitup.client.text.tokenizer import ModelTokenizer
from splitup.decode.prompt import TextRequest
from splitup.decode.sampler import Sampler
from splitup.decode.sequential import SequentialDecoder
from splitup.decode.stop import StopFilter
from splitup.graph.manifest import Port
from tests.client.text.test_tokenizer import make_word_tokenizers

VOCAB, EOS = 10, 9
SAT, FIRST, SECOND, THIRD = 2, 6, 7, 8  # a word, and the bytes of a character


class Model:
    """A session whose model says certain tokens, one a step."""

    def __init__(self, tokens: Sequence[int]) -> None:
        port = Port(name="tokens", dtype="int32", shape=(4,), rows="T")
        self.manifest: Any = SimpleNamespace(user_inputs=(port,), text=None)
        self._tokens = iter(tokens)

    def submit(self, arrays: dict[str, np.ndarray]) -> asyncio.Future[dict[str, np.ndarray]]:
        answer: asyncio.Future[dict[str, np.ndarray]] = asyncio.Future()
        answer.set_result({"logits": np.eye(VOCAB, dtype=np.float32)[[next(self._tokens)]]})
        return answer


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[ModelTokenizer]:
    data = make_word_tokenizers()["llama"].to_str().encode()
    with closing(ModelTokenizer(data, "model words")) as running:
        yield running


def generate(tokenizer: ModelTokenizer, said: Sequence[int], **options: Any) -> list[Token]:
    """Return what follows "the cat" when the model says these tokens."""
    request = TextRequest(
        prompt=(0, 1),
        sampler=Sampler(),
        max_tokens=options.pop("max_tokens", len(said)),
        eos_ids=frozenset({EOS}),
        vocab=VOCAB,
        context=64,
        chunk=4,
    )

    async def collect() -> list[Token]:
        session: Any = Model(said)
        found = generate_tokens(session, SequentialDecoder(request), tokenizer, **options)
        return [token async for token in found]

    return asyncio.run(collect())


def test_the_first_word_keeps_its_space_and_ends_at_a_stop_string(
    tokenizer: ModelTokenizer,
) -> None:
    assert generate(tokenizer, [SAT, 3]) == [Token(SAT, " sat"), Token(3, " on")]
    ends = StopFilter([" sat"])
    assert generate(tokenizer, [SAT, 3], ends=ends) == [] and ends.found


@pytest.mark.parametrize("end", [[], [EOS]], ids=["length", "end token"])
def test_an_unfinished_character_at_the_end_is_said(
    tokenizer: ModelTokenizer, end: list[int]
) -> None:
    character = [FIRST, SECOND, THIRD]
    given = generate(tokenizer, [SAT, *character, *end])
    assert [token.text for token in given] == [" sat", "", "", "\u6f22"]
    given = generate(tokenizer, [SAT, *character[:2], *end])
    assert [token.id for token in given] == [SAT, *character[:2]]
    assert [token.text for token in given] == [" sat", "", "\ufffd\ufffd"]
