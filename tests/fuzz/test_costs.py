from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from splitup.core import limits
from splitup.core.codec import parse_json
from splitup.core.records import LaxRecord
from tests.fuzz import costs
from tests.fuzz.binary_doors import find_binary_doors

SIZE = 24 * 1024
MOST = 20  # bytes of memory for a byte
SLOWEST = 12  # times as long as zeros
ATTEMPTS = 5
# what any message may take: a few hundred guessed tokens are 1 KiB, and 70 KiB in memory
FREE = limits.JSON_FREE_BYTES
ZEROS = ("a tensor of zeros", "tensors of zeros")  # count as their length wherever frames count


@pytest.mark.parametrize("kind", costs.find_kinds(), ids=lambda kind: kind.__name__)
def test_s20_the_first_wrong_entry_ends_a_check(kind: type[LaxRecord]) -> None:
    fillings = (
        [0] * 1000,
        [{}] * 1000,
        {f"{index:x}": 0 for index in range(1000)},
        ["\ud800"] * 999,
    )
    for place in costs.find_places(kind):
        for filling in fillings:
            errors = costs.count_errors(kind, costs.put(place, filling))
            assert errors < 100, f"{errors} errors for 1,000 entries at {place}"


@pytest.mark.parametrize("kind", costs.find_kinds(), ids=lambda kind: kind.__name__)
def test_s20_no_class_takes_much_memory(kind: type[LaxRecord]) -> None:
    for place in costs.find_places(kind):
        for name, (filling, parsed) in parse_shapes().items():
            value = costs.put(place, filling)
            memory = parsed + costs.measure_memory(partial(costs.count_errors, kind, value), SIZE)
            assert memory <= MOST, f"{name} at {place}: {memory:.1f} bytes for one"


@cache
def parse_shapes() -> dict[str, tuple[Any, float]]:
    """Return a list and an object as they are read, and what memory that took for each byte."""
    fillings = costs.make_fillings(SIZE)
    texts = {name: fillings[name] for name in ("[0.5, …]", '{"1000":0, …}')}
    return {
        name: (parse_json(text), costs.measure_memory(partial(parse_json, text), SIZE))
        for name, text in texts.items()
    }


@pytest.mark.parametrize("door", costs.find_doors())
def test_s20_no_text_costs_far_more_than_an_ordinary_one(door: str) -> None:
    for name, filling in costs.make_fillings(SIZE).items():
        memory = check_time(name, costs.find_doors()[door](filling), SIZE)
        assert memory <= MOST, f"{name}: {memory:.1f} bytes for one"


@pytest.mark.parametrize("door", find_binary_doors(SIZE))
def test_s20_no_bytes_cost_far_more_than_ordinary_ones(door: str) -> None:
    read, inputs = find_binary_doors(SIZE)[door]
    for name, data in inputs.items():
        memory = check_time(name, partial(read, data), len(data))
        most = MOST + FREE / len(data)
        assert memory <= most or name in ZEROS, f"{name}: {memory:.1f} bytes for one"


def check_time(name: str, work: Callable[[], object], size: int) -> float:
    """Return the memory of ``work`` for a byte; fail if it takes far longer than reading zeros.

    The unit is ``parse_json`` of zeros in the same process, so the machine matters little. Both are
    measured again when the work seems slow: a machine that others use changes its speed.
    """
    ratios = []
    for runs in range(1, ATTEMPTS + 1):
        if runs > 1:
            measure_zeros_us.cache_clear()
        ratios.append(costs.measure_us(work, size, runs) / measure_zeros_us())
        if ratios[-1] <= SLOWEST:
            return costs.measure_memory(partial(costs.run_to_error, work), size)
    pytest.fail(f"{name}: {min(ratios):.1f} times as long as zeros")


@cache
def measure_zeros_us() -> float:
    zeros = "[" + "0," * (SIZE // 2) + "0]"
    return costs.measure_us(partial(parse_json, zeros, max_values=SIZE), SIZE)
