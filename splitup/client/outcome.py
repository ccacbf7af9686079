"""The results of an execution: outputs and timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from splitup.client.market.receipts import PendingReceipt
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
