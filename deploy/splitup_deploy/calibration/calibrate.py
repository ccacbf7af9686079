"""Measure how far honest nodes are apart and how near the smallest cheats come, task by task.

Every task is computed in *variants*: this machine's code generators, with and without their
optimisations, with one thread and several. All get the inputs that the first variant's tasks gave
each other, as every node is judged on the inputs it committed to. Then the first variant computes
the cheats (``splitup_deploy.calibration.perturbations``). ``splitup_deploy.calibration.separation``
draws the line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.table import Table
from tokenizers import Tokenizer

from splitup.core.codec import parse_json
from splitup.core.errors import InvalidInput, Unavailable
from splitup.core.tensors import TensorSpec, encode_safetensors_header, parse_safetensors
from splitup.decode.step import make_arrays, make_causal_step
from splitup.graph.compare import PPB, Metrics
from splitup.graph.dtypes import FLOATS
from splitup.graph.ir import Graph
from splitup.graph.manifest import (
    ClientTask,
    InputSource,
    Manifest,
    Task,
    TaskSource,
    get_blob_key,
    get_task_key,
    get_weights_key,
)
from splitup.graph.rules import load_graph
from splitup.graph.self_test_vectors import make_inputs
from splitup_deploy.calibration.perturbations import Perturbation, list_perturbations
from splitup_deploy.calibration.separation import (
    Calibration,
    Spread,
    calibrate,
    measure_step,
    take_largest,
    take_smaller,
)
from splitup_deploy.cutting.build import CompiledModel

Array = np.ndarray[Any, Any]
Say = Callable[[str], None]
_TIMEOUT_S: Final = 3_600.0  # one variant of one model: unoptimised kernels are slow


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to compute honestly. ``problem`` says why it cannot be used here, "" when it can."""

    name: str
    environment: dict[str, str]
    threads: int = 1
    determinism: str = ""
    problem: str = ""


VARIANTS: Final = (
    Variant("X86", {"DEV": "CPU:X86"}),
    Variant("X86, not optimised", {"DEV": "CPU:X86", "NOOPT": "1"}),
    Variant("X86, two threads", {"DEV": "CPU:X86"}, threads=2),
    Variant("clang", {"DEV": "CPU:CLANG"}),
    Variant("clang, not optimised", {"DEV": "CPU:CLANG", "NOOPT": "1"}),
    Variant("clang, two threads", {"DEV": "CPU:CLANG"}, threads=2),
    Variant("LLVM", {"DEV": "CPU:LLVM"}),
    Variant("LLVM, not optimised", {"DEV": "CPU:LLVM", "NOOPT": "1"}),
)


@dataclass(frozen=True, slots=True)
class TaskReport:
    """One task: its calibrations by dtype, and the worst honest pair in words that people know."""

    index: int
    label: str
    task_id: str
    calibrations: tuple[Calibration, ...]
    worst: Metrics | None  # of two honest outputs, by relative L2; None when all are equal


