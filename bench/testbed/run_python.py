"""Python programs beside the benchmark: run to their end, or asked line by line."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from bench.report import ROOT
from splitup.core.errors import Unavailable

_STOP_S = 20.0
_LINE_BYTES = 2**20

Ask = Callable[[str], Awaitable[str]]


async def run_python(*arguments: str) -> str:
    """Run Python to its end and return what it printed; raise Unavailable when it fails.

    When the caller is cancelled the program gets SIGINT, so that it stops what it has started.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdout=PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=ROOT,
    )
    try:
        output = (await process.communicate())[0].decode()
    except asyncio.CancelledError:
        process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        raise
    if process.returncode:
        raise Unavailable(
            f"{' '.join(arguments)[:80]} ended with {process.returncode}: {output[-400:]}"
        )
    return output


@asynccontextmanager
async def run_lines(module: str, *arguments: str) -> AsyncIterator[tuple[str, Ask]]:
    """Run a module until the block is left; give its first line, and what asks for the others.

    It has to answer each line with one, and to end when its stdin ends.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments), stdin=PIPE, stdout=PIPE, limit=_LINE_BYTES
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None

    async def ask(line: str) -> str:
        stdin.write(f"{line}\n".encode())
        return (await stdout.readline()).decode()

    try:
        yield (await stdout.readline()).decode(), ask
    finally:
        stdin.close()
        await process.wait()
