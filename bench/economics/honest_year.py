"""A year of honest nodes with three kinds of devices: does the committee convict any of them?

    python -m bench.economics.honest_year FILE

FILE is written first if it is not there: a real calibration of the example between the CPU, OpenCL
and WebGPU, with every task's outputs on each. Then the members' own state machines run executions
among nodes of these three classes (``tests.protocol.simulator``: signed messages, a chain, virtual
time). Members compute on CPUs. Every task is drawn, and a member looks at every drawn task of a
small pool, so that one simulated execution stands for many real ones.

A node's outputs are the CPU's in a step that was measured, plus its class's difference in that
step, times a random factor whose logarithm varies as that of the measured differences does. So some
differences are larger than any that was measured. ``growth`` multiplies all of them.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from splitup.core.tensors import TensorSpec, bytes_to_array
from splitup.graph.compare import PPB, Tolerance, compare_tensors, find_tolerance
from splitup.messages.plans import Plan
from splitup.messages.verification import Ruling
from splitup.protocol.committee import commands as cmd
from splitup.protocol.planning.exposure import Economics
from splitup.protocol.settlement.proof_of_sampling import Outcome
from tests.builders import COMMON_CLASS, make_chain_manifest
from tests.protocol.simulator import Node, Simulation

Floats = NDArray[np.float64]

CLASSES: Final = {
    "CPU": COMMON_CLASS,
    "CL": "tinygrad 0.14.0/CL:OPENCL/pocl",
    "WEBGPU": "tinygrad 0.14.0/WEBGPU:WGSL/SwiftShader",
}
NODES_PER_CLASS: Final = 3
SAMPLING: Final = 0.08
EXECUTIONS_PER_YEAR: Final = 365 * 48  # one every half hour
STEPS: Final = 8  # of a simulated execution
GROWTHS: Final = (2, 4, 8, 16, 32)
_CALIBRATED_STEPS: Final = 24
_TARGET_BYTES: Final = 2_500_000  # eleven tasks
_PER_SIMULATION: Final = 50  # executions
_EVERY: Final = Economics(sampling_bps=10_000, reward_milli=1_200, slash_milli=800)  # q = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """One output of a task, as CPU, CL and WEBGPU computed it in S steps."""

    spec: TensorSpec
    tolerance: Tolerance
    is_logits: bool
    base: Floats  # [S, n]: the CPU's
    differences: dict[str, Floats]  # by class [S, n]: its own less the CPU's

    def find_sizes(self, kind: str) -> Floats:
        """Return the relative L2 [S] of a class's differences."""
        norms = np.linalg.norm(self.base, axis=1)
        found = np.linalg.norm(self.differences[kind], axis=1) / np.maximum(norms, 1e-300)
        return np.asarray(found)

    def find_spread(self, kind: str) -> float:
        """Return the standard deviation of the logarithm of what differs at all."""
        sizes = self.find_sizes(kind)
        sizes = sizes[sizes > 0]
        return float(np.log(sizes).std()) if len(sizes) > 1 else 0.0


@dataclass(slots=True)
class Tally:
    """What a simulation found."""

    executions: int = 0
    draws: int = 0
    by_kind: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0))
    looked: int = 0  # by a member, once for each that did
    compared: int = 0  # outputs of a step, with another class's
    nearest: float = 0.0  # the largest share of a tolerance that a difference took
    convicted: int = 0  # tasks whose executor or validator was said to have lied
    slashed: int = 0


