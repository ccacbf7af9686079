from __future__ import annotations

import pytest

from splitup.core.codec import parse_json
from splitup.core.records import LaxRecord
from tests.fuzz import costs
from tests.fuzz.binary_doors import find_binary_doors

SIZE = 64 * 1024
_MESSAGES = ("JSON of any route", "split inference", "split inference, binary")


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


@pytest.mark.parametrize("door", costs.find_doors())
def test_s20_no_text_costs_far_more_than_an_ordinary_one(door: str) -> None:
    """The unit is ``parse_json`` of zeros in the same process, so the machine matters little."""
    zeros = "[" + "0," * (SIZE // 2) + "0]"
    unit = costs.measure(lambda: parse_json(zeros, max_values=SIZE), SIZE)[0]
    for name, filling in costs.make_fillings(SIZE).items():
        us, memory = costs.measure(costs.find_doors()[door](filling), SIZE)
        most = 20 if door in _MESSAGES else 26  # others hold the pairs of an object, to see order
        assert memory <= most, f"{name}: {memory:.1f} bytes for one"
        assert us <= 12 * unit, f"{name}: {us / unit:.1f} times as long as zeros"


@pytest.mark.parametrize("door", find_binary_doors(SIZE))
def test_s20_no_bytes_cost_far_more_than_ordinary_ones(door: str) -> None:
    zeros = "[" + "0," * (SIZE // 2) + "0]"
    unit = costs.measure(lambda: parse_json(zeros, max_values=SIZE), SIZE)[0]
    for name, (us, memory) in costs.measure_inputs(*find_binary_doors(SIZE)[door]).items():
        assert us <= 12 * unit, f"{name}: {us / unit:.1f} times as long as zeros"
        # a tensor of zeros counts as its length, not as the 182 bytes that tell of it
        assert memory <= 60 or name == "a tensor of zeros", f"{name}: {memory:.1f} bytes for one"
