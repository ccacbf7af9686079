"""The shipped block model is small, and writes records in few steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.modes.slowlink import DESCRIPTIONS
from bench.testbed.models import BLOCKS, load_draft
from splitup.client.text.drafting import LocalModel, make_blocks
from splitup.decode.block_diffusion import BlockDiffusionDecoder
from splitup.decode.prompt import TextRequest
from splitup.decode.sampler import Sampler
from splitup.demo.models import find_example

CHUNK = 64
MAX_BYTES = 8_200_000  # weights of at most 8 MB, and the tokenizer


@pytest.mark.long  # in small: decode/test_block_diffusion.py
async def test_the_shipped_block_model_writes_records_in_fewer_steps(tmp_path: Path) -> None:
    folder = find_example().with_name(BLOCKS)
    assert (folder / "model.safetensors").stat().st_size <= 8_000_000
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_BYTES
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    manifest, programs = await load_draft(tmp_path / "blocks", CHUNK, BLOCKS)
    info = manifest.text
    assert info is not None
    tokens, steps = list[int](), 0
    try:
        for description in DESCRIPTIONS[:3]:
            prompt = tuple(tokenizer.encode(f"{description}\n").ids)
            request = TextRequest(
                *(prompt, Sampler(), 128, frozenset(info.eos_ids), info.vocab, info.context, CHUNK),
                blocks=make_blocks(info.diffusion),
            )
            decoder, number = BlockDiffusionDecoder(request), 0
            model = LocalModel(BLOCKS, manifest, info, programs)
            while (step := decoder.next_step()) is not None:
                tokens += decoder.receive_logits(number, await model.compute(step))
                number += 1
            steps += number
            await model.end()
    finally:
        programs.close()
    assert len(tokens) > 1.8 * steps
    assert tokenizer.decode(tokens).count("Section: ") == 3
