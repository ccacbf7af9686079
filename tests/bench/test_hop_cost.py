"""Every call on a step's path is a miss once weights have gone through the caches: few stay few."""

from __future__ import annotations

import statistics

import pytest

from bench.measure.hop_cost import LEGS, Walk, measure

STEPS = 30
# leg -> calls and files that a step in the middle of an execution may make; raise one with a reason
MOST = {
    "client out": (25, 8),
    "client, after the send": (8, 4),
    "node in": (24, 12),
    "node out": (23, 11),
    "node, off the path": (17, 10),
    "node, its rates": (3, 2),
    "client in": (17, 8),
}


@pytest.mark.asyncio
async def test_a_hop_takes_few_calls_in_few_files() -> None:
    walks = await measure(STEPS)
    assert MOST.keys() == LEGS.keys()
    for leg, (calls, files) in MOST.items():
        assert len(walks[leg]) >= STEPS, f"{leg} was not seen at every step"
        names = sorted({f"{file}: {name}" for walk in walks[leg] for file, name in walk.calls})
        assert statistics.median(map(count_calls, walks[leg])) <= calls, names
        assert statistics.median(walk.files for walk in walks[leg]) <= files, names


def count_calls(walk: Walk) -> int:
    return len(walk.calls)
