"""Tasks computed on the device give what the reference interpreter gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_tests.page.device import run_on_device
from safetensors.numpy import load_file
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends.source_model import Sizes

from splitup.decode.step import make_arrays, make_causal_step
from splitup.graph.arrays import Array, get_array_dtype
from splitup.graph.error_bound import compute_node
from splitup.graph.ir import bind_rows
from splitup.graph.manifest import get_task_key, get_weights_key
from splitup.graph.rules import CheckedGraph, check_graph, load_graph
from tests.deploy.checkpoints import CASES, save_checkpoint
from tests.deploy.ggufs import save_gguf
from tests.deploy.llamas import save_llama
from tests.deploy.saved import save_case
from tests.parameters import some_of

Steps = Sequence[Sequence[Array]]
CHUNK = 4
STEPS = ((0, 3), (3, 1), (4, 4))  # start and rows of each
RUN = """
    const WORDS = {
        U8: ["uint8", Uint8Array], U16: ["uint16", Uint16Array], I32: ["int32", Int32Array],
    };
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
            if (kind && kind !== "blocks") {
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


def make_inputs(graph: CheckedGraph, start: int, rows: int) -> list[Array]:
    """Return the inputs of one step, of any task of a language model."""
    random = np.random.default_rng(start)
    arrays = make_arrays(make_causal_step(random.integers(0, 50, rows).tolist(), start), CHUNK)
    found: list[Array] = []
    for spec in graph.inputs:
        if spec.name in arrays:
            found.append(arrays[spec.name])
        else:
            shape = (rows, *spec.shape[1:]) if spec.rows else spec.shape
            found.append(random.normal(0, 1, shape).astype(np.float32))
    return found


def run_reference(graph: CheckedGraph, weights: Sequence[Array], steps: Steps) -> list[list[Array]]:
    """Return what the reference interpreter computes in each step."""
    states = [np.zeros(spec.shape, get_array_dtype(spec.dtype)) for spec in graph.states]
    results = []
    for inputs in steps:
        pairs = zip(graph.inputs, inputs, strict=True)
        rows = {spec.rows: len(array) for spec, array in pairs if spec.rows}
        bound = check_graph(bind_rows(graph, rows))
        given = {"INPUT": inputs, "WEIGHT": weights, "STATE": states}
        values: dict[int, Array] = {}
        for index, node in enumerate(bound.nodes):
            if node.op in given:
                values[index] = given[node.op][node.arg]  # type: ignore[index]
            else:
                values[index] = compute_node(node, [values[src] for src in node.srcs])
        results.append([values[output.node] for output in bound.outputs])
        states = list(states)
        for update in bound.updates:
            states[update.state] = values[update.node]
    return results


def describe(graph: CheckedGraph, inputs: Sequence[Array]) -> list[dict[str, Any]]:
    return [
        {"dtype": spec.dtype, "shape": array.shape, "data": array.ravel().tolist()}
        for spec, array in zip(graph.inputs, inputs, strict=True)
    ]


def check(model: str, folder: Path, private: int) -> int:
    """Compare all tasks of the client; return how many tables they read as a whole."""
    compiled = build(model, 1 << 30, sizes=Sizes(chunk=CHUNK), private=private)
    assert compiled.manifest.client is not None
    stored = {blob.key: blob for blob in compiled.blobs}
    given, wanted = [], []
    for task in compiled.manifest.client.tasks:
        path = folder / task.task_id
        path.write_bytes(b"".join(stored[get_task_key(task.task_id)].open()))
        weights = path.with_suffix(".safetensors")
        weights.write_bytes(b"".join(stored[get_weights_key(task.weights_digest)].open()))
        graph = load_graph(path.read_bytes())
        arrays = load_file(weights)
        steps = [make_inputs(graph, start, rows) for start, rows in STEPS]
        wanted.append(run_reference(graph, [arrays[w.name] for w in graph.weights], steps))
        shown = [describe(graph, inputs) for inputs in steps]
        given.append({"graph": str(path), "weights": str(weights), "steps": shown})
    tables = 0
    for task, found, results in zip(
        compiled.manifest.client.tasks, run_on_device(RUN, given), wanted, strict=True
    ):
        tables += found["tables"]
        for outputs, expected in zip(found["outputs"], results, strict=True):
            for output, array in zip(outputs, expected, strict=True):
                flat = array.ravel().astype(np.float64)
                error = np.abs(np.array(output) - flat).max() / max(1, np.abs(flat).max())
                assert error < 2e-5, (task.label, error)
    return tables


@pytest.mark.parametrize(
    ("case", "blocks", "tables"),
    [
        ("llama-float16", 0, 2),
        ("gemma2", 1, 10),  # scaled embeddings, bounded logits
        ("kimi-linear", 1, 21),  # layers with a memory instead of attention
        ("qwen3_moe", 1, 8),  # experts
    ],
)
def test_the_client_s_tasks(case: str, blocks: int, tables: int, tmp_path: Path) -> None:
    save_case(case, tmp_path / "m")
    assert check(str(tmp_path / "m"), tmp_path, blocks) == tables


@pytest.mark.parametrize("case", some_of(("llama-float16", "llama3-bfloat16"), "llama3-bfloat16"))
def test_private_blocks_with_caches_of_halves(case: str, tmp_path: Path) -> None:
    three = replace(CASES[case], change={**CASES[case].change, "num_hidden_layers": 3})
    save_checkpoint(tmp_path / "m", three)
    assert check(str(tmp_path / "m"), tmp_path, 1) == 10


def test_casts_round_to_the_nearest_half_and_ties_to_even() -> None:
    """Every positive float16, what lies between two, and the float32 numbers beside that."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = np.append((halves[1:] + halves[:-1]) / 2, np.float32(65_520))
    near = [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))]
    numbers = np.concatenate([halves, *near, np.array([np.inf, np.nan, 1e-30], np.float32)])
    numbers = np.concatenate([numbers, -numbers])
    program = """
        const data = new Float32Array(Uint32Array.from(given).buffer);
        const x = page.wrap("float32", [given.length], data);
        const { data: halves } = page.computeNode({ op: "CAST", dtype: "float16" }, null, [x]);
        return Array.from(new Uint32Array(halves.buffer));
    """
    given = np.array(run_on_device(program, numbers.view(np.uint32).tolist()), np.uint32)
    with np.errstate(over="ignore"):
        wanted = numbers.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(given.view(np.float32), wanted)
    assert (np.signbit(given.view(np.float32)) == np.signbit(wanted))[~np.isnan(wanted)].all()


@pytest.mark.parametrize("form", some_of(("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"), "Q4_1", "Q6_K"))
def test_quantised_blocks_are_matrices(form: str, tmp_path: Path) -> None:
    """Embedding, head and two blocks of a GGUF file, which would not fit as float32."""
    width = 256 if form.endswith("K") else 32
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 3}
    save_gguf(tmp_path / "m.gguf", sizes, forms={"": form})
    assert check(str(tmp_path / "m.gguf"), tmp_path, 1) == 10


def test_an_untied_head(tmp_path: Path) -> None:
    save_llama(tmp_path / "m", {"tie_word_embeddings": False, "num_hidden_layers": 3})
    assert check(str(tmp_path / "m"), tmp_path, 0) == 2


def test_what_a_browser_cannot_compute_is_refused(tmp_path: Path) -> None:
    program = """
        const node = (op, dtype, srcs, arg = null) => [op, dtype, srcs, arg];
        return given.map(({ inputs, nodes, version = 1 }) => {
            const text = JSON.stringify({
                format: "splitup.graph", version, inputs, weights: [], states: [], updates: [],
                nodes, outputs: [["y", nodes.length - 1]],
            });
            try {
                const values = inputs.map(([, dtype, shape]) => page.makeValue(dtype, shape));
                const one = new page.Program(page.parseGraph(text, "t"), [], kernels);
                one.begin([], values).getOutput(0);
                return "";
            } catch (error) { return error.message; }
        });
    """
    x = ["INPUT", "float32", [], 0]
    cases: list[tuple[list[Any], dict[str, Any], str]] = [
        ([x, ["NEG", "float32", [0], None]], {}, ""),
        ([x, ["EVAL", "float32", [0], None]], {}, "operation EVAL"),
        ([x, ["CAST", "int64", [0], None]], {}, "type int64"),
        (
            [x, ["EXPAND", "float32", [0], [1 << 30]], ["NEG", "float32", [1], None]],
            {},
            "too large",
        ),
        ([x, ["NEG", "float32", [1], None]], {}, "node 1 reads a later one"),
        ([x, ["RESHAPE", "float32", [0], [5]]], {}, "no value of shape"),
        ([x, ["SHRINK", "float32", [0], [[3, 2]]]], {}, "SHRINK leaves"),
        ([x], {"version": 2}, "update this page"),
    ]
    given = [
        {"inputs": [["x", "float32", [4]]], "nodes": nodes, **more} for nodes, more, _ in cases
    ]
    found = run_on_device(program, given)
    assert all(
        words in text and bool(words) == bool(text)
        for (_, _, words), text in zip(cases, found, strict=True)
    ), found
