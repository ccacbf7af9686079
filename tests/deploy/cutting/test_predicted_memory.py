"""What a task takes is never more than was predicted from its graph, whatever the cut.

tinygrad once kept what two values of a task need, such as the mean of a row, instead of computing
it twice as predicted; the first case is such a task.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends.source_model import Sizes

from splitup.backend.compiler.schedule import compile_graph
from splitup.backend.devices.device_choice import select_device
from splitup.core.errors import InvalidModel
from splitup.graph.manifest import get_task_key
from splitup.graph.memory import round_up
from splitup.graph.rules import load_graph
from tests.deploy import checkpoints, variations
from tests.deploy.checkpoints import Case, save_checkpoint
from tests.deploy.mixtures import Shapes
from tests.parameters import some_of

_FOUND = {
    **{"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 96},
    **{"sliding_window_pattern": 4, "sliding_window": 4, "max_position_embeddings": 128},
    **{"num_key_value_heads": 1, "head_dim": 8},
}


def iter_parallel(case: Case) -> Shapes:
    """Yield the names and shapes of a Cohere 2's weights."""
    c = case.config
    hidden, inner, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    cached = hidden // heads * c["num_key_value_heads"]
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        for name, rows in (("q", hidden), ("k", cached), ("v", cached), ("o", hidden)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
        for name in ("gate", "up"):
            yield f"{prefix}mlp.{name}_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, inner)


def check_cut(directory: Path, case: Case, chunk: int, share: float) -> int:
    """Cut a model at a share of its memory and compile its tasks; return how many there are."""
    save_checkpoint(directory, case)
    sizes = Sizes(chunk=chunk)
    (whole,) = build(str(directory), 10**9, sizes=sizes).manifest.tasks
    built = build(str(directory), int(whole.vram_bytes * share), sizes=sizes)
    stored = {blob.key: b"".join(blob.open()) for blob in built.blobs}
    for task in built.manifest.tasks:
        schedule = compile_graph(load_graph(stored[get_task_key(task.task_id)]), DEVICE)
        taken = sum(schedule.inputs) + sum(schedule.weights) + sum(schedule.values)
        taken += 2 * sum(round_up(size) for size in schedule.states)
        assert taken <= task.vram_bytes, (case.config, case.dtype, chunk, share, task.label)
    return len(built.manifest.tasks)


DEVICE = select_device().device


@pytest.mark.long  # in small: one random cut, below
def test_what_values_share_is_computed_as_predicted(tmp_path: Path) -> None:
    case = replace(variations.CASES["cohere2"], shapes=iter_parallel, dtype="float16")
    assert check_cut(tmp_path, replace(case, change={**case.change, **_FOUND}), 12, 0.5) == 3


@pytest.mark.parametrize("seed", some_of(range(4), 3))
def test_random_cuts_take_what_was_predicted(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    names = ("llama", "qwen3", "olmo2", "gemma3", "phi3", "cohere2")
    name = names[draw.randrange(len(names))]
    case = variations.CASES[name] if name == "cohere2" else checkpoints.CASES[name]
    change: dict[str, Any] = {
        "intermediate_size": draw.choice([48, 96, 128]),
        "max_position_embeddings": draw.choice([32, 64, 128]),
        "vocab_size": draw.choice([40, 96, 300]),
    }
    case = replace(
        case,
        change={**case.change, **change},
        shapes=iter_parallel if name == "cohere2" else None,
        dtype=draw.choice(["float32", "float16", "bfloat16"]),
    )
    try:
        assert check_cut(tmp_path, case, draw.choice([1, 3, 8, 12]), draw.uniform(0.3, 0.6)) > 1
    except InvalidModel as error:  # an operation alone takes more than such a share
        assert "raise --target-vram" in str(error)
