"""Traces by OpenTelemetry: an execution is a trace, its tasks and their first steps are spans.

A text by draft and target workers is a trace, too, and the calls to them are its spans.

They are sent over OTLP (HTTP) when ``OTEL_EXPORTER_OTLP_ENDPOINT`` or
``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` is set, and the extra ``splitup[otel]`` is installed. The
other variables of OpenTelemetry's specification hold, too. Otherwise nothing is loaded or done.

Attributes hold ids, labels and counts: no prompts, no tokens, no keys. Times are those that the
nodes report at the end of an execution, by their own clocks, and for calls the caller's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Final

from splitup.client.outcome import TraceEvent, make_trace
from splitup.core.source_tree import compose_package_install
from splitup.graph.manifest import Manifest
from splitup.messages.plans import Request
from splitup.messages.progress import Trace

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_log = logging.getLogger("splitup.telemetry")


@dataclass(frozen=True, slots=True)
class CallSpan:
    """One call of a draft or target worker; times are the caller's clock, and the worker's own.

    ``worker_ns`` is from the request's arrival there to the answer, ``model_ns`` the model's part.
    """

    name: str
    worker: str
    span_id: int
    started_ns: int
    wall_ns: int
    worker_ns: int
    model_ns: int
    error: str = ""


STEPS: Final = 32  # of each task that have spans of their own
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_NAMES: Final = ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES")


def is_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment asks for traces."""
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if is_off or environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return False
    return any(environment.get(name) for name in _ENDPOINTS)


async def send_trace(manifest: Manifest, request: Request, traces: Sequence[Trace]) -> None:
    """Hand the trace of an execution that has ended to OpenTelemetry, if it is wanted.

    Raises nothing: whatever nodes report, the execution has succeeded.
    """
    if not is_wanted():
        return
    try:
        events = [event for event in make_trace(manifest, traces) if _is_possible(event)]
        if events:
            await asyncio.to_thread(_record, events, request)
    except Exception:
        _log.exception("the trace of %s cannot be sent", request.execution_id)


def _is_possible(event: TraceEvent) -> bool:
    """Return whether a node's times are in order and can be encoded."""
    return 0 < event.received_ns <= event.started_ns <= event.ended_ns <= event.sent_ns < 2**63


def _record(events: Sequence[TraceEvent], request: Request) -> None:
    opened = _open()
    if opened is None:
        return
    from opentelemetry.trace import set_span_in_context

    tracer, name_trace = opened
    with name_trace(int(request.execution_id[2:34], 16)):
        root = tracer.start_span(
            "execution",
            start_time=min(event.received_ns for event in events),
            attributes={
                "splitup.execution.id": request.execution_id,
                "splitup.model.id": request.model_id,
                "splitup.steps": 1 + max(event.step for event in events),
            },
        )
    inside = set_span_in_context(root)
    ordered = sorted(events, key=lambda event: (event.task, event.node, event.step))
    for _, group in groupby(ordered, key=lambda event: (event.task, event.node)):
        steps = list(group)
        task = tracer.start_span(
            steps[0].label,
            context=inside,
            start_time=min(event.received_ns for event in steps),
            attributes={
                "splitup.task": steps[0].task,
                "splitup.node": steps[0].node,
                "splitup.steps": len(steps),
                "splitup.compute_ms": sum(e.ended_ns - e.started_ns for e in steps) / 1e6,
            },
        )
        for event in steps[:STEPS]:
            step = tracer.start_span(
                "step",
                context=set_span_in_context(task),
                start_time=event.started_ns,
                attributes={"splitup.step": event.step},
            )
            step.end(event.ended_ns)
        task.end(max(event.sent_ns for event in steps))
    root.end(max(event.sent_ns for event in events))


async def send_calls(name: str, calls: Sequence[CallSpan]) -> None:
    """Hand the calls of one text, as a trace of this name, to OpenTelemetry, if it is wanted."""
    if calls and is_wanted():
        await asyncio.to_thread(_record_calls, name, calls)


def _record_calls(name: str, calls: Sequence[CallSpan]) -> None:
    opened = _open()
    if opened is None:
        return
    from opentelemetry.trace import set_span_in_context

    tracer, _ = opened
    root = tracer.start_span(name, start_time=min(call.started_ns for call in calls))
    inside = set_span_in_context(root)
    for call in calls:
        attributes: dict[str, str | float] = {
            "splitup.worker": call.worker,
            "splitup.call.id": f"{call.span_id:016x}",
            "splitup.worker_ms": call.worker_ns / 1e6,
            "splitup.model_ms": call.model_ns / 1e6,
        }
        if call.error:
            attributes["error.type"] = "failed"  # what a worker says may quote tokens
        span = tracer.start_span(
            call.name, context=inside, start_time=call.started_ns, attributes=attributes
        )
        span.end(call.started_ns + call.wall_ns)
    root.end(max(call.started_ns + call.wall_ns for call in calls))


@cache
def _open() -> tuple[Tracer, Callable[[int], AbstractContextManager[None]]] | None:
    """Return the tracer, which sends in the background, and what gives a trace its id.

    None without the extra. A trace's id is the beginning of its execution's, so that either finds
    the other.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    except ImportError:
        _log.warning(
            "traces are asked for; install what sends them: %s", compose_package_install("otel")
        )
        return None

    class TraceIds(RandomIdGenerator):
        trace_id = 0
        lock = threading.Lock()

        def generate_trace_id(self) -> int:
            return self.trace_id or super().generate_trace_id()

    ids = TraceIds()

    @contextmanager
    def name_trace(trace_id: int) -> Iterator[None]:
        with ids.lock:
            ids.trace_id = trace_id
            try:
                yield
            finally:
                ids.trace_id = 0

    own = {} if any(map(os.environ.get, _NAMES)) else {"service.name": "splitup"}
    provider = TracerProvider(resource=Resource.create(own), id_generator=ids)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("splitup"), name_trace
