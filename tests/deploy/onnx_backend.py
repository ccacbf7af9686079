"""Run the node tests of the ``onnx`` package through the compiler, and print what passes.

    python -m tests.deploy.onnx_backend [--failures] [--only TEST ...] > onnx-support.md

Every test's model is compiled, cut into as many tasks as half its memory gives (or fewer, when one
operation takes more), and its tasks are run one after another in this process. The tables on stdout
are Markdown; ``--failures`` adds every test that fails, with the compiler's message. Needs the
package ``onnx``.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case.node import collect_testcases
from splitup_deploy.cutting.build import CompiledModel, build

from splitup.core.errors import InvalidModel
from splitup.core.tensors import array_to_bytes, bytes_to_array
from tests.deploy.execution import CutModel

ROOMY_BYTES = 10**12
SHARES = (0.5, 0.6, 0.8, 1.0)  # of the uncut model's memory: the first that is possible is taken


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one test ended. ``reason`` is empty when it passed."""

    name: str
    op: str
    tasks: int
    reason: str


def compile_small(path: str) -> CompiledModel:
    """Cut a model into tasks of half its memory, or as near to that as its operations allow."""
    whole = build(path, ROOMY_BYTES)
    total = sum(task.vram_bytes for task in whole.manifest.tasks)
    for share in SHARES[:-1]:
        try:
            return build(path, max(int(total * share), 1))
        except InvalidModel:
            continue
    return whole


def to_array(value: Any) -> Any:
    if isinstance(value, TensorProto):
        value = numpy_helper.to_array(value)
    value = np.asarray(value)
    return value.view(np.uint16) if value.dtype.name == "bfloat16" else value


def hold_constant(case: Any, name: str) -> None:
    """Make an initialiser of an input, such as a shape, that is needed before the model runs."""
    graph, (inputs, outputs) = case.model.graph, case.data_sets[0]
    names = [port.name for port in graph.input]
    place = names.index(name)
    graph.initializer.append(numpy_helper.from_array(to_array(inputs[place]), name))
    del graph.input[place]
    case.data_sets[0] = ([*inputs[:place], *inputs[place + 1 :]], outputs)


def compile_case(case: Any, path: Path) -> CompiledModel:
    for _ in range(8):
        path.write_bytes(case.model.SerializeToString())
        try:
            return compile_small(str(path))
        except InvalidModel as error:
            found = re.search(
                r"depends on the input '([^']*)'; every shape|"
                r"of input '([^']*)' cannot have size 0",
                str(error),
            )
            if found is None or len(case.data_sets) != 1:
                raise
            hold_constant(case, found[1] or found[2])
    raise InvalidModel("more than 8 inputs are needed before the model runs")


def run_case(case: Any, directory: Path) -> Outcome:
    op = case.model.graph.node[0].op_type if len(case.model.graph.node) == 1 else ""
    path = directory / "model.onnx"
    try:
        compiled = compile_case(case, path)
        cut = CutModel(compiled)
    except InvalidModel as error:
        return Outcome(case.name, op, 0, str(error).replace(f"'{path}' ", ""))
    count = len(compiled.manifest.tasks)
    for inputs, wanted in case.data_sets:
        given = {
            port.name: array_to_bytes(port.spec, to_array(array))
            for port, array in zip(compiled.manifest.inputs, inputs, strict=True)
        }
        made = cut.step(cut.new_states(), given)
        for port, value in zip(compiled.manifest.outputs, wanted, strict=True):
            expected, got = to_array(value), bytes_to_array(port.spec, made[port.name])
            if got.dtype.name != expected.dtype.name:
                return Outcome(case.name, op, count, f"wrong dtype: {got.dtype}, {expected.dtype}")
            try:
                np.testing.assert_allclose(got, expected, case.rtol, case.atol)
            except AssertionError as error:
                first = " ".join(str(error).split())
                return Outcome(case.name, op, count, f"wrong numbers: {first[:160]}")
    return Outcome(case.name, op, count, "")


