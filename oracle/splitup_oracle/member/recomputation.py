"""Recomputes a task in a confined process with limited memory, processor time and time.

Strangers choose what a task makes tinygrad do; the worst result is that this process dies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from splitup.core import limits, tuning
from splitup.core.errors import Unavailable
from splitup.graph.compare import Tolerance
from splitup.protocol.settlement.proof_of_sampling import compute_ruling_s
from splitup.sandbox.child import Child, ChildDied, ChildFailed, open_files

_MODULE: Final = "splitup_oracle.member.recompute_process"
_FOUND: Final = {"inputs", "outputs", "state", "accepted", "is_defined", "noisy_steps"}
_DEVICE: Final = re.compile(r"[^/]+/(?P<device>[A-Z0-9]+:[A-Z0-9]+)(?:/|$)")


@dataclass(frozen=True, slots=True)
class Replay:
    """One task to recompute from files in ``directory``."""

    directory: Path
    task: Path
    weights: Path | None
    inputs: Sequence[Path]  # per port, all steps as ``recompute_process.write_tensor`` writes them
    steps: int
    gate: int | None  # as in the manifest
    determinism: str
    memory_bytes: int  # of all tensors: weights, states and values
    claims: Sequence[Sequence[Path]] = ()  # each per output, to compare within ``tolerances``
    tolerances: Sequence[Tolerance] = ()
    logits: int | None = None  # index of the output that holds them
    merges: bool = False  # whether many steps take one pass; no party is convicted by that
    seed: str = ""  # of the noise (splitup.graph.noise); unknown to all when inputs were chosen
    defined_steps: int = 0  # first steps known to be defined for this seed and these inputs
    defined_inputs: Sequence[str] = ()  # digests of these inputs


async def replay(job: Replay) -> dict[str, Any]:
    """Return the digests ``inputs``, ``outputs`` and ``state`` of a recomputed task.

    Also which of the claims are ``accepted``, one bool for each, and whether the result is defined
    (``is_defined``): if it is not, rounding alone may be why a claim is not accepted. Its first
    ``noisy_steps`` were tried, 0 where no claim was refused. Raises
    Unavailable if it failed: another determinism class, not enough memory or time, a crash. The
    message ends with the last line that the process wrote to stderr.
    """
    device = _find_device(job.determinism)
    on_cpu = device.startswith("CPU:")
    programs = 4 if job.seed else 2  # with noise the task is computed by a second program
    time_s = compute_ruling_s(job.memory_bytes, job.steps)
    weights = [] if job.weights is None else [job.weights]
    paths = [path for claim in job.claims for path in claim]
    with open_files([job.task, *weights, *job.inputs, *paths]) as files:
        task, *rest = files
        claimed = iter(rest[len(weights) + len(job.inputs) :])
        question = {
            "task": task,
            "weights": rest.pop(0) if weights else None,
            "inputs": rest[: len(job.inputs)],
            "steps": job.steps,
            "merges": job.merges,
            "gate": job.gate,
            "determinism": job.determinism,
            "claims": [[next(claimed) for _ in claim] for claim in job.claims],
            "tolerances": [tolerance.model_dump() for tolerance in job.tolerances],
            "logits": job.logits,
            "seed": job.seed,
            "defined_steps": job.defined_steps,
            "defined_inputs": list(job.defined_inputs),
            "memory_bytes": programs * job.memory_bytes + tuning.REPLAY_OVERHEAD_BYTES
            if on_cpu
            else 0,
            "vram_bytes": job.memory_bytes,
            "cpu_s": int(2 * time_s),
        }
        found = await _ask(device, question, time_s, files)
    if found.keys() != _FOUND:
        raise Unavailable(f"the recomputation answered with {sorted(found)}")
    return found


async def find_class(determinism: str) -> str:
    """Return the class in which this machine computes on the device of the given class.

    Raises Unavailable when that device cannot be opened here.
    """
    found = await _ask(_find_device(determinism), {}, limits.RULING_S)
    return str(found.get("determinism"))


def _find_device(determinism: str) -> str:
    match = _DEVICE.match(determinism)
    return match["device"] if match is not None else ""


async def _ask(
    device: str, question: dict[str, Any], time_s: float, files: Sequence[int] = ()
) -> dict[str, Any]:
    """Ask a process of its own; raise Unavailable."""
    child = Child(_MODULE, files=files, device=device)
    try:
        found, _ = await child.ask_apart(question, timeout_s=time_s, max_bytes=0)
    except (ChildDied, ChildFailed) as error:
        raise Unavailable(f"the recomputation failed: {error}") from None
    finally:
        child.close()
    return found
