"""A draft model on the client: which ones are taken, and what happens when one dies."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from bench.testbed.models import DRAFT, load_draft
from splitup.client.text.drafting import (
    Drafting,
    LocalModel,
    Speculation,
    bring_home,
    check_vocabulary,
)
from splitup.core.errors import InvalidInput
from splitup.decode.prompt import TextRequest
from splitup.decode.sampler import Sampler
from splitup.decode.sequential import SequentialDecoder
from splitup.decode.speculation.decoder import Experience, SpeculativeDecoder
from splitup.decode.speculation.sources import ModelDrafts
from splitup.demo.models import find_example

CHUNK = 16


def test_a_draft_model_needs_the_same_vocabulary() -> None:
    example = find_example()
    target = (example / "tokenizer.json").read_bytes()
    draft = (example.with_name(DRAFT) / "tokenizer.json").read_bytes()
    assert target != draft, "they differ in what matters to chats only"
    check_vocabulary(target, draft, DRAFT)
    other = json.loads(draft)
    vocabulary = other["model"]["vocab"]
    other["model"]["vocab"] = dict(zip(vocabulary, reversed(vocabulary.values()), strict=True))
    with pytest.raises(InvalidInput, match="has another vocabulary"):
        check_vocabulary(target, json.dumps(other).encode(), DRAFT)


@pytest.mark.parametrize(
    "data", [b"[" * 200_000, b"{}", b"[]", b"\xff", b'{"model": {"vocab": 1}}']
)
def test_a_draft_whose_tokenizer_is_none_is_refused(data: bytes) -> None:
    for target in (data, (find_example() / "tokenizer.json").read_bytes()):
        with pytest.raises(InvalidInput, match="has another vocabulary"):
            check_vocabulary(target, data, DRAFT)


@pytest.mark.long  # in small: decode/test_speculative.py
async def test_a_model_drafts_for_itself_until_it_dies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Drafts of the target itself are all right, so a text takes far fewer steps."""
    manifest, programs = await load_draft(tmp_path / "draft", CHUNK)
    try:
        info = manifest.text
        assert info is not None
        with pytest.raises(InvalidInput, match="private"):
            bring_home(manifest, DRAFT)
        request = TextRequest((0, 500, 700), Sampler(0.8, 3), 24, frozenset(), 2048, 256, CHUNK)

        wanted: list[int] = []
        target = LocalModel(DRAFT, manifest, info, programs)
        plain = SequentialDecoder(request)
        while (step := plain.next_step()) is not None:
            logits = await target.compute(step)
            wanted += plain.receive_logits(len(wanted), logits)
        assert logits.shape == (1, 2048) and logits.dtype == np.float32

        local = LocalModel(DRAFT, manifest, info, programs)
        experience, now_s = Experience(), [0.0]
        rates = experience.model
        source = ModelDrafts(request, rates, chunk=local.chunk, context=local.context)
        decoder = SpeculativeDecoder(request, [source], experience, clock=lambda: now_s[0])
        drafting = Drafting(decoder, local)
        target, tokens, steps = LocalModel(DRAFT, manifest, info, programs), [], 0
        while not decoder.finished:
            while not decoder.finished and (found := decoder.next_step()) is not None:
                for _ in range(4):
                    await drafting.advance(None)
                now_s[0] += 1.0  # drafts take no time
                tokens += decoder.receive_logits(steps, await target.compute(found))
                steps += 1
            await drafting.advance(None)
        assert tokens == wanted and steps < len(wanted) / 2
        await drafting.close()

        decoder = Speculation(local).make_decoder(request)
        drafting = Drafting(decoder, local)
        assert decoder.next_step() is not None
        programs.close()
        with caplog.at_level(logging.WARNING):
            assert await drafting.advance(asyncio.get_running_loop().create_future())
        assert "the text goes on without it" in caplog.text
        assert decoder.next_draft() is None
        decoder.receive_logits(0, np.zeros((1, 2048), np.float32))
        assert decoder.next_step() is not None, "the next step waits for no draft"
        await drafting.close()
    finally:
        programs.close()
