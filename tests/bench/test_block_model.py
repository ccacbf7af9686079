"""The shipped block model writes text, and the published picture of it is a picture."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tokenizers import Tokenizer

from bench.measure.block_model import (
    GREEDY,
    PLOT,
    PROMPTS,
    Example,
    Quality,
    draw_plot,
    measure_quality,
)
from bench.testbed.models import BLOCKS, RECORDS, load_draft
from splitup.decode.block_diffusion import DiffusionOptions
from splitup.demo.models import find_example

MAX_BYTES = 8_200_000  # weights of at most 8 MB, and the tokenizer


async def test_the_shipped_block_model_writes_likely_records_in_fewer_steps(tmp_path: Path) -> None:
    folder = find_example().with_name(BLOCKS)
    assert (folder / "model.safetensors").stat().st_size <= 8_000_000
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_BYTES
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(f"{text}\n").ids for text in PROMPTS[:3]]
    examples = []
    try:
        for name in (RECORDS, BLOCKS):
            examples.append(Example(name, *await load_draft(tmp_path / name, 64, name)))
        judge, blocks = examples
        found = await measure_quality(judge, blocks, prompts, [DiffusionOptions()], [GREEDY])
    finally:
        for example in examples:
            example.programs.close()
    own, greedy = found
    assert own.tokens_per_step <= 1 and own.options is None  # the end token is not counted
    assert greedy.tokens_per_step > 1.8
    assert greedy.nats < 1, "a model that guesses at random has 7.6"


def test_the_picture_is_well_formed() -> None:
    kinds = (None, DiffusionOptions(threshold=0.5), DiffusionOptions(), DiffusionOptions(ahead=1))
    rows = [Quality(t, kind, 1.5, 1.0, 0.7) for t in (0.0, 1.0) for kind in kinds]
    ElementTree.fromstring(draw_plot(rows))
    ElementTree.parse(PLOT)
