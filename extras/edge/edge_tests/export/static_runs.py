"""A static graph computed with numpy, and sequences fed through one step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from splitup_deploy.frontends.huggingface.directory import open_decoder
from splitup_deploy.frontends.onnx.onnx_graph import OnnxModel, OnnxNode, OnnxTensor
from splitup_deploy.frontends.source_model import Sizes
from splitup_edge.export.static_graph import build_static_step, make_shape
from splitup_edge.static_step import StaticShape, keep_rows, make_static_inputs

from splitup.core.tensors import get_numpy_dtype
from splitup.decode.step import StepInput, make_arrays

Run = Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]


def open_static(directory: Path, max_len: int, block: int) -> tuple[OnnxModel, StaticShape]:
    opened = open_decoder(directory, Sizes(context=max_len))
    shape = make_shape(opened.config, block)
    model = build_static_step(opened.config, opened.weights, shape)
    opened.check_all_read()
    return model, shape


def read_tensor(tensor: OnnxTensor) -> np.ndarray:
    return np.frombuffer(tensor.read(), get_numpy_dtype(tensor.dtype)).reshape(tensor.shape)


def run_numpy(model: OnnxModel) -> Run:
    """Return what computes the graph, in float64."""
    held = {name: read_tensor(tensor) for name, tensor in model.graph.tensors.items()}

    def run(inputs: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        values: dict[str, np.ndarray] = {**held, **inputs}
        for node in model.graph.nodes:
            values[node.outputs[0]] = compute(node, [values[name] for name in node.inputs])
        return {port.name: values[port.name] for port in model.graph.outputs}

    return run


def compute(node: OnnxNode, given: Sequence[Any]) -> np.ndarray:
    options: dict[str, Any] = dict(node.attributes)
    x, *rest = (array.astype(np.float64) if array.dtype == np.float32 else array for array in given)
    simple = {
        "Add": np.add,
        "Sub": np.subtract,
        "Mul": np.multiply,
        "MatMul": np.matmul,
        "Div": np.divide,
        "Max": np.maximum,
    }
    if node.op in simple:
        return simple[node.op](x, rest[0])
    if node.op == "Gemm":
        return x @ rest[0].T + (rest[1] if len(rest) > 1 else 0.0)
    if node.op == "RMSNormalization":
        mean = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(mean + options["epsilon"]) * rest[0]
    if node.op == "Softmax":
        powers = np.exp(x - x.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)
    if node.op == "Slice":
        start, end, axis = (int(array[0]) for array in rest)
        assert end <= x.shape[axis]
        return x[(slice(None),) * axis + (slice(start, end),)]
    others: dict[str, Callable[[], np.ndarray]] = {
        "Concat": lambda: np.concatenate([x, *rest], options["axis"]),
        "Gather": lambda: x[rest[0]],
        "ReduceSum": lambda: x.sum(tuple(rest[0]), keepdims=bool(options["keepdims"])),
        "Reshape": lambda: x.reshape(rest[0]),
        "Sigmoid": lambda: 1 / (1 + np.exp(-x)),
        "Sign": lambda: np.sign(x),
        "Tanh": lambda: np.tanh(x),
        "Transpose": lambda: x.transpose(options["perm"]),
    }
    return others[node.op]()


def feed_static(
    run: Run,
    shape: StaticShape,
    steps: Sequence[StepInput],
    *,
    chunk: int | None = None,
    commits: Sequence[bool] | None = None,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the wanted logits of every step, and the last cache."""
    cache, found = shape.new_cache(), []
    for number, step in enumerate(steps):
        arrays = make_arrays(step, chunk or shape.block)
        keep_rows(cache, arrays["layout"])
        is_kept = commits is None or commits[number]
        inputs = make_static_inputs(arrays, shape, commits=is_kept)
        result = run({**inputs, "kv_cache": cache})
        cache = result["updated_kv_cache"].astype(np.float32)
        found.append(result["logits"][0][arrays["outputs"]])
    return found, cache
