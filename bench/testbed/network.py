"""A whole network as processes on this machine, with a user who has a deposit."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
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
    devnet: Devnet, net: SplitUp, model: DemoModel, path: Path | None = None
) -> None:
    """Register a model, which is fetched without a path; wait until enough nodes hold it."""
    path = path or await asyncio.to_thread(model.find)
    await register(devnet.directory, path, model)
    await wait_for_holders(net, devnet.directory, say, model.name)
