"""Computing a model's tasks in several ways: each variant is a process with its code generator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from splitup.core.codec import parse_json
from splitup.core.errors import InvalidInput, Unavailable
from splitup.decode.step import make_arrays, make_causal_step
from splitup.decode.texts import EncodedText, make_text_arrays
from splitup.graph.manifest import (
    ClientTask,
    InputSource,
    Manifest,
    Task,
    TaskSource,
    get_task_key,
    get_weights_key,
)
from splitup.graph.self_test_vectors import make_inputs
from splitup_deploy.cutting.build import CompiledModel

Say = Callable[[str], None]
_TIMEOUT_S: Final = 3_600.0  # one variant of one model: unoptimised kernels are slow


@dataclass(frozen=True, slots=True)
class Variant:
    """A code generator with its options. ``problem`` says why it does not work here, "" if it does.

    ``determinism`` is the determinism class that it reports.
    """

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
    Variant("OpenCL", {"DEV": "CL"}),
    Variant("WebGPU", {"DEV": "WEBGPU"}),
    *(Variant(device, {"DEV": device}) for device in ("CUDA", "NV", "AMD", "METAL")),
)


@dataclass
class CalibrationRun:
    """One calibration: its files, its progress, and the variants that were computed so far."""

    directory: Path
    compiled: CompiledModel
    steps: int
    say: Say
    variants: list[Variant] = field(default_factory=list)

    @property
    def early(self) -> dict[int, ClientTask]:
        """Return the client's tasks that run before the nodes, by index."""
        client = self.compiled.manifest.client
        return {} if client is None else {n: client.tasks[n] for n in client.find_early()}

    @property
    def sends(self) -> dict[str, InputSource | TaskSource]:
        """Return for each input of the nodes which value of the client it is."""
        manifest = self.compiled.manifest
        if manifest.client is None:
            return {}
        names = (port.name for port in manifest.inputs)
        return dict(zip(names, manifest.client.sends, strict=True))


def make_steps(
    manifest: Manifest, steps: int, tokens: Sequence[int], seed: int
) -> list[list[bytes]]:
    """Return the bytes of the users' inputs, step by step; of a text model, one text's tokens.

    Every step has one row, because the number of rows in a step does not change a row's bytes. An
    encoder's step is one text, the first of them ``tokens``.
    """
    ports, text_info = [port.spec for port in manifest.user_inputs], manifest.text
    if text_info is None:
        return [make_inputs(ports, seed, step + 1) for step in range(steps)]
    random = np.random.default_rng(seed)
    if manifest.is_encoder:
        texts = [random.integers(0, text_info.vocab, n + 1) for n in range(steps)]
        texts[0] = np.array(tokens or texts[0])
        encoded = [EncodedText(tuple(map(int, text[: text_info.context]))) for text in texts]
        rows = [make_text_arrays([text]) for text in encoded]
        return [[arrays[port.name].tobytes() for port in ports] for arrays in rows]
    if steps > text_info.context:
        raise InvalidInput(
            f"{steps} steps are more than the model's context of {text_info.context}; lower --steps"
        )
    chunk = next(port.shape[0] for port in ports if port.name == "tokens")
    drawn = random.integers(0, text_info.vocab, steps)
    text = [*tokens, *map(int, drawn[len(tokens) :])][:steps]
    rows = [make_arrays(make_causal_step([token], at), chunk) for at, token in enumerate(text)]
    if (images := text_info.images) is not None:
        rows = [{**arrays, "images": np.zeros((1, images.width), np.float32)} for arrays in rows]
    return [[arrays[port.name].tobytes() for port in ports] for arrays in rows]


def write_tasks(run: CalibrationRun) -> None:
    """Write the graphs and weights of all tasks to files."""
    blobs = {blob.key: blob for blob in run.compiled.blobs}
    tasks: list[Task | ClientTask] = [*run.compiled.manifest.tasks, *run.early.values()]
    for task in tasks:
        graph = b"".join(blobs[get_task_key(task.task_id)].open())
        (run.directory / f"{task.task_id}.json").write_bytes(graph)
        if task.weights_digest:
            with (run.directory / f"{task.task_id}.safetensors").open("wb") as file:
                for chunk in blobs[get_weights_key(task.weights_digest)].open():
                    file.write(chunk)


def write_inputs(run: CalibrationRun, tokens: Sequence[int]) -> None:
    """Write the users' inputs of all steps to a file."""
    manifest = run.compiled.manifest
    rows = make_steps(manifest, run.steps, tokens, seed=1)
    arrays = {
        port.name: np.stack([np.frombuffer(row[place], np.uint8) for row in rows])
        for place, port in enumerate(manifest.user_inputs)
    }
    np.savez(run.directory / "inputs.npz", **arrays)  # type: ignore[arg-type]


def make_job(
    run: CalibrationRun, task: Task | ClientTask, inputs: Path, output: Path
) -> dict[str, Any]:
    """Return the job of one task; the outputs of earlier tasks are in the directory ``inputs``."""
    sources = []
    for port in task.inputs:
        origin, name = port.source, "{}.npz"
        if isinstance(task, ClientTask):
            name = "client{}.npz"
        elif isinstance(origin, InputSource) and run.sends:
            origin, name = run.sends[origin.input], "client{}.npz"
        if isinstance(origin, TaskSource):
            sources.append([str(inputs / name.format(origin.task)), f"port{origin.port}"])
        else:
            assert isinstance(origin, InputSource)  # outputs of nodes are read by later tasks only
            sources.append([str(run.directory / "inputs.npz"), origin.input])
    weights = str(run.directory / f"{task.task_id}.safetensors") if task.weights_digest else ""
    return {
        "graph": str(run.directory / f"{task.task_id}.json"),
        "weights": weights,
        "inputs": sources,
        "output": str(output),
        "steps": run.steps,
        "forget_at": None,
    }


def run_variant(run: CalibrationRun, variant: Variant, number: int) -> Variant:
    """Compute all tasks; the outputs of the first variant that works are all variants' inputs."""
    first = next((n for n, v in enumerate(run.variants) if not v.problem), number)
    folder = run.directory / f"variant{number}"
    folder.mkdir()
    given = run.directory / f"variant{first}"
    early = run.early if first == number else {}
    jobs = [
        *(make_job(run, t, given, folder / f"client{n}.npz") for n, t in early.items()),
        *(
            make_job(run, task, given, folder / f"{index}.npz")
            for index, task in enumerate(run.compiled.manifest.tasks)
        ),
    ]
    try:
        return replace(variant, determinism=run_jobs(folder / "jobs.json", variant, jobs))
    except Unavailable as error:
        return replace(variant, problem=str(error))


def run_jobs(plan: Path, variant: Variant, jobs: list[dict[str, Any]]) -> str:
    """Run jobs in a process with the variant's code generator; return its determinism class.

    Raises Unavailable with the last line of the process's stderr.
    """
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
        raise Unavailable(f"it was not done within {_TIMEOUT_S:g} s") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise Unavailable(said.removeprefix("error: ")[:300])
    report: dict[str, str] = parse_json(done.stdout)
    return report["determinism_class"]


def read_outputs(path: Path, task: Task) -> list[list[bytes]]:
    """Return the outputs of one task, per step and port."""
    with np.load(path, allow_pickle=False) as archive:
        columns = [archive[f"port{port}"] for port in range(len(task.outputs))]
    return [[column[step].tobytes() for column in columns] for step in range(len(columns[0]))]
