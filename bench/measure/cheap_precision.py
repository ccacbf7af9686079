"""How soon is who computes with less precision convicted by members of another class?

    python -m bench.measure.cheap_precision [STEPS]

The example's weights, which are float16, get random lower bits, so that they are float32 as those
of a model that was trained so. ``splitup-deploy calibrate`` makes the tolerances, over twelve
tokens. Then executors compute every task over STEPS other tokens as those do that save: with
float16, bfloat16 or int8 weights, or activations in float16. What the judge does with that is the
members' own comparison with their own numbers: executors compute on the CPU, and the judge on
WebGPU, in another order of sums. An honest executor is compared, too.

A task is drawn whole, so that one step that is refused convicts. Expected are the tokens that a
client got, until a verdict, in executions of 32 tokens.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import load_file, save_file
from splitup_deploy.calibration.calibrate_model import calibrate_model
from splitup_deploy.calibration.perturbations import (
    list_perturbations,
    rename_weights,
    round_activations,
)
from splitup_deploy.calibration.variant_runs import (
    VARIANTS,
    CalibrationRun,
    make_job,
    read_outputs,
    run_jobs,
    run_variant,
    write_inputs,
    write_tasks,
)
from splitup_deploy.cutting.build import CompiledModel, build
from splitup_deploy.frontends.source_model import Sizes

from splitup.core.tensors import (
    ITEM_BYTES,
    TensorSpec,
    encode_safetensors_header,
    parse_safetensors,
)
from splitup.demo.models import find_example
from splitup.graph.arrays import decode_array, encode_array, round_array
from splitup.graph.compare import PPB, Tolerance, compare_tensors, find_tolerance
from splitup.graph.ir import Graph
from splitup.graph.manifest import Task
from splitup.graph.rules import check_graph, load_graph
from splitup.protocol.planning.exposure import Economics

SHARES: Final = (800, 5_000, 10_000)  # of tasks that are verified, in 1/10,000
EXECUTION_TOKENS: Final = 32
_CALIBRATED_STEPS: Final = 12
_TARGET_BYTES: Final = (
    5_000_000  # as the example's cut into eleven tasks, of weights twice as large
)
_HONEST: Final = "as it should"
_ECONOMICS: Final = Economics(sampling_bps=800, reward_milli=1_200, slash_milli=100_000)

Weights = dict[str, bytes]


def make_float32_example(directory: Path) -> Path:
    """Copy the example, its weights in float32 that float16 does not hold."""
    model = directory / "model"
    shutil.copytree(find_example(), model)
    random = np.random.default_rng(1)
    changed = {}
    for name, weight in load_file(model / "model.safetensors").items():
        low = weight.astype(np.float16)
        width = np.spacing(np.abs(low)).astype(np.float32)
        changed[name] = low.astype(np.float32) + width * random.uniform(-0.5, 0.5, low.shape)
        changed[name] = changed[name].astype(np.float32)
    save_file(changed, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config.update({name: "float32" for name in ("dtype", "torch_dtype") if name in config})
    (model / "config.json").write_text(json.dumps(config))
    return model


def list_cheaper(graph: Graph, weights: Weights) -> Iterator[tuple[str, Graph, Weights]]:
    """Yield what an executor may compute instead of the task; float32 weights are rounded."""
    yield _HONEST, graph, weights
    for name in ("float16", "bfloat16"):
        rounded = {
            w.name: _round(w.dtype, weights[w.name], name) if w.dtype == "float32" else data
            for w, data in ((w, weights[w.name]) for w in graph.weights)
        }
        if rounded != weights:
            yield f"{name} weights", rename_weights(graph, rounded), rounded
    for perturbation in list_perturbations(graph, weights, 1):
        if perturbation.name == "weights in 8 bits":
            yield "int8 weights", perturbation.graph, dict(perturbation.weights)
    lowered = round_activations(check_graph(graph))
    if lowered != graph:
        yield "float16 activations", lowered, weights


def _round(dtype: str, data: bytes, lower: str) -> bytes:
    array = decode_array(TensorSpec("", dtype, (len(data) // ITEM_BYTES[dtype],)), data)
    return encode_array(dtype, round_array(dtype, round_array(lower, array)))


def compute_cheaply(run: CalibrationRun, index: int, task: Task) -> dict[str, list[list[bytes]]]:
    """Return what executors of the first class claim over all steps, by what they do."""
    graph = load_graph((run.directory / f"{task.task_id}.json").read_bytes())
    weights: Weights = {}
    if task.weights_digest:
        data = (run.directory / f"{task.task_id}.safetensors").read_bytes()
        table = parse_safetensors(data)
        weights = {w.name: data[table[w.name].start : table[w.name].end] for w in graph.weights}
    folder = run.directory / f"cheap{index}"
    folder.mkdir()
    jobs, files = [], {}
    for count, (name, changed, made) in enumerate(list_cheaper(graph, weights)):
        files[name] = folder / f"{count}.npz"
        job = make_job(run, task, run.directory / "variant0", files[name])
        (folder / f"{count}.json").write_bytes(changed.to_bytes())
        if changed.weights:
            header = encode_safetensors_header([weight.spec for weight in changed.weights])
            path = folder / f"{count}.safetensors"
            path.write_bytes(header + b"".join(made[w.name] for w in changed.weights))
            job["weights"] = str(path)
        jobs.append({**job, "graph": str(folder / f"{count}.json")})
    run_jobs(folder / "jobs.json", run.variants[0], jobs)
    return {name: read_outputs(file, task) for name, file in files.items()}


def find_refused(
    compiled: CompiledModel,
    index: int,
    claimed: list[list[bytes]],
    own: list[list[bytes]],
    tolerances: list[Tolerance],
) -> list[bool]:
    """Return for each step whether a member that compares it with its own refuses it."""
    task = compiled.manifest.tasks[index]
    logits = {(p.task, p.port) for p in compiled.manifest.outputs if p.name == "logits"}
    return [
        not all(
            compare_tensors(
                port.spec,
                one,
                other,
                find_tolerance(tolerances, port.spec.dtype),
                is_logits=(index, place) in logits,
            ).is_accepted
            for place, (port, one, other) in enumerate(zip(task.outputs, claims, mine, strict=True))
        )
        for claims, mine in zip(claimed, own, strict=True)
    ]


def measure(steps: int, say: Callable[[str], None]) -> dict[str, list[tuple[str, float, int]]]:
    """Return by what executors do: task, share of refused steps, the first one (-1: none)."""
    found: dict[str, list[tuple[str, float, int]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = make_float32_example(folder)
        compiled = build(str(source), _TARGET_BYTES, sizes=Sizes(chunk=8))
        (folder / "calibration").mkdir()
        variants = [one for one in VARIANTS if one.name in ("X86", "WebGPU")]
        report = calibrate_model(
            compiled, folder / "calibration", _CALIBRATED_STEPS, variants=variants, say=say
        )
        working = [variant for variant in report.variants if not variant.problem]
        say(f"variants: {', '.join(variant.name for variant in working)}")
        worst = [task.worst.relative_l2 for task in report.tasks if task.worst is not None]
        tolerances = report.make_file()["tasks"]
        bounds = [row["relative_l2_ppb"] / PPB for rows in tolerances.values() for row in rows]
        say(f"honest relative L2 up to {max(worst, default=0):.1e}, among {len(worst)} tasks")
        say(f"tolerances of {min(bounds):.1e} to {max(bounds):.1e}")
        (folder / "run").mkdir()
        run = CalibrationRun(folder / "run", compiled, steps, say)
        write_tasks(run)
        vocabulary = compiled.manifest.text.vocab if compiled.manifest.text else 2
        write_inputs(run, np.random.default_rng(2).integers(0, vocabulary, steps).tolist())
        run.variants += [run_variant(run, variant, n) for n, variant in enumerate(working)]
        for index, task in enumerate(compiled.manifest.tasks):
            rows = [Tolerance.model_validate(row) for row in tolerances.get(task.task_id, ())]
            if not rows:
                say(f"task {index} ({task.label}) has no tolerance: it is not judged so")
                continue
            for kind, claimed in compute_cheaply(run, index, task).items():
                refused = np.ones(steps, bool)
                for number in range(1, len(working)):  # the judge that sees least of it
                    own = read_outputs(run.directory / f"variant{number}" / f"{index}.npz", task)
                    step = find_refused(compiled, index, claimed, own, rows)
                    if kind == _HONEST:
                        refused = np.array(step) if number == 1 else refused | step
                    else:
                        refused &= step
                first = int(np.argmax(refused)) if refused.any() else -1
                found.setdefault(kind, []).append((task.label, float(refused.mean()), first))
    return found


def expect_tokens(share_bps: int, tasks: int, *, is_pool_small: bool = False) -> float:
    """Return the tokens until a verdict, if each of so many tasks is convicted once it is drawn.

    In a small pool whose validators all lie alike, a member looks at a share of the drawn tasks,
    and one in three may help the liars.
    """
    looked = share_bps / 10_000
    if is_pool_small:
        looked *= _ECONOMICS.compute_outsider_bps(share_bps) / 10_000 * 2 / 3
    return EXECUTION_TOKENS / (1 - (1 - looked) ** tasks)


def main(steps: int) -> None:
    """Print both tables."""
    found = measure(steps, lambda text: print(text, file=sys.stderr))
    print(f"| the executor computes with | tasks | refused steps of {steps} | first refused |")
    print("|---|---|---|---|")
    for kind, rows in found.items():
        shares, first = [share for _, share, _ in rows], max(first for _, _, first in rows)
        least, most = min(shares), max(shares)
        missed = sum(first < 0 for _, _, first in rows)
        shown = f"never in {missed} tasks" if missed else f"{first + 1}"
        print(f"| {kind} | {len(rows)} | {least:.0%} to {most:.0%} | {shown} |")
    tasks = max(len(rows) for rows in found.values())
    print("\n| verified | lies in one task | in all | in one, its pool lies alike | in all |")
    print("|---|---|---|---|---|")
    for share in SHARES:
        cells = [
            f"{expect_tokens(share, lies, is_pool_small=small):,.0f}"
            for small in (False, True)
            for lies in (1, tasks)
        ]
        print(f"| {share / 100:.0f} % | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
