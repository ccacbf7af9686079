"""Recomputes tasks in a confined process with limited memory, processor time and time.

Strangers choose what a task makes tinygrad do; the worst result is that this process dies. It stays
while there are disputes, and compiled tasks are kept on the disk, so a second look at a task costs
neither an interpreter's start nor its compiling.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from splitup.backend.compiler.compile_server import MODULE as COMPILE_MODULE
from splitup.backend.compiler.compile_server import CompileServer
from splitup.backend.compiler.kernel_cache import KernelCache
from splitup.core import limits, tuning
from splitup.core.background import BackgroundTasks
from splitup.core.codec import parse_json
from splitup.core.errors import InvalidInput, SplitUpError, Unavailable
from splitup.graph.tolerances import Tolerance
from splitup.messages.determinism import find_device
from splitup.protocol.settlement.proof_of_sampling import compute_ruling_s
from splitup.sandbox.child import ChildFailed, open_files
from splitup.sandbox.warm_child import WarmChild

_MODULE: Final = "splitup_oracle.member.recompute_process"
_FOUND: Final = {"inputs", "outputs", "state", "accepted", "noisy_steps"}
_DEVICE: Final = re.compile(r"[^/]+/(?P<device>[A-Z0-9]+:[A-Z0-9]+)(?:/|$)")
_ANSWER_BYTES: Final = limits.MIB  # of JSON: digests of a task's ports


@dataclass(frozen=True, slots=True)
class RecomputeJob:
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
    patience: int = 1  # so many times the usual time


class Recomputer:
    """The processes that recompute on this machine, one for each kind of device."""

    def __init__(self, cache: KernelCache) -> None:
        self._cache = cache
        self._devices: dict[str, _Device] = {}

    async def replay(self, job: RecomputeJob) -> dict[str, Any]:
        """Return the digests ``inputs``, ``outputs`` and ``state`` of a recomputed task.

        Also which of the claims are ``accepted``, one bool for each, and whether the result is
        defined (``is_defined``): if it is not, rounding alone may be why a claim is not accepted.
        Its first ``noisy_steps`` were tried, 0 where no claim was refused. Raises InvalidInput
        when no machine of this kind can recompute it: another determinism class, a graph that
        breaks a rule. Raises Unavailable when it took too long or the machine lacks something.
        """
        device = await self._find(job.determinism)
        if device.report["determinism_class"] != job.determinism:
            raise InvalidInput(
                f"this machine computes as '{device.report['determinism_class']}', "
                f"not as '{job.determinism}'"
            )
        graph = await asyncio.to_thread(job.task.read_bytes)
        kernels = [await device.compile(graph, job)]
        found = await device.ask("replay", job, kernels)
        if not isinstance(found, dict) or found.keys() != _FOUND:
            raise Unavailable("the recomputation gave another answer than it was asked for")
        noisy = found["noisy_steps"]
        is_known = noisy <= job.defined_steps and found["inputs"] == list(job.defined_inputs)
        found["is_defined"] = not noisy or is_known
        if not found["is_defined"]:
            kernels.append(await device.compile(graph, job, is_noisy=True))
            found["is_defined"] = await device.ask("noise", job, kernels, noisy) is True
        return found

    async def find_class(self, determinism: str) -> str:
        """Return the class in which this machine computes on the device of the given class.

        Raises InvalidInput when that device cannot be opened here, Unavailable.
        """
        return (await self._find(determinism)).report["determinism_class"]

    def close(self) -> None:
        """End the processes."""
        for device in self._devices.values():
            device.close()

    async def _find(self, determinism: str) -> _Device:
        match = _DEVICE.match(determinism)
        name = match["device"] if match is not None else ""
        device = self._devices.get(name)
        if device is None:
            device = await _Device.open(name, self._cache)
            if len(self._devices) >= tuning.MAX_CLASSES:
                self.close()
                self._devices.clear()
            device = self._devices.setdefault(name, device)
        return device


class _Device:
    """The process that recomputes on one device, and what it says of the device."""

    def __init__(
        self, child: WarmChild, compiler: CompileServer, report: Mapping[str, str]
    ) -> None:
        self._child = child
        self._compiler = compiler
        self.report = report

    @classmethod
    async def open(cls, name: str, cache: KernelCache) -> _Device:
        child = WarmChild(_MODULE, name)
        report = await _ask(child, {"ask": "class"}, limits.RULING_S)
        if not isinstance(report, dict) or not {"device", "determinism_class"} <= report.keys():
            raise Unavailable("the recomputation does not say on which device it computes")
        # what compiles for a GPU opens it, and forks of that process could not use it any more
        on_cpu = report["device"] == "CPU"
        compiling = child if on_cpu else WarmChild(COMPILE_MODULE, name)
        return cls(child, CompileServer(compiling, 0, cache), report)

    def close(self) -> None:
        self._child.close()
        self._compiler.close()

    async def compile(self, graph: bytes, job: RecomputeJob, *, is_noisy: bool = False) -> bytes:
        """Return the code of the task, or of the task with noise."""
        return await self._compiler.find(
            graph, self.report, job.memory_bytes, job.gate, is_noisy=is_noisy
        )

    async def ask(
        self, what: str, job: RecomputeJob, kernels: Sequence[bytes], noisy_steps: int = 0
    ) -> object:
        """Return what the process says of a job."""
        programs = 2 * len(kernels)  # with noise the task is computed by a second program
        time_s = job.patience * compute_ruling_s(job.memory_bytes, job.steps)
        weights = [] if job.weights is None else [job.weights]
        paths = [path for claim in job.claims for path in claim]
        places = iter(range(1 + len(weights) + len(job.inputs) + len(paths)))
        question = {
            "ask": what,
            "task": next(places),
            "weights": next(places) if weights else None,
            "inputs": [next(places) for _ in job.inputs],
            "steps": job.steps,
            "merges": job.merges,
            "gate": job.gate,
            "determinism": job.determinism,
            "claims": [[next(places) for _ in claim] for claim in job.claims],
            "tolerances": [tolerance.model_dump() for tolerance in job.tolerances],
            "logits": job.logits,
            "seed": job.seed,
            "noisy_steps": noisy_steps,
            "memory_bytes": programs * job.memory_bytes + tuning.REPLAY_OVERHEAD_BYTES
            if self.report["device"] == "CPU"
            else 0,
            "vram_bytes": job.memory_bytes,
            "cpu_s": int(2 * time_s),
        }
        with open_files([job.task, *weights, *job.inputs, *paths]) as files:
            return await _ask(self._child, question, time_s, kernels, files)


async def _ask(
    child: WarmChild,
    question: Mapping[str, Any],
    time_s: float,
    buffers: Sequence[bytes] = (),
    files: Sequence[int] = (),
) -> object:
    """Return an answer's JSON. Raises InvalidInput when the process refuses, Unavailable."""
    try:
        _, made = await child.ask(
            question, buffers, timeout_s=time_s, max_bytes=_ANSWER_BYTES, files=files
        )
    except ChildFailed as error:
        raise InvalidInput(str(error)) from None
    with suppress(SplitUpError, ValueError):
        if len(made) == 1:
            return parse_json(bytes(made[0]))
    raise Unavailable("the recomputation gave an answer that cannot be read")


