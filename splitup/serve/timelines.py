"""The timelines of executions that this server ran: which node computed what, and when.

Nodes report their times to the client alone, at the end of an execution.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from splitup.client.execution.session import Session
from splitup.client.outcome import TraceEvent, make_trace

MOST_SPANS: Final = 100_000  # of all executions together; some 30 MB
MOST_STEPS: Final = 64  # of one answer: what a page can draw


class Timelines:
    """The latest timelines, as many as fit."""

    def __init__(self) -> None:
        self._traces: OrderedDict[str, tuple[TraceEvent, ...]] = OrderedDict()

    async def keep(self, session: Session) -> None:
        """Keep the times that nodes reported of an execution that has ended."""
        trace = make_trace(session.manifest, await session.finish())
        self._traces[session.execution_id] = trace[:MOST_SPANS]
        while sum(map(len, self._traces.values())) > MOST_SPANS:
            self._traces.popitem(last=False)

    def show(self, execution_id: str, first_step: int) -> dict[str, Any]:
        """Return the spans from a step on; times are in microseconds after the first one.

        ``is_known`` is False while the execution is open, and for those of other clients.
        """
        spans = [
            event
            for event in self._traces.get(execution_id, ())
            if first_step <= event.step < first_step + MOST_STEPS
        ]
        begin = min((event.received_ns for event in spans), default=0)
        return {
            "is_known": execution_id in self._traces,
            "spans": [
                {
                    "node": event.node,
                    "task": event.task,
                    "label": event.label,
                    "step": event.step,
                    "received_us": (event.received_ns - begin) // 1_000,
                    "started_us": (event.started_ns - begin) // 1_000,
                    "ended_us": (event.ended_ns - begin) // 1_000,
                    "sent_us": (event.sent_ns - begin) // 1_000,
                }
                for event in spans
            ],
        }
