"""Steps of a random Llama of any size on this process's device; no file holds its weights.

    python -m bench.gpu.random_model ours|tinygrad NAME CHUNK   # one JSON object on stdout

Every weight is a piece of one table of random numbers, so that 7 B parameters take no disk. Both
sides have the same weights.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from bench.testbed.models import LLAMA_15M, LLAMA_124M, shape_llama
from bench.testbed.tinygrad_llama import Llama, iter_shapes
from tests.deploy import ggufs
from tests.deploy.llamas import TINY

CHUNK: Final = 64
CONTEXT: Final = 512
TOKENS: Final = 24
FIRST: Final = 5
_FLOAT32: Final = {"torch_dtype": "float32"}
_HALF: Final[dict[str, Any]] = {"torch_dtype": "float16"}
_1B: Final = shape_llama(2_048, 5_632, layers=22, heads=32, kv_heads=4, **_HALF)
_7B: Final = shape_llama(4_096, 11_008, layers=32, heads=32, kv_heads=32, **_HALF)
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "15M": LLAMA_15M | _FLOAT32,
    "124M": LLAMA_124M | _FLOAT32,
    "1.1B": _1B,
    "1.1B Q4_0": {**_1B, "torch_dtype": "Q4_0"},
    "7B": _7B,
    "7B Q4_0": {**_7B, "torch_dtype": "Q4_0"},
}
_TABLE: Final = 2**22 + 2**12 + 3  # numbers; no multiple of a matrix's rows


def make_config(name: str) -> dict[str, Any]:
    """Return the config.json of a model."""
    return {**TINY, "rope_theta": 10_000.0, **CONFIGS[name], "max_position_embeddings": CONTEXT}


def save_hollow_gguf(path: Path, config: dict[str, Any]) -> None:
    """Write the head of a GGUF file of Q4_0 matrices; what follows is a hole of zeros."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in iter_shapes(config):
        stem, _, kind = name.rpartition(".")
        layer, _, rest = stem.removeprefix("model.layers.").partition(".")
        place = ggufs.NAMES.get(stem) or f"blk.{layer}.{ggufs.NAMES[rest]}"
        tensors[f"{place}.{kind}"] = ("Q4_0" if len(shape) > 1 else "F32", shape)
    heads = config["num_attention_heads"]
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": CONTEXT,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": config["hidden_size"] // heads,
    }
    head = {"general.architecture": "llama", **{f"llama.{key}": v for key, v in values.items()}}
    ggufs.write_hollow_gguf(path, {**head, **ggufs.make_tokens(config["vocab_size"])}, tensors)


