"""The timelines of executions that this server ran: which node computed what, and when.

Nodes report their times to the client alone, at the end of an execution. They tell when each step
of a text ran, so that the server shows them only to whose texts these were.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from splitup.client.leases import Lease
from splitup.client.outcome import TraceEvent, make_trace

MOST_SPANS: Final = 100_000  # of all executions together; some 30 MB
MOST_STEPS: Final = 64  # of one answer: what a page can draw


class Timelines:
    """The latest timelines, as many as fit."""

    def __init__(self) -> None:
        self._traces: OrderedDict[str, tuple[TraceEvent, ...]] = OrderedDict()
        self._owners: dict[str, str | None] = {}

    async def keep(self, lease: Lease) -> None:
        """Keep the times that nodes reported of a lease that has ended."""
        session = lease.session
        trace = make_trace(session.manifest, await session.finish())
        self._traces[session.execution_id] = trace[:MOST_SPANS]
        self._owners[session.execution_id] = lease.principal
        while sum(map(len, self._traces.values())) > MOST_SPANS:
            oldest, _ = self._traces.popitem(last=False)
            del self._owners[oldest]

    def show(self, execution_id: str, principal: str, first_step: int) -> dict[str, Any]:
        """Return the spans from a step on; times are in microseconds after the first one.

        ``is_known`` is False while the execution is open, and for those of other principals.
        """
        is_known = self._owners.get(execution_id) == principal
        spans = [
            event
            for event in (self._traces[execution_id] if is_known else ())
            if first_step <= event.step < first_step + MOST_STEPS
        ]
        begin = min((event.received_ns for event in spans), default=0)
        return {
            "is_known": is_known,
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