@dataclass(frozen=True, slots=True)
class Report:
    """What ``calibrate_model`` found."""

    variants: tuple[Variant, ...]
    tasks: tuple[TaskReport, ...]
    steps: int

    def make_file(self) -> dict[str, Any]:
        """Return what ``register --tolerance`` reads; tasks without a tolerance are left out."""
        found = {
            task.task_id: [
                c.tolerance.model_dump() for c in task.calibrations if c.tolerance is not None
            ]
            for task in self.tasks
        }
        return {"tasks": {task_id: rows for task_id, rows in found.items() if rows}}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for a JSON report."""
        return {
            "steps": self.steps,
            "variants": [
                {"name": v.name, "determinism_class": v.determinism, "problem": v.problem}
                for v in self.variants
            ],
            "tasks": [
                {
                    "index": task.index,
                    "label": task.label,
                    "task_id": task.task_id,
                    "worst_honest": None if task.worst is None else task.worst.to_dict(),
                    "calibrations": [
                        {
                            "dtype": c.dtype,
                            "honest": c.honest,
                            "cheats": dict(c.perturbations),
                            "tolerance": None if c.tolerance is None else c.tolerance.model_dump(),
                            "reason": c.reason,
                        }
                        for c in task.calibrations
                    ],
                }
                for task in self.tasks
            ],
        }


@dataclass
class _Bench:
    """Files of one calibration; outputs are kept as (directory, task)."""

    directory: Path
    compiled: CompiledModel
    steps: int
    say: Say
    variants: list[Variant] = field(default_factory=list)

    @property
    def early(self) -> dict[int, ClientTask]:
        """Return what the client computes before nodes do, by index."""
        client = self.compiled.manifest.client
        return {} if client is None else {n: client.tasks[n] for n in client.find_early()}

    @property
    def sends(self) -> dict[str, InputSource | TaskSource]:
        """Return where the client has what it sends from, by input of the nodes."""
        manifest = self.compiled.manifest
        if manifest.client is None:
            return {}
        names = (port.name for port in manifest.inputs)
        return dict(zip(names, manifest.client.sends, strict=True))


def calibrate_model(
    compiled: CompiledModel,
    directory: Path,
    steps: int,
    *,
    tokens: Sequence[int] = (),
    variants: Sequence[Variant] = VARIANTS,
    say: Say = lambda text: None,
) -> Report:
    """Calibrate every task of the nodes over ``steps`` steps, in files under ``directory``.

    What the client computes before them is computed once, with the first variant. Takes minutes of
    CPU. ``tokens`` is a text model's prompt; more are drawn where it ends. Raises
    InvalidInput without weights, Unavailable when fewer than two variants work here.
    """
    if not compiled.is_complete:
        raise InvalidInput("the model has no weights, so there is nothing to measure")
    bench = _Bench(directory, compiled, steps, say)
    _write_tasks(bench)
    _write_inputs(bench, tokens)
    for number, variant in enumerate(variants):
        say(f"computing with {variant.name}")
        bench.variants.append(_run_variant(bench, variant, number))
    if sum(not variant.problem for variant in bench.variants) < 2:
        problems = "; ".join(f"{v.name}: {v.problem}" for v in bench.variants if v.problem)
        raise Unavailable(
            f"only one way to compute works here, so there is nothing to compare ({problems}): "
            "install another, for example with 'apt install clang'"
        )
    tasks = [
        _calibrate_task(bench, index, task) for index, task in enumerate(compiled.manifest.tasks)
    ]
    return Report(tuple(bench.variants), tuple(tasks), steps)


def encode_prompt(compiled: CompiledModel, prompt: str) -> list[int]:
    """Return a text model's tokens of a prompt; raises InvalidInput for a model without text."""
    if not prompt:
        return []
    if compiled.manifest.text is None:
        raise InvalidInput("the model reads no text; leave --prompt out")
    key = get_blob_key(compiled.manifest.text.tokenizer_digest)
    blob = next(blob for blob in compiled.blobs if blob.key == key)
    return list(Tokenizer.from_str(b"".join(blob.open()).decode()).encode(prompt).ids)


def make_steps(
    manifest: Manifest, steps: int, tokens: Sequence[int], seed: int
) -> list[list[bytes]]:
    """Return the bytes of what users give, step by step: of a text model, one text's tokens.

    Every step has one row: how many a step has does not change a row's bytes.
    """
    ports, text_info = [port.spec for port in manifest.user_inputs], manifest.text
    if text_info is None:
        return [make_inputs(ports, seed, step + 1) for step in range(steps)]
    if steps > text_info.context:
        raise InvalidInput(
            f"{steps} steps are more than the model's context of {text_info.context}; lower --steps"
        )
    chunk = next(port.shape[0] for port in ports if port.name == "tokens")
    drawn = np.random.default_rng(seed).integers(0, text_info.vocab, steps)
    text = [*tokens, *map(int, drawn[len(tokens) :])][:steps]
    rows = [make_arrays(make_causal_step([token], at), chunk) for at, token in enumerate(text)]
    return [[arrays[port.name].tobytes() for port in ports] for arrays in rows]


def render_report(report: Report) -> Table:
    """Return the table for a terminal: per task, honest and dishonest relative L2, and the line."""
    table = Table(box=None)
    for name in ("task", "dtype", "honest, at most", "nearest cheat", "at least", "tolerance"):
        table.add_column(name, justify="left" if name in ("task", "nearest cheat") else "right")
    for task in report.tasks:
        for found in task.calibrations:
            nearest = min(
                found.perturbations,
                key=lambda name: found.perturbations[name]["relative_l2_ppb"],
                default="",
            )
            bounds = {} if found.tolerance is None else found.tolerance.list_bounds()
            table.add_row(
                f"{task.index} {task.label}",
                found.dtype,
                _format_ppb(found.honest["relative_l2_ppb"]),
                nearest,
                _format_ppb(found.perturbations[nearest]["relative_l2_ppb"]) if nearest else "",
                ", ".join(_format_bound(*item) for item in bounds.items()) or found.reason,
            )
    return table