class Weights:
    """Random weights by name: normal numbers, as large as keeps the hidden state's size."""

    def __init__(self) -> None:
        self._table = np.random.default_rng(0).standard_normal(_TABLE).astype(np.float32)
        self._made: dict[str, np.ndarray[Any, Any]] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        """Return a weight, the same in all layers, of numbers as large as keep the state's size."""
        if (key := re.sub("[0-9]+", "", name)) not in self._made:
            self._made[key] = self._make(key, shape, dtype)
        return self._made[key]

    def _make(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        count = math.prod(shape)
        start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % _TABLE
        scale, middle = (0.1, 1.0) if len(shape) == 1 else (0.5 / math.sqrt(shape[-1]), 0.0)
        piece = (np.roll(self._table, -start) * scale + middle).astype(dtype)
        return np.resize(piece, count).reshape(shape)


def split_weight(name: str, config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of the weights that the compiler joined to this one."""
    shapes = dict(iter_shapes(config))
    for joined, parts in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
        if joined in name:
            names = [name.replace(joined, f"{part}_proj") for part in parts]
            return [(one, shapes[one]) for one in names]
    return [(name, shapes[name])]


def run_ours(name: str, chunk: int) -> dict[str, Any]:
    """Compile and run the model as one task; returns times in milliseconds and memory in bytes."""
    from splitup_deploy.cutting.build import prepare
    from splitup_deploy.frontends.source_model import Sizes

    from splitup.backend.runtime import TaskProgram
    from splitup.decode.step import make_arrays, make_causal_step
    from splitup.graph.rules import check_graph

    weights, config, begun = Weights(), make_config(name), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        if config["torch_dtype"] == "Q4_0":
            save_hollow_gguf(path := path.with_suffix(".gguf"), config)
        else:
            path.write_text(json.dumps(config))
        traced = prepare(str(path), Sizes(context=CONTEXT, chunk=chunk)).traced
    shapes = {one.name: one for one in traced.graph.weights}

    @functools.cache
    def make_bytes(weight: str) -> bytes:
        spec = shapes[weight]
        if spec.dtype == "uint8":  # blocks of 18 bytes: a float16 scale, 32 numbers of 4 bits
            blocks = np.random.default_rng(1).integers(0, 256, (2**16 + 3, 18), dtype=np.uint8)
            blocks[:, :2] = np.frombuffer(np.float16(2**-8).tobytes(), np.uint8)
            return np.resize(blocks, spec.shape).tobytes()
        parts = [weights.get(*part, spec.dtype) for part in split_weight(weight, config)]
        return np.concatenate(parts).tobytes()

    def get_bytes(weight: str) -> memoryview:
        if weight.endswith(".rope"):
            return memoryview(b"".join(traced.weights[weight].read()))
        first = re.sub(r"layers\.[0-9]+", "layers.0", weight)
        return memoryview(make_bytes(first))

    get_digest = functools.cache(lambda name: hashlib.sha256(get_bytes(name)).hexdigest())
    named = [
        replace(weight, digest=get_digest(re.sub(r"layers\.[0-9]+", "layers.0", weight.name)))
        for weight in traced.graph.weights
    ]
    graph = check_graph(replace(traced.graph, weights=tuple(named)))

    program = TaskProgram.from_graph(graph, get_bytes)
    loaded_s = time.perf_counter() - begun
    [logits] = program.outputs

    def make_inputs(tokens: list[int], position: int) -> list[bytes]:
        arrays = make_arrays(make_causal_step(tokens, position), chunk)
        return [arrays[spec.name].tobytes() for spec in program.inputs]

    state, token, times = program.new_state(), FIRST, []
    digest = hashlib.sha256()
    for position in range(TOKENS):
        inputs = make_inputs([token], position)
        started = time.perf_counter()
        [out] = program.run(state, inputs)
        times.append(1e3 * (time.perf_counter() - started))
        digest.update(out)
        token = int(np.frombuffer(out, np.float32).reshape(-1, logits.shape[-1])[-1].argmax())
    result = {
        "load_s": round(loaded_s, 2),
        "step_ms": round(median(times[4:]), 3),
        "predicted_bytes": program.vram_bytes,
        "allocated_bytes": program.allocated_bytes,
        "weight_bytes": sum(one.spec.nbytes for one in graph.weights),
        "sha256": digest.hexdigest()[:16],
    }
    if chunk > 1:
        rows = [list(range(1, chunk + 1))] * 5
        state, spent = program.new_state(), []
        for number, row in enumerate(rows):
            inputs = make_inputs(row, number * chunk)
            started = time.perf_counter()
            program.run(state, inputs)
            spent.append(1e3 * (time.perf_counter() - started))
        result["chunk_ms"] = round(median(spent[2:]), 3)
    return result


def run_tinygrad(name: str, _: int) -> dict[str, Any]:
    """Run tinygrad's own jitted model on the same weights."""
    from tinygrad import UOp
    from tinygrad.tensor import Tensor

    weights, config = Weights(), make_config(name)
    dtype = config["torch_dtype"]
    model = Llama(config, CONTEXT, lambda weight, shape: weights.get(weight, shape, dtype))
    position, token, times = UOp.variable("at", 0, CONTEXT - 1), FIRST, list[float]()
    for at in range(TOKENS):
        started = time.perf_counter()
        logits: Any = model.step(Tensor([[token]]), position.bind(at)).numpy()
        times.append(1e3 * (time.perf_counter() - started))
        token = int(logits[0, -1].argmax())
    return {"step_ms": round(median(times[4:]), 3)}


def main() -> None:
    """Run one side of one model."""
    os.environ.setdefault("DEV", "CUDA")
    if sys.argv[1] == "tinygrad":
        from splitup.backend.devices.device_choice import select_device

        select_device()  # the same compiler
    side: Callable[[str, int], dict[str, Any]]
    side = {"ours": run_ours, "tinygrad": run_tinygrad}[sys.argv[1]]
    print(json.dumps(side(sys.argv[2], int(sys.argv[3]))))


if __name__ == "__main__":
    main()
