"""The node as a process: opens everything in order, serves until it is stopped, closes it again."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from splitup.chain.client import Chain
from splitup.chain.committee_reader import Committees, fetch_node_key
from splitup.core.background import run_until
from splitup.messages.determinism import check_own
from splitup.messages.network import Deployment
from splitup.net.http import SignedClient
from splitup.net.http_server import make_app, serve_app
from splitup.net.metrics import Reading, serve_metrics
from splitup.net.relay import Relay
from splitup.storage.journal import Journal
from splitup_node.committee.outgoing import check_outgoing
from splitup_node.config import NodeConfig
from splitup_node.node import NodeDaemon
from splitup_node.settlement.account import check_registration
from splitup_node.worker.supervisor import WORKER_ARGV, Supervisor
from splitup_node.worker.worker_pool import Workers

_log = logging.getLogger("splitup.node")


async def run_node(
    config: NodeConfig,
    *,
    worker_argv: Sequence[str] = WORKER_ARGV,
    stop: asyncio.Event | None = None,
) -> None:
    """Run a node until SIGTERM or SIGINT, or until ``stop`` is set.

    Raises ConfigurationError (keys, port, data directory, no stake, a network that the node may not
    connect to), ChainUnavailable, and KeyboardInterrupt for a SIGINT that comes before it serves.
    """
    stop = stop or asyncio.Event()
    is_interrupted = False

    def on_interrupt() -> None:
        nonlocal is_interrupted
        is_interrupted = True
        stop.set()

    async with contextlib.AsyncExitStack() as stack:
        loop = asyncio.get_running_loop()
        for number, handler in ((signal.SIGTERM, stop.set), (signal.SIGINT, on_interrupt)):
            loop.add_signal_handler(number, handler)
            stack.callback(loop.remove_signal_handler, number)
        node = await run_until(stop, _open_node(config, worker_argv, stack))
        if node is not None:
            await node.run(stop)
            return
    if is_interrupted:
        raise KeyboardInterrupt


async def _open_node(
    config: NodeConfig, worker_argv: Sequence[str], stack: contextlib.AsyncExitStack
) -> NodeDaemon:
    """Open what a node works with and start to serve; ``stack`` closes it all."""
    identity = config.load_identity()
    deployment = Deployment.load(config.deployment)
    config.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    journal = stack.enter_context(Journal.open(config.data_dir))
    chain = await Chain.connect(config.rpc_url, deployment, private_key=identity.private_key)
    stack.push_async_callback(chain.close)
    entry = await check_registration(chain, identity, config)
    http = await stack.enter_async_context(SignedClient(identity))
    committees = Committees(chain)
    committee = await committees.fetch_current()
    await check_outgoing(config, identity.address, chain, http, committee)
    workers = Workers(
        [
            Supervisor(
                config.data_dir,
                memory_bytes=memory_bytes,
                device=device,
                threads=config.threads,
                name=f"worker-{number}" if number else "worker",
                cache_directory=config.kernel_cache,
                worker_argv=worker_argv,
            )
            for number, (device, memory_bytes) in enumerate(config.device_shares)
        ]
    )
    stack.push_async_callback(workers.close)
    device = await workers.start()
    check_own(device["determinism_class"])
    node = NodeDaemon(
        *(config, identity, journal, chain, committees, http, workers),
        committee=committee,
        device=device,
    )
    app = make_app()
    node.add_routes(app)
    if config.offer_relay:
        relay = Relay(lambda: node.endpoint, functools.partial(fetch_node_key, chain))
        relay.add_routes(app)
        stack.push_async_callback(relay.close)
    server = await serve_app(app, config.host, config.port)
    stack.push_async_callback(server.close)
    await stack.enter_async_context(
        serve_metrics(config.metrics, lambda: list_readings(node.get_status()))
    )
    await node.find_endpoint(server, entry["endpoint"])
    _log.info("node %s serves on %s; %s", identity.address, server.url, node.device["reason"])
    if node.device["sandbox"]:
        _log.warning("models are not fully confined here: %s", node.device["sandbox"])
    return node


def list_readings(status: Mapping[str, Any]) -> Iterator[Reading]:
    """Yield the figures of a node's status (``Node.get_status``)."""

    def read(name: str, text: str, value: float) -> Reading:
        return Reading(f"splitup_node_{name}", text, value)

    yield read("memory_limit_bytes", "Device memory that tasks may fill.", status["vram_bytes"])
    yield read("memory_used_bytes", "Device memory that tasks fill.", status["vram_used_bytes"])
    yield read("state_limit_bytes", "Memory for states of executions.", status["state_limit_bytes"])
    yield read("state_bytes", "Memory that states of executions fill.", status["state_bytes"])
    yield read("tasks_loaded", "Tasks in memory.", len(status["resident"]))
    yield read("executions", "Executions under way.", status["executions"])
    yield read("queue_seconds", "Estimated work that waits.", status["queue_ms"] / 1e3)
    yield read("runs_total", "Task runs for executions.", status["work"]["runs"])
    yield read(
        "compute_seconds_total",
        "Time that the device computed for executions.",
        status["work"]["compute_us"] / 1e6,
    )
    yield read("verifications_total", "Tasks of others recomputed.", status["verified"])
    yield read("worker_restarts_total", "Workers that were lost.", status["worker_restarts"])
    yield read("warnings", "Things that are wrong now.", len(status["warnings"]))
    direct = not status["reach_problem"]
    yield read("reachable_directly", "1 when peers connect without a relay.", direct)
