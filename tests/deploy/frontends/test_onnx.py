"""ONNX files: what they compute when cut, what is read from them, and what is refused."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_deploy.cutting.build import CompiledModel, build, parse_dims
from splitup_deploy.frontends.onnx.graph_file import read_onnx
from splitup_deploy.frontends.onnx.model_file import _Importer, load_onnx
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.frontends.weight_sources import FileSlice
from splitup_deploy.uncut_model import load_reference
from splitup_edge.export.onnx_file import encode_number as number
from splitup_edge.export.onnx_file import encode_piece as piece

from splitup.core.errors import InvalidInput, InvalidModel
from splitup.core.tensors import array_to_bytes, bytes_to_array
from tests.builders import HANG_S
from tests.deploy.execution import CutModel, CutReference
from tests.deploy.llamas import relative_error
from tests.deploy.onnxes import Graph, compute_vision, encode_model, save_onnx, save_vision

LARGE = 10**9


def run(
    compiled: CompiledModel, *arrays: np.ndarray, tasks: Any = CutReference
) -> list[np.ndarray]:
    cut = tasks(compiled)
    ports = compiled.manifest.inputs
    given = {p.name: array_to_bytes(p.spec, a) for p, a in zip(ports, arrays, strict=True)}
    made = cut.step(cut.new_states(), given)
    return [bytes_to_array(port.spec, made[port.name]) for port in compiled.manifest.outputs]


@pytest.mark.long  # in small: each node by the standard; cutting/test_cut_equals_whole.py
def test_a_vision_model_is_cut_and_computes_the_same(tmp_path: Path) -> None:
    source, weights = save_vision(tmp_path / "m.onnx")
    compiled = build(source, 4_600)
    assert compiled.manifest.kind == "function" and len(compiled.manifest.tasks) >= 3
    assert compiled.manifest.tasks[0].label.startswith("the_Conv")
    picture = np.random.default_rng(1).normal(0, 1, (1, 3, 8, 8)).astype(np.float32)
    (given,) = run(compiled, picture, tasks=CutModel)
    assert relative_error(given, compute_vision(weights, picture)) <= 1e-5
    whole = load_reference(source)
    (wanted,) = whole.run(whole.new_state(), [picture.tobytes()])
    assert given.tobytes() == wanted


def test_initialisers_stay_in_the_file_under_their_names(tmp_path: Path) -> None:
    source, weights = save_vision(tmp_path / "m.onnx")
    model = read_onnx(Path(source))
    assert set(model.graph.tensors) == {*weights, "flat"}
    data = Path(source).read_bytes()
    for name, array in weights.items():
        place = model.graph.tensors[name].data
        assert isinstance(place, FileSlice)
        assert data[place.start : place.end] == array.tobytes()
    assert build(source, LARGE).model_id == build(source, LARGE).model_id


def test_a_batch_is_given_or_has_one_row(tmp_path: Path) -> None:
    source, weights = save_vision(tmp_path / "m.onnx", batch="batch")
    with pytest.raises(InvalidModel, match=r"no size .* called 'sequence'; it leaves open: batch"):
        build(source, LARGE, sizes=Sizes(dims={"batch": 1, "sequence": 2}))
    with pytest.raises(InvalidModel, match="size 0"):
        build(source, LARGE, sizes=Sizes(dims={"batch": 0}))
    alone = build(source, LARGE)
    assert alone.manifest.outputs[0].shape == (1, 5)
    assert alone.notes == ("a batch of one is assumed; for another: --dim batch=N",)
    compiled = build(source, LARGE, sizes=Sizes(dims={"batch": 3}))
    assert compiled.manifest.outputs[0].shape == (3, 5)
    picture = np.random.default_rng(1).normal(0, 1, (3, 3, 8, 8)).astype(np.float32)
    (given,) = run(compiled, picture)
    assert relative_error(given, compute_vision(weights, picture)) <= 1e-5


# as exporters write what they leave open: nothing, a number below one, names that say nothing
@pytest.mark.parametrize("first", [None, -1, "?", "unk__214", "DynamicDimension.0", "N"])
def test_sizes_that_a_file_leaves_open_are_all_named_at_once(
    first: int | str | None, tmp_path: Path
) -> None:
    ports = [("x", "float32", (first, -1, "width", 2)), ("state", "float32", (2, "batch_size", 3))]
    graph = Graph(ports, [("y", "float32", (None, "?", None, 2)), ("z", "float32", (2, -1, 3))])
    source = save_onnx(tmp_path / "m.onnx", graph.add("Neg", "x", "y").add("Neg", "state", "z"))
    with pytest.raises(InvalidModel) as refused:
        build(source, LARGE)
    assert str(refused.value) == (
        "the file leaves sizes open (axis 1 of input 'x', axis 2 of input 'x'), and tasks have "
        "fixed ones; give them: --dim x.1=SIZE --dim width=SIZE"
    )
    compiled = build(source, LARGE, sizes=Sizes(dims={"x.1": 5, "width": 4}))
    assert [port.shape for port in compiled.manifest.inputs] == [(1, 5, 4, 2), (2, 1, 3)]
    name = first if isinstance(first, str) and first != "?" else "x.0"
    assert compiled.notes == (
        f"a batch of one is assumed; for another: --dim {name}=N --dim batch_size=N",
    )


def test_a_first_axis_with_another_name_is_no_batch(tmp_path: Path) -> None:
    graph = Graph([("x", "float32", ("sequence_length", 3))], [("y", "float32", (None, 3))])
    source = save_onnx(tmp_path / "m.onnx", graph.add("Neg", "x", "y"))
    with pytest.raises(InvalidModel, match="give them: --dim sequence_length=SIZE"):
        build(source, LARGE)


def test_external_data_come_from_the_models_own_directory(tmp_path: Path) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    array = np.arange(16, dtype=np.float32)
    for place in (inside / "w.bin", tmp_path / "w.bin"):
        place.write_bytes(bytes(64) + array.tobytes())
    (inside / "link.bin").symlink_to(tmp_path / "w.bin")

    def write(location: str, offset: str = "64") -> str:
        entries = {"location": location, "offset": offset, "length": "64"}.items()
        tensor = number(1, 16) + number(2, 1) + piece(8, "w") + number(14, 1)
        tensor += b"".join(piece(13, piece(1, key) + piece(2, value)) for key, value in entries)
        graph = Graph([("x", "float32", (16,))], [("y", "float32", (16,))]).add("Add", "x w", "y")
        (inside / "m.onnx").write_bytes(encode_model(graph.encode() + piece(5, tensor)))
        return str(inside / "m.onnx")

    (given,) = run(build(write("w.bin"), LARGE), array)
    np.testing.assert_array_equal(given, 2 * array)
    for bad in (str(tmp_path / "w.bin"), "absent.bin", "", "."):
        with pytest.raises(InvalidModel, match="keeps tensor 'w' in"):
            build(write(bad), LARGE)
    for bad in ("../w.bin", "link.bin"):
        with pytest.raises(InvalidModel, match="hidden or outside"):
            build(write(bad), LARGE)
    for bad in ("65", "-1", "1e3", "٣"):
        with pytest.raises(InvalidModel, match="'w'"):
            build(write("w.bin", bad), LARGE)


def test_s89_external_data_are_no_hidden_file(tmp_path: Path) -> None:
    (tmp_path / ".splitup").mkdir()
    (tmp_path / ".splitup" / "passphrase").write_text("16 secret bytes.")
    tensor = number(1, 16) + number(2, 3) + piece(8, "w") + number(14, 1)
    tensor += piece(13, piece(1, "location") + piece(2, ".splitup/passphrase"))
    graph = Graph([("x", "int8", (16,))], [("y", "int8", (16,))]).add("Add", "x w", "y")
    (tmp_path / "m.onnx").write_bytes(encode_model(graph.encode() + piece(5, tensor)))
    with pytest.raises(InvalidModel, match="hidden or outside"):
        build(str(tmp_path / "m.onnx"), LARGE)


def make(op: str, arrays: dict[str, np.ndarray], output: np.ndarray, constant: str = "",
         **options: Any) -> Graph:  # fmt: skip
    """Return a graph of one node; the inputs named in ``constant`` are initialisers."""
    held = {name: array for name, array in arrays.items() if name in constant.split()}
    ports = [(n, a.dtype.name, a.shape) for n, a in arrays.items() if n not in held]
    graph = Graph(ports, [("out", output.dtype.name, output.shape)], held)
    return graph.add(op, " ".join(arrays), "out", **options)


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(0, 1, shape).astype(np.float32)


def soften(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    powers = np.exp(x - x.max(axes, keepdims=True))
    return powers / powers.sum(axes, keepdims=True)


INTEGERS = np.array([7, -7, 9, -9, 2**31 - 1, -5, 0, 6], np.int32)
DIVISORS = np.array([2, 2, -4, -4, 3, 7, -3, 6], np.int32)
LONG = np.array([2**62 + 1, -(2**62) - 3, 10**18, -17, 5, 2**53 + 1], np.int64)
LONG_DIVISORS = np.array([3, 7, -(10**9) - 7, 5, 2**61, 1], np.int64)
HALVES = np.array([0.5, 1.5, 2.5, -0.5, 300.0, -9.0], np.float32)


def truncate(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.array([abs(int(x)) // abs(int(y)) * (1 if (x < 0) == (y < 0) else -1)
                     for x, y in zip(a, b, strict=True)], a.dtype)  # fmt: skip


CASES: dict[str, tuple[Graph, int, dict[str, np.ndarray], np.ndarray]] = {}


def case(
    name: str,
    op: str,
    arrays: dict[str, np.ndarray],
    wanted: np.ndarray,
    opset: int = 17,
    constant: str = "",
    **options: Any,
) -> None:
    given = {key: array for key, array in arrays.items() if key not in constant.split()}
    CASES[name] = (make(op, arrays, wanted, constant, **options), opset, given, wanted)


X = draw(2, 3, 4)
case("softmax before opset 13", "Softmax", {"x": X}, soften(X, (1, 2)), 11, axis=1)
case("softmax since opset 13", "Softmax", {"x": X}, soften(X, (1,)), 13, axis=1)
case("division of integers", "Div", {"x": INTEGERS, "y": DIVISORS}, truncate(INTEGERS, DIVISORS))
case("division of long integers", "Div", {"x": LONG, "y": LONG_DIVISORS},
     truncate(LONG, LONG_DIVISORS))  # fmt: skip
case("remainder with y's sign", "Mod", {"x": INTEGERS, "y": DIVISORS}, INTEGERS % DIVISORS)
case("remainder with x's sign", "Mod", {"x": INTEGERS, "y": DIVISORS},
     np.fmod(INTEGERS, DIVISORS), fmod=1)  # fmt: skip
case("bit shift", "BitShift", {"x": np.array([1, 200, 3, 9], np.uint8),
     "y": np.array([7, 1, 8, 0], np.uint8)}, np.array([128, 144, 0, 9], np.uint8),
     direction="LEFT")  # fmt: skip
case("quantising rounds half to even", "QuantizeLinear",
     {"x": HALVES, "s": np.array(1.0, np.float32), "z": np.array(0, np.uint8)},
     np.array([0, 2, 2, 0, 255, 0], np.uint8), constant="s z")  # fmt: skip
case("gather", "Gather", {"x": draw(5, 3), "i": np.array([4, 0, -1], np.int64)},
     draw(5, 3)[[4, 0, -1]])  # fmt: skip
case("slice", "Slice", {"x": X, "a": np.array([3], np.int64), "b": np.array([-9], np.int64),
     "c": np.array([2], np.int64), "d": np.array([-2], np.int64)}, X[:, :, 3::-2],
     constant="a b c d")  # fmt: skip
case("matmul", "MatMul", {"x": draw(4, 6), "y": draw(6, 3)}, draw(4, 6) @ draw(6, 3))
case("upsampling takes the lower neighbour", "Resize",
     {"x": draw(1, 1, 2, 2), "s": np.array([1, 1, 1.5, 1.5], np.float32)},
     draw(1, 1, 2, 2)[:, :, [0, 0, 1]][..., [0, 0, 1]], 10, constant="s")  # fmt: skip
case("resizing to one column", "Resize",
     {"x": np.arange(1, 17, dtype=np.float32).reshape(1, 1, 4, 4),
      "roi": np.zeros(0, np.float32), "s": np.zeros(0, np.float32),
      "n": np.array([1, 1, 3, 1], np.int64)},
     np.array([5 / 3, 7, 37 / 3], np.float32).reshape(1, 1, 3, 1), 19, constant="roi s n",
     mode="linear", coordinate_transformation_mode="pytorch_half_pixel")  # fmt: skip
case("transpose", "Transpose", {"x": X}, X.transpose(2, 0, 1).copy(), perm=[2, 0, 1])


def compute_lstm(x: np.ndarray, w: np.ndarray, r: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the outputs [steps, 1, batch, size] of an LSTM, gates in the order i, o, f, c."""

    def squash(v: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-v))

    size = r.shape[2]
    h, cell, rows = np.zeros((x.shape[1], size)), np.zeros((x.shape[1], size)), []
    for step in x:
        gates = step @ w[0].T + h @ r[0].T + b[0, : 4 * size] + b[0, 4 * size :]
        i, o, f, c = np.split(gates, 4, 1)
        cell = squash(f) * cell + squash(i) * np.tanh(c)
        h = squash(o) * np.tanh(cell)
        rows.append(h)
    return np.stack(rows)[:, None].astype(np.float32)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return causal attention of [batch, heads, rows, size] with grouped keys."""
    k, v = (np.repeat(part, q.shape[1] // k.shape[1], 1) for part in (k, v))
    scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3])
    hidden = np.triu(np.full(scores.shape[2:], -np.inf), 1)
    return soften(scores + hidden, (3,)).astype(np.float32) @ v


LSTM = {"x": draw(4, 2, 3), "w": draw(1, 8, 3), "r": draw(1, 8, 2), "b": draw(1, 16)}
case("LSTM", "LSTM", LSTM, compute_lstm(*LSTM.values()), constant="w r b", hidden_size=2)
QKV = {"q": draw(1, 4, 3, 2), "k": draw(1, 2, 3, 2), "v": draw(1, 2, 3, 2) + 1}
case("attention with grouped keys", "Attention", QKV, attend(*QKV.values()), 23, is_causal=1)
STEPS = np.array([3, 1], np.int64)
case("reversed sequences", "ReverseSequence", {"x": draw(4, 2), "n": STEPS},
     np.stack([draw(4, 2)[[2, 1, 0, 3], 0], draw(4, 2)[:, 1]], 1),
     time_axis=0, batch_axis=1)  # fmt: skip
PLACES = np.array([[[[-1.0, -1.0], [1.0, 1.0]], [[0.0, 0.0], [5.0, 0.0]]]], np.float32)
PICTURE = np.arange(9, dtype=np.float32).reshape(1, 1, 3, 3)
case("samples of a grid", "GridSample", {"x": PICTURE, "g": PLACES},
     np.array([[[[0, 8], [4, 0]]]], np.float32), 20, align_corners=1)  # fmt: skip

MASK = np.array([[True, False, True, True], [False, False, True, False]])
PAIRS = np.array([[[0, 0], [1, 2]], [[1, -1], [0, 3]]], np.int64)
COLUMNS = np.array([[3, 0, 1, -1], [2, 2, 0, 1]], np.int64)
FLAGS = np.array([False, True])
case("gather of booleans", "Gather", {"x": MASK, "i": COLUMNS[0]}, MASK[:, COLUMNS[0]], axis=1)
case("gather of booleans by constants", "Gather", {"x": MASK, "i": COLUMNS[0]},
     MASK[:, COLUMNS[0]], constant="i", axis=1)  # fmt: skip
case("gather of elements that are booleans", "GatherElements", {"x": MASK, "i": COLUMNS},
     np.take_along_axis(MASK, COLUMNS % 4, 1), axis=1)  # fmt: skip
case("gather of booleans by pairs", "GatherND", {"x": MASK, "i": PAIRS},
     MASK[PAIRS[..., 0], PAIRS[..., 1]])  # fmt: skip
case("gather of rows of booleans in batches", "GatherND", {"x": MASK, "i": COLUMNS[:, :1]},
     MASK[[0, 1], COLUMNS[:, 0]], batch_dims=1)  # fmt: skip
case("compressed booleans", "Compress", {"x": MASK, "c": MASK[0]}, MASK[:, MASK[0]],
     constant="c", axis=1)  # fmt: skip
case("scattered booleans", "ScatterND", {"x": MASK, "i": np.array([[0, 0], [1, 3]]), "u": FLAGS},
     np.array([[False, False, True, True], [False, False, True, True]]))  # fmt: skip
case("scattered elements that are booleans", "ScatterElements",
     {"x": MASK, "i": np.array([[3], [0]]), "u": FLAGS.reshape(2, 1)},
     np.array([[True, False, True, False], [True, False, True, False]]), axis=1)  # fmt: skip
case("reversed booleans", "ReverseSequence", {"x": MASK, "n": np.array([2, 3], np.int64)},
     np.array([[False, True, True, True], [True, False, False, False]]),
     time_axis=1, batch_axis=0)  # fmt: skip
case("a triangle of booleans", "Trilu", {"x": MASK}, np.triu(MASK))


def test_a_mask_over_a_batch_s_tokens(tmp_path: Path) -> None:
    """How exporters read a tokenizer's attention mask: integers, booleans, then one by place."""
    places = np.stack(
        np.broadcast_arrays(np.arange(2)[:, None, None], np.arange(4)[None, None]), -1
    )
    graph = Graph(
        [("mask", "int64", (2, 4)), ("x", "float32", (2, 4, 4))],
        [("y", "float32", (2, 4, 4))],
        {
            "i": places.astype(np.int64),
            "low": np.array(-3e38, np.float32),
            "zero": draw(1)[:0].sum(),
        },
    )
    graph.add("Cast", "mask", "b", to=9).add("GatherND", "b i", "seen")
    graph.add("Where", "seen zero low", "bias").add("Add", "x bias", "s")
    graph.add("Softmax", "s", "y", axis=2)
    compiled = build(save_onnx(tmp_path / "m.onnx", graph), LARGE)
    mask, x = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int64), draw(2, 4, 4)
    wanted = soften(np.where(mask[:, None] != 0, x, np.float32(-3e38)), (2,))
    np.testing.assert_allclose(run(compiled, mask, x)[0], wanted, 1e-5, 1e-6)


