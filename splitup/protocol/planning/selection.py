"""Which node runs and which node checks every task of an execution: pure functions of a seed.

``splitup.protocol.planning.sampling_clocks`` defines the weight and the clock of one node; this
module computes them for whole plans, a thousand tasks and ten thousand nodes at once. The nodes
that may run a task are selected before anything is hashed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from splitup.core import limits
from splitup.core.errors import InvalidInput
from splitup.graph.manifest import Manifest, TaskSource
from splitup.messages.plans import Plan, PlanNode, Request, TaskTerms
from splitup.messages.snapshots import (
    Reference,
    Snapshot,
    compute_classes,
    compute_reference,
    get_operator,
)
from splitup.protocol.planning.sampling_clocks import (
    EXECUTOR,
    MAX_ETA_MS,
    MAX_STAKE_MILLI,
    SPEED_MILLI,
    STAKE_UNIT,
    VALIDATOR,
    compute_fairness_milli,
    compute_reference_ms,
    derive_draw_key,
    may_check,
    neglog2_q32,
)

Rows = npt.NDArray[np.int64]  # places of nodes in a snapshot
_Numbers = npt.NDArray[np.int64]
_Bits = npt.NDArray[np.uint64]

_LOW_HALF: Final = np.uint64(0xFFFFFFFF)
COLUMN_VALUES: Final = 64  # of fewer values each logarithm for itself is faster than a column
_LOG_ERROR: Final = 16.0  # Q32 units: twice what rounding up and float64 can differ by, and more


@dataclass(frozen=True, slots=True)
class CandidatePool:
    """The nodes that may get one task in one role; ``is_resident`` tells whether they hold it."""

    task: int
    terms: TaskTerms
    rows: Rows
    is_resident: bool = True


class Index:
    """A snapshot as columns, and the nodes that may run each task; made once per snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        entries = snapshot.entries
        self.entries = entries
        self.reference = compute_reference(entries)
        self.place = {entry.node: row for row, entry in enumerate(entries)}
        self.operators = [get_operator(entry) for entry in entries]
        self.raw = [bytes.fromhex(entry.node[2:]) for entry in entries]

        def column(values: Sequence[int]) -> _Numbers:
            return np.array(values, np.int64)

        self.stake_milli = column(
            [min(entry.stake_micro_usdc // STAKE_UNIT, MAX_STAKE_MILLI) for entry in entries]
        )
        self.fairness_milli = column([compute_fairness_milli(e.credit_milli) for e in entries])
        self.rtt_ms = column([entry.rtt_ms for entry in entries])
        self.queue_ms = column([entry.queue_ms for entry in entries])
        self.speed_mflops = column(
            [entry.speed_mflops or self.reference.speed_mflops for entry in entries]
        )
        self.bandwidth_kbps = column(
            [entry.bandwidth_kbps or self.reference.bandwidth_kbps for entry in entries]
        )
        self.vram_free_bytes = column([entry.vram_free_bytes for entry in entries])
        self.holders: dict[str, list[int]] = {}
        for row, entry in enumerate(entries):
            for task_id in entry.resident:
                self.holders.setdefault(task_id, []).append(row)
        self.classes = compute_classes(entries)
        self.candidates: dict[tuple[str, bool], Rows] = {}  # by task id and crosses_classes
        for task_id, rows in self.holders.items():
            for crosses in (False, True):
                allowed = self.classes[task_id].allowed(crosses_classes=crosses)
                found = [row for row in rows if entries[row].determinism in allowed]
                self.candidates[task_id, crosses] = column(found or rows)


# ---- plans -------------------------------------------------------------------------------------


def compute_plan(request: Request, seed: str, snapshot: Snapshot, manifest: Manifest) -> Plan:
    """Assign nodes to every task at once; a pure function of its arguments.

    Only nodes that hold a task are considered for it, and of those only the nodes of classes that
    may run it (``TaskClasses.allowed``) if there are any. For a task that nobody holds, nodes with
    enough memory to load it are considered.
    Raises InvalidInput naming the first task that nobody can run.
    """
    index = snapshot.once(Index)
    terms = compute_terms(manifest, index.reference)
    pools = []
    for number, task in enumerate(manifest.tasks):
        rows = index.candidates.get((task.task_id, task.crosses_classes))
        pool = CandidatePool(number, terms[number], rows, True) if rows is not None else None
        if pool is None:
            able: Rows = np.flatnonzero(index.vram_free_bytes >= max(1, task.vram_bytes))
            pool = CandidatePool(number, terms[number], able, False)
        if not len(pool.rows):
            raise InvalidInput(
                f"no live node serves task {number} ({task.label}) of model {request.model_id}; "
                "start a node that does, or wait for one to load it"
            )
        pools.append(pool)
    orders = rank(seed, EXECUTOR, pools, index, limits.MAX_FALLBACKS)
    entries = index.entries
    return Plan(
        request=request,
        seed=seed,
        tasks=tuple(tuple(entries[row].node for row in order) for order in orders),
        nodes=tuple(
            PlanNode.model_construct(  # from a snapshot whose fields were validated
                node=entries[row].node,
                signing_key=entries[row].signing_key,
                endpoint=entries[row].endpoint,
            )
            for row in sorted({row for order in orders for row in order})
        ),
        terms=terms,
        unverifiable=tuple(
            number
            for number, task in enumerate(manifest.tasks)
            if not task.crosses_classes
            and not (task.task_id in index.classes and index.classes[task.task_id].ruled)
        ),
    )


def compute_terms(manifest: Manifest, reference: Reference) -> tuple[TaskTerms, ...]:
    """Return what selection needs of every task, with the reference's critical path up to it."""
    terms: list[TaskTerms] = []
    done_ms: list[int] = []
    for task in manifest.tasks:
        before = [p.source.task for p in task.inputs if isinstance(p.source, TaskSource)]
        ready_ms = min(MAX_ETA_MS, max((done_ms[source] for source in before), default=0))
        found = TaskTerms.model_construct(  # from a manifest whose fields were validated
            task_id=task.task_id,
            flops=task.flops,
            weights_bytes=task.weights_bytes,
            input_bytes=sum(port.nbytes for port in task.inputs),
            ready_ms=ready_ms,
            crosses_classes=task.crosses_classes,
        )
        terms.append(found)
        # queues drain while earlier tasks run, so only round trip, transfer and compute are added
        idle = Reference(reference.rtt_ms, 0, reference.speed_mflops, reference.bandwidth_kbps)
        done_ms.append(ready_ms + compute_reference_ms(found, idle))
    return tuple(terms)


def rank_validators(
    seed: str,
    task: int,
    plan: Plan,
    snapshot: Snapshot,
    manifest: Manifest,
    executors: Sequence[str] = (),
) -> list[str]:
    """Return the nodes that may recompute ``task``, best first, one node per operator.

    ``executors`` are the nodes that ran the tasks; by default the plan's.

    No node of the executor's operator is listed, and only nodes of its determinism class: bytes are
    compared, and honest nodes of another class compute different bytes. Operators of neighbouring
    tasks come last, because they can gain from hiding a lie next to their own work. They are drawn
    only when nobody else holds the task.
    """
    index = snapshot.once(Index)
    executors = executors or plan.executors()
    executor = index.place.get(executors[task])
    if executor is None:
        return []
    neighbours = {
        index.operators[index.place[executors[other]]]
        for other in manifest.neighbours.get(task, ())
        if executors[other] in index.place
    }
    terms = plan.terms or compute_terms(manifest, index.reference)
    judges = [
        row
        for row in index.holders.get(manifest.tasks[task].task_id, ())
        if may_check(index.entries[row], index.entries[executor])
    ]
    pools = [
        CandidatePool(task, terms[task], np.array(rows, np.int64))
        for rows in (
            [row for row in judges if index.operators[row] not in neighbours],
            [row for row in judges if index.operators[row] in neighbours],
        )
    ]
    first: dict[str, str] = {}  # one operator must not give two of the answers
    for order in rank(seed, VALIDATOR, pools, index):
        for row in order:
            first.setdefault(index.operators[row], index.entries[row].node)
    return list(first.values())


def is_pool_small(executor: str, task_id: str, snapshot: Snapshot) -> bool:
    """Return whether those who may check an executor's task could all belong to one coalition.

    They hold less than ``limits.SMALL_POOL_BPS`` of all stake, counted as for weights. Operators
    are declared, and cost a stake each; only the stake bounds how many of them are one party.
    """
    index = snapshot.once(Index)
    row = index.place.get(executor)
    if row is None:
        return False
    judges = [
        other
        for other in index.holders.get(task_id, ())
        if may_check(index.entries[other], index.entries[row])
    ]
    held, total = int(index.stake_milli[judges].sum()), int(index.stake_milli.sum())
    return held * 10_000 < total * limits.SMALL_POOL_BPS


# ---- many clocks at once -----------------------------------------------------------------------


def rank(
    seed: str, role: int, pools: Sequence[CandidatePool], index: Index, limit: int | None = None
) -> list[list[int]]:
    """Return the first ``limit`` rows of every pool by their clocks, ties broken by address.

    The order is that of the clocks (``sampling_clocks``). Quotients are compared as correctly
    rounded floats, which never invert an order; where two floats are equal, exactly. With a limit,
    exact logarithms are computed only of rows that may be among the first.
    """
    lengths = [len(pool.rows) for pool in pools]
    if not sum(lengths):
        return [[] for _ in pools]
    rows = np.concatenate([pool.rows for pool in pools])
    owner = np.repeat(np.arange(len(pools)), lengths)
    weights = compute_weights(pools, owner, rows, index)
    drawn = _draw(seed, role, pools, index)
    if limit is not None and max(lengths) > limit:
        kept = _find_early(drawn, weights, lengths, limit)
        rows, owner, weights, drawn = rows[kept], owner[kept], weights[kept], drawn[kept]
        lengths = np.bincount(owner, minlength=len(pools)).tolist()
    logs = neglog2_q32_of(drawn)
    clocks = logs / weights
    order = np.lexsort((rows, clocks, owner))  # rows ascend with the addresses
    ordered, starts = rows[order], np.cumsum([0, *lengths])
    tied = _find_ties(clocks[order], owner[order])
    found = []
    for number, start in enumerate(starts[:-1]):
        part = slice(start, starts[number + 1])
        if number in tied:
            exact = [
                ((int(logs[at]) << 64) // int(weights[at]), int(rows[at])) for at in order[part]
            ]
            found.append([row for _, row in sorted(exact)][:limit])
        else:
            found.append(ordered[part][:limit].tolist())
    return found


def compute_weights(
    pools: Sequence[CandidatePool], owner: _Numbers, rows: Rows, index: Index
) -> _Numbers:
    """Return the weight of every row for the pool that owns it, in thousandths."""

    def spread(values: Sequence[int]) -> Any:
        return np.array(values, np.int64)[owner]

    terms = [pool.terms for pool in pools]
    speed, bandwidth = index.speed_mflops[rows], index.bandwidth_kbps[rows]
    loads = [0 if c.is_resident else c.terms.weights_bytes for c in pools]
    waiting = (
        index.queue_ms[rows]
        + _divide(spread(loads), bandwidth)
        - spread([found.ready_ms for found in terms])
    )
    eta_ms = (
        1
        + index.rtt_ms[rows]
        + np.maximum(0, waiting)
        + _divide(spread([found.input_bytes for found in terms]), bandwidth)
        + _divide(spread([found.flops for found in terms]), speed * 1000)
    )
    base = spread([compute_reference_ms(found, index.reference) for found in terms])
    low, high = SPEED_MILLI
    relative = np.clip(base * 1000 // np.minimum(eta_ms, MAX_ETA_MS), low, high)
    product = index.stake_milli[rows] * relative * relative * index.fairness_milli[rows]
    weights: _Numbers = np.maximum(1, product // 10**9)
    return weights


def neglog2_q32_of(values: _Bits) -> _Numbers:
    """Return ``sampling_clocks.neglog2_q32`` of every value, to the last bit."""
    if len(values) < COLUMN_VALUES:
        return np.array([neglog2_q32(value) for value in values.tolist()], np.int64)
    x = values + np.uint64(1)  # 0 stands for 2^64
    whole = np.zeros(len(x), np.uint64)
    mantissa = x.copy()
    for step in (32, 16, 8, 4, 2, 1):  # shift the highest bit to the top, counting
        small = mantissa < np.uint64(1 << (64 - step))
        mantissa[small] <<= np.uint64(step)
        whole[~small] += np.uint64(step)
    fraction = np.zeros(len(x), np.uint64)
    for _ in range(32):
        high, low = mantissa >> np.uint64(32), mantissa & _LOW_HALF
        cross = high * low  # the square is high² · 2^64 + cross · 2^33 + low²
        bottom = low * low
        lower = bottom + (cross << np.uint64(33))
        top = high * high + (cross >> np.uint64(31)) + (lower < bottom)
        carry = top >> np.uint64(63)
        mantissa = np.where(carry == 1, top, (top << np.uint64(1)) | (lower >> np.uint64(63)))
        fraction = (fraction << np.uint64(1)) | carry
    logs = (64 << 32) - ((whole << np.uint64(32)) | fraction).astype(np.int64)
    logs[x == 0] = 0
    found: _Numbers = logs
    return found


def _find_early(drawn: _Bits, weights: _Numbers, lengths: Sequence[int], limit: int) -> Rows:
    """Return the places, ascending, of all rows that may be among the first ``limit`` of a pool.

    A logarithm in float64 is within ``_LOG_ERROR`` of the exact one. So ``limit`` rows have a clock
    of at most the cut, and a row whose least possible clock is above the cut comes after them.
    """
    logs = 2.0**32 * (64.0 - np.log2(drawn.astype(np.float64) + 1.0))
    least, most = (logs - _LOG_ERROR) / weights, (logs + _LOG_ERROR) / weights
    found, start = [], 0
    for length in lengths:
        pool = slice(start, start + length)
        if length <= limit:
            found.append(np.arange(pool.start, pool.stop))
        else:
            cut = np.partition(most[pool], limit - 1)[limit - 1]
            found.append(start + np.flatnonzero(least[pool] <= cut))
        start += length
    return np.concatenate(found)


def _draw(seed: str, role: int, pools: Sequence[CandidatePool], index: Index) -> _Bits:
    raw = index.raw
    digests = []
    for pool in pools:
        key = derive_draw_key(seed, pool.task, role)
        digests += [sha256(key + raw[row]).digest() for row in pool.rows.tolist()]
    return np.frombuffer(b"".join(digests), ">u8")[::4].astype(np.uint64)  # the first 8 bytes each


def _divide(numbers: Any, by: Any) -> Any:
    """Return the quotients, and 0 where the divisor is 0: an unmeasured figure costs nothing."""
    return np.where(by > 0, numbers // np.maximum(by, 1), 0)


def _find_ties(clocks: npt.NDArray[np.float64], owner: _Numbers) -> set[int]:
    equal = (clocks[1:] == clocks[:-1]) & (owner[1:] == owner[:-1])
    return set(owner[1:][equal].tolist())
