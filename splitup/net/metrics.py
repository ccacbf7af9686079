"""What Prometheus reads of a process: its own listener, apart from the party's interface.

Names follow Prometheus' conventions: base units, ``_total`` for counters, the prefix ``splitup_``
and the party. Labels have few values, and none is a secret, a key or a stranger's word.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from splitup.core.errors import ConfigurationError

_log = logging.getLogger("splitup.metrics")

REGISTRY: Final = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
_METHODS: Final = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"})
_REQUESTS: Final = Counter(
    "splitup_http_requests",
    "HTTP requests, by method, route and status.",
    ("method", "route", "status"),
    registry=REGISTRY,
)
_DURATION: Final = Histogram(
    "splitup_http_request_duration_seconds",
    "Time until an HTTP request was answered; long polls and streams included.",
    ("route",),
    buckets=(0.005, 0.02, 0.1, 0.5, 2, 10, 60),
    registry=REGISTRY,
)


class Reading(NamedTuple):
    """One value at the moment of the scrape; a name that ends in ``_total`` is a counter."""

    name: str
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


Read = Callable[[], Iterable[Reading]]


def make_histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
    """Return a histogram that every scrape of this process shows; names are used once."""
    return Histogram(name, text, buckets=buckets, registry=REGISTRY)


class _Readings(Collector):
    def __init__(self, read: Read) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for reading in self._read():
            kind = CounterMetricFamily if reading.name.endswith("_total") else GaugeMetricFamily
            family = families.setdefault(reading.name, kind(reading.name, reading.help))
            family.add_sample(reading.name, dict(reading.labels), float(reading.value))
        yield from families.values()


@web.middleware
async def count_requests(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Count every request of a server, also those that fail or whose client leaves (499)."""
    resource = request.match_info.route.resource
    route = "unknown" if resource is None else resource.canonical
    method = request.method if request.method in _METHODS else "other"
    began, status = time.monotonic(), "499"
    try:
        response = await handler(request)
        status = str(response.status)
        return response
    except web.HTTPException as error:
        status = str(error.status)
        raise
    finally:
        _REQUESTS.labels(method, route, status).inc()
        _DURATION.labels(route).observe(time.monotonic() - began)


@asynccontextmanager
async def serve_metrics(address: str, read: Read) -> AsyncIterator[None]:
    """Answer ``GET /metrics`` at "HOST:PORT" (port 0: any free one) while the block lasts.

    "" opens nothing. Raises ConfigurationError when the port is taken.
    """
    if not address:
        yield
        return
    host, _, port = address.rpartition(":")
    readings = _Readings(read)
    REGISTRY.register(readings)
    app = web.Application()
    app.router.add_get("/metrics", _answer)
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, host.strip("[]"), int(port)).start()
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"metrics cannot be offered at {address} ({error}); choose another address"
            ) from None
        _log.info("metrics: http://%s:%d/metrics", host, runner.addresses[0][1])
        yield
    finally:
        await runner.cleanup()
        REGISTRY.unregister(readings)


async def _answer(request: web.Request) -> web.Response:
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return web.Response(body=encode(REGISTRY), headers={"Content-Type": content_type})
