"""Measure, task by task, how much correct results differ and how much perturbed ones do.

Every task is computed in *variants*: this machine's code generators, with and without their
optimisations, with one thread and several. All variants get the inputs that the first variant's
tasks gave each other, because every node is judged on the inputs it committed to. Then the first
variant computes the tasks perturbed and with noise (``splitup_deploy.calibration.perturbations``),
and ``splitup_deploy.calibration.separation`` looks for a tolerance between the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from splitup.client.text.tokenizer import ModelTokenizer
from splitup.core.errors import InvalidInput, Unavailable
from splitup.core.tensors import TensorSpec, encode_safetensors_header, parse_safetensors
from splitup.graph.compare import Metrics
from splitup.graph.dtypes import FLOATS
from splitup.graph.manifest import Task, get_blob_key
from splitup.graph.rules import CheckedGraph, load_graph
from splitup_deploy.calibration.calibration_report import CalibrationReport, TaskReport
from splitup_deploy.calibration.perturbations import Perturbation, list_noises, list_perturbations
from splitup_deploy.calibration.separation import (
    Spread,
    calibrate,
    measure_step,
    take_largest,
    take_smaller,
)
from splitup_deploy.calibration.variant_runs import (
    VARIANTS,
    CalibrationRun,
    Say,
    Variant,
    make_job,
    read_outputs,
    run_jobs,
    run_variant,
    write_inputs,
    write_tasks,
)
from splitup_deploy.cutting.build import CompiledModel

Array = np.ndarray[Any, Any]


def calibrate_model(
    compiled: CompiledModel,
    directory: Path,
    steps: int,
    *,
    tokens: Sequence[int] = (),
    variants: Sequence[Variant] = VARIANTS,
    say: Say = lambda text: None,
) -> CalibrationReport:
    """Calibrate every task of the nodes over ``steps`` steps, in files under ``directory``.

    Tasks that the client runs before the nodes are computed once, with the first variant. Takes
    minutes of CPU. ``tokens`` is a text model's prompt, which random tokens follow. Raises
    InvalidInput without weights, Unavailable when fewer than two variants work on this machine.
    """
    if not compiled.is_complete:
        raise InvalidInput("the model has no weights, so its tasks cannot be computed")
    run = CalibrationRun(directory, compiled, steps, say)
    write_tasks(run)
    write_inputs(run, tokens)
    for number, variant in enumerate(variants):
        say(f"computing with {variant.name}")
        run.variants.append(run_variant(run, variant, number))
    if sum(not variant.problem for variant in run.variants) < 2:
        problems = "; ".join(f"{v.name}: {v.problem}" for v in run.variants if v.problem)
        raise Unavailable(
            f"only one code generator works on this machine, so there is nothing to compare "
            f"({problems}); install another, for example with 'apt install clang'"
        )
    tasks = [
        _calibrate_task(run, index, task) for index, task in enumerate(compiled.manifest.tasks)
    ]
    return CalibrationReport(tuple(run.variants), tuple(tasks), steps)


def encode_prompt(compiled: CompiledModel, prompt: str) -> list[int]:
    """Return a text model's tokens of a prompt; raises InvalidInput for a model without text."""
    if not prompt:
        return []
    if compiled.manifest.text is None:
        raise InvalidInput("the model reads no text; leave --prompt out")
    with open_tokenizer(compiled) as tokenizer:
        return tokenizer.encode(prompt)


def open_tokenizer(compiled: CompiledModel) -> closing[ModelTokenizer]:
    """Return a text model's tokenizer, for one ``with``."""
    assert compiled.manifest.text is not None
    key = get_blob_key(compiled.manifest.text.tokenizer_digest)
    blob = next(blob for blob in compiled.blobs if blob.key == key)
    return closing(ModelTokenizer(b"".join(blob.open()), "the model"))


def _calibrate_task(run: CalibrationRun, index: int, task: Task) -> TaskReport:
    ports = [port.spec for port in task.outputs]
    working = [n for n, variant in enumerate(run.variants) if not variant.problem]
    honest = [read_outputs(run.directory / f"variant{n}" / f"{index}.npz", task) for n in working]
    differences: dict[str, list[Metrics]] = {}
    for one, other in combinations(honest, 2):
        _add_differences(differences, ports, one, other)
    graph, weights = _load_task(run, task)
    perturbed = list(list_perturbations(graph, weights, run.steps))
    changes = [*perturbed, *list_noises(graph, weights)]
    outputs = _compute_changed(run, index, task, changes)
    perturbations = _measure_perturbations(
        ports, honest, ((change.name, next(outputs)) for change in perturbed)
    )
    noise: dict[str, list[Metrics]] = {}
    for noisy in outputs:
        _add_differences(noise, ports, noisy, honest[0])
    calibrations = tuple(
        calibrate(
            dtype,
            take_largest(differences.get(dtype, ())),
            take_largest(noise.get(dtype, ())),
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


def _add_differences(
    found: dict[str, list[Metrics]],
    ports: Sequence[TensorSpec],
    one: Sequence[Sequence[bytes]],
    other: Sequence[Sequence[bytes]],
) -> None:
    for claimed, recomputed in zip(one, other, strict=True):
        for dtype, metrics in measure_step(ports, claimed, recomputed).items():
            found.setdefault(dtype, []).extend(metrics)


def _compute_changed(
    run: CalibrationRun, index: int, task: Task, changes: Sequence[Perturbation]
) -> Iterator[list[list[bytes]]]:
    """Yield the outputs of the changed tasks, computed by the first variant that works."""
    number = next(n for n, variant in enumerate(run.variants) if not variant.problem)
    folder = run.directory / f"changed{index}"
    folder.mkdir()
    jobs = []
    for count, change in enumerate(changes):
        job = make_job(run, task, run.directory / f"variant{number}", folder / f"{count}.npz")
        jobs.append({**job, **_write_perturbation(folder, count, change)})
    run.say(f"task {index} ({task.label}): {', '.join(change.name for change in changes)}")
    if jobs:
        run_jobs(folder / "jobs.json", run.variants[number], jobs)
    for count in range(len(changes)):
        yield read_outputs(folder / f"{count}.npz", task)


def _measure_perturbations(
    ports: Sequence[TensorSpec],
    honest: Sequence[Sequence[Sequence[bytes]]],
    perturbed: Iterable[tuple[str, Sequence[Sequence[bytes]]]],
) -> dict[str, dict[str, Spread]]:
    """Return for each perturbation and dtype its smallest difference from correct outputs.

    The smallest is over steps and variants. Steps whose bytes the perturbation leaves as they are
    do not count.
    """
    result: dict[str, dict[str, Spread]] = {}
    for name, outputs in perturbed:
        for step, claimed in enumerate(outputs):
            if claimed == honest[0][step]:
                continue
            for variant in honest:
                for dtype, found in measure_step(ports, claimed, variant[step]).items():
                    spreads = result.setdefault(name, {})
                    spreads[dtype] = take_smaller(spreads.get(dtype), take_largest(found))
    return result


def _load_task(run: CalibrationRun, task: Task) -> tuple[CheckedGraph, dict[str, bytes]]:
    graph = load_graph((run.directory / f"{task.task_id}.json").read_bytes())
    if not task.weights_digest:
        return graph, {}
    data = (run.directory / f"{task.task_id}.safetensors").read_bytes()
    table = parse_safetensors(data)
    return graph, {w.name: data[table[w.name].start : table[w.name].end] for w in graph.weights}


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
