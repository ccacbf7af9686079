"""What is larger than the target is divided, and gives the same values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from splitup_deploy.cutting.build import build
from splitup_deploy.cutting.divide import divide
from splitup_deploy.cutting.partition import find_regions, partition
from splitup_deploy.cutting.slices import Box, has, join_boxes
from splitup_deploy.cutting.task_graphs import CutTask, cut_graph
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.frontends.tracing import TracedModel
from splitup_deploy.frontends.weight_sources import (
    FilePart,
    FileSlice,
    WeightSource,
    join_sources,
    select,
)
from splitup_deploy.uncut_model import load_reference

from splitup.core.errors import InvalidModel
from splitup.core.tensors import TensorSpec
from splitup.graph.cost import compute_vram_bytes
from splitup.graph.ir import Graph
from splitup.graph.rules import check_graph
from tests.deploy.execution import CutModel
from tests.deploy.llamas import save_llama
from tests.deploy.steps import as_inputs
from tests.graph.graphs import Builder, compute_graph


def read(source: WeightSource) -> np.ndarray:
    return np.frombuffer(b"".join(source.read()), source.spec.dtype).reshape(source.spec.shape)


def finish(builder: Builder, outputs: dict[str, int]) -> TracedModel:
    sources = {
        weight.name: WeightSource(weight.spec, (builder.weight_bytes[weight.name],))
        for weight in builder.weights
    }
    return TracedModel(builder.graph(outputs), {}, sources)


@st.composite
def models(draw: st.DrawFn) -> TracedModel:
    """Products with weights of any size, moved, padded, flipped, cut; with skips and branches."""
    b = Builder()
    made = [b.store("float32", b.input("x", "float32", 8))]
    sizes = [8]
    random = np.random.default_rng(draw(st.integers(0, 9)))
    for index in range(draw(st.integers(1, 5))):
        read_at = draw(st.integers(max(0, index - 1), index))
        inner, out = sizes[read_at], draw(st.sampled_from([8, 64, 150]))
        kind = draw(st.sampled_from(["rows", "columns", "lookup", "elementwise"]))
        if kind == "elementwise":
            out = inner
            w = b.weight(f"w{index}", random.integers(-3, 4, inner).astype(np.float32))
            value = b.add("MUL", "float32", made[read_at], w)
        elif kind == "lookup":
            w = b.weight(f"w{index}", random.integers(-3, 4, (5, out)).astype(np.float32))
            rows = b.add("RESHAPE", "int32", b.add("IOTA", "int32", arg=5), arg=(5, 1))
            hit = b.add("CMPEQ", "bool", rows, b.const("int32", str(draw(st.integers(0, 5)))))
            zero = b.const("float32", "0" * 16)
            picked = b.add("WHERE", "float32", hit, w, zero)
            value = b.add("REDUCE", "float32", picked, arg=("ADD", 1))
        else:
            shape = (inner, out) if kind == "rows" else (out, inner)
            w = b.weight(f"w{index}", random.integers(-3, 4, shape).astype(np.float32))
            if kind == "columns":
                w = b.add("PERMUTE", "float32", w, arg=(1, 0))
            x = b.add("RESHAPE", "float32", made[read_at], arg=(inner, 1))
            value = b.add("REDUCE", "float32", b.add("MUL", "float32", x, w), arg=("ADD", 1))
        change = draw(st.sampled_from(["none", "flip", "pad", "shrink", "square", "stack"]))
        if change == "flip":
            value = b.add("FLIP", "float32", value, arg=(1,))
        elif change == "pad":
            value = b.add("PAD", "float32", value, arg=((3, out + 5),))
            out += 5
        elif change == "shrink" and out > 8:
            value = b.add("SHRINK", "float32", value, arg=((2, out - 4),))
            out -= 4
        elif change == "square" and out % 2 == 0:
            value = b.add("RESHAPE", "float32", value, arg=(2, out // 2))
            value = b.add(
                "RESHAPE", "float32", b.add("PERMUTE", "float32", value, arg=(1, 0)), arg=(out,)
            )
        elif change == "stack":
            value = b.add("STACK", "float32", value, value)
            value = b.add("RESHAPE", "float32", value, arg=(2 * out,))
            out *= 2
        made.append(b.store("float32", value))
        sizes.append(out)
    return finish(
        b, {"y": made[-1], "z": made[len(made) // 2]} if len(made) > 2 else {"y": made[-1]}
    )


def evaluate(
    graph: Graph, inputs: dict[str, np.ndarray], weights: dict[str, np.ndarray]
) -> dict[int, np.ndarray]:
    """Return the value of every node; inputs and weights are by name."""
    known = {("INPUT", place): inputs[spec.name] for place, spec in enumerate(graph.inputs)}
    known |= {("WEIGHT", place): weights[w.name] for place, w in enumerate(graph.weights)}
    return compute_graph(graph, known)


def run_tasks(
    model: TracedModel, tasks: list[CutTask], inputs: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Compute the tasks in order and return the model's outputs by the name of their port."""
    made: list[list[np.ndarray]] = []
    named = {}
    for task in tasks:
        given_inputs = {
            spec.name: inputs[source] if isinstance(source, str) else made[source[0]][source[1]]
            for spec, source in zip(task.graph.inputs, task.sources, strict=True)
        }
        weights = {weight.name: read(model.weights[weight.name]) for weight in task.graph.weights}
        values = evaluate(task.graph, given_inputs, weights)
        made.append([values[output.node] for output in task.graph.outputs])
        named.update({o.name: values[o.node] for o in task.graph.outputs})
    return named