class HonestNetwork(Simulation):
    """Nodes of three classes, all honest; members compare what those of the CPU get."""

    def __init__(
        self,
        tasks: Sequence[Measured],
        seed: int,
        *,
        growth: float = 1.0,
        tally: Tally | None = None,
    ) -> None:
        manifest = make_chain_manifest(len(tasks))
        listed = tuple(
            entry.model_copy(update={"tolerances": (one.tolerance,)})
            for entry, one in zip(manifest.tasks, tasks, strict=True)
        )
        super().__init__(
            seed,
            nodes=len(CLASSES) * NODES_PER_CLASS,
            economics=_EVERY,
            manifest=manifest.model_copy(update={"tasks": listed}),
        )
        self.compared_classes = set(CLASSES.values()) - {COMMON_CLASS}
        self._tasks, self._seed, self._growth = tasks, seed, growth
        self._compute_steps = lru_cache(4_096)(self._compute_steps)  # type: ignore[method-assign]
        self.tally = tally or Tally()
        self.kinds: dict[str, str] = {}
        for number, node in enumerate(self.nodes):
            kind = [*CLASSES][number % len(CLASSES)]
            node.determinism, self.kinds[node.address] = CLASSES[kind], kind
        self.run(40)  # until a snapshot holds these classes

    def play(self, number: int) -> None:
        """Run an execution to its settlement, and add it to the tally."""
        execution_id, tally = self.request(number), self.tally
        assert self.run(120, lambda: self.is_settled(execution_id)), self.logs[-5:]
        self.run(3)
        plan = next(iter(self.certificates[execution_id].values())).plan
        outcomes = self.find_outcomes(execution_id)
        tally.executions += 1
        tally.draws += len(outcomes)
        tally.looked += sum(n for (one, _), n in self.recomputed.items() if one == execution_id)
        tally.convicted += sum(o != Outcome.HONEST.value for o in outcomes.values())
        tally.slashed += len(self.chain.settlements[execution_id].slashes)
        for node in self.find_executors(plan):
            tally.by_kind[self.kinds[node]] += 1

    # ---- what nodes and members compute ---------------------------------------------------------

    def _compute_steps(self, execution_id: str, task: int, kind: str) -> tuple[bytes, ...]:
        """Return a task's output in every step, as a class computes it."""
        one = self._tasks[task]
        name = f"{self._seed}/{execution_id}/{task}".encode()
        random = np.random.default_rng(int.from_bytes(hashlib.sha256(name).digest()[:8]))
        rows = random.integers(len(one.base), size=STEPS)
        normal = dict(zip(CLASSES, random.standard_normal((len(CLASSES), STEPS)), strict=True))
        values = one.base[rows]
        if kind != "CPU":
            factors = self._growth * np.exp(one.find_spread(kind) * normal[kind])
            values = values + one.differences[kind][rows] * factors[:, None]
        return tuple(row.tobytes() for row in values.astype(np.float32))

    def _digest(self, execution_id: str, task: int, kind: str) -> tuple[str, ...]:
        steps = self._compute_steps(execution_id, task, kind)
        return (hashlib.sha256(b"".join(steps)).hexdigest(),)

    def _compute(self, execution_id: str, plan: Plan, task: int) -> tuple[str, ...]:
        return self._digest(execution_id, task, "CPU")

    def _compute_on(self, node: Node, execution_id: str, plan: Plan, task: int) -> tuple[str, ...]:
        return self._digest(execution_id, task, self.kinds[node.address])

    def _accepts(
        self, command: cmd.RecomputeTask, found: Ruling, author: str, outputs: tuple[str, ...]
    ) -> bool:
        """Compare what a node stored with the member's own, as ``recompute_process`` does."""
        execution_id, task = command.order.draw.execution_id, found.task
        kind, one = self.kinds[author], self._tasks[task]
        if outputs != self._digest(execution_id, task, kind):
            return False
        ours = self._compute_steps(execution_id, task, "CPU")
        accepted = True
        for claimed, own in zip(self._compute_steps(execution_id, task, kind), ours, strict=True):
            compared = compare_tensors(
                one.spec, claimed, own, one.tolerance, is_logits=one.is_logits
            )
            self.tally.compared += 1
            if (metrics := compared.metrics) is not None:
                bounds = one.tolerance.list_bounds()
                shares = [metrics.measure(name) / most for name, most in bounds.items()]
                self.tally.nearest = max([self.tally.nearest, *shares])
            accepted &= compared.is_accepted
        return accepted


