"""Small random checkpoints of every family of models, the same on every machine.

``tests/deploy/golden/make_golden.py`` runs Hugging Face's own models on them and saves the logits,
which ``test_families.py`` compares with. This module needs neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.deploy.llamas import TOKENIZER

GOLDEN = Path(__file__).parent / "golden"
VOCAB = 40
STEPS = 20
TOKENS = [int(token) for token in np.random.RandomState(11).randint(0, VOCAB, STEPS)]
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

_BASE: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GEMMA: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 16,
    "num_hidden_layers": 3,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 24,
    "sliding_window": 6,
    "final_logit_softcapping": 5.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@dataclass(frozen=True)
class Case:
    """One checkpoint: ``change`` is laid over the common configuration.

    ``without`` names fields that are left out of that. ``shapes`` yields its weights' names and
    shapes where ``iter_shapes`` does not know the family.
    """

    architecture: str
    model_type: str
    change: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    context: int | None = None
    shapes: Callable[[Case], Iterator[tuple[str, tuple[int, ...]]]] | None = None
    without: frozenset[str] = frozenset()

    @property
    def config(self) -> dict[str, Any]:
        names = {"architectures": [self.architecture], "model_type": self.model_type}
        base = {key: value for key, value in _BASE.items() if key not in self.without}
        return {**names, **base, **self.change}


CASES: dict[str, Case] = {
    "llama": Case("LlamaForCausalLM", "llama", {"rope_theta": 500.0}),
    "llama-biases": Case(
        "LlamaForCausalLM",
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 12,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "rope_scaling": {"type": "linear", "factor": 2.5},
        },
    ),
    "llama3-bfloat16": Case(
        "LlamaForCausalLM",
        "llama",
        {"rope_theta": 1000.0, "rope_scaling": _LLAMA3, "torch_dtype": "bfloat16"},
        "bfloat16",
    ),
    "llama-float16": Case(
        "LlamaForCausalLM",
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "dtype": "float16"},
        "float16",
    ),
    "mistral": Case("MistralForCausalLM", "mistral", {"sliding_window": 7, "rope_theta": 1000.0}),
    "qwen2": Case(
        "Qwen2ForCausalLM",
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2-yarn": Case(
        "Qwen2ForCausalLM",
        "qwen2",
        {
            "use_sliding_window": False,
            "sliding_window": 5,
            "max_window_layers": 0,
            "rope_theta": 1000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "qwen3": Case(
        "Qwen3ForCausalLM",
        "qwen3",
        {"head_dim": 16, "attention_bias": True, "rope_theta": 1000.0},
    ),
    "qwen3-yarn": Case(
        "Qwen3ForCausalLM",
        "qwen3",
        {
            "head_dim": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "use_sliding_window": True,
            "sliding_window": 4,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 8.0,
                "beta_slow": 0.5,
                "mscale": 1.2,
                "mscale_all_dim": 0.7,
                "truncate": False,
            },
        },
    ),
    "phi3": Case("Phi3ForCausalLM", "phi3", {"sliding_window": 9}),
    "phi3-longrope": Case(
        "Phi3ForCausalLM",
        "phi3",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "partial_rotary_factor": 0.75,
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 24,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 3.0],
                "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            },
        },
        context=24,
    ),
    "smollm3": Case(
        "SmolLM3ForCausalLM",
        "smollm3",
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "no_rope_layer_interval": 2,
            "use_sliding_window": False,
            "sliding_window": None,
            "rope_theta": 1000.0,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": Case("Olmo2ForCausalLM", "olmo2", {"rope_theta": 1000.0}),
    "gemma2": Case("Gemma2ForCausalLM", "gemma2", {**_GEMMA, "attn_logit_softcapping": 2.0}),
    "gemma3": Case(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            **_GEMMA,
            "rope_theta": 100000.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 3,
        },
    ),
    "gemma3-new": Case(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            **_GEMMA,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
}


def iter_shapes(case: Case) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every weight's Hugging Face name and shape."""
    if case.shapes is not None:
        yield from case.shapes(case)
        return
    c, family = case.config, case.model_type
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    size = c.get("head_dim", hidden // c["num_attention_heads"])
    query, cached = c["num_attention_heads"] * size, c["num_key_value_heads"] * size
    gemma = family.startswith("gemma")
    bias = c.get("attention_bias", False)
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], hidden)
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        norms = ["input", "post_attention"]
        if family == "olmo2":
            norms = ["post_attention", "post_feedforward"]
            yield f"{prefix}self_attn.q_norm.weight", (query,)
            yield f"{prefix}self_attn.k_norm.weight", (cached,)
        norms += ["pre_feedforward", "post_feedforward"] if gemma else []
        for norm in norms:
            yield f"{prefix}{norm}_layernorm.weight", (hidden,)
        if family in ("qwen3", "gemma3_text"):
            yield f"{prefix}self_attn.q_norm.weight", (size,)
            yield f"{prefix}self_attn.k_norm.weight", (size,)
        if family == "phi3":
            layers = [("self_attn.qkv_proj", query + 2 * cached, hidden, False)]
            layers += [("mlp.gate_up_proj", 2 * inner, hidden, False)]
        else:
            qkv = bias or family == "qwen2"
            layers = [
                ("self_attn.q_proj", query, hidden, qkv),
                ("self_attn.k_proj", cached, hidden, qkv),
                ("self_attn.v_proj", cached, hidden, qkv),
                ("mlp.gate_proj", inner, hidden, c.get("mlp_bias", False)),
                ("mlp.up_proj", inner, hidden, c.get("mlp_bias", False)),
            ]
        layers += [
            ("self_attn.o_proj", hidden, query, bias),
            ("mlp.down_proj", hidden, inner, c.get("mlp_bias", False)),
        ]
        for name, out, width, biased in layers:
            yield f"{prefix}{name}.weight", (out, width)
            if biased:
                yield f"{prefix}{name}.bias", (out,)


