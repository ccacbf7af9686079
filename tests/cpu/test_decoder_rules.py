from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from splitup.cpu.decoder_rules import WORD_BYTES, list_places, shorten
from splitup.cpu.matmul_shape import LANES

NBYTES = 14
OPERATIONS = ("and", "shift right", "shift left", "or")


def compute(value: Any, block: np.ndarray, loaded: set[int]) -> np.ndarray:
    """Return the eight lanes of a value, uint32, as the vector instructions would."""
    if not isinstance(value[0], str):
        return np.array(value, np.int64).astype(np.uint32)
    name, *operands = value
    if name == "word":
        places = range(operands[0], operands[0] + 4)
        loaded.update(places)
        return np.full(LANES, sum(int(block[p]) << 8 * i for i, p in enumerate(places)), np.uint32)
    if name in ("byte", "bytes"):
        start, is_signed = operands
        part = block[start : start + (1 if name == "byte" else LANES)]
        loaded.update(range(start, start + len(part)))
        return np.resize(part.view(np.int8) if is_signed else part, LANES).astype(np.uint32)
    one, two = (compute(operand, block, loaded) for operand in operands)
    if name.startswith("shift"):
        moved = one >> two % 32 if name == "shift right" else one << two % 32
        return np.where(two < 32, moved, 0).astype(np.uint32)
    return one & two if name == "and" else one | two


def draw(random: np.random.Generator, depth: int) -> Any:
    """Return a random expression of loads of a block."""
    if depth == 0:
        name = random.choice(["byte", "bytes"])
        place = int(random.integers(2, 12 if name == "byte" else 5))
        return str(name), place, bool(random.random() < 0.2)
    name = str(random.choice(OPERATIONS, p=(0.35, 0.25, 0.25, 0.15)))
    inner = draw(random, depth - 1)
    if name == "or":
        return name, inner, draw(random, int(random.integers(depth)))
    top = 256 if name == "and" else int(random.choice([5, 9, 40]))
    numbers = random.integers(0, top, LANES if random.random() < 0.5 else 1)
    return name, inner, tuple(int(number) for number in np.resize(numbers, LANES))


@pytest.mark.parametrize("seed", range(20))
def test_a_shorter_expression_has_the_same_bits(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(50):
        value = draw(random, int(random.integers(1, 6)))
        block = random.integers(0, 256, NBYTES, np.uint8)
        places, loaded = list(list_places(value)), set[int]()
        short = shorten(value, range(min(places), max(places) - WORD_BYTES + 1))
        found = compute(short, block, loaded)
        np.testing.assert_array_equal(found, compute(value, block, set()), str((value, short)))
        assert min(places) <= min(loaded) and max(loaded) < max(places), short


def test_what_q5_0_writes_becomes_one_shift_and_one_mask() -> None:
    """A bit is shifted down, masked, shifted up and masked again, another in each lane."""
    counts = tuple(range(LANES))
    bit = "and", ("shift right", ("byte", 2, False), counts), (1,) * LANES
    value = "and", ("shift left", bit, (4,) * LANES), (255,) * LANES
    moved = tuple(count + 4 for count in counts)
    assert shorten(value, range(19)) == ("and", ("shift right", ("word", 1), moved), (16,) * LANES)
    assert "('word', 1)" not in str(shorten(value, range(2, 19)))  # before what the graph reads
