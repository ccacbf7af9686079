"""What an encoder takes: bounds on texts and tokens, and on what a foreign tokenizer says."""

from __future__ import annotations

from pathlib import Path

import pytest
from splitup_deploy.cutting.build import build
from tokenizers import Tokenizer, processors

from splitup.client.text.encoding import EncoderModel, TextTooLong, get_encoder_info
from splitup.client.text.generation import get_text_info
from splitup.client.text.tokenizer import ModelTokenizer
from splitup.core.errors import InvalidInput
from tests.deploy.encoders import CASES, save_encoder


def test_texts_and_pairs(tmp_path: Path) -> None:
    manifest = build(save_encoder(tmp_path, CASES["bert-ranker"]), 10**8).manifest
    info = get_encoder_info(manifest, "tiny")
    with pytest.raises(
        InvalidInput, match=r"scores of pairs of texts and writes no text; .*splitup serve"
    ):
        get_text_info(manifest, "tiny")
    data = (tmp_path / "tokenizer.json").read_bytes()
    tokenizer = ModelTokenizer(data, "model tiny")
    try:
        model = EncoderModel("tiny", manifest, info, tokenizer)
        assert model.is_ranker
        pair = model.encode("w4", "w5 w6")
        assert pair.tokens == (2, 4, 3, 5, 6, 3) and pair.types == (0, 0, 0, 1, 1, 1)
        whole = model.encode("w9 " * 30)  # the file pads to 8 tokens and cuts to 5
        assert len(whole.tokens) == 32 == info.context
        assert model.encode("w4", "").tokens == (2, 4, 3, 3)
        for text, message in (
            ("w9 " * 31, "up to 32 tokens, and this one has 33 tokens"),
            ("w" * 5000, "has 5000 characters"),
            ([4] * 33, "has 33 tokens"),
        ):
            with pytest.raises(TextTooLong, match=message):
                model.encode(text)  # type: ignore[arg-type]
        for text in ("w9 " * 31, "w9 " * 5000):
            assert model.encode(text, cuts=True) == whole, "the special tokens stay"
            assert model.encode("w9 " * 30) == whole, "what follows is not cut"
        assert model.encode([4] * 33, cuts=True).tokens == (4,) * 32
        for empty in ("", []):
            with pytest.raises(InvalidInput, match="the text is empty"):
                model.encode(empty)  # type: ignore[arg-type]
        for token in (-1, 40, 2**40):
            with pytest.raises(InvalidInput, match="outside the vocabulary of 40"):
                model.encode([token])
    finally:
        tokenizer.close()


def test_foreign_token_types_are_bounded(tmp_path: Path) -> None:
    manifest = build(save_encoder(tmp_path, CASES["bert-ranker"]), 10**8).manifest
    file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    file.post_processor = processors.TemplateProcessing(
        single="$A", pair="$A $B:4294967295", special_tokens=[]
    )
    tokenizer = ModelTokenizer(file.to_str().encode(), "model tiny")
    try:
        model = EncoderModel("tiny", manifest, get_encoder_info(manifest, "tiny"), tokenizer)
        with pytest.raises(InvalidInput, match="token types beyond 1"):
            model.encode("w4", "w5")
    finally:
        tokenizer.close()
