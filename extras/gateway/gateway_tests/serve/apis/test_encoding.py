"""Texts of requests for embeddings: what is too long or empty is named by its place, or cut."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_deploy.cutting.build import build
from splitup_gateway.apis.encoding import EmbeddingRequest, prepare_texts, write_answer
from splitup_gateway.apis.requests import parse_request
from splitup_gateway.errors import ApiError
from splitup_gateway.generation import Report

from splitup.client.text.encoding import EncoderModel, get_encoder_info
from splitup.client.text.tokenizer import ModelTokenizer
from tests.deploy.encoders import CASES, save_encoder

LONG = "w9 " * 31


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EncoderModel]:
    folder: Path = tmp_path_factory.mktemp("encoder")
    manifest = build(save_encoder(folder, CASES["bert"]), 10**8).manifest
    tokenizer = ModelTokenizer((folder / "tokenizer.json").read_bytes(), "model tiny")
    try:
        yield EncoderModel("tiny", manifest, get_encoder_info(manifest, "tiny"), tokenizer)
    finally:
        tokenizer.close()


@pytest.mark.parametrize(
    ("texts", "place", "code"),
    [
        (["w4", "w5", "w6", LONG], 3, "context_length_exceeded"),
        (["w4", "w" * 5_000], 1, "context_length_exceeded"),
        ([[2, 4, 3], [4] * 33], 1, "context_length_exceeded"),
        (["w4", "w5", "w6", ""], 3, None),
        ([[4], []], 1, None),
        ([[4], [40]], 1, None),
    ],
)
async def test_a_text_that_cannot_be_is_named_by_its_place(
    model: EncoderModel, texts: list[Any], place: int, code: str | None
) -> None:
    asked = parse_request(EmbeddingRequest, {"model": "tiny", "input": texts})
    with pytest.raises(ApiError, match=rf"^'input\.{place}': ") as caught:
        await prepare_texts(model, asked)
    assert (caught.value.param, caught.value.code) == (f"input.{place}", code)


async def test_what_is_too_long_is_cut_where_that_is_asked(model: EncoderModel) -> None:
    fields = {"model": "tiny", "input": ["w4", LONG, "w" * 5_000], "truncate": True}
    cut = await prepare_texts(model, parse_request(EmbeddingRequest, fields))
    assert [len(text.tokens) for text in cut.texts][:2] == [3, 32]
    assert all(text.tokens[-1] == cut.texts[0].tokens[-1] for text in cut.texts)
    empty = {"model": "tiny", "input": ["w4", ""], "truncate": True}
    with pytest.raises(ApiError, match=r"'input\.1': the text is empty"):
        await prepare_texts(model, parse_request(EmbeddingRequest, empty))


@pytest.mark.parametrize("form", ["float", "base64"])
async def test_s105_a_long_answer_is_written_while_others_go_on(
    model: EncoderModel, form: str
) -> None:
    rows = np.arange(300, dtype=np.float32).reshape(100, 3) / 7
    fields = {"model": "tiny", "input": ["w4"] * 100, "encoding_format": form}
    asked = parse_request(EmbeddingRequest, fields)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    answer = json.loads(await write_answer(model, asked, rows, Report((1, 2))))
    counting.cancel()
    assert turns >= 100
    assert [one["index"] for one in answer["data"]] == [*range(100)]
    found = [one["embedding"] for one in answer["data"]]
    if form == "base64":
        found = [np.frombuffer(base64.b64decode(text), "<f4") for text in found]
    assert np.array_equal(np.array(found, np.float32), rows)
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert answer["usage"]["prompt_tokens"] == 2
