"""Small Llama directories, and a plain numpy Llama to compare with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from splitup.graph.arrays import get_array_dtype, round_array

# the smallest that the library reads
TOKENIZER = '{"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[]}}'

EXAMPLE = Path(__file__).parents[2] / "examples" / "packages-4m"
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "tie_word_embeddings": False,
    "vocab_size": 40,
    "eos_token_id": [3, 1],
}


def make_weights(
    config: dict[str, Any], seed: int = 0, scale: float = 0.3
) -> dict[str, np.ndarray]:
    """Return random float32 weights under their Hugging Face names."""
    random = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    size = config.get("head_dim", hidden // heads)

    def draw(*shape: int) -> np.ndarray:
        return random.normal(0, scale, shape).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": draw(config["vocab_size"], hidden),
        "model.norm.weight": 1 + draw(hidden),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = draw(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights[prefix + "input_layernorm.weight"] = 1 + draw(hidden)
        weights[prefix + "post_attention_layernorm.weight"] = 1 + draw(hidden)
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            weights[prefix + f"self_attn.{name}_proj.weight"] = draw(rows * size, hidden)
        weights[prefix + "self_attn.o_proj.weight"] = draw(hidden, heads * size)
        for name in ("gate", "up"):
            weights[prefix + f"mlp.{name}_proj.weight"] = draw(inner, hidden)
        weights[prefix + "mlp.down_proj.weight"] = draw(hidden, inner)
    return weights


def save_llama(
    directory: Path,
    config: dict[str, Any] | None = None,
    *,
    shards: int = 1,
    scale: float = 0.3,
) -> dict[str, np.ndarray]:
    """Write a model directory and return its weights."""
    config = {**TINY, **(config or {})}
    weights = make_weights(config, scale=scale)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(TOKENIZER)
    if shards == 1:
        save_file(weights, directory / "model.safetensors")
        return weights
    names = sorted(weights)
    table = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, directory / file)
        table.update(dict.fromkeys(part, file))
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": table}))
    return weights


def load_example() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return config and weights of the example model."""
    config = json.loads((EXAMPLE / "config.json").read_text())
    weights = load_file(EXAMPLE / "model.safetensors")
    return config, {name: array.astype(np.float32) for name, array in weights.items()}


def compute_logits(
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    tokens: list[int],
    seen: np.ndarray | None = None,
    cache: str = "float32",
    add_mlp: Callable[[int, np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Return the logits after every token, float32 [len(tokens), vocab].

    ``seen[i, j]`` says whether token i attends to token j; by default, to all up to itself. Keys
    and values are rounded to the dtype ``cache``, or with "8bit" to 255 steps of each row's largest
    number. ``add_mlp`` returns what a layer adds in place of
    the Llama's own MLP.

    Plain numpy from the papers: RMSNorm (arXiv 1910.07467), rotary positions in the half-split
    layout (arXiv 2104.09864), grouped queries (arXiv 2305.13245), SwiGLU (arXiv 2002.05202).
    """
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    size = config.get("head_dim", config["hidden_size"] // heads)
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    count = len(tokens)
    angles = np.arange(count)[:, None] * theta ** (-2.0 * np.arange(size // 2) / size)
    cosine, sine = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"])
        return x / scale * weights[name]

    def rotate(x: np.ndarray) -> np.ndarray:
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1)

    x = weights["model.embed_tokens.weight"][tokens].astype(np.float64)
    future = np.where(np.tri(count, dtype=bool) if seen is None else seen, 0.0, -np.inf)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        h = norm(x, prefix + "input_layernorm.weight")
        q, k, v = (
            (h @ weights[prefix + f"self_attn.{p}_proj.weight"].T).reshape(count, -1, size)
            for p in "qkv"
        )
        if prefix + "self_attn.q_norm.weight" in weights:
            q, k = (
                norm(part, f"{prefix}self_attn.{n}_norm.weight") for part, n in ((q, "q"), (k, "k"))
            )
        q, k = rotate(q), rotate(k)
        k, v = (round_rows(part, cache) for part in (k, v))
        k, v = (np.repeat(part, heads // kv_heads, 1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size) + future
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", powers / powers.sum(-1, keepdims=True), v)
        x = x + mixed.reshape(count, -1) @ weights[prefix + "self_attn.o_proj.weight"].T
        h = norm(x, prefix + "post_attention_layernorm.weight")
        if add_mlp is not None:
            x = x + add_mlp(layer, h)
            continue
        names = (f"{prefix}mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
        x = x + compute_mlp(h, *(weights[name] for name in names))
    x = norm(x, "model.norm.weight")
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return (x @ weights[head].T).astype(np.float32)


def round_rows(rows: np.ndarray, cache: str) -> np.ndarray:
    """Return keys or values [tokens, heads, size] as a cache holds them."""
    if cache != "8bit":
        return round_array(cache, rows.astype(get_array_dtype(cache)))
    steps = np.maximum(np.abs(rows).max(-1, keepdims=True), 1e-30) / 127
    return np.copysign(np.floor(np.abs(rows / steps) + 0.5), rows) * steps


def compute_mlp(h: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Return what a SwiGLU MLP gives."""
    g = h @ gate.T
    return (g / (1 + np.exp(-g)) * (h @ up.T)) @ down.T


def relative_error(given: np.ndarray, wanted: np.ndarray) -> float:
    """Return the relative L2 distance."""
    return float(np.linalg.norm(given - wanted) / np.linalg.norm(wanted))
