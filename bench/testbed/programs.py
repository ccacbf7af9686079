"""Programs of the product, as a benchmark uses them."""

from __future__ import annotations

import asyncio
import re
import signal
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.report import say
from splitup.core.errors import Unavailable
from splitup.devnet.processes import find_program


@asynccontextmanager
async def run_service(pattern: str, *command: str | Path) -> AsyncIterator[tuple[str, int]]:
    """Run ``splitup`` until the block is left; give what it says of its address, and its pid."""
    process = await asyncio.create_subprocess_exec(
        find_program("splitup"), *map(str, command), stderr=PIPE
    )
    assert process.stderr is not None
    try:
        lines = []
        while line := (await process.stderr.readline()).decode(errors="replace"):
            lines.append(line)
            if found := re.search(pattern, line):
                break
        else:
            raise Unavailable("".join(lines))
        passing = asyncio.create_task(_pass_on(process.stderr))
        yield found[1], process.pid
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await process.wait()
    await passing


async def _pass_on(lines: asyncio.StreamReader) -> None:
    """Print what a program says; it would wait for a reader when the pipe is full."""
    async for line in lines:
        say(line.decode(errors="replace").rstrip())


@asynccontextmanager
async def run_server(
    directory: str | Path, model: str, *flags: str
) -> AsyncIterator[tuple[str, int]]:
    """Run ``splitup serve``; give its address and process id."""
    command = ("serve", model, "--port", "0", *flags, "--config", directory)
    async with run_service(r"base URL: (\S+)/v1", *command) as server:
        yield server
