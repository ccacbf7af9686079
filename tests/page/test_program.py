"""Tasks computed on the device give what nodes' kernels give, of every family of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_deploy.cutting.build import CompiledModel, build
from splitup_deploy.frontends.source_model import Sizes

from splitup.backend.runtime import TaskProgram
from splitup.core.tensors import array_to_bytes, bytes_to_array
from splitup.decode.step import make_arrays, make_causal_step
from splitup.graph.manifest import get_task_key, get_weights_key
from tests.deploy.llamas import EXAMPLE, save_llama
from tests.deploy.saved import save_case
from tests.page.device import run_on_device

CHUNK = 4
STEPS = ((0, 3), (3, 1), (4, 4))  # start and rows of each
RUN = """
    const WORDS = { U16: ["uint16", Uint16Array], I32: ["int32", Int32Array] };
    const KINDS = { F16: "float16", BF16: "bfloat16", F32: "float32" };
    function load({ graph, weights }) {
        const parsed = page.parseGraph(readFileSync(graph, "utf8"), "task");
        const file = weights === null ? Buffer.alloc(10) : readFileSync(weights);
        const begin = 8 + Number(file.readBigUInt64LE(0));
        const header = weights === null ? {} : JSON.parse(file.subarray(8, begin));
        const tables = page.Program.findTables(parsed);
        const stored = parsed.weights.map(({ name, shape }, place) => {
            const { dtype, data_offsets: [start, end] } = header[name];
            const bytes = new Uint8Array(file.subarray(begin + start, begin + end));
            const kind = tables.get(place);
            if (kind) {
                const table = kernels.addTable(kind, ...shape);
                kernels.getBytes(table).set(bytes);
                return { table };
            }
            const known = KINDS[dtype];
            if (known) {
                return { value: page.wrap(known, shape, page.decode(known, bytes)) };
            }
            const [word, Numbers] = WORDS[dtype];
            return { value: page.wrap(word, shape, new Numbers(bytes.buffer)) };
        });
        return [new page.Program(parsed, stored, kernels), tables.size];
    }
    const ARRAYS = { int32: Int32Array, float32: Float32Array };
    return given.map(({ steps, ...files }) => {
        const [program, tables] = load(files);
        let state = program.newState();
        const outputs = steps.map((inputs) => {
            const values = inputs.map(({ dtype, shape, data }) =>
                page.wrap(dtype, shape, ARRAYS[dtype].from(data)));
            const step = program.begin(state, values);
            state = step.update();
            return program.graph.outputs.map((_, place) => Array.from(step.getOutput(place).data));
        });
        return { outputs, tables };
    });
"""


def make_inputs(task: TaskProgram, start: int, rows: int) -> list[np.ndarray[Any, Any]]:
    """Return the inputs of one step, of any task of a language model."""
    random = np.random.default_rng(start)
    arrays = make_arrays(make_causal_step(random.integers(0, 50, rows).tolist(), start), CHUNK)
    found = []
    for spec in task.inputs:
        if spec.name in arrays:
            found.append(arrays[spec.name])
        else:
            shape = (rows, *spec.shape[1:]) if spec.rows else spec.shape
            found.append(random.normal(0, 1, shape).astype(np.float32))
    return found


def write_tasks(
    compiled: CompiledModel, folder: Path
) -> tuple[list[dict[str, Any]], list[list[list[np.ndarray[Any, Any]]]], list[str]]:
    """Write the client's tasks; return them with their steps, the nodes' results, and labels."""
    assert compiled.manifest.client is not None
    stored = {blob.key: blob for blob in compiled.blobs}
    given, wanted, labels = [], [], []
    for task in compiled.manifest.client.tasks:
        graph = b"".join(stored[get_task_key(task.task_id)].open())
        (folder / f"{len(given)}.json").write_bytes(graph)
        weights = None
        if task.weights_digest:
            weights = b"".join(stored[get_weights_key(task.weights_digest)].open())
            (folder / f"{len(given)}.safetensors").write_bytes(weights)
        program = TaskProgram(graph, weights, is_foreign=False)
        state = program.new_state()
        steps, results = [], []
        for start, rows in STEPS:
            arrays = make_inputs(program, start, rows)
            pairs = zip(program.inputs, arrays, strict=True)
            outputs = program.run(state, [array_to_bytes(spec, array) for spec, array in pairs])
            found = zip(program.outputs, outputs, strict=True)
            results.append([bytes_to_array(spec, data) for spec, data in found])
            named = zip(program.inputs, arrays, strict=True)
            steps.append(
                [
                    {"dtype": spec.dtype, "shape": array.shape, "data": array.ravel().tolist()}
                    for spec, array in named
                ]
            )
        path = str(folder / str(len(given)))
        files = {"graph": f"{path}.json", "weights": f"{path}.safetensors" if weights else None}
        given.append({**files, "steps": steps})
        wanted.append(results)
        labels.append(task.label)
    return given, wanted, labels


def check(model: str, folder: Path, private: int) -> list[tuple[str, int]]:
    """Compare all tasks of the client; return their labels and how many tables each has."""
    compiled = build(model, 1 << 30, sizes=Sizes(chunk=CHUNK), private=private)
    given, wanted, labels = write_tasks(compiled, folder)
    found = run_on_device(RUN, given)
    for label, task, results in zip(labels, found, wanted, strict=True):
        for outputs, arrays in zip(task["outputs"], results, strict=True):
            for output, array in zip(outputs, arrays, strict=True):
                flat = array.ravel().astype(np.float64)
                error = np.abs(np.array(output) - flat).max() / max(1, np.abs(flat).max())
                assert error < 2e-5, (label, error)
    return [(label, task["tables"]) for label, task in zip(labels, found, strict=True)]


@pytest.mark.parametrize("private", [0, 1])
def test_the_example_s_tasks(private: int, tmp_path: Path) -> None:
    tasks = dict(check(str(EXAMPLE), tmp_path, private))
    assert tasks["embed"] == 1 and all(count for label, count in tasks.items() if "head" in label)


@pytest.mark.parametrize("case", ["llama3-bfloat16", "gemma2", "kimi-linear", "qwen3_moe"])
def test_tasks_of_other_families(case: str, tmp_path: Path) -> None:
    """bfloat16; scaled embeddings and bounded logits; recurrent layers; experts."""
    save_case(case, tmp_path / "m")
    blocks = 0 if case == "llama3-bfloat16" else 1
    assert all(count for _, count in check(str(tmp_path / "m"), tmp_path, blocks))


def test_an_untied_head(tmp_path: Path) -> None:
    save_llama(tmp_path / "m", {"tie_word_embeddings": False, "num_hidden_layers": 3})
    assert len(check(str(tmp_path / "m"), tmp_path, 0)) == 2
