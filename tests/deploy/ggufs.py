"""Small GGUF files, written here, and what their tensors stand for."""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.deploy import moes
from tests.deploy.checkpoints import Case
from tests.deploy.checkpoints import iter_shapes as iter_case_shapes
from tests.deploy.checkpoints import make_weights as make_case_weights
from tests.deploy.llamas import TINY, make_weights

ALIGNMENT = 32
KINDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30}
BLOCKS = {  # elements, bytes, a scale that gives weights of usual size, and where it stands
    "Q4_0": (32, 18, 0.03, (0,)),
    "Q4_1": (32, 20, 0.02, (0, 2)),
    "Q8_0": (32, 34, 0.004, (0,)),
    "Q4_K": (256, 144, 0.0005, (0, 2)),
    "Q6_K": (256, 210, 0.00015, (208,)),
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}
MIXTURE_NAMES = {
    **NAMES,
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate.e_score_correction_bias": "exp_probs_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
DENSE_NAMES = {
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "gemma2": _GEMMA_NAMES,
    "gemma3": _GEMMA_NAMES,
}
MIXTURES = {
    "olmoe": "olmoe",
    "glm4_moe": "glm4moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
}
ARRAY = 9


def encode_text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def encode_value(value: Any) -> bytes:
    """Return a metadata value with its kind: bool, int (uint32), float (float32), str or a list.

    Lists of ints are int32, as the converter writes them.
    """
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + encode_text(value)
    items = [encode_value(item) for item in value]
    kind = items[0][:4] if items else struct.pack("<I", 8)
    if kind == struct.pack("<I", 4):
        kind = struct.pack("<I", 5)
    return (
        struct.pack("<I", ARRAY)
        + kind
        + struct.pack("<Q", len(items))
        + b"".join(item[4:] for item in items)
    )


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]],
) -> bytes:
    """Write a file of (format, numpy shape, bytes) per tensor, and return it."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += encode_text(key) + encode_value(value)
    body = b""
    for name, (form, shape, data) in tensors.items():
        body += b"\0" * (-len(body) % ALIGNMENT)
        head += encode_text(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", KINDS[form], len(body))
        body += data
    head += b"\0" * (-len(head) % ALIGNMENT)
    path.write_bytes(head + body)
    return head + body


def write_hollow_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    """Write a file of (format, numpy shape) per tensor, whose numbers are a hole of zeros."""
    head, end = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)), 0
    for key, value in metadata.items():
        head += encode_text(key) + encode_value(value)
    for name, (form, shape) in tensors.items():
        end += -end % ALIGNMENT
        head += encode_text(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", KINDS[form], end)
        numbers, nbytes = BLOCKS[form][:2] if form in BLOCKS else (1, 4)
        end += math.prod(shape) // numbers * nbytes
    head += b"\0" * (-len(head) % ALIGNMENT)
    path.write_bytes(head)
    os.truncate(path, len(head) + end)


def quantise(array: np.ndarray, form: str) -> tuple[bytes, np.ndarray]:
    """Return an array's bytes in a format, and the float32 values that these stand for.

    Blocks get random small numbers with the array's spread: what counts is that both agree.
    """
    if form == "F32":
        return array.astype("<f4").tobytes(), array
    if form == "F16":
        half = array.astype("<f2")
        return half.tobytes(), half.astype(np.float32)
    size, nbytes, scale, places = BLOCKS[form]
    count = array.size // size
    random = np.random.default_rng(array.size)
    raw = random.integers(0, 256, (count, nbytes), dtype=np.uint8)
    for at in places:
        raw[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return raw.tobytes(), dequantise(raw, form).reshape(array.shape)


def dequantise(raw: np.ndarray, form: str) -> np.ndarray:
    """Return float32 [blocks, elements] of uint8 [blocks, bytes], in plain numpy."""

    def half(at: int) -> np.ndarray:
        return raw[:, at : at + 2].copy().view("<f2").astype(np.float32)

    if form == "Q4_0":
        q = np.concatenate([raw[:, 2:] & 15, raw[:, 2:] >> 4], 1).astype(np.float32) - 8
        return q * half(0)
    if form == "Q4_1":
        q = np.concatenate([raw[:, 4:] & 15, raw[:, 4:] >> 4], 1).astype(np.float32)
        return q * half(0) + half(2)
    if form == "Q8_0":
        return raw[:, 2:].view(np.int8).astype(np.float32) * half(0)
    if form == "Q4_K":
        s = raw[:, 4:16]
        scale = np.concatenate([s[:, :4] & 63, (s[:, 8:] & 15) | (s[:, :4] >> 6 << 4)], 1)
        low = np.concatenate([s[:, 4:8] & 63, (s[:, 8:] >> 4) | (s[:, 4:8] >> 6 << 4)], 1)
        data = raw[:, 16:].reshape(-1, 4, 1, 32)
        q = np.concatenate([data & 15, data >> 4], 2).reshape(-1, 8, 32).astype(np.float32)
        values = q * (scale * half(0))[:, :, None] - (low * half(2))[:, :, None]
        return values.reshape(len(raw), -1)
    low = raw[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], 2).reshape(-1, 256)
    high = raw[:, 128:192].reshape(-1, 2, 1, 32)
    high = np.concatenate([high >> 2 * part & 3 for part in range(4)], 2).reshape(-1, 256)
    q = (low | high << 4).astype(np.float32) - 32
    scales = raw[:, 192:208].view(np.int8).astype(np.float32) * half(208)
    return (q.reshape(-1, 16, 16) * scales[:, :, None]).reshape(len(raw), -1)


def interleave(data: bytes, rows: int, head_dim: int) -> bytes:
    """Reorder the rows of heads as the converter of the llama architecture does."""
    array = np.frombuffer(data, np.uint8).reshape(rows // head_dim, 2, head_dim // 2, -1)
    return array.swapaxes(1, 2).tobytes()


def make_tokens(vocab: int) -> dict[str, Any]:
    """Return the metadata of a byte-level BPE with ``vocab`` tokens."""
    letters = [chr(ord("a") + index) for index in range(26)]
    tokens = [*letters, "Ġ", "ab", "abc", "Ġa"]
    special = [f"<|{index}|>" for index in range(vocab - len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*tokens, *special],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3] * len(special),
        "tokenizer.ggml.merges": ["a b", "ab c", "Ġ a"],
        "tokenizer.ggml.eos_token_id": vocab - 1,
    }


def save_gguf(
    path: Path,
    config: Mapping[str, Any] | None = None,
    *,
    family: str = "llama",
    forms: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Write a model; return its config.json and the weights that it stands for, by HF names.

    ``forms`` gives the format of matrices by GGUF name, "" for all others.
    """
    table = {**TINY, **(config or {})}
    heads, hidden = table["num_attention_heads"], table["hidden_size"]
    head_dim = table.get("head_dim", hidden // heads)
    is_moe = "num_experts_per_tok" in table
    weights = {**(moes.make_weights if is_moe else make_weights)(table), **(extra or {})}
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, array in weights.items():
        stem, _, kind = name.rpartition(".")
        if stem in NAMES:
            place = NAMES[stem]
        else:
            layer, _, rest = stem.removeprefix("model.layers.").partition(".")
            rest = re.sub(r"experts\.[0-9]+", "experts", rest)
            place = f"blk.{layer}.{NAMES.get(rest) or 'attn_' + rest[10] + '_norm'}"
        short = place.rpartition(".")[2]
        chosen = (forms or {}).get(short, (forms or {}).get("", "F32"))
        form = chosen if array.ndim == 2 else "F32"
        data, weights[name] = quantise(array, form)
        if family == "llama" and short in ("attn_q", "attn_k"):
            data = interleave(data, array.shape[0], head_dim)
        shape: tuple[int, ...] = array.shape
        if ".experts." in name:  # all of a layer's in one tensor
            _, (count, *_), before = tensors.get(f"{place}.{kind}", (form, (0,), b""))
            shape, data = (count + 1, *shape), before + data
        tensors[f"{place}.{kind}"] = (form, shape, data)
    values = {
        "block_count": table["num_hidden_layers"],
        "context_length": table["max_position_embeddings"],
        "embedding_length": hidden,
        "feed_forward_length": table["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": table["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": table["rms_norm_eps"],
        "rope.freq_base": float(table["rope_theta"]),
        "rope.dimension_count": head_dim,
    }
    if is_moe:
        count = table.get("num_experts", table.get("num_local_experts"))
        values |= {"expert_count": count, "expert_used_count": table["num_experts_per_tok"]}
    if "moe_intermediate_size" in table:
        values["expert_feed_forward_length"] = table["moe_intermediate_size"]
    if "head_dim" in table:
        values["attention.key_length"] = values["attention.value_length"] = head_dim
    head = {"general.architecture": family}
    head.update({f"{family}.{key}": value for key, value in values.items()})
    head.update(make_tokens(table["vocab_size"]))
    head.update(metadata or {})
    write_gguf(path, {k: v for k, v in head.items() if v is not None}, tensors)
    return table, weights


def save_dense(path: Path, case: Case, metadata: Mapping[str, Any] | None = None) -> None:
    """Write a Gemma or Phi-3 of ``tests/deploy/checkpoints.py`` as its converter does.

    It adds 1 to a Gemma's norms: here the checkpoint holds the sums.
    """
    c, family = case.config, case.model_type.removesuffix("_text")
    names, shapes = {**MIXTURE_NAMES, **DENSE_NAMES[family]}, dict(iter_case_shapes(case))
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, data in make_case_weights(case).items():
        stem, _, kind = name.rpartition(".")
        layer, _, rest = stem.removeprefix("model.layers.").partition(".")
        place = names.get(stem) or f"blk.{layer}.{names[rest]}"
        tensors[f"{place}.{kind}"] = ("F32", shapes[name], data)
    size = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    turned = int(size * c.get("partial_rotary_factor", 1.0))
    scaling = c.get("rope_scaling") or {}
    for kind in ("long", "short") if "long_factor" in scaling else ():
        data = np.array(scaling[f"{kind}_factor"], "<f4").tobytes()
        tensors[f"rope_factors_{kind}.weight"] = ("F32", (turned // 2,), data)
    values = {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "attention.key_length": c.get("head_dim"),
        "attention.sliding_window": c.get("sliding_window") or 0,
        "rope.freq_base": float(c.get("rope_theta", 10_000.0)),
        "rope.freq_base_swa": c.get("rope_local_base_freq"),
        "rope.dimension_count": turned if family == "phi3" else None,
        "rope.scaling.type": "linear" if family == "gemma3" else None,
        "rope.scaling.factor": scaling.get("factor"),
        "rope.scaling.attn_factor": scaling.get("attention_factor"),
        "rope.scaling.original_context_length": c.get("original_max_position_embeddings"),
        "attn_logit_softcapping": c.get("attn_logit_softcapping"),
        "final_logit_softcapping": c.get("final_logit_softcapping"),
    }
    head: dict[str, Any] = {"general.architecture": family}
    head |= {f"{family}.{key}": value for key, value in values.items()}
    head |= make_tokens(c["vocab_size"]) | dict(metadata or {})
    write_gguf(path, {k: v for k, v in head.items() if v is not None}, tensors)


def save_mixture(
    path: Path,
    case: Case,
    *,
    forms: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    split: bool = True,
) -> dict[str, np.ndarray]:
    """Write a case of ``tests/deploy/mixtures.py`` as its converter does.

    Returns the weights that it stands for, by HF names. ``split``: kv_b as two tensors.
    """
    c, family = case.config, MIXTURES[case.model_type]
    shapes, forms = dict(iter_case_shapes(case)), forms or {}
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    weights: dict[str, np.ndarray] = {}

    def place(name: str, array: np.ndarray) -> np.ndarray:
        short = name.split(".")[-2]
        form = forms.get(short, forms.get("", "F32")) if array.ndim > 1 else "F32"
        if array.shape[-1] % BLOCKS.get(form, (1, 0))[0]:
            form = "F32"  # as the converter does where blocks do not divide a row
        data, values = quantise(np.ascontiguousarray(array), form)
        shape: tuple[int, ...] = array.shape
        if short.endswith("_exps"):  # all of a layer's in one tensor
            _, (count, *_), before = tensors.get(name, (form, (0,), b""))
            shape, data = (count + 1, *shape), before + data
        tensors[name] = (form, shape, data)
        return values.reshape(array.shape)

    for name, data in make_case_weights(case).items():
        array = np.frombuffer(data, "<f4").reshape(shapes[name])
        stem, _, kind = name.rpartition(".")
        if kind == "e_score_correction_bias":
            stem, kind = name, "bias"
        layer, _, rest = stem.removeprefix("model.layers.").partition(".")
        rest = re.sub(r"experts\.[0-9]+", "experts", rest)
        found = MIXTURE_NAMES.get(stem) or f"blk.{layer}.{MIXTURE_NAMES[rest]}"
        if family == "glm4moe":
            found = found.replace("ffn_norm", "post_attention_norm")
        if rest == "self_attn.kv_b_proj" and split:
            fixed = c["qk_nope_head_dim"]
            both = array.reshape(c["num_attention_heads"], -1, c["kv_lora_rank"])
            prefix = f"blk.{layer}.attn_"
            key = place(f"{prefix}k_b.weight", both[:, :fixed].transpose(0, 2, 1))
            value = place(f"{prefix}v_b.weight", both[:, fixed:])
            whole = np.concatenate([key.transpose(0, 2, 1), value], 1)
            weights[name] = whole.reshape(array.shape)
            continue
        weights[name] = place(f"{found}.{kind}", array)
    head: dict[str, Any] = {"general.architecture": family}
    values = describe_mixture(case, split)
    head |= {f"{family}.{key}": value for key, value in values.items()}
    head |= make_tokens(c["vocab_size"]) | dict(metadata or {})
    write_gguf(path, {k: v for k, v in head.items() if v is not None}, tensors)
    return weights


def describe_mixture(case: Case, split: bool) -> dict[str, Any]:
    """Return the family's metadata, as the converter writes them; None where there is nothing."""
    c, latent = case.config, "kv_lora_rank" in case.config
    heads = c["num_attention_heads"]
    size = c.get("head_dim", c["hidden_size"] // heads)
    scaling = c.get("rope_scaling") or {}
    parameters = c.get("rope_parameters", {})
    partial = parameters.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
    values: dict[str, Any] = {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "rope.freq_base": float(parameters.get("rope_theta", c.get("rope_theta", 10_000.0))),
        "rope.dimension_count": int(size * partial),
        "vocab_size": c["vocab_size"],
        "expert_count": c.get("num_experts", c.get("n_routed_experts")),
        "expert_used_count": c["num_experts_per_tok"],
    }
    if "n_routed_experts" in c:
        is_softmax = case.model_type == "deepseek_v2"
        values |= {
            "expert_feed_forward_length": c["moe_intermediate_size"],
            "expert_shared_count": c["n_shared_experts"],
            "leading_dense_block_count": c.get("first_k_dense_replace"),
            "expert_weights_scale": c["routed_scaling_factor"],
            "expert_weights_norm": c["norm_topk_prob"],
            "expert_gating_func": 1 if is_softmax else 2,
            "expert_group_count": c.get("n_group"),
            "expert_group_used_count": c.get("topk_group"),
        }
    if not latent:
        return values | {"attention.key_length": size, "attention.value_length": size}
    rank, turned, fixed = (
        c[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
    )
    lengths = {"key_length": turned + fixed, "value_length": c["v_head_dim"]}
    if split:
        lengths = {f"{key}_mla": value for key, value in lengths.items()}
        lengths |= {"head_count_kv": 1, "key_length": rank + turned, "value_length": rank}
    values |= {f"attention.{key}": value for key, value in lengths.items()}
    values |= {
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": c["q_lora_rank"],
        "rope.dimension_count": turned,
    }
    if scaling:
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": scaling["factor"],
            "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * scaling["mscale_all_dim"],
        }
    return values