def simulate(
    tasks: Sequence[Measured], executions: int, *, seed: int = 1, growth: float = 1.0
) -> Tally:
    """Run so many executions, all of whose tasks are drawn."""
    tally = Tally()
    for first in range(0, executions, _PER_SIMULATION):
        network = HonestNetwork(tasks, seed + first, growth=growth, tally=tally)
        for number in range(first, min(executions, first + _PER_SIMULATION)):
            network.play(number + 1)
    return tally


# ---- measuring -----------------------------------------------------------------------------------


def measure() -> tuple[list[dict[str, Any]], dict[str, Floats]]:
    """Calibrate the example on the three devices; return each output's description and arrays.

    Outputs of integers, and of tasks without a tolerance, are left out.
    """
    from splitup_deploy.calibration.calibrate_model import calibrate_model
    from splitup_deploy.calibration.variant_runs import VARIANTS
    from splitup_deploy.cutting.build import build
    from splitup_deploy.frontends.source_model import Sizes

    from splitup.demo.models import find_example

    variants = [one for one in VARIANTS if one.name in ("X86", "OpenCL", "WebGPU")]
    compiled = build(str(find_example()), _TARGET_BYTES, sizes=Sizes(chunk=8))
    listed, arrays = [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = calibrate_model(compiled, folder, _CALIBRATED_STEPS, variants=variants, say=_say)
        tolerances = {
            task: [Tolerance.model_validate(row) for row in rows]
            for task, rows in report.make_file()["tasks"].items()
        }
        for index, task in enumerate(compiled.manifest.tasks):
            for place, port in enumerate(task.outputs):
                tolerance = find_tolerance(tolerances.get(task.task_id, ()), port.dtype)
                if port.dtype != "float32" or tolerance is None:
                    continue
                names = [
                    p.name for p in compiled.manifest.outputs if (p.task, p.port) == (index, place)
                ]
                label = f"{index}.{place}"
                for number, kind in enumerate(CLASSES):
                    with np.load(folder / f"variant{number}" / f"{index}.npz") as archive:
                        rows = archive[f"port{place}"]
                    arrays[f"{label}.{kind}"] = np.stack(
                        [bytes_to_array(port.spec, row.tobytes()).reshape(-1) for row in rows]
                    )
                listed.append(
                    {
                        "label": label,
                        "name": port.name,
                        "shape": list(port.shape),
                        "is_logits": "logits" in names,
                        "tolerance": tolerance.model_dump(),
                    }
                )
    return listed, arrays


def load(path: Path) -> list[Measured]:
    """Return what was measured, one output for each."""
    with np.load(path, allow_pickle=False) as archive:
        listed = json.loads(str(archive["listed"]))
        found = []
        for entry in listed:
            values = {kind: archive[f"{entry['label']}.{kind}"].astype(float) for kind in CLASSES}
            found.append(
                Measured(
                    TensorSpec(entry["name"], "float32", tuple(entry["shape"])),
                    Tolerance.model_validate(entry["tolerance"]),
                    entry["is_logits"],
                    values["CPU"],
                    {kind: one - values["CPU"] for kind, one in values.items() if kind != "CPU"},
                )
            )
        return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure unless the file is there, simulate, and print what was found."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m bench.economics.honest_year FILE")
    path = Path(sys.argv[1])
    if not path.exists():
        listed, arrays = measure()
        np.savez(path, listed=np.array(json.dumps(listed)), **arrays)  # type: ignore[arg-type]
        _say(f"{len(listed)} outputs of tasks were measured; run this again to simulate")
        return
    tasks = load(path)
    for place, one in enumerate(tasks):
        sizes = {kind: f"{one.find_sizes(kind).max():.2g}" for kind in one.differences}
        spread = {kind: f"{one.find_spread(kind):.2f}" for kind in one.differences}
        bound = (one.tolerance.relative_l2_ppb or 0) / PPB
        print(f"output {place} {one.spec.name}: {sizes}, spread {spread}, tolerance {bound:.2g}")
    needed = round(EXECUTIONS_PER_YEAR * SAMPLING)
    print("a year:", simulate(tasks, needed), flush=True)
    for growth in GROWTHS:
        print(f"{growth} times as far apart:", simulate(tasks, 10, growth=growth), flush=True)


if __name__ == "__main__":
    main()
