"""The results of an execution: outputs, timeline, receipt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from splitup.crypto.quorum import Payment
from splitup.graph.manifest import Manifest
from splitup.messages.plans import Plan
from splitup.messages.progress import Trace

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One task at one step, on the clock of the node that ran it; nanoseconds since the epoch.

    ``received_ns`` is when the last input had arrived, ``started_ns`` and ``ended_ns`` bound the
    compute, ``sent_ns`` is when the outputs were handed to the network.
    """

    node: str
    task: int
    label: str
    step: int
    received_ns: int
    started_ns: int
    ended_ns: int
    sent_ns: int


@dataclass(frozen=True, slots=True)
class Transition:
    """From the end of a task's last predecessor to its own start, at one step."""

    source: int
    target: int
    step: int
    is_local: bool  # both on one node
    nanoseconds: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """How the chain closed an execution: ``status`` is "settled" or "refunded"."""

    execution_id: str
    status: str
    steps: int
    payments: tuple[Payment, ...]
    slashes: tuple[tuple[str, int], ...]  # (node, micro-USDC)
    paid_micro_usdc: int  # to the nodes, out of the price
    fee_micro_usdc: int  # to the committee; if refunded, the reservation, to the treasury
    refunded_micro_usdc: int
    evidence_root: str  # "" when refunded
    block_number: int
    transaction: str
    model_id: str
    verify_bps: int  # share of the tasks that the request had verified, in 1/10,000


class PendingReceipt:
    """The receipt of an execution that may not be settled yet: ``await`` it, or ``wait()`` for it.

    ``wait`` is for threads other than the event loop's; both raise Unavailable when the chain does
    not close the execution in time.
    """

    def __init__(self, execution_id: str, fetch: Callable[[], Awaitable[Receipt]]) -> None:
        self.execution_id = execution_id
        self._fetch = fetch
        self._loop = asyncio.get_running_loop()
        self._receipt: Receipt | None = None

    def __await__(self) -> Generator[Any, None, Receipt]:
        return self._get().__await__()

    def wait(self) -> Receipt:
        return asyncio.run_coroutine_threadsafe(self._get(), self._loop).result()

    async def _get(self) -> Receipt:
        if self._receipt is None:
            self._receipt = await self._fetch()
        return self._receipt


@dataclass(frozen=True, slots=True)
class Result:
    """A complete result: every output of every step, verified against its producer's signature.

    ``outputs`` has a leading step axis when the inputs had one. ``trace`` holds the times that
    nodes reported and may lack nodes that did not. ``elapsed_s`` runs from the
    submission of the request to the last output.
    """

    execution_id: str
    outputs: Mapping[str, Array]
    trace: tuple[TraceEvent, ...]
    plan: Plan
    manifest: Manifest
    elapsed_s: float
    nodes: tuple[str, ...]  # who ran every task in the end, by task index
    receipt: PendingReceipt = field(repr=False)


def make_trace(manifest: Manifest, traces: Sequence[Trace]) -> tuple[TraceEvent, ...]:
    """Return the nodes' spans as one timeline, ordered by start."""
    events = [
        TraceEvent(
            node=trace.node,
            task=span.task,
            label=manifest.tasks[span.task].label,
            step=span.step,
            received_ns=int(span.received_ns),
            started_ns=int(span.started_ns),
            ended_ns=int(span.ended_ns),
            sent_ns=int(span.sent_ns),
        )
        for trace in traces
        for span in trace.spans
    ]
    return tuple(sorted(events, key=lambda event: (event.started_ns, event.step, event.task)))


def compute_transitions(manifest: Manifest, trace: Sequence[TraceEvent]) -> list[Transition]:
    """Return every transition of the trace: a task's start minus the last end among its sources.

    A task fed by graph inputs alone has none. Steps whose predecessors left no span are skipped.
    The clocks are the nodes' own: on several machines the figures include their offset.
    """
    spans = {(event.task, event.step): event for event in trace}
    sources: dict[int, list[int]] = {}
    for source, target in manifest.edges():
        sources.setdefault(target, []).append(source)
    found = []
    for (task, step), event in sorted(spans.items()):
        ended = [spans.get((source, step)) for source in sources.get(task, ())]
        known = [other for other in ended if other is not None]
        if not known or len(known) != len(ended):
            continue
        last = max(known, key=lambda other: other.ended_ns)
        found.append(
            Transition(
                source=last.task,
                target=task,
                step=step,
                is_local=last.node == event.node,
                nanoseconds=event.started_ns - last.ended_ns,
            )
        )
    return found


def compute_percentile(values: Sequence[int], percent: int) -> int:
    """Return the nearest-rank percentile of at least one value."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