_log = logging.getLogger("splitup.oracle.recompute_capabilities")


class RecomputeCapabilities:
    """Tests the devices of the classes that nodes name, one at a time, each in its own process.

    A machine computes in one class per device, so nodes that invent classes cause no further tests.
    """

    def __init__(self, recomputer: Recomputer) -> None:
        self._recomputer = recomputer
        self._found: dict[str, str | None] = {}  # device -> our class on it; None: not tested yet
        self._turn = asyncio.Lock()
        self._tests = BackgroundTasks()

    def can_recompute(self, determinism: str) -> bool:
        """Return whether this machine computes in a class; True while the test is not over."""
        device = find_device(determinism)
        if not device:
            return False
        if device not in self._found:
            self._found[device] = None
            self._tests.start(self._try(device, determinism))
        return self._found[device] in (None, determinism)

    async def close(self) -> None:
        """Cancel all tests."""
        await self._tests.close()

    async def _try(self, device: str, determinism: str) -> None:
        async with self._turn:
            try:
                found = await self._recomputer.find_class(determinism)
            except (SplitUpError, OSError) as error:
                _log.warning("nothing can be recomputed on %s here: %s", device, error)
                found = ""
            self._found[device] = found
            if found and found != determinism:
                _log.warning("this machine computes as '%s', not as '%s'", found, determinism)