def run_cases(only: list[str]) -> Iterator[Outcome]:
    warnings.simplefilter("ignore")
    np.random.seed(0)
    cases = sorted(collect_testcases(None), key=lambda case: case.name)
    with tempfile.TemporaryDirectory() as directory:
        for case in cases:
            if only and case.name not in only:
                continue
            start = time.monotonic()
            try:
                outcome = run_case(case, Path(directory))
            except Exception as error:  # a bug of ours: the table shows it, too
                outcome = Outcome(case.name, "?", 0, f"CRASH {type(error).__name__}: {error}"[:200])
            print(
                f"{time.monotonic() - start:6.2f} s  {outcome.tasks:3d} tasks  {outcome.name}  "
                f"{outcome.reason[:300]}",
                file=sys.stderr,
                flush=True,
            )
            yield outcome


REASONS = (
    (
        r"the type (string|float8|float4|u?int[24]|complex)|of strings",
        "types that tasks lack: strings, floats of 8 and 4 bits, integers of 4 and 2 bits",
    ),
    (r"is a (sequence|optional|map)", "sequences, maps and optional values: ports are tensors"),
    (r"shape of its result depends on the data", "results whose shape depends on the data"),
    (r"is empty: its shape|cannot have size 0", "tensors without elements"),
    (
        r"no output depends on|has no inputs",
        "nothing to compute: results that depend on no input, or inputs that no result depends on",
    ),
    (r"no control flow", "Loop and Scan: tasks have no control flow"),
    (r"random numbers|uses COPY|THREEFRY", "random numbers: a task is a pure function"),
    (r"tasks do not train|preview.training", "training"),
    (r"pictures must be decoded", "decoding of picture files"),
    (r"uses version", "operations of opset 6 and before"),
    (r"wrong numbers.*Max abs.*|wrong numbers", "numbers differ by more than the test allows"),
    (r"depends on the input|that takes long", "shapes that depend on an input"),
    (r"is of the domain", "other domains (classical machine learning, previews)"),
    (r"opset \d+: the operation is not supported", "operations that are not implemented"),
)


def find_reason(outcome: Outcome) -> str:
    for pattern, reason in REASONS:
        if re.search(pattern, outcome.reason):
            return reason
    return "variations of an operation that are not implemented"


def make_tables(outcomes: list[Outcome], with_failures: bool) -> str:
    """Return the reasons for which tests fail, and the numbers by operation, as Markdown."""
    passed = [outcome for outcome in outcomes if not outcome.reason]
    cut = sum(outcome.tasks > 1 for outcome in outcomes)
    text = (
        f"onnx {onnx.__version__}: {len(passed):,} of {len(outcomes):,} tests pass; "
        f"{cut:,} models gave more than one task.\n\n"
    )
    reasons: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.reason:
            reasons.setdefault(find_reason(outcome), []).append(outcome)
    text += "| tests that fail | why | operations |\n|---|---|---|\n"
    for reason, group in sorted(reasons.items(), key=lambda item: -len(item[1])):
        operations = sorted({outcome.op for outcome in group} - {""})
        text += f"| {len(group)} | {reason} | {', '.join(operations)} |\n"
    text += (
        "\nBy operation; tests of function bodies, which have several nodes, are counted as "
        '"function bodies".\n\n| operation | pass | of |\n|---|---|---|\n'
    )
    total = Counter(outcome.op or "function bodies" for outcome in outcomes)
    good = Counter(outcome.op or "function bodies" for outcome in passed)
    for op in sorted(total):
        text += f"| {op} | {good[op]} | {total[op]} |\n"
    if with_failures:
        text += "\n| test | why it fails |\n|---|---|\n"
        for outcome in outcomes:
            if outcome.reason:
                why = outcome.reason.replace("|", "/").replace("\n", " ")
                text += f"| {outcome.name.removeprefix('test_')} | {why[:160]} |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="TEST", help="names of tests")
    parser.add_argument("--failures", action="store_true", help="list every test that fails")
    arguments = parser.parse_args()
    print(make_tables(list(run_cases(arguments.only)), arguments.failures), end="")


if __name__ == "__main__":
    main()
