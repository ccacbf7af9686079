"""Small mixtures of experts as Hugging Face directories, and a plain numpy model of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.deploy import llamas
from tests.deploy.llamas import TOKENIZER, compute_mlp

COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "rope_theta": 500.0,
    "tie_word_embeddings": False,
    "vocab_size": 40,
    "eos_token_id": 3,
}
MIXTRAL: dict[str, Any] = {
    **COMMON,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "rms_norm_eps": 1e-5,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN3_MOE: dict[str, Any] = {
    **COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "rms_norm_eps": 1e-6,
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "num_hidden_layers": 3,
}
CASES: dict[str, dict[str, Any]] = {
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe_plain": {**QWEN3_MOE, "norm_topk_prob": False, "decoder_sparse_step": 2},
}
TOKENS = [3, 17, 39, 0, 8, 8, 25, 31, 2, 14, 5, 36]
GOLDEN = Path(__file__).parent / "golden" / "moe_logits.npz"


def compute_digest(config: dict[str, Any]) -> str:
    """Return what names a configuration and its weights."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, array in sorted(make_weights(config).items()):
        digest.update(name.encode() + array.tobytes())
    return digest.hexdigest()


def make_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Return random float32 weights under their Hugging Face names."""
    random = np.random.default_rng(seed)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads, size = config["num_key_value_heads"], config.get("head_dim", hidden // heads)

    def draw(*shape: int) -> np.ndarray:
        return random.normal(0, 0.3, shape).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": draw(config["vocab_size"], hidden),
        "model.norm.weight": 1 + draw(hidden),
        "lm_head.weight": draw(config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = 1 + draw(hidden)
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            weights[f"{prefix}self_attn.{name}_proj.weight"] = draw(rows * size, hidden)
        weights[f"{prefix}self_attn.o_proj.weight"] = draw(hidden, heads * size)
        if config["model_type"] != "mixtral":
            for name in ("q_norm", "k_norm"):
                weights[f"{prefix}self_attn.{name}.weight"] = 1 + draw(size)
        for name, out, inner in _list_mlps(config, layer):
            weights[prefix + name] = draw(out, inner)
    return weights


def save_moe(
    directory: Path,
    config: dict[str, Any],
    dtype: str = "float32",
    weights: dict[str, np.ndarray] | None = None,
) -> None:
    """Write a model directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(TOKENIZER)
    table = {n: array.astype(dtype) for n, array in (weights or make_weights(config)).items()}
    save_file(table, directory / "model.safetensors")


def compute_logits(
    config: dict[str, Any], weights: dict[str, np.ndarray], tokens: list[int]
) -> np.ndarray:
    """Return the logits after every token: a Llama's, with experts in place of its MLP."""
    weights = {name: array.astype(np.float64) for name, array in weights.items()}

    def add_mlp(layer: int, h: np.ndarray) -> np.ndarray:
        names = [f"model.layers.{layer}.{name}" for name, _, _ in _list_mlps(config, layer)]
        if len(names) == 3:
            return compute_mlp(h, *(weights[name] for name in names))
        routed = h @ weights[names[0]].T
        powers = np.exp(routed - routed.max(-1, keepdims=True))
        powers /= powers.sum(-1, keepdims=True)
        added = np.zeros_like(h)
        for row in range(len(tokens)):
            best = np.argsort(-powers[row], kind="stable")[: config["num_experts_per_tok"]]
            gates = powers[row, best]
            if config.get("norm_topk_prob", True):
                gates = gates / gates.sum()
            for expert, gate in zip(best, gates, strict=True):
                three = names[1 + 3 * expert : 4 + 3 * expert]
                added[row] += gate * compute_mlp(h[row], *(weights[name] for name in three))
        return added

    return llamas.compute_logits(config, weights, tokens, add_mlp=add_mlp)


def _list_mlps(config: dict[str, Any], layer: int) -> list[tuple[str, int, int]]:
    """Return (name, outputs, inputs): a dense MLP's three, or the router and three per expert."""
    hidden = config["hidden_size"]
    if config["model_type"] == "mixtral":
        prefix, names = "block_sparse_moe", ("w1", "w3", "w2")
        count, inner = config["num_local_experts"], config["intermediate_size"]
    else:
        prefix, names = "mlp", ("gate_proj", "up_proj", "down_proj")
        count, inner = config["num_experts"], config["moe_intermediate_size"]
        if layer in config["mlp_only_layers"] or (layer + 1) % config["decoder_sparse_step"]:
            inner = config["intermediate_size"]
            shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
            return [(f"mlp.{n}.weight", *shape) for n, shape in zip(names, shapes, strict=True)]
    rows = [(f"{prefix}.gate.weight", count, hidden)]
    for expert in range(count):
        for name, shape in zip(names, ((inner, hidden),) * 2 + ((hidden, inner),), strict=True):
            rows.append((f"{prefix}.experts.{expert}.{name}.weight", *shape))
    return rows