def _format_ppb(value: int) -> str:
    return f"{value / PPB:.1e}"


def _format_bound(name: str, bound: int) -> str:
    if name == "max_ulp":
        return f"{bound} ULP"
    return f"{name.removesuffix('_ppb').replace('_', ' ')} {_format_ppb(bound)}"


# ---- files -------------------------------------------------------------------------------------


def _write_tasks(bench: _Bench) -> None:
    blobs = {blob.key: blob for blob in bench.compiled.blobs}
    tasks: list[Task | ClientTask] = [*bench.compiled.manifest.tasks, *bench.early.values()]
    for task in tasks:
        graph = b"".join(blobs[get_task_key(task.task_id)].open())
        (bench.directory / f"{task.task_id}.json").write_bytes(graph)
        if task.weights_digest:
            with (bench.directory / f"{task.task_id}.safetensors").open("wb") as file:
                for chunk in blobs[get_weights_key(task.weights_digest)].open():
                    file.write(chunk)


def _write_inputs(bench: _Bench, tokens: Sequence[int]) -> None:
    manifest = bench.compiled.manifest
    rows = make_steps(manifest, bench.steps, tokens, seed=1)
    arrays = {
        port.name: np.stack([np.frombuffer(row[place], np.uint8) for row in rows])
        for place, port in enumerate(manifest.user_inputs)
    }
    np.savez(bench.directory / "inputs.npz", **arrays)  # type: ignore[arg-type]


def _make_job(bench: _Bench, task: Task | ClientTask, inputs: Path, output: Path) -> dict[str, Any]:
    """Return the job of one task; ``inputs`` is where the outputs of tasks before it are."""
    sources = []
    for port in task.inputs:
        origin, name = port.source, "{}.npz"
        if isinstance(task, ClientTask):
            name = "client{}.npz"
        elif isinstance(origin, InputSource) and bench.sends:
            origin, name = bench.sends[origin.input], "client{}.npz"
        if isinstance(origin, TaskSource):
            sources.append([str(inputs / name.format(origin.task)), f"port{origin.port}"])
        else:
            assert isinstance(origin, InputSource)  # what nodes give is read by later tasks only
            sources.append([str(bench.directory / "inputs.npz"), origin.input])
    weights = str(bench.directory / f"{task.task_id}.safetensors") if task.weights_digest else ""
    return {
        "graph": str(bench.directory / f"{task.task_id}.json"),
        "weights": weights,
        "inputs": sources,
        "output": str(output),
        "steps": bench.steps,
        "forget_at": None,
    }


def _run_variant(bench: _Bench, variant: Variant, number: int) -> Variant:
    """Compute all tasks; the first variant that works gives the others' inputs."""
    first = next((n for n, v in enumerate(bench.variants) if not v.problem), number)
    folder = bench.directory / f"variant{number}"
    folder.mkdir()
    given = bench.directory / f"variant{first}"
    early = bench.early if first == number else {}
    jobs = [
        *(_make_job(bench, t, given, folder / f"client{n}.npz") for n, t in early.items()),
        *(
            _make_job(bench, task, given, folder / f"{index}.npz")
            for index, task in enumerate(bench.compiled.manifest.tasks)
        ),
    ]
    try:
        determinism = _measure(folder / "jobs.json", variant, jobs)
    except Unavailable as error:
        return Variant(variant.name, variant.environment, variant.threads, problem=str(error))
    return Variant(variant.name, variant.environment, variant.threads, determinism)


def _measure(plan: Path, variant: Variant, jobs: list[dict[str, Any]]) -> str:
    """Run jobs in a process of the variant's own. Raises Unavailable with what it said."""
    plan.write_text(json.dumps({"threads": variant.threads, "jobs": jobs}))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "splitup_deploy.calibration.measure", str(plan)],
            env={**os.environ, **variant.environment},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"it took more than {_TIMEOUT_S:g} s") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise Unavailable(said.removeprefix("error: ")[:300])
    report: dict[str, str] = parse_json(done.stdout)
    return report["determinism_class"]