def make_weights(case: Case) -> dict[str, bytes]:
    """Return random weights as little-endian bytes of the case's dtype.

    ``RandomState`` gives the same numbers in every version of numpy.
    """
    random = np.random.RandomState(5)
    weights = {}
    for name, shape in iter_shapes(case):
        values = random.uniform(-0.35, 0.35, shape).astype("<f4")
        is_gemma = case.model_type in ("gemma2", "gemma3_text")  # their norms add one
        if ("norm" in name and not is_gemma) or name.endswith("layer_scalar"):
            values += 1
        if name.endswith("A_log"):
            values -= 2  # memories that last longer than a few tokens
        if case.dtype == "bfloat16":
            weights[name] = (values.view("<u4") >> 16).astype("<u2").tobytes()
        else:
            weights[name] = values.astype(np.dtype(case.dtype).newbyteorder("<")).tobytes()
    return weights


def compute_checkpoint_digest(case: Case) -> str:
    """Return the SHA-256 of configuration and weights."""
    digest = hashlib.sha256(json.dumps(case.config, sort_keys=True).encode())
    for data in make_weights(case).values():
        digest.update(data)
    return digest.hexdigest()


def save_safetensors(path: Path, case: Case, names: list[str] | None = None) -> None:
    """Write (some of) the weights; numpy has no bfloat16, so the file is written by hand."""
    weights, shapes = make_weights(case), dict(iter_shapes(case))
    header: dict[str, Any] = {}
    offset = 0
    for name in names or list(weights):
        end = offset + len(weights[name])
        header[name] = {
            "dtype": DTYPES[case.dtype],
            "shape": list(shapes[name]),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    data = b"".join(weights[name] for name in header)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def save_checkpoint(directory: Path, case: Case) -> None:
    """Write a model directory with one safetensors file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(case.config))
    (directory / "tokenizer.json").write_text(TOKENIZER)
    save_safetensors(directory / "model.safetensors", case)
