"""Run a Python program to its end; it ends when the caller is cancelled."""

from __future__ import annotations

import asyncio
import signal
import sys

from bench.report import ROOT
from splitup.core.errors import Unavailable

_STOP_S = 20.0


async def run_python(*arguments: str, quiet: bool = False) -> str:
    """Run Python to its end and return what it printed; raise Unavailable when it fails.

    When the caller is cancelled the program gets SIGINT, so that it stops what it has started.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL if quiet else None,
        cwd=ROOT,
    )
    try:
        output = (await process.communicate())[0].decode()
    except asyncio.CancelledError:
        process.send_signal(signal.SIGINT)
        try:
            await asyncio.wait_for(process.wait(), _STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        raise
    if process.returncode:
        raise Unavailable(
            f"{' '.join(arguments)[:80]} ended with {process.returncode}: {output[-400:]}"
        )
    return output
