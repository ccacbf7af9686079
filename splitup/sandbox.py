"""Replays a task in a process of its own: no environment, bounded memory, processor and time.

What a task makes tinygrad do is a stranger's choice; the worst is that this process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from splitup import limits
from splitup.codec import parse_json
from splitup.errors import Unavailable

_PASSED: Final = (  # how compilers and drivers are found; no configuration, no secret
    "PATH",
    "LANG",
    "CC",
    "LLVM_PATH",
    "LD_LIBRARY_PATH",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "VIRTUAL_ENV",
    "PYTHONPATH",
)
_DEVICE: Final = re.compile(r"[^/]+/(?P<device>[A-Z0-9]+:[A-Z0-9]+)(?:/|$)")


@dataclass(frozen=True, slots=True)
class Replay:
    """One task to be replayed from files in ``directory``, which also holds what it writes."""

    directory: Path
    task: Path
    weights: Path | None
    inputs: Sequence[Path]  # per port, all steps as ``recompute.write_tensor`` writes them
    steps: int
    gate: int | None  # the manifest's
    determinism: str
    memory_bytes: int  # of tensors: weights, states and values


async def replay(job: Replay) -> dict[str, Any]:
    """Return the digests ``inputs``, ``outputs`` and ``state`` of a replay.

    Raises Unavailable when it cannot be done here: another determinism class, no memory, no time,
    a crash. The message ends with the process's own last words.
    """
    match = _DEVICE.match(job.determinism)
    on_cpu = match is not None and match["device"].startswith("CPU:")
    time_s = limits.RULING_S + limits.RULING_STEP_S * job.steps
    description = {
        "task": str(job.task),
        "weights": str(job.weights or ""),
        "inputs": [str(path) for path in job.inputs],
        "steps": job.steps,
        "gate": job.gate,
        "determinism": job.determinism,
        "memory_bytes": 2 * job.memory_bytes + limits.REPLAY_OVERHEAD_BYTES if on_cpu else 0,
        "cpu_s": int(2 * time_s),
    }
    path = job.directory / "job.json"
    path.write_text(json.dumps(description))
    environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
    environment["HOME"] = environment["TMPDIR"] = str(job.directory)
    environment["CACHEDB"] = str(job.directory / "kernels.db")
    if match is not None:
        environment["DEV"] = match["device"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "splitup.graph.recompute", str(path)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        cwd=job.directory,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(time_s):
            output, words = await process.communicate()
    except TimeoutError:
        raise Unavailable(f"the replay took more than {time_s:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):  # a compiler it started goes with it
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if process.returncode != 0:
        last = words.decode(errors="replace").strip().rpartition("\n")[2]
        raise Unavailable(f"the replay ended with {process.returncode}: {last[-300:]}")
    found: dict[str, Any] = parse_json(output)
    return found
