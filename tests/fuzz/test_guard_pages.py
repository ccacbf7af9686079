"""Legal graphs stay in their buffers; and the fuzzer finds what used to leave them."""

from __future__ import annotations

import itertools

from tests.fuzz.guard_pages import describe_find, search

CASES = 2_000


def test_hostile_inputs_of_legal_graphs_stay_in_their_buffers() -> None:
    report = search(itertools.count(), cases=CASES)
    finds = [describe_find(*find) for find in report.finds.items()]
    assert not finds, "\n".join(finds)
    assert report.cases >= CASES and report.kinds["refused"] < sum(report.kinds.values()) / 20
