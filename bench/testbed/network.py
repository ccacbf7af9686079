"""A whole network as processes on this machine, with a user who has a deposit."""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from bench.report import say
from splitup.client.connection import SplitUp
from splitup.config import NETWORK_FILE
from splitup.demo.models import DemoModel, find_example
from splitup.demo.run import EXAMPLE, register, wait_for_holders
from splitup.devnet.network import Devnet, DevnetOptions

DEPOSIT_USDC: Final = 100
LONG_VRAM: Final = "2.5MB"  # a task holds its KV cache, which grows with the context


@dataclass(frozen=True, slots=True)
class Registered:
    """What it took to register a model, and until nodes held it."""

    tasks: int
    seconds: float
    cpu_s: float  # of ``splitup-deploy register``
    held_s: float


@asynccontextmanager
async def run_network(
    nodes: int, vram_bytes: int, *, prepare: Callable[[Devnet], Awaitable[None]] | None = None
) -> AsyncIterator[tuple[Devnet, SplitUp]]:
    """Start a network without a model; remove it at the end. ``prepare`` may change it before."""
    directory = Path(tempfile.mkdtemp(prefix="splitup-bench-"))
    devnet = Devnet(DevnetOptions(directory, nodes, vram_bytes), say)
    try:
        await devnet.start()
        if prepare is not None:
            await prepare(devnet)
        async with SplitUp.connect(directory / NETWORK_FILE) as net:
            await net.deposit(DEPOSIT_USDC)
            yield devnet, net
    finally:
        await devnet.stop()
        shutil.rmtree(directory, ignore_errors=True)


@asynccontextmanager
async def run_example(
    nodes: int,
    vram_bytes: int,
    *,
    context: int | None = None,
    prepare: Callable[[Devnet], Awaitable[None]] | None = None,
) -> AsyncIterator[tuple[Devnet, SplitUp]]:
    """Start a network with the example model.

    With a longer ``context`` the example writes nonsense, at the same speed.
    """
    async with run_network(nodes, vram_bytes, prepare=prepare) as (devnet, net):
        path, model = find_example(), EXAMPLE
        if context is not None:
            model = replace(EXAMPLE, target_vram=LONG_VRAM)
            path = Path(shutil.copytree(path, devnet.directory / "model"))
            config = path / "config.json"
            values = json.loads(config.read_text()) | {"max_position_embeddings": context}
            config.write_text(json.dumps(values))
        await put_model(devnet, net, model, path)
        yield devnet, net


async def put_model(
    devnet: Devnet, net: SplitUp, model: DemoModel, path: Path | None = None, *flags: str
) -> Registered:
    """Register a model, which is fetched without a path; wait until enough nodes hold it."""
    path = path or await asyncio.to_thread(model.find)
    before_s, started = _read_children_s(), time.monotonic()
    await register(devnet.directory, path, model, *flags)
    cpu_s, registered = _read_children_s() - before_s, time.monotonic()
    await wait_for_holders(net, devnet.directory, say, model.name)
    held_s = time.monotonic() - registered
    tasks = (await net.fetch_model(model.name)).manifest.tasks
    return Registered(len(tasks), registered - started, cpu_s, held_s)


def _read_children_s() -> float:
    """Return the CPU seconds of all processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
