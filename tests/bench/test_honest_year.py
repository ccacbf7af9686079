"""Honest nodes of three kinds of devices, judged by the members' own machines: nobody loses."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from bench.economics.honest_year import CLASSES, STEPS, Measured, simulate
from splitup.core.tensors import TensorSpec
from splitup.graph.compare import PPB, Tolerance

PAGE = (Path(__file__).resolve().parents[2] / "bench/reports/verification.md").read_text()
ROW = re.compile(r"^\| \d+ .*attention[^|]*\|(.*)\|$", re.MULTILINE)
ROWS, WIDTH = 8, 256


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
        found.append(Measured(spec, tolerance, False, base, differences))
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
