"""Which tasks a node takes on: the least served first, then the best paid, as long as they fit.

Pure: the committee's list of tasks in, one choice out. Nodes that start together see the same list,
so ties are broken by a hash of node and task, and they spread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

from splitup import limits
from splitup.errors import PeerFault
from splitup.wire import Bytes32Field, Count, DigestField, Message


class DemandEntry(Message):
    """A registered task as a committee member lists it in its answer to a heartbeat."""

    model_id: Bytes32Field
    task: Count
    task_id: DigestField
    vram_bytes: Count
    weights_bytes: Count
    price_micro_usdc: Count
    holders: Count  # live nodes that serve it
    operators: Count = 0  # in the determinism class with most of them
    verifiable: bool = False  # sold with verification: enough operators hold it in one class


def parse_demand(value: object) -> tuple[DemandEntry, ...]:
    """Validate the ``tasks`` of a heartbeat's answer; raise PeerFault when they are malformed."""
    if not isinstance(value, list) or len(value) > limits.MAX_DEMAND:
        raise PeerFault("a heartbeat's answer holds no list of tasks, or too long a one")
    return tuple(DemandEntry.from_value(entry) for entry in value)


def merge_demand(answers: Iterable[Iterable[DemandEntry]]) -> tuple[DemandEntry, ...]:
    """Return one entry per (model, task) with the lowest number of holders that a member reports.

    The lowest, because the harm of serving a task once too often is small.
    """
    merged: dict[tuple[str, int], DemandEntry] = {}
    for answer in answers:
        for entry in answer:
            known = merged.get((entry.model_id, entry.task))
            if known is None or entry.holders < known.holders:
                merged[entry.model_id, entry.task] = entry
    return tuple(merged.values())


def choose_task(
    node: str,
    demand: Iterable[DemandEntry],
    resident: Collection[str],
    excluded: Collection[str],
    free_bytes: int,
) -> DemandEntry | None:
    """Return the task to load next, None when nothing fits or all is resident.

    ``excluded`` are tasks that failed to load here.
    """
    fitting = [
        entry
        for entry in demand
        if entry.task_id not in resident
        and entry.task_id not in excluded
        and entry.vram_bytes <= free_bytes
    ]
    return min(
        fitting,
        key=lambda entry: (entry.holders, -entry.price_micro_usdc, _tie(node, entry.task_id)),
        default=None,
    )


def _tie(node: str, task_id: str) -> bytes:
    return hashlib.sha256(f"{node}/{task_id}".encode()).digest()
