"""Honest nodes of three kinds of devices, judged by the members' own machines: nobody loses.

The state machines run executions among nodes of these three classes, with signed messages, a chain
and virtual time. Members compute on CPUs. Every task is drawn, and a member looks at every drawn
task of a small pool. A node's outputs are the CPU's in a step, plus its class's difference in that
step, times a random factor whose logarithm varies as that of the differences does. So some are
larger than any of the report. ``growth`` multiplies all of them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from splitup.core.tensors import TensorSpec
from splitup.graph.compare import PPB, compare_tensors
from splitup.graph.tolerances import Tolerance
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
STEPS: Final = 8  # of a simulated execution
_EVERY: Final = Economics(sampling_bps=10_000, reward_milli=1_200, slash_milli=800)  # q = 1
PAGE = (Path(__file__).resolve().parents[3] / "bench/reports/verification.md").read_text()
ROW = re.compile(r"^\| \d+ .*attention[^|]*\|(.*)\|$", re.MULTILINE)
ROWS, WIDTH = 8, 256


@dataclass(frozen=True, slots=True)
class Measured:
    """One output of a task, as CPU, CL and WEBGPU computed it in S steps."""

    spec: TensorSpec
    tolerance: Tolerance
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

    draws: int = 0
    by_kind: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0))
    looked: int = 0  # by a member, once for each that did
    compared: int = 0  # outputs of a step, with another class's
    nearest: float = 0.0  # the largest share of a tolerance that a difference took
    convicted: int = 0  # tasks whose executor or validator was said to have lied
    slashed: int = 0


class HonestNetwork(Simulation):
    """Nodes of three classes, all honest; members compare what those of the CPU get."""

    def __init__(self, tasks: Sequence[Measured], growth: float) -> None:
        manifest = make_chain_manifest(len(tasks))
        listed = tuple(
            entry.model_copy(update={"tolerances": (one.tolerance,)})
            for entry, one in zip(manifest.tasks, tasks, strict=True)
        )
        super().__init__(
            seed=1,
            nodes=len(CLASSES) * NODES_PER_CLASS,
            economics=_EVERY,
            manifest=manifest.model_copy(update={"tasks": listed}),
        )
        self.compared_classes = set(CLASSES.values()) - {COMMON_CLASS}
        self._tasks, self._growth = tasks, growth
        self._compute_steps = lru_cache(4_096)(self._compute_steps)  # type: ignore[method-assign]
        self.tally = Tally()
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
        plan = self.find_plan(execution_id)
        outcomes = self.find_outcomes(execution_id)
        tally.draws += len(outcomes)
        tally.looked += sum(n for (one, _), n in self.recomputed.items() if one == execution_id)
        tally.convicted += sum(o != Outcome.HONEST.value for o in outcomes.values())
        tally.slashed += len(self.chain.settlements[execution_id].slashes)
        for node in self.find_executors(plan):
            tally.by_kind[self.kinds[node]] += 1

    def _compute_steps(self, execution_id: str, task: int, kind: str) -> tuple[bytes, ...]:
        """Return a task's output in every step, as a class computes it."""
        one = self._tasks[task]
        name = f"{execution_id}/{task}".encode()
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
            compared = compare_tensors(one.spec, claimed, own, one.tolerance, is_logits=False)
            self.tally.compared += 1
            if (metrics := compared.metrics) is not None:
                bounds = one.tolerance.list_bounds()
                shares = [metrics.measure(name) / most for name, most in bounds.items()]
                self.tally.nearest = max([self.tally.nearest, *shares])
            accepted &= compared.is_accepted
        return accepted


def simulate(tasks: Sequence[Measured], executions: int, *, growth: float = 1.0) -> Tally:
    """Run so many executions, all of whose tasks are drawn."""
    network = HonestNetwork(tasks, growth)
    for number in range(executions):
        network.play(number + 1)
    return network.tally


def read_tasks() -> list[Measured]:
    """Return tasks with the differences and tolerances of the report on verification."""
    random = np.random.default_rng(1)
    found = []
    for line in ROW.findall(PAGE)[:4]:
        cells = [cell.strip() for cell in line.split("|")]
        base = random.standard_normal((ROWS, WIDTH)).astype(np.float32).astype(float)
        differences = {}
        for kind, cell in zip(("CL", "WEBGPU"), cells, strict=False):
            noise = random.standard_normal((ROWS, WIDTH)) * random.lognormal(0, 0.25, (ROWS, 1))
            sizes = np.linalg.norm(noise, axis=1) / np.linalg.norm(base, axis=1)
            differences[kind] = noise * float(cell) / sizes.max()
        tolerance = Tolerance(
            dtype="float32",
            relative_l2_ppb=round(float(cells[-1]) * PPB),
            exponent_ppb=None,
            mantissa_ppb=None,
            max_ulp=None,
        )
        spec = TensorSpec("y", "float32", (1, WIDTH))
        found.append(Measured(spec, tolerance, base, differences))
    return found


@pytest.fixture(scope="module")
def tasks() -> list[Measured]:
    return read_tasks()


def test_honest_nodes_of_three_classes_are_never_convicted(tasks: list[Measured]) -> None:
    tally = simulate(tasks, 4)
    assert len(tasks) == 4 and tally.draws == tally.looked == 16, "a member looks at every task"
    assert min(tally.by_kind[kind] for kind in CLASSES) > 0
    assert tally.compared == STEPS * (tally.draws - tally.by_kind["CPU"])
    assert 0 < tally.nearest < 0.25
    assert (tally.convicted, tally.slashed) == (0, 0)


def test_the_simulation_convicts_nodes_that_differ_more_than_the_tolerance(
    tasks: list[Measured],
) -> None:
    tally = simulate(tasks, 2, growth=100)
    assert tally.nearest > 1 and tally.convicted > 0 and tally.slashed > 0
