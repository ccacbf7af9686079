"""Proof that a node may recompute a task, for a party that knows only the snapshot's root.

A verification order therefore stays small, however many nodes there are: it carries two entries and
their Merkle proofs, of 14 steps each for 16,384 nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from splitup.core.errors import PeerFault
from splitup.crypto.merkle import make_proof
from splitup.graph.manifest import Manifest
from splitup.messages.plans import Plan
from splitup.messages.snapshots import (
    UNRULED,
    OpenedEntry,
    OpenedSnapshot,
    Snapshot,
    check_opened,
    make_entry_leaves,
    make_snapshot_header,
)
from splitup.messages.verification import VerificationOrder
from splitup.protocol.planning.sampling_clocks import may_check


def open_snapshot(snapshot: Snapshot, nodes: Sequence[str]) -> OpenedSnapshot:
    """Return the entries of these nodes with their proofs; nodes without one are left out."""
    from splitup.protocol.planning.selection import Index  # numpy, which only members need

    index, leaves = snapshot.once(Index), snapshot.once(make_entry_leaves)
    rows = [index.place[node] for node in nodes if node in index.place]
    return OpenedSnapshot(
        header=tuple("0x" + word.hex() for word in snapshot.once(make_snapshot_header)),
        entries=tuple(
            OpenedEntry(
                entry=snapshot.entries[row],
                row=row,
                proof=tuple("0x" + word.hex() for word in make_proof(leaves, row)),
            )
            for row in rows
        ),
    )


def compares_numbers(order: VerificationOrder, manifest: Manifest) -> bool:
    """Return whether members would compare outputs of a task to decide about it.

    They do not compute in the executor's class, and every output has a tolerance. Then validators
    store their outputs before they commit to them.
    """
    entry = order.snapshot.find(order.executors[order.task])
    is_unruled = entry is not None and entry.determinism.startswith(UNRULED)
    return is_unruled and manifest.tasks[order.task].crosses_classes


def check_validators(
    opened: OpenedSnapshot, plan: Plan, executor: str, task_id: str
) -> tuple[str, ...]:
    """Return which of the opened nodes may recompute a task that ``executor`` ran.

    These are the nodes that ``rank_validators`` ranks, and other nodes of the same operators; the
    committee decides which of them is asked. Raises PeerFault when the entries are not of the
    plan's snapshot, or the executor's is missing.
    """
    check_opened(opened, plan.request.snapshot_root)
    against = opened.find(executor)
    if against is None:
        raise PeerFault(f"the entry of the executor {executor} is not shown")
    entries = [shown.entry for shown in opened.entries]
    return tuple(e.node for e in entries if task_id in e.resident and may_check(e, against))
