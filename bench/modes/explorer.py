"""The explorer over 10,000 executions and 2,000 nodes: indexing, pages, and the size of the page.

The events come from a real chain, where code that emits them stood in the contracts' place.
"""

from __future__ import annotations

import asyncio
import gzip
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
from aiohttp import web
from splitup_gateway.access import Access
from splitup_gateway.explorer.event_index import EventIndex
from splitup_gateway.explorer.follower import Follower
from splitup_gateway.explorer.views import Explorer
from splitup_gateway.explorer_routes import ExplorerRoutes
from splitup_gateway.page_files import MARKET_PAGE
from splitup_gateway.timelines import Timelines

from bench.report import Bar, Report, say
from bench.testbed.emitter import Emitter
from splitup.chain.client import Chain
from splitup.chain.deployment import deploy
from splitup.chain.rpc import Rpc
from splitup.core.errors import Unavailable
from splitup.crypto.quorum import pack_words
from splitup.devnet.anvil import derive_key
from splitup.messages.snapshots import Snapshot, SnapshotEntry
from splitup.net.http import serve_app
from tests.builders import find_free_port
from tests.local_chain import start_anvil

EXECUTIONS: Final = 10_000
NODES: Final = 2_000
EXECUTORS: Final = 6  # of an execution
TASKS: Final = 12
CLIENTS: Final = 50
ASKED: Final = 10  # times for each page
MNEMONIC: Final = "test test test test test test test test test test test junk"
MODEL: Final = "0x" + "4d" * 32


async def run(quick: bool) -> Report:
    """Fill a chain with events, index them, and ask for every page."""
    executions, nodes = (500, 100) if quick else (EXECUTIONS, NODES)
    async with start_anvil(find_free_port(), mnemonic=MNEMONIC) as anvil:
        key = derive_key(MNEMONIC, 0)
        deployment = await deploy(anvil.url, key)
        async with await Chain.connect(anvil.url, deployment, private_key=key) as chain:
            tasks = [(f"0x{index + 1:064x}", 1 << 30, 10**9, 100_000_000) for index in range(TASKS)]
            edges = [index << 16 | index + 1 for index in range(TASKS - 1)]
            await chain.send("models", "register", MODEL, "tiny", tasks, edges)
            say(f"emitting the events of {executions} executions and {nodes} nodes")
            async with Rpc(anvil.url) as rpc:
                await emit(Emitter(rpc, deployment, chain.address), executions, nodes)
            with tempfile.TemporaryDirectory() as folder:
                index = EventIndex.open(f"sqlite:///{Path(folder) / 'index.sqlite'}", deployment)
                say("indexing")
                seconds = await measure_indexing(chain, index, executions)
                say("pages")
                async with serve_views(chain, index, nodes) as url:
                    pages = await measure_pages(url)
                index.close()
    return make_report(executions, nodes, seconds, pages)


def _hash(kind: str, number: int) -> str:
    return "0x" + sha256(f"{kind} {number}".encode()).hexdigest()


def _address(kind: str, number: int) -> str:
    return _hash(kind, number)[:42]


async def emit(emitter: Emitter, executions: int, nodes: int) -> None:
    """Emit what a market of this size has emitted: every execution is settled."""
    await emitter.emit(
        "nodes",
        "NodeRegistered",
        [
            {
                "account": _address("node", number),
                "signingKey": _hash("key", number),
                "vramGb": 12,
                "stake": 2_200_000_000,
                "endpoint": f"http://n{number:06d}",
            }
            for number in range(nodes)
        ],
    )
    for event in ("RequestNodeSelections", "PlanAccepted", "ExecutionCommitted", "Settled"):
        values = [_make_values(number, nodes) for number in range(executions)]
        await emitter.emit("market", event, values)


def _make_values(number: int, nodes: int) -> dict[str, Any]:
    """Return the arguments of all events of one execution."""
    chosen = [_address("node", (number * 7 + place) % nodes) for place in range(EXECUTORS)]
    return {
        "executionId": _hash("execution", number),
        "modelId": MODEL,
        "client": _address("client", number % CLIENTS),
        "steps": 40,
        "inputsDigest": _hash("inputs", number),
        "clientKey": _hash("client key", number),
        "maxPrice": 50_000_000,
        "deadline": 2_000_000_000,
        "nonce": number,
        "snapshotSequence": number,
        "snapshotRoot": _hash("snapshot", number),
        "planRoot": _hash("plan", number),
        "seed": _hash("seed", number),
        "executors": EXECUTORS,
        "root": _hash("root", number),
        "exposures": pack_words((node, 5_000_000) for node in chosen),
        "paid": 6_000_000,
        "fee": 60_000,
        "refunded": 43_940_000,
        "slashed": 0,
        "evidenceRoot": _hash("evidence", number),
        "payouts": pack_words((node, 1_000_000) for node in chosen),
    }


