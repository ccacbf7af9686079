from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_deploy.frontends.decoder.rotary import compute_rope_table, make_rope
from splitup_deploy.frontends.huggingface.directory import load_huggingface
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference

from splitup.backend.runtime import TaskProgram
from splitup.core.errors import InvalidModel
from splitup.graph.arrays import encode_array, round_array
from tests.deploy.checkpoints import DTYPES
from tests.deploy.llamas import TINY, compute_logits, relative_error, save_llama
from tests.deploy.quantisations import write_tensors
from tests.deploy.reference_program import ReferenceProgram, load_graph
from tests.deploy.steps import feed
from tests.parameters import some_of

TOKENS = [5, 0, 39, 7, 7, 12, 1, 30, 22, 3]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 12, "num_hidden_layers": 1},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    ],
)
def test_logits_agree_with_numpy(change: dict[str, Any], tmp_path: Path) -> None:
    config = {key: value for key, value in {**TINY, **change}.items() if value is not None}
    weights = save_llama(tmp_path, change)
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = feed(load_graph(str(tmp_path)), TOKENS)
    assert relative_error(given, compute_logits(config, weights, TOKENS)) <= 1e-4


@pytest.mark.long  # in small: test_step.py
def test_several_rows_in_one_step_give_the_same(tmp_path: Path) -> None:
    weights = save_llama(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    program = load_reference(str(tmp_path), Sizes(chunk=4))
    wanted = compute_logits(TINY, weights, TOKENS)
    assert relative_error(feed(program, TOKENS, rows=4), wanted) <= 1e-4
    with pytest.raises(InvalidModel, match="--chunk 1 to 16"):
        load_reference(str(tmp_path), Sizes(chunk=17))


@pytest.mark.parametrize("chunk", [1, 4])
def test_the_head_multiplies_rows_in_memory(chunk: int, tmp_path: Path) -> None:
    """Looking them up on the way would keep the largest product from its kernel."""
    save_llama(tmp_path)
    graph = load_huggingface(str(tmp_path), Sizes(chunk=chunk)).traced.graph
    (output,) = graph.outputs
    found, pending = [], list(graph.nodes[output.node].srcs)
    while pending:
        node = graph.nodes[pending.pop()]
        found.append(node.op)
        pending.extend(() if node.op == "CONTIGUOUS" else node.srcs)
    assert "CONTIGUOUS" in found
    assert "LOOKUP" not in found


@pytest.mark.long  # in small: test_gguf_parts.py; without tensors in test_whole_checkpoints.py
def test_shards_give_the_same_model(tmp_path: Path) -> None:
    save_llama(tmp_path / "one")
    save_llama(tmp_path / "three", shards=3)
    one, three = (load_reference(str(tmp_path / name)) for name in ("one", "three"))
    assert one.task_id == three.task_id


@pytest.mark.parametrize("dtype", some_of(["float16", "bfloat16"], "bfloat16"))
# compiled in small: on_device_models.py on WebGPU, and the example in test_cut_equals_whole.py
@pytest.mark.parametrize("load", some_of([load_graph, load_reference], load_graph))
def test_a_model_of_halves_computes_in_float32_and_caches_halves(
    load: Callable[..., ReferenceProgram | TaskProgram], dtype: str, tmp_path: Path
) -> None:
    """Widened exactly, and keys and values rounded to nearest, also those of the step itself."""
    weights = save_halves(tmp_path, dtype)
    for chunk in (1, 4):
        given = feed(load(str(tmp_path), Sizes(chunk=chunk)), TOKENS, rows=chunk)
        assert relative_error(given, compute_logits(TINY, weights, TOKENS, cache=dtype)) <= 5e-5
    assert relative_error(given, compute_logits(TINY, weights, TOKENS)) >= 2e-4


def save_halves(directory: Path, dtype: str) -> dict[str, np.ndarray]:
    """Write weights as float16 or bfloat16; return the numbers. numpy has no bfloat16."""
    tensors, wide = {}, {}
    for name, array in save_llama(directory).items():
        wide[name] = round_array(dtype, array).astype(np.float32)
        tensors[name] = np.frombuffer(encode_array(dtype, wide[name]), "<u2").reshape(array.shape)
    write_tensors(
        directory / "model.safetensors",
        {name: (DTYPES[dtype], bits) for name, bits in tensors.items()},
    )
    return wide


def test_the_rope_table_is_exact() -> None:
    """Against the library's float64 functions, also at positions far beyond a block."""
    count = 40_000
    data = compute_rope_table(count, make_rope(10000.0, 8))
    table = np.frombuffer(data, np.float32).reshape(count, 2, 4)
    angles = np.arange(count)[:, None] * 10000.0 ** (-2.0 * np.arange(4) / 8)
    np.testing.assert_allclose(table[:, 0], np.cos(angles), atol=4e-8, rtol=0)
    np.testing.assert_allclose(table[:, 1], np.sin(angles), atol=4e-8, rtol=0)
    assert data[: 999 * 32] == compute_rope_table(999, make_rope(10000.0, 8))


@pytest.mark.parametrize(
    ("theta", "dims", "words"),
    [
        (1e-300, 64, "rope theta"),
        (float("nan"), 64, "rope theta"),
        (1e300, 64, "rope theta"),
        (10_000.0, 1 << 30, "rotary dimensions"),
    ],
)
def test_rope_that_would_take_for_ever_is_refused(theta: float, dims: int, words: str) -> None:
    with pytest.raises(InvalidModel, match=words):
        make_rope(theta, dims)
