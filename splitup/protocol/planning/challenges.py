"""Evidence of a wrong choice in a plan, in the form that the chain checks by itself.

Anybody who holds a plan and the snapshot that it names can look for a wrong choice and open only
the Merkle leaves that prove it; ``Bonds.sol`` recomputes the two clocks. The figures of a task and
its candidates are taken as the plan and the snapshot state them. Arguments are plain values, named
as in contracts/src/interfaces/IBonds.sol.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from splitup.crypto import merkle
from splitup.messages.plans import Plan, hash_candidates, make_plan_header, make_plan_leaves
from splitup.messages.snapshots import (
    Snapshot,
    get_operator,
    hash_unopened,
    make_entry_leaves,
    make_held_leaves,
    make_snapshot_header,
)
from splitup.protocol.planning.sampling_clocks import EXECUTOR
from splitup.protocol.planning.selection import CandidatePool, Index, rank


@dataclass(frozen=True, slots=True)
class Challenge:
    """A function of the Bonds contract and its arguments after the member's vote."""

    function: str
    args: tuple[Any, ...]


def find_wrong_choice(plan: Plan, snapshot: Snapshot) -> Challenge | None:
    """Return evidence against the signers of this plan, or None when all its choices are right.

    Evidence is the first position of the first task at which another node belongs, or a node that
    is not in the snapshot. A list that ends early is no evidence, nor is a task that nobody held.
    """
    index = snapshot.once(Index)
    pools = [
        CandidatePool(number, terms, index.candidates[terms.task_id, terms.crosses_classes])
        for number, terms in enumerate(plan.terms)
        if terms.task_id in index.classes
    ]
    orders = rank(plan.seed, EXECUTOR, pools, index)
    for pool, order in zip(pools, orders, strict=True):
        listed = plan.tasks[pool.task]
        for place, (node, row) in enumerate(zip(listed, order, strict=False)):
            if node not in index.place:
                return _show_stranger(plan, snapshot, pool.task, place)
            if node != snapshot.entries[row].node:
                return _show_better(plan, snapshot, pool.task, place, row)
    return None


def _show_better(plan: Plan, snapshot: Snapshot, task: int, place: int, better: int) -> Challenge:
    index = snapshot.once(Index)
    leaves = make_entry_leaves(snapshot)
    task_id = plan.terms[task].task_id
    held = list(index.classes)
    number = held.index(task_id)
    opened = {
        "header": open_header(snapshot),
        "ruledClasses": [sha256(n.encode()).digest() for n in index.classes[task_id].ruled],
        "unruledClasses": [sha256(n.encode()).digest() for n in index.classes[task_id].unruled],
        "heldIndex": number,
        "heldProof": merkle.make_proof(make_held_leaves(index.classes), number),
    }
    listed = index.place[plan.tasks[task][place]]
    return Challenge(
        "reportSelection",
        (
            open_task(plan, task),
            opened,
            place,
            open_entry(snapshot, leaves, listed),
            open_entry(snapshot, leaves, better),
        ),
    )


def _show_stranger(plan: Plan, snapshot: Snapshot, task: int, place: int) -> Challenge:
    leaves = make_entry_leaves(snapshot)
    after = bisect_left([entry.node for entry in snapshot.entries], plan.tasks[task][place])
    around = [row for row in (after - 1, after) if 0 <= row < len(leaves)]
    entries = [open_entry(snapshot, leaves, row) for row in around]
    return Challenge(
        "reportStranger", (open_task(plan, task), open_header(snapshot), place, entries)
    )


# ---- openings ----------------------------------------------------------------------------------


def open_plan(plan: Plan) -> dict[str, Any]:
    """Return the header of a plan, ``PlanHeader``."""
    words = make_plan_header(plan)
    return {
        "requestHash": words[0],
        "executionId": words[1],
        "modelId": words[2],
        "snapshotRoot": words[3],
        "seed": words[4],
        "directoryHash": words[5],
        "taskCount": int.from_bytes(words[6]),
        "tasksRoot": words[7],
    }


def open_task(plan: Plan, task: int) -> dict[str, Any]:
    """Return one task of a plan with its proof, ``OpenedTask``."""
    terms = plan.terms[task]
    return {
        "plan": open_plan(plan),
        "task": {
            "index": task,
            "taskId": bytes.fromhex(terms.task_id),
            "flops": terms.flops,
            "weightsBytes": terms.weights_bytes,
            "inputBytes": terms.input_bytes,
            "readyMs": terms.ready_ms,
            "crossesClasses": terms.crosses_classes,
            "verifiable": task not in plan.unverifiable,
            "candidatesHash": hash_candidates(plan.tasks[task]),
        },
        "proof": merkle.make_proof(make_plan_leaves(plan), task),
        "candidates": list(plan.tasks[task]),
    }


def open_header(snapshot: Snapshot) -> dict[str, Any]:
    """Return the header of a snapshot, ``SnapshotHeader``."""
    words = make_snapshot_header(snapshot)
    names = (
        *("configuration", "sequence", "epoch"),
        *("rttMs", "queueMs", "speedMflops", "bandwidthKbps"),
        *("entryCount", "heldCount"),
    )
    numbers = {name: int.from_bytes(word) for name, word in zip(names, words, strict=False)}
    return {**numbers, "entriesRoot": words[-2], "heldRoot": words[-1]}


def open_entry(snapshot: Snapshot, leaves: Sequence[bytes], row: int) -> dict[str, Any]:
    """Return one entry of a snapshot with its proof, ``OpenedEntry``."""
    entry = snapshot.entries[row]
    resident = [bytes.fromhex(task_id) for task_id in entry.resident]
    return {
        "entry": {
            "node": entry.node,
            "operator": get_operator(entry),
            "signingKey": entry.signing_key,
            "endpointHash": hash_unopened(entry),
            "stakeMicroUsdc": entry.stake_micro_usdc,
            "rttMs": entry.rtt_ms,
            "queueMs": entry.queue_ms,
            "speedMflops": entry.speed_mflops,
            "bandwidthKbps": entry.bandwidth_kbps,
            "vramFreeBytes": entry.vram_free_bytes,
            "creditMilli": entry.credit_milli,
            "classHash": sha256(entry.determinism.encode()).digest(),
            "residentHash": sha256(b"".join(resident)).digest(),
        },
        "index": row,
        "proof": merkle.make_proof(leaves, row),
        "resident": resident,
    }
