"""The shipped block model writes text, and the published picture of it is a picture."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from bench.measure.block_model import (
    BLOCKS,
    GREEDY,
    PLOT,
    Example,
    Quality,
    draw_plot,
    measure_quality,
)
from bench.testbed.models import load_draft
from splitup.demo.run import MODEL, find_example

PROMPT = [0, 1184, 500, 700, 321, 44]  # no multiple of a block
MAX_BYTES = 8_200_000  # weights of at most 8 MB, and the tokenizer


async def test_the_shipped_block_model_writes_likely_text_in_fewer_steps(tmp_path: Path) -> None:
    folder = find_example().with_name(BLOCKS)
    assert (folder / "model.safetensors").stat().st_size <= 8_000_000
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_BYTES
    examples = []
    try:
        for name in (MODEL, BLOCKS):
            examples.append(Example(name, *await load_draft(tmp_path / name, 64, name)))
        teacher, blocks = examples
        found = await measure_quality(teacher, blocks, [PROMPT], (0.5,), [GREEDY])
    finally:
        for example in examples:
            example.programs.close()
    own, greedy = found
    assert own.tokens_per_step == 1 and own.threshold is None
    assert greedy.tokens_per_step > 1.3
    assert greedy.nats < 3, "a model that guesses at random has 7.6"


def test_the_picture_is_well_formed() -> None:
    rows = [Quality(t, n, 1.5, 1.0, 0.7) for t in (0.0, 1.0) for n in (None, 0.5, 0.9)]
    ElementTree.fromstring(draw_plot(rows))
    ElementTree.parse(PLOT)
