"""Traces, as a collector gets them over OTLP."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SentSpan

from splitup.client.telemetry import STEPS, is_wanted
from splitup.net.http_server import serve_app
from tests.builders import HANG_S

EXECUTION = "0x" + "ee" * 32
SCRIPT = """
import asyncio, json, sys
from splitup.client.telemetry import send_trace
from splitup.messages.progress import Span, Trace
from tests.builders import address, make_chain_manifest, make_request

def span(task, step, at, sent=0):
    times = (at, at + 1_000, at + 3_000, sent or at + 4_000)
    names = ("received_ns", "started_ns", "ended_ns", "sent_ns")
    return Span(task=task, step=step, **dict(zip(names, map(str, times))))

spans = [[span(task, step, 10**18 + 10**6 * step + 10**4 * task) for step in range(40)]
         for task in range(2)]
spans[1].append(span(1, 40, 10**18, sent=10**19 * 9))  # a node that lies about its clock
traces = [Trace(execution_id="0x" + "ee" * 32, node=address(task + 1), spans=tuple(spans[task]))
          for task in range(2)]
asyncio.run(send_trace(make_chain_manifest(2), make_request(40), traces))
print(json.dumps(sorted(name for name in sys.modules if name.startswith("opentelemetry"))))
"""
CALLS = """
import asyncio, json, sys
from splitup.client.telemetry import CallSpan, send_calls

calls = [CallSpan("TargetService/VerifyDrafts", "127.0.0.1:5", 7, 10**18 + at, 5_000, 4_000, 3_000,
                  error) for at, error in ((0, ""), (6_000, "token 5 is unknown"))]
asyncio.run(send_calls("text", calls))
print(json.dumps(sorted(name for name in sys.modules if name.startswith("opentelemetry"))))
"""


@asynccontextmanager
async def run_collector() -> AsyncIterator[tuple[str, list[SentSpan], list[str]]]:
    """Collect spans, and the names of the services that sent them."""
    spans: list[SentSpan] = []
    services: list[str] = []

    async def collect(request: web.Request) -> web.Response:
        body = ExportTraceServiceRequest.FromString(await request.read())
        for resource in body.resource_spans:
            services.extend(
                entry.value.string_value
                for entry in resource.resource.attributes
                if entry.key == "service.name"
            )
            for scope in resource.scope_spans:
                spans.extend(scope.spans)
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    server = await serve_app(app, "127.0.0.1", 0)
    try:
        yield server.url, spans, services
    finally:
        await server.close()


async def run_script(environment: Mapping[str, str], script: str = SCRIPT) -> list[str]:
    """Send a trace in a process of its own; return the modules of OpenTelemetry it loaded."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script),
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(HANG_S):
        output, errors = await process.communicate()
    assert process.returncode == 0 and not errors, errors.decode()
    loaded: list[str] = json.loads(output.splitlines()[-1])
    return loaded


@pytest.mark.long  # in small: a text by workers, below
async def test_an_execution_is_a_trace_and_its_tasks_are_spans() -> None:
    async with run_collector() as (url, spans, services):
        await run_script({"OTEL_EXPORTER_OTLP_ENDPOINT": url})
    assert set(services) == {"splitup"}
    assert {span.trace_id.hex() for span in spans} == {EXECUTION[2:34]}
    [root] = [span for span in spans if not span.parent_span_id]
    tasks = [span for span in spans if span.parent_span_id == root.span_id]
    assert root.name == "execution" and len(tasks) == 2
    facts = {
        entry.key: entry.value.int_value or entry.value.string_value for entry in root.attributes
    }
    assert facts["splitup.execution.id"] == EXECUTION and facts["splitup.steps"] == 40
    for task in tasks:
        steps = [span for span in spans if span.parent_span_id == task.span_id]
        assert len(steps) == STEPS
        assert task.start_time_unix_nano >= root.start_time_unix_nano
        assert task.end_time_unix_nano <= root.end_time_unix_nano < 2 * 10**18
    allowed = ("splitup.execution.id", "splitup.model.id", "splitup.steps", "splitup.step")
    allowed += ("splitup.task", "splitup.node", "splitup.compute_ms")
    assert {entry.key for span in spans for entry in span.attributes} <= set(allowed)


async def test_a_text_by_workers_is_a_trace_and_its_calls_are_spans() -> None:
    async with run_collector() as (url, spans, _):
        await run_script({"OTEL_EXPORTER_OTLP_ENDPOINT": url}, CALLS)
    [root] = [span for span in spans if not span.parent_span_id]
    calls = [span for span in spans if span.parent_span_id == root.span_id]
    assert [call.name for call in calls] == ["TargetService/VerifyDrafts"] * 2
    assert root.end_time_unix_nano - root.start_time_unix_nano == 11_000
    facts = [{entry.key: entry.value for entry in call.attributes} for call in calls]
    assert facts[0]["splitup.worker"].string_value == "127.0.0.1:5"
    assert facts[0]["splitup.model_ms"].double_value == 0.003
    assert "error.type" not in facts[0] and facts[1]["error.type"].string_value == "failed"


async def test_without_the_variables_nothing_is_loaded() -> None:
    assert await run_script({}, CALLS + SCRIPT) == []


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_the_variables_of_the_specification_decide(
    environment: dict[str, str], wanted: bool
) -> None:
    assert is_wanted(environment) is wanted
