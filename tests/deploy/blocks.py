"""Small models that write blocks of tokens, as Hugging Face directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.deploy import moes

BLOCK, MASK = 4, 38
# as published: fields of the code that trained it, and no experts
SDAR: dict[str, Any] = {
    **moes.COMMON,
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "rms_norm_eps": 1e-6,
    "head_dim": 16,
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "fuse_cross_entropy": True,
    "use_sliding_window": False,
    "max_window_layers": 2,
    "sliding_window": None,
}
SDAR_MOE: dict[str, Any] = {
    **moes.QWEN3_MOE,
    "architectures": ["SDARMoeForCausalLM"],
    "model_type": "sdar_moe",
    "block_length": BLOCK,
    "mask_token_id": MASK,
    "ep_size": 1,
}
# what ``moes`` takes for "no experts"
NO_EXPERTS = {
    "num_experts": 1,
    "moe_intermediate_size": 1,
    "mlp_only_layers": list(range(8)),
    "decoder_sparse_step": 1,
}
CASES = {"sdar": SDAR, "sdar-moe": SDAR_MOE}
TOKENS = [3, 17, 39, 0, 8, 8, 25, 31, 2, MASK, 5, MASK]
GOLDEN = Path(__file__).parent / "golden" / "block_logits.npz"


def make_weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return random weights under their Hugging Face names."""
    return moes.make_weights({**NO_EXPERTS, **config})


def save_blocks(directory: Path, config: dict[str, Any]) -> None:
    """Write a model directory."""
    moes.save_moe(directory, config, weights=make_weights(config))