# kernels of all operations are in backend/compiler/test_lowering.py
@pytest.mark.parametrize("tasks", [CutReference, pytest.param(CutModel, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CASES)
def test_a_node_computes_what_the_standard_says(tmp_path: Path, name: str, tasks: Any) -> None:
    graph, opset, arrays, wanted = CASES[name]
    compiled = build(save_onnx(tmp_path / "m.onnx", graph, opset), LARGE)
    (given,) = run(compiled, *arrays.values(), tasks=tasks)
    assert given.dtype == wanted.dtype
    np.testing.assert_allclose(given, wanted, 1e-5, 1e-6)


@pytest.mark.parametrize("name", ["", "/", "/Split", ":"])
def test_nodes_need_no_name_and_no_first_output(tmp_path: Path, name: str) -> None:
    graph = Graph([FLOAT], [("z", "float32", (1, 3))], node_name=name)
    graph.add("Split", "x", "- y", axis=0).add("Relu", "y", "z")
    compiled = build(save_onnx(tmp_path / "m.onnx", graph, 13), LARGE)
    assert all(task.label for task in compiled.manifest.tasks)
    x = np.array([[1, 2, 3], [-4, 5, -6]], np.float32)
    np.testing.assert_array_equal(run(compiled, x)[0], [[0, 5, 0]])


def test_division_by_zero_stops_nobody(tmp_path: Path) -> None:
    x, y = np.array([5, -5, 0], np.int32), np.zeros(3, np.int32)
    compiled = build(save_onnx(tmp_path / "m.onnx", make("Div", {"x": x, "y": y}, x)), LARGE)
    np.testing.assert_array_equal(run(compiled, x, y, tasks=CutModel)[0], x)


def test_shapes_are_computed_from_constants_and_shapes(tmp_path: Path) -> None:
    graph = Graph(
        [("x", "float32", (2, 3, 4))],
        [("y", "float32", (6, 4))],
        {"zero": np.array(0, np.int64), "one": np.array(1, np.int64)},
    )
    graph.add("Shape", "x", "s").add("Gather", "s zero", "a").add("Gather", "s one", "b")
    graph.add("Mul", "a b", "ab").add("Constant", "", "minus", value=np.array([-1], np.int64))
    graph.add("Constant", "", "axes", value=np.array([0], np.int64))
    graph.add("Unsqueeze", "ab axes", "ab1").add("Concat", "ab1 minus", "shape", axis=0)
    graph.add("Reshape", "x shape", "y")
    compiled = build(save_onnx(tmp_path / "m.onnx", graph), LARGE)
    np.testing.assert_array_equal(run(compiled, X)[0], X.reshape(6, 4))
    assert not compiled.manifest.tasks[0].weights_digest


@pytest.mark.parametrize("flag", [True, False])
def test_if_with_a_constant_takes_one_branch_else_both(tmp_path: Path, flag: bool) -> None:
    def branch(op: str) -> Graph:
        return Graph([], [("z", "float32", (2, 3, 4))]).add(op, "x", "z")

    options = {"then_branch": branch("Neg"), "else_branch": branch("Abs")}
    wanted = -X if flag else np.abs(X)
    ports = [("x", "float32", X.shape)]
    graph = Graph(ports, [("y", "float32", X.shape)], {"c": np.array(flag)})
    compiled = build(save_onnx(tmp_path / "m.onnx", graph.add("If", "c", "y", **options)), LARGE)
    np.testing.assert_array_equal(run(compiled, X)[0], wanted)
    graph = Graph([*ports, ("c", "bool", ())], [("y", "float32", X.shape)])
    compiled = build(save_onnx(tmp_path / "m.onnx", graph.add("If", "c", "y", **options)), LARGE)
    np.testing.assert_array_equal(run(compiled, X, np.array(flag))[0], wanted)


def test_two_outputs_of_one_value_are_two_ports(tmp_path: Path) -> None:
    ports = [(name, "float32", (3,)) for name in ("x", "y", "z")]
    graph = Graph(ports[:1], ports).add("Identity", "x", "y").add("Identity", "x", "z")
    compiled = build(save_onnx(tmp_path / "m.onnx", graph), LARGE)
    x = draw(3)
    assert [given.tobytes() for given in run(compiled, x)] == [x.tobytes()] * 3


FLOAT = ("x", "float32", (2, 3))
OUT = ("y", "float32", (2, 3))
REFUSED: dict[str, tuple[Graph, int, str]] = {
    "unknown operation": (Graph([FLOAT], [OUT]).add("Frobnicate", "x", "y"), 17,
        r"node 'the Frobnicate' \(Frobnicate\) at opset 17"),
    "unknown domain": (Graph([FLOAT], [OUT]).add("Relu", "x", "y", domain="evil"), 17, "'evil'"),
    "opset too old": (Graph([FLOAT], [OUT]).add("Relu", "x", "y"), 6, "version 6 .*: 7 to"),
    "opset too new": (Graph([FLOAT], [OUT]).add("Relu", "x", "y"), 99, "version 99"),
    "shapes differ": (Graph([FLOAT, ("z", "float32", (4, 5))], [OUT]).add("Add", "x z", "y"), 17,
        r"node 'the Add' \(Add\), opset 17: .*shape"),
    "wrong declaration": (Graph([FLOAT], [("y", "float32", (3, 2))]).add("Relu", "x", "y"), 17,
        r"output 'y' has shape \[2, 3\]; the file says \[3, 2\]"),
    "wrong dtype": (Graph([FLOAT], [("y", "int32", (2, 3))]).add("Relu", "x", "y"), 17,
        "output 'y' is float32; the file says int32"),
    "shape from an input": (Graph([FLOAT, ("s", "int64", (2,))], [OUT]).add("Reshape", "x s", "y"),
        17, "node 'the Reshape' .*depends on the input 's'"),
    "data-dependent shape": (Graph([FLOAT], [("y", "int64", (2, None))]).add("NonZero", "x", "y"),
        17, "depends on the data"),
    "random numbers": (Graph([FLOAT], [OUT]).add("Bernoulli", "x", "y"), 17, "random"),
    "unknown input": (Graph([FLOAT], [OUT]).add("Add", "x w", "y"), 17, "'w', which no earlier"),
    "name twice": (Graph([FLOAT], [OUT]).add("Relu", "x", "y").add("Relu", "x", "y"), 17, "exists"),
    "no output": (Graph([FLOAT], [("z", "float32", (2, 3))]).add("Relu", "x", "y"), 17, "'z'"),
    "unused input": (Graph([FLOAT, ("u", "float32", (1,))], [OUT]).add("Relu", "x", "y"), 17,
        "'u'"),
    "unknown attribute": (Graph([FLOAT], [OUT]).add("Relu", "x", "y", colour=1), 17, "colour"),
    "strings": (Graph([("x", 8, (2, 3))], [OUT]).add("Relu", "x", "y"), 17, "string"),
    "no shape": (Graph([("x", "float32", (3, None))], [OUT]).add("Relu", "x", "y"), 17, "x.1=SIZE"),
    "one input too many": (Graph([FLOAT, ("k", "int32", (2**20,))], [OUT]).add("MaxPool", "x k",
        "y"), 17, "input 1 is one too many"),
    "training": (Graph([FLOAT], [OUT], {"r": np.array(0.5, np.float32), "t": np.array(True)}).add(
        "Dropout", "x r t", "y"), 17, "inference"),
    "endless split": (Graph([FLOAT], [OUT]).add("Split", "x", "y", num_outputs=2**40), 18,
        "num_outputs"),
    "endless scatter": (Graph([("x", "float32", (2**20,)), ("i", "int64", (2**20, 1)), ("u",
        "float32", (2**20,))], [("y", "float32", (2**20,))]).add("ScatterND", "x i u", "y"), 17,
        "1048576 updates"),
    "too large": (Graph([("x", "float32", (2**31 - 1, 2**31 - 1))], [OUT]).add("Relu", "x", "y"),
        17, "bytes; at most"),
    "bomb": (Graph([FLOAT], [("y", "float32", (None, None, None))],
        {"s": np.array([2**40, 2, 3], np.int64)}).add("Expand", "x s", "y"), 17, "size|shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, name: str) -> None:
    graph, opset, problem = REFUSED[name]
    start = time.monotonic()
    with pytest.raises(InvalidModel, match=problem):
        build(save_onnx(tmp_path / "m.onnx", graph, opset), LARGE)
    assert time.monotonic() - start < HANG_S


def test_hostile_files_are_refused_at_once(tmp_path: Path) -> None:
    def nest(depth: int) -> bytes:
        data = b""
        for _ in range(depth):
            data = piece(
                1, piece(4, "If") + piece(5, piece(1, "g") + piece(6, data) + number(20, 5))
            )
        return data

    path, tensor = tmp_path / "m.onnx", number(2, 1) + piece(8, "w")
    hostile = {
        "empty": b"",
        "no graph": number(1, 8),
        "length": b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        "endless number": b"\x08" + b"\xff" * 20,
        "group": b"\x0b\x0c",
        "deep": encode_model(nest(2_000)),
        "dims": encode_model(piece(5, number(1, 2**62) + number(1, 2**62) + tensor)),
        "negative": encode_model(piece(5, number(1, -1) + tensor)),
        "too short": encode_model(piece(5, number(1, 9) + tensor + piece(9, bytes(8)))),
        "two data": encode_model(piece(5, tensor + piece(9, bytes(4)) + piece(4, bytes(4)))),
        "two graphs": encode_model(b"") + piece(7, b""),
    }
    for name, content in hostile.items():
        path.write_bytes(content)
        start = time.monotonic()
        with pytest.raises(InvalidModel):
            read_onnx(path)
        assert time.monotonic() - start < HANG_S, name


def test_s130_a_name_is_found_at_once_however_often_it_stands() -> None:
    importer = _Importer({})
    asked = Counter[str]()

    class Names(dict[str, int]):
        def __contains__(self, name: object) -> bool:
            asked["names"] += 1
            return super().__contains__(name)

    importer.names = Names()
    found = [importer.rename(name) for name in ["ä.2", *"äöü" * 100]]
    assert found[:5] == ["_.2", "_", "_.3", "_.4", "_.5"] and len({*found}) == 301
    assert asked["names"] < 3 * len(found)


def test_s130_all_constants_of_a_model_that_shapes_depend_on_are_bounded(tmp_path: Path) -> None:
    graph = Graph([FLOAT], [("y", "float32", (2, 3))])
    graph.tensors = {"size": np.array([2, 60_000], np.int64), "shape": np.array([2, 3], np.int64)}
    for step in range(60):  # each takes a tenth of a second
        graph.tensors[f"c{step}"] = np.array([[1], [3]], np.int64)
        graph.add("Expand", f"c{step} size", f"e{step}")
        graph.add("ReduceMin", f"e{step}", f"m{step}", keepdims=0)
        graph.add("Mul", f"m{step} shape", f"s{step}")
        graph.add("Expand", f"{f'r{step - 1}' if step else 'x'} s{step}", f"r{step}")
    graph.add("Relu", "r59", "y")
    with pytest.raises(InvalidModel, match=r"constant 's\d+' that takes long to compute"):
        load_onnx(str(save_onnx(tmp_path / "m.onnx", graph)), Sizes())


@pytest.mark.long  # in small: graph/test_hostile_graphs.py
def test_a_long_chain_of_nodes_is_compiled_or_refused_without_recursion(tmp_path: Path) -> None:
    graph = Graph([FLOAT], [("v2000", "float32", (2, 3))])
    for step in range(2_000):
        graph.add("Neg" if step % 2 else "Abs", f"v{step}" if step else "x", f"v{step + 1}")
    compiled = build(save_onnx(tmp_path / "m.onnx", graph), LARGE)
    assert compiled.manifest.outputs[0].shape == (2, 3)


def test_dimensions_are_parsed_from_the_command_line() -> None:
    assert parse_dims(["batch=2", "x.0=1", "a=b=3"]) == {"batch": 2, "x.0": 1, "a=b": 3}
    for bad in (["batch"], ["=1"], ["batch=0"], ["batch=-1"], ["batch=1", "batch=1"], ["b=1e3"]):
        with pytest.raises(InvalidInput, match="write each one once"):
            parse_dims(bad)
