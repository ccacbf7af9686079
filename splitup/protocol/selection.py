"""Which node runs and which node checks a task: exponential clocks over public randomness.

Every eligible node draws ``E = -log2(u) / weight`` with ``u`` from a hash of the seed, the task,
the role and the node; the smallest clock wins and the sorted list is the fallback order. With
independent exponential clocks a node wins with probability weight / sum of weights (Efraimidis and
Spirakis, Information Processing Letters 97, 2006). Integers only, so that Python and Solidity
agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median_low
from typing import Final

from eth_hash.auto import keccak

from splitup import limits
from splitup.errors import InvalidInput
from splitup.graph.manifest import Manifest
from splitup.wire import Plan, PlanNode, Request, Snapshot, SnapshotEntry

EXECUTOR: Final = 0
VALIDATOR: Final = 1

_TAG: Final = b"splitup/select/v1"
_STAKE_UNIT_MICRO_USDC: Final = 1_000_000_000  # the smallest stake: 1000 USDC is weight 1
_MAX_STAKE_MILLI: Final = 4_000  # more stake than four units buys no more work
_MIN_CLASS: Final = 3  # an executor, a validator and a third that breaks a tie
_SPEED_MILLI: Final = (500, 2_000)  # measured speed counts between half and double, squared


def neglog2_q32(value: int) -> int:
    """Return -log2((value + 1) / 2^64) in Q32 fixed point, rounded up, for a 64-bit ``value``.

    The fraction comes from repeated squaring, one bit each, as in the classic digit recurrence for
    binary logarithms; all intermediate values fit 128 bits, so that Solidity computes the same.
    """
    if not 0 <= value < 2**64:
        raise InvalidInput(f"neglog2 takes a 64-bit value, not {value}")
    x = value + 1
    whole = x.bit_length() - 1
    mantissa = (x << 63) >> whole  # in [2^63, 2^64): the value 1.0 … 2.0 in Q63
    fraction = 0
    for _ in range(32):
        mantissa = (mantissa * mantissa) >> 63
        fraction <<= 1
        if mantissa >= 2**64:
            mantissa >>= 1
            fraction |= 1
    return (64 << 32) - ((whole << 32) | fraction)


def compute_clock(seed: str, task: int, role: int, node: str, weight: int) -> int:
    """Return the node's exponential clock for a task and role; smaller is better."""
    digest = keccak(
        _TAG
        + bytes.fromhex(seed[2:])
        + task.to_bytes(4, "big")
        + role.to_bytes(1, "big")
        + bytes.fromhex(node[2:])
    )
    return (neglog2_q32(int.from_bytes(digest[:8], "big")) << 64) // weight


def compute_weight(entry: SnapshotEntry, median_eta_ms: int) -> int:
    """Return a node's weight in thousandths: capped stake times squared relative speed."""
    stake = min(entry.stake_micro_usdc * 1000 // _STAKE_UNIT_MICRO_USDC, _MAX_STAKE_MILLI)
    low, high = _SPEED_MILLI
    speed = max(low, min(high, median_eta_ms * 1000 // _eta_ms(entry)))
    return max(1, stake * speed * speed // 1_000_000)


def rank(seed: str, task: int, role: int, entries: Iterable[SnapshotEntry]) -> list[str]:
    """Return the nodes of ``entries`` ordered by their clocks, ties broken by address."""
    eligible = list(entries)
    if not eligible:
        return []
    median_eta_ms = median_low(_eta_ms(entry) for entry in eligible)
    clocks = [
        (compute_clock(seed, task, role, e.node, compute_weight(e, median_eta_ms)), e.node)
        for e in eligible
    ]
    return [node for _, node in sorted(clocks)]


def compute_plan(request: Request, seed: str, snapshot: Snapshot, manifest: Manifest) -> Plan:
    """Assign nodes to every task at once; a pure function of its arguments.

    Raises InvalidInput naming the first task that no live node holds in its memory.
    """
    holders = _index_by_task(snapshot)
    tasks = []
    for index, task in enumerate(manifest.tasks):
        order = rank(seed, index, EXECUTOR, _find_verifiable(holders.get(task.task_id, ())))
        if not order:
            raise InvalidInput(
                f"no live node serves task {index} ({task.label}) of model {request.model_id}; "
                "start a node that does, or wait for one to load it"
            )
        tasks.append(tuple(order[: limits.MAX_FALLBACKS]))
    named = {node for order in tasks for node in order}
    directory = tuple(
        PlanNode(node=entry.node, signing_key=entry.signing_key, endpoint=entry.endpoint)
        for entry in snapshot.entries
        if entry.node in named
    )
    return Plan(request=request, seed=seed, tasks=tuple(tasks), nodes=directory)


def rank_validators(
    seed: str,
    task: int,
    plan: Plan,
    snapshot: Snapshot,
    manifest: Manifest,
    executors: Sequence[str] = (),
) -> list[str]:
    """Return who may recompute ``task``, best first.

    ``executors`` ran the tasks in the end; by default the plan's first candidates.

    Never its executor, and only nodes of its determinism class: bytes are compared, and a node of
    another class computes other ones without lying. Executors of neighbouring tasks come last:
    they gain from hiding a lie next to their own work, and are drawn only when nobody else holds
    the task.
    """
    executors = executors or plan.executors()
    neighbours = {
        executors[other]
        for source, target in manifest.edges()
        for other in (source, target)
        if task in (source, target) and other != task
    }
    classes = {entry.node: entry.determinism for entry in snapshot.entries}
    holders = [
        entry
        for entry in _index_by_task(snapshot).get(manifest.tasks[task].task_id, ())
        if entry.node != executors[task] and entry.determinism == classes.get(executors[task])
    ]
    apart = [entry for entry in holders if entry.node not in neighbours]
    near = [entry for entry in holders if entry.node in neighbours]
    return rank(seed, task, VALIDATOR, apart) + rank(seed, task, VALIDATOR, near)


def _find_verifiable(holders: Sequence[SnapshotEntry]) -> Sequence[SnapshotEntry]:
    """Return the holders whose determinism class can check itself; all when no class can.

    Nodes state their own class. Without this rule one that invents a class of its own would be paid
    for work that nobody can check.
    """
    sizes = Counter(entry.determinism for entry in holders)
    return [e for e in holders if sizes[e.determinism] >= _MIN_CLASS] or holders


def _eta_ms(entry: SnapshotEntry) -> int:
    return entry.rtt_ms + entry.queue_ms + 1


def _index_by_task(snapshot: Snapshot) -> dict[str, Sequence[SnapshotEntry]]:
    holders: dict[str, list[SnapshotEntry]] = {}
    for entry in snapshot.entries:
        for task_id in entry.resident:
            holders.setdefault(task_id, []).append(entry)
    return dict(holders)