async def measure_indexing(chain: Chain, index: EventIndex, executions: int) -> float:
    """Return the seconds from an empty index to a complete one."""
    begun = time.perf_counter()
    following = asyncio.create_task(Follower(chain, index).run())
    try:
        while await asyncio.to_thread(index.count, "Settled") < executions:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return time.perf_counter() - begun
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@asynccontextmanager
async def serve_views(chain: Chain, index: EventIndex, nodes: int) -> AsyncIterator[str]:
    """Serve the explorer's API over an index; its network is this list of live nodes alone."""
    snapshot = Snapshot(
        configuration=1,
        sequence=1,
        epoch=1,
        entries=tuple(
            SnapshotEntry(
                node=node,
                signing_key=_hash("key", number),
                endpoint=f"http://127.0.0.1:{number % 60_000 + 1}",
                stake_micro_usdc=2_200_000_000,
                rtt_ms=1,
                queue_ms=0,
                resident=tuple(f"{task + 1:064x}" for task in range(TASKS)),
                determinism="tinygrad 0.14.0/CPU:X86/x86_64/products 4",
            )
            for number, node in _sort_nodes(nodes)
        ),
    )

    async def fetch_snapshot() -> Snapshot:
        return snapshot

    async def fetch_model(_: str) -> None:
        raise Unavailable("nobody stores the manifest")

    net: Any = SimpleNamespace(chain=chain, fetch_snapshot=fetch_snapshot, fetch_model=fetch_model)
    app = web.Application()
    ExplorerRoutes(Explorer(net, index)).add_to(app, Timelines(), Access(None))
    server = await serve_app(app, "127.0.0.1", 0)
    try:
        yield f"{server.url}/explorer/v1"
    finally:
        await server.close()


def _sort_nodes(nodes: int) -> list[tuple[int, str]]:
    pairs = ((number, _address("node", number)) for number in range(nodes))
    return sorted(pairs, key=lambda pair: pair[1])


async def measure_pages(url: str) -> dict[str, list[float]]:
    """Return the milliseconds of every answer that a page waits for, by page."""
    node, client, execution = _address("node", 7), _address("client", 1), _hash("execution", 99)
    paths = {
        "status": "status",
        "nodes": "nodes",
        "nodes, searched": f"nodes?search={node[:8]}",
        "models": "models",
        "model": f"models/{MODEL}",
        "executions": "executions",
        "executions of a client": f"executions?of={client}",
        "executions of a model": f"executions?of={MODEL}",
        "execution": f"executions/{execution}",
        "gas": f"executions/{execution}/gas",
        "account of a node": f"accounts/{node}",
        "earnings": f"accounts/{node}/earnings",
        "account of a client": f"accounts/{client}",
        "search for an address": f"search?q={node[:10]}",
        "search for an execution": f"search?q={execution[:20]}",
        "search for a model": "search?q=ti",
    }
    found: dict[str, list[float]] = {}
    async with aiohttp.ClientSession() as http:
        older = "executions"  # a page far down
        for _ in range(5):
            async with http.get(f"{url}/{older}") as reply:
                older = f"executions?before={(await reply.json())['next']}"
        for name, path in (paths | {"older executions": older}).items():
            for _ in range(ASKED):
                begun = time.perf_counter()
                async with http.get(f"{url}/{path}") as reply:
                    assert reply.status == 200, await reply.text()
                    await reply.read()
                found.setdefault(name, []).append(1_000 * (time.perf_counter() - begun))
    return found


def _compress_files() -> Iterator[int]:
    folder = files("splitup_gateway") / "page"
    for name, _ in MARKET_PAGE.values():
        yield len(gzip.compress((folder / name).read_bytes(), mtime=0))


def make_report(
    executions: int, nodes: int, seconds: float, pages: dict[str, list[float]]
) -> Report:
    """Return the bars."""
    medians = {name: round(statistics.median(times), 1) for name, times in pages.items()}
    slowest = max(medians, key=lambda name: medians[name])
    size = f"{executions:,} executions and {nodes:,} nodes"
    bars = [
        Bar(f"indexing {size}", round(seconds, 1), "s", at_most=60.0),
        Bar("slowest page of the explorer", medians[slowest], "ms", at_most=200.0, note=slowest),
        Bar("the page, compressed", round(sum(_compress_files()) / 1e3, 1), "KB", at_most=300.0),
    ]
    first = {name: round(times[0], 1) for name, times in pages.items()}
    return Report(bars, {"page_ms": medians, "first_page_ms": first})