@settings(max_examples=40, deadline=None)
@given(models(), st.integers(12, 80))
def test_pieces_give_the_same_values(model: TracedModel, quarters: int) -> None:
    target = 256 * quarters
    divided = divide(model, target)
    graph = check_graph(divided.model.graph)
    try:
        parts = partition(graph, divided.model.labels, target, borders=divided.borders)
    except InvalidModel as error:
        event("impossible")
        assert "alone needs" in str(error)
        return
    assert [r.root for part in parts for r in part] == [
        r.root for r in find_regions(divided.model.graph, {})
    ]
    tasks = cut_graph(graph, parts)
    for index, task in enumerate(tasks):
        assert compute_vram_bytes(task.graph) <= target
        assert all(isinstance(source, str) or source[0] < index for source in task.sources)
    event("divided" if divided.model is not model else "as it was")
    x = {"x": np.arange(8, dtype=np.float32)}
    whole = {name: read(source) for name, source in model.weights.items()}
    before = evaluate(model.graph, x, whole)
    after = run_tasks(divided.model, tasks, x)
    for output in model.graph.outputs:
        assert np.array_equal(after[output.name], before[output.node])


def make_wide(rows: int = 1, inner: int = 64, out: int = 200) -> TracedModel:
    b = Builder()
    x = b.add("RESHAPE", "float32", b.input("x", "float32", rows, inner), arg=(rows, 1, inner))
    w = b.weight("w", np.arange(out * inner, dtype=np.float32).reshape(out, inner))
    w = b.add("RESHAPE", "float32", w, arg=(1, out, inner))
    product = b.add("PERMUTE", "float32", b.add("MUL", "float32", x, w), arg=(2, 0, 1))
    return finish(b, {"y": b.store("float32", b.add("REDUCE", "float32", product, arg=("ADD", 1)))})


def test_a_wide_product_becomes_parallel_tasks_and_a_join() -> None:
    model = make_wide()
    divided = divide(model, 17_700)
    graph = check_graph(divided.model.graph)
    tasks = cut_graph(graph, partition(graph, divided.model.labels, 17_700))
    weights = [[weight.name for weight in task.graph.weights] for task in tasks]
    assert weights == [["w[0:64,:]"], ["w[64:128,:]"], ["w[128:192,:]"], ["w[192:200,:]"]]
    assert [task.sources for task in tasks[:3]] == [("x",)] * 3
    assert tasks[3].sources == ("x", (0, 0), (1, 0), (2, 0))  # the last piece, and the join


def test_what_fits_or_cannot_be_divided_stays() -> None:
    model = make_wide()
    assert divide(model, 10**6).model is model
    assert divide(model, 700).model is model  # one row and x are more
    b = Builder()
    total = b.add("REDUCE", "float32", b.input("x", "float32", 1000), arg=("ADD", 1))
    assert not divide(finish(b, {"y": b.store("float32", total)}), 512).borders


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.tuples(st.integers(0, 4), st.integers(1, 4))] * 2), max_size=5))
def test_boxes_are_joined_where_nothing_is_added(boxes: list[Box]) -> None:
    def mark(some: list[Box]) -> np.ndarray:
        marked = np.zeros((8, 8), bool)
        for box in some:
            marked[tuple(slice(start, start + size) for start, size in box)] = True
        return marked

    joined = join_boxes(boxes)
    assert np.array_equal(mark(joined), mark(boxes))
    assert all(any(has(whole, box) for whole in joined) for box in boxes)
    assert len(joined) <= len(boxes)


def test_a_block_stays_together_and_rows_far_apart_stay_apart() -> None:
    gate, up = ((0, 8), (0, 3)), ((64, 8), (0, 3))
    parts = [(*rows, inside) for rows in (gate, up) for inside in ((2, 32), (0, 1), (1, 1), (0, 1))]
    assert join_boxes(parts) == [(*gate, (0, 34)), (*up, (0, 34))]


