"""GGUF files of the encoders of ``encoders``, written as llama.cpp's converter does."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.deploy.checkpoints import iter_shapes, make_weights
from tests.deploy.encoders import CASES as DIRECTORIES
from tests.deploy.encoders import VOCAB, EncoderCase
from tests.deploy.ggufs import BLOCKS, make_tokens, quantise, write_gguf

# gguf-py's tensor_mapping.py; a dot begins what stands in a block
NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.tok_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.LayerNorm": "token_embd_norm",
    "embeddings.norm": "token_embd_norm",
    "final_norm": "output_norm",
    "pooler.dense": "cls",
    "pre_classifier": "cls",
    "classifier.dense": "cls",
    "head.dense": "cls",
    "head.norm": "cls.norm",
    "classifier": "cls.output",
    "classifier.out_proj": "cls.output",
    **{f".attention.self.{name}": f".attn_{name[0]}" for name in ("query", "key", "value")},
    **{f".attention.{letter}_lin": f".attn_{letter}" for letter in "qkv"},
    ".attention.output.dense": ".attn_output",
    ".attention.out_lin": ".attn_output",
    ".attention.output.LayerNorm": ".attn_output_norm",
    ".sa_layer_norm": ".attn_output_norm",
    ".intermediate.dense": ".ffn_up",
    ".ffn.lin1": ".ffn_up",
    ".output.dense": ".ffn_down",
    ".ffn.lin2": ".ffn_down",
    ".output.LayerNorm": ".layer_output_norm",
    ".output_layer_norm": ".layer_output_norm",
    ".attn_norm": ".attn_norm",
    ".attn.Wqkv": ".attn_qkv",
    ".attn.Wo": ".attn_output",
    ".mlp_norm": ".ffn_norm",
    ".mlp.Wi": ".ffn_up",
    ".mlp.Wo": ".ffn_down",
}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "\u2581the", "\u2581caf", "e", "\u2581e"]


def _change(name: str, **change: Any) -> EncoderCase:
    """Return a case in float32 with other fields, None for none, and vectors of length one."""
    case = DIRECTORIES[name]
    fields = {key: value for key, value in {**case.change, **change}.items() if value is not None}
    return replace(case, change=fields, dtype="float32", is_normalised=True)


CASES = {
    "bert": DIRECTORIES["bert"],
    "roberta": _change("roberta"),
    "distilbert": _change("distilbert"),
    "modernbert": DIRECTORIES["modernbert"],
    # llama.cpp's converter drops the layer that is called "cls" here; this is a file with it
    "bert-ranker": _change("bert-ranker", hidden_act="gelu"),
    "xlm-roberta-ranker": _change("xlm-roberta-ranker"),
    "distilbert-ranker": _change("distilbert-ranker"),
    "modernbert-ranker": _change(  # as files can have it: without biases, every third layer whole
        "modernbert-ranker",
        **dict.fromkeys(("layer_types", "rope_parameters")),
        **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), False),
        global_rope_theta=700.0,
        local_rope_theta=30.0,
    ),
}


def save_encoder_gguf(
    path: Path,
    name: str,
    metadata: dict[str, Any] | None = None,
    *,
    form: str = "F32",
    widened: bool = False,
    without: str = "-",
) -> None:
    """Write a case as llama.cpp's converter does, matrices in a format or what it stands for.

    A value of ``metadata`` that is None is left out, and so are the tensors that begin with
    ``without``.
    """
    case = CASES[name]
    first = case.config["pad_token_id"] + 1 if "roberta" in name else 0
    shapes, tensors = dict(iter_shapes(case)), {}
    for own, data in make_weights(case).items():
        place = translate_name(own)
        if place.startswith(without) or (case.pooling and place.startswith("cls.")):
            continue
        array = np.frombuffer(data, "<f4").reshape(shapes[own])
        if place == "position_embd.weight":
            array = array[first:]
        is_plain = array.ndim < 2 or array.shape[-1] % BLOCKS.get(form, (1, 0))[0]
        stored, values = quantise(array, kept := "F32" if is_plain else form)
        if widened:
            kept, stored = "F32", values.astype("<f4").tobytes()
        tensors[place] = (kept, array.shape, stored)
    head = describe(case, first) | (metadata or {})
    write_gguf(path, {key: value for key, value in head.items() if value is not None}, tensors)


def translate_name(name: str) -> str:
    """Return what llama.cpp calls a weight of a directory."""
    stem, _, kind = re.sub("^(bert|roberta|distilbert|model)[.]", "", name).rpartition(".")
    if (match := re.fullmatch(r"(?:.*layer|layers)\.(\d+)(\..+)", stem)) is not None:
        return f"blk.{match[1]}{NAMES[match[2]]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def describe(case: EncoderCase, first: int) -> dict[str, Any]:
    """Return the metadata of a file."""
    c, is_modern = case.config, case.model_type == "modernbert"
    family = "modern-bert" if is_modern else "bert"
    keys = {
        "block_count": c.get("n_layers", c.get("num_hidden_layers")),
        "context_length": c["max_position_embeddings"] - first,
        "embedding_length": c.get("dim", c.get("hidden_size")),
        "feed_forward_length": c.get("hidden_dim", c.get("intermediate_size")),
        "attention.head_count": c.get("n_heads", c.get("num_attention_heads")),
        "attention.layer_norm_epsilon": c.get("layer_norm_eps", 1e-12),
        "attention.causal": False,
        "pooling_type": {"mean": 1, "cls": 2}.get(case.pooling or ""),
        "classifier.output_labels": None if case.pooling else ["LABEL_0"],
    }
    if is_modern:
        keys |= {
            "attention.layer_norm_epsilon": 1e-7,  # layer_norm_eps, which the model does not use
            "attention.layer_norm_rms_epsilon": c["norm_eps"],
            "attention.sliding_window": c["local_attention"],
            "attention.sliding_window_pattern": 3,
            "rope.freq_base": c["global_rope_theta"],
            "rope.freq_base_swa": c["local_rope_theta"],
            "rope.scaling.type": "none",
            "vocab_size": VOCAB,
            "hidden_activation": "gelu",
        }
    head: dict[str, Any] = {"general.architecture": family}
    head |= {f"{family}.{key}": value for key, value in keys.items()}
    kind = {"roberta": "gpt2", "xlm-roberta": "t5", "modernbert": "gpt2"}.get(case.model_type)
    if kind == "gpt2":
        around = {"bos_token_id": VOCAB - 2, "eos_token_id": VOCAB - 1}
        tokens = {"pre": "modern-bert" if is_modern else "roberta-bpe", **around}
        return head | make_tokens(VOCAB) | {f"tokenizer.ggml.{k}": v for k, v in tokens.items()}
    if kind == "t5":
        tokens = {
            "model": kind,
            "tokens": ["<s>", "<pad>", "</s>", "<unk>", *(f"\u2581w{n}" for n in range(VOCAB - 4))],
            "token_type": [3, 3, 3, 2] + [1] * (VOCAB - 4),
            "scores": [0.0] * 4 + [-1.0] * (VOCAB - 4),
            "bos_token_id": 0,
            "eos_token_id": 2,
        }
    else:
        tokens = {
            "model": "bert",
            "pre": "jina-v2-en",
            "tokens": [*WORDS, *(f"\u2581w{number}" for number in range(VOCAB - len(WORDS)))],
            "token_type": [3] * 4 + [1] * (VOCAB - 4),
            "token_type_count": 2,
            "unknown_token_id": 1,
            "cls_token_id": 2,
            "bos_token_id": 2,
            "seperator_token_id": 3,
        }
    return head | {f"tokenizer.ggml.{key}": value for key, value in tokens.items()}