def _read(path: Path, task: Task) -> list[list[bytes]]:
    """Return the outputs of one task, per step and port."""
    with np.load(path, allow_pickle=False) as archive:
        columns = [archive[f"port{port}"] for port in range(len(task.outputs))]
    return [[column[step].tobytes() for column in columns] for step in range(len(columns[0]))]


# ---- tasks -------------------------------------------------------------------------------------


def _calibrate_task(bench: _Bench, index: int, task: Task) -> TaskReport:
    ports = [port.spec for port in task.outputs]
    working = [n for n, variant in enumerate(bench.variants) if not variant.problem]
    honest = [_read(bench.directory / f"variant{n}" / f"{index}.npz", task) for n in working]
    differences: dict[str, list[Metrics]] = {}
    for one in range(len(honest)):
        for other in range(one + 1, len(honest)):
            for claimed, recomputed in zip(honest[one], honest[other], strict=True):
                for dtype, found in measure_step(ports, claimed, recomputed).items():
                    differences.setdefault(dtype, []).extend(found)
    perturbations = _measure_perturbations(bench, index, task, honest)
    calibrations = tuple(
        calibrate(
            dtype,
            take_largest(differences.get(dtype, ())),
            {name: spreads[dtype] for name, spreads in perturbations.items() if dtype in spreads},
        )
        for dtype in sorted({port.dtype for port in ports if port.dtype in FLOATS})
    )
    worst = max(
        (m for found in differences.values() for m in found),
        key=lambda m: m.relative_l2,
        default=None,
    )
    return TaskReport(index, task.label, task.task_id, calibrations, worst)


def _measure_perturbations(
    bench: _Bench, index: int, task: Task, honest: Sequence[Sequence[Sequence[bytes]]]
) -> dict[str, dict[str, Spread]]:
    """Return for each cheat and dtype how little it shows, over steps and honest variants.

    A step at which the cheat gives the honest bytes does no harm and says nothing.
    """
    number = next(n for n, variant in enumerate(bench.variants) if not variant.problem)
    folder = bench.directory / f"cheats{index}"
    folder.mkdir()
    ports = [port.spec for port in task.outputs]
    jobs, names = [], []
    for count, perturbation in enumerate(_list_perturbations(bench, task)):
        bench.say(f"task {index} ({task.label}): {perturbation.name}")
        job = _make_job(bench, task, bench.directory / f"variant{number}", folder / f"{count}.npz")
        jobs.append({**job, **_write_perturbation(folder, count, perturbation)})
        names.append(perturbation.name)
    if jobs:
        _measure(folder / "jobs.json", bench.variants[number], jobs)
    result: dict[str, dict[str, Spread]] = {}
    for count, name in enumerate(names):
        for step, claimed in enumerate(_read(folder / f"{count}.npz", task)):
            if claimed == honest[0][step]:
                continue
            for variant in honest:
                for dtype, found in measure_step(ports, claimed, variant[step]).items():
                    spreads = result.setdefault(name, {})
                    spreads[dtype] = take_smaller(spreads.get(dtype), take_largest(found))
    return result


def _list_perturbations(bench: _Bench, task: Task) -> Iterator[Perturbation]:
    graph: Graph = load_graph((bench.directory / f"{task.task_id}.json").read_bytes())
    weights: dict[str, bytes] = {}
    if task.weights_digest:
        data = (bench.directory / f"{task.task_id}.safetensors").read_bytes()
        table = parse_safetensors(data)
        weights = {w.name: data[table[w.name].start : table[w.name].end] for w in graph.weights}
    return list_perturbations(graph, weights, bench.steps)


def _write_perturbation(folder: Path, count: int, perturbation: Perturbation) -> dict[str, Any]:
    graph = folder / f"{count}.json"
    graph.write_bytes(perturbation.graph.to_bytes())
    weights = ""
    if perturbation.graph.weights:
        path = folder / f"{count}.safetensors"
        specs: list[TensorSpec] = [weight.spec for weight in perturbation.graph.weights]
        header = encode_safetensors_header(specs)
        path.write_bytes(header + b"".join(perturbation.weights[spec.name] for spec in specs))
        weights = str(path)
    return {"graph": str(graph), "weights": weights, "forget_at": perturbation.forget_at}
