"""Recomputes a task in a process of its own: minimal environment, limited memory, CPU and time.

Strangers choose what a task makes tinygrad do; the worst result is that this process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from splitup.core import limits, tuning
from splitup.core.codec import parse_json
from splitup.core.errors import Unavailable
from splitup.graph.compare import Tolerance

_PASSED: Final = (  # needed to find compilers and drivers; nothing secret
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
    """One task to recompute from files in ``directory``, which also takes its output files."""

    directory: Path
    task: Path
    weights: Path | None
    inputs: Sequence[Path]  # per port, all steps as ``recompute_process.write_tensor`` writes them
    steps: int
    gate: int | None  # as in the manifest
    determinism: str
    memory_bytes: int  # of all tensors: weights, states and values
    claimed: Sequence[Path] = ()  # per output, to compare within ``tolerances``
    tolerances: Sequence[Tolerance] = ()
    logits: int | None = None  # index of the output that holds them


async def replay(job: Replay) -> dict[str, Any]:
    """Return the digests ``inputs``, ``outputs`` and ``state`` of a recomputed task.

    With ``claimed`` outputs also whether they are ``accepted``. Raises Unavailable if it failed:
    another determinism class, not enough memory or time, a crash. The message ends with the last
    line that the process wrote to stderr.
    """
    device = _find_device(job.determinism)
    on_cpu = device.startswith("CPU:")
    time_s = limits.RULING_S + limits.RULING_STEP_S * job.steps
    description = {
        "task": str(job.task),
        "weights": str(job.weights or ""),
        "inputs": [str(path) for path in job.inputs],
        "steps": job.steps,
        "gate": job.gate,
        "determinism": job.determinism,
        "claimed": [str(path) for path in job.claimed],
        "tolerances": [tolerance.model_dump() for tolerance in job.tolerances],
        "logits": job.logits,
        "memory_bytes": 2 * job.memory_bytes + tuning.REPLAY_OVERHEAD_BYTES if on_cpu else 0,
        "vram_bytes": job.memory_bytes,
        "cpu_s": int(2 * time_s),
    }
    path = job.directory / "job.json"
    path.write_text(json.dumps(description))
    return await _run(job.directory, device, time_s, str(path))


async def find_class(determinism: str) -> str:
    """Return the class in which this machine computes on the device of the given class.

    Raises Unavailable when that device cannot be opened here.
    """
    with tempfile.TemporaryDirectory() as name:
        found = await _run(Path(name), _find_device(determinism), limits.RULING_S)
    return str(found["determinism"])


def _find_device(determinism: str) -> str:
    match = _DEVICE.match(determinism)
    return match["device"] if match is not None else ""


async def _run(directory: Path, device: str, time_s: float, *arguments: str) -> dict[str, Any]:
    """Run the process and return the JSON that it prints; raise Unavailable."""
    environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
    environment["HOME"] = environment["TMPDIR"] = str(directory)
    environment["CACHEDB"] = str(directory / "kernels.db")
    if device:
        environment["DEV"] = device
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "splitup_oracle.member.recompute_process", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        cwd=directory,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(time_s):
            output, words = await process.communicate()
    except TimeoutError:
        raise Unavailable(f"the recomputation took more than {time_s:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):  # also kills a compiler that it started
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if process.returncode != 0:
        last = words.decode(errors="replace").strip().rpartition("\n")[2]
        raise Unavailable(
            f"the recomputation ended with status {process.returncode}: {last[-300:]}"
        )
    found: dict[str, Any] = parse_json(output)
    return found