def test_rows_of_blocks_are_divided_between_blocks() -> None:
    b = Builder()
    table = b.weight("w", np.arange(50 * 5 * 32, dtype=np.uint8).reshape(50, 5, 32))
    wide = b.add("RESHAPE", "float32", b.add("CAST", "float32", table), arg=(50, 160))
    row = b.add("RESHAPE", "int32", b.input("row", "int32", 1), arg=(1, 1))
    place = b.add("RESHAPE", "int32", b.add("IOTA", "int32", arg=50), arg=(50, 1))
    hit = b.add("CMPEQ", "bool", place, row)
    picked = b.add("WHERE", "float32", hit, wide, b.const("float32", "0" * 16))
    picked = b.add("REDUCE", "float32", picked, arg=("ADD", 1))
    divided = divide(finish(b, {"y": b.store("float32", picked)}), 4_500)
    names = [weight.name for weight in divided.model.graph.weights]
    assert names == ["w", "w[:,0:2,:]", "w[:,2:4,:]", "w[:,4:5,:]"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_boxes_of_weights(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    array = np.random.default_rng(0).integers(0, 99, shape).astype(np.uint16)
    raw = array.tobytes()
    cuts = sorted({0, len(raw), *data.draw(st.lists(st.integers(0, len(raw)), max_size=3))})
    path = tmp_path_factory.mktemp("box") / "w"
    path.write_bytes(b"??" + raw)
    reads: list[int] = []
    make: Callable[[int, int], FilePart | bytes] = data.draw(
        st.sampled_from(
            [
                lambda a, b: FileSlice(path, 2 + a, 2 + b),
                lambda a, b: raw[a:b],
                lambda a, b: Counted(raw[a:b], reads),
            ]
        )
    )
    parts, sizes = zip(*[(make(a, b), b - a) for a, b in pairwise(cuts)], strict=True)
    box = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        box.append((start, data.draw(st.integers(1, size - start))))
    source = WeightSource(TensorSpec("w", "uint16", shape), parts, sizes=sizes)
    part = select(source, "part", tuple(box))
    wanted = array[tuple(slice(start, start + size) for start, size in box)]
    assert part.spec == TensorSpec("part", "uint16", wanted.shape)
    assert np.array_equal(read(part), wanted)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_bank_of_computed_experts_is_read_once_for_all_its_pieces(axis: int) -> None:
    """Quantised blocks are put together while they are read, which takes time."""
    array = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)
    reads: list[int] = []
    experts = [
        WeightSource(TensorSpec(f"{n}.{half}", "uint8", (2, 3)), (Counted(part.tobytes(), reads),))
        for n, expert in enumerate(array)
        for half, part in enumerate(np.split(expert, 2))
    ]
    bank = join_sources(TensorSpec("bank", "uint8", array.shape), experts)
    for start in range(0, array.shape[axis], 2):
        box = [(0, size) for size in array.shape]
        box[axis] = (start, 2)
        wanted = array.take(range(start, start + 2), axis)
        assert np.array_equal(read(select(bank, "piece", tuple(box))), wanted)
    assert len(reads) == 12


@dataclass(frozen=True)
class Counted:
    """Computed bytes, in two chunks, that count how often they are read."""

    data: bytes
    reads: list[int]

    def read(self) -> Iterator[bytes]:
        self.reads.append(1)
        yield from (self.data[:3], self.data[3:])


def test_embedding_head_and_mlp_in_pieces_give_the_same_bytes(tmp_path: Path) -> None:
    """Bit for bit with the uncut model, on the kernels of this process's device."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 320}
    save_llama(tmp_path / "m", {**sizes, "num_hidden_layers": 1})
    compiled = build(str(tmp_path / "m"), 45_000, sizes=Sizes(chunk=2))
    tasks = compiled.manifest.tasks
    labels = " ".join(task.label for task in tasks)
    assert "embed 2 of" in labels and "head 2 of" in labels and "MLP 2 of" in labels
    assert all(task.vram_bytes <= 45_000 for task in tasks)
    assert {edge for edge in compiled.manifest.edges() if edge[1] - edge[0] > 1}  # no chain
    cut, whole = CutModel(compiled), load_reference(str(tmp_path / "m"), Sizes(chunk=2))
    states, state = cut.new_states(), whole.new_state()
    for position, token in enumerate([3, 319, 0, 77, 150, 9]):
        inputs = as_inputs(whole.inputs, token, position)
        (wanted,) = whole.run(state, [inputs[spec.name] for spec in whole.inputs])
        assert cut.step(states, inputs)["logits"] == wanted
