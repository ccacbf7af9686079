"""Small random checkpoints of every family of encoders, as ``checkpoints`` has them of decoders.

``golden/make_golden.py`` saves what Hugging Face's own models compute for ``TEXTS``, padded into
one batch: the vectors, pooled by sentence-transformers' definition, or a reranker's scores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from splitup.decode.texts import EncodedText
from tests.deploy.checkpoints import GOLDEN, Case, save_checkpoint

SAVED = GOLDEN / "saved_encoders.json"
VOCAB = 40
LENGTHS = (7, 1, 30, 16, 3)
_random = np.random.RandomState(17)
TEXTS = [
    EncodedText(
        tuple(int(token) for token in _random.randint(4, VOCAB, length)),
        tuple(int(place > length // 2) for place in range(length)),
    )
    for length in LENGTHS
]
_BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
}
_ROBERTA = {
    "hidden_act": "gelu",
    "max_position_embeddings": 34,
    "pad_token_id": 1,
    "layer_norm_eps": 1e-5,
}
_DISTIL = {
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "activation": "gelu",
    "sinusoidal_pos_embds": False,
}
_RENAMED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


@dataclass(frozen=True)
class EncoderCase(Case):
    """``pooling`` and ``is_normalised`` say what the directory's modules.json does.

    Without ``pooling`` it is a reranker.
    """

    pooling: str | None = None
    is_normalised: bool = False

    @property
    def config(self) -> dict[str, Any]:
        names = {"architectures": [self.architecture], "model_type": self.model_type}
        base = {key: value for key, value in _BASE.items() if key not in self.without}
        labels = {} if self.pooling else _ONE_LABEL
        return {**names, **base, **labels, **self.change}


def _iter_bert(case: Case) -> Iterator[tuple[str, tuple[int, ...]]]:
    c, kind = case.config, case.model_type
    hidden, inner = 32, 48
    prefix = {"BertModel": "", "RobertaModel": ""}.get(case.architecture)
    if prefix is None:
        prefix = {"xlm-roberta": "roberta"}.get(kind, kind) + "."
    names = {
        "bert": ("attention.self.query", "attention.self.key", "attention.self.value"),
        "mpnet": ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        "distilbert": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    }
    others = {
        "bert": ("attention.output.dense", "attention.output.LayerNorm", "output.LayerNorm"),
        "mpnet": ("attention.attn.o", "attention.LayerNorm", "output.LayerNorm"),
        "distilbert": ("attention.out_lin", "sa_layer_norm", "output_layer_norm"),
    }
    own = kind if kind in names else "bert"
    yield f"{prefix}embeddings.word_embeddings.weight", (VOCAB, hidden)
    yield f"{prefix}embeddings.position_embeddings.weight", (c["max_position_embeddings"], hidden)
    if own == "bert":
        yield (
            f"{prefix}embeddings.token_type_embeddings.weight",
            (c.get("type_vocab_size", 2), hidden),
        )
    yield from _iter_layer(f"{prefix}embeddings.LayerNorm", hidden)
    if own == "mpnet":
        yield f"{prefix}encoder.relative_attention_bias.weight", (32, 4)
    for layer in range(2):
        block = f"{prefix}{'transformer' if own == 'distilbert' else 'encoder'}.layer.{layer}."
        for name in (*names[own], others[own][0]):
            yield from _iter_layer(block + name, hidden, hidden)
        for name in others[own][1:]:
            yield from _iter_layer(block + name, hidden)
        up, down = (
            ("ffn.lin1", "ffn.lin2")
            if own == "distilbert"
            else ("intermediate.dense", "output.dense")
        )
        yield from _iter_layer(block + up, inner, hidden)
        yield from _iter_layer(block + down, hidden, inner)
    if own == "bert" and kind == "bert":
        yield from _iter_layer(f"{prefix}pooler.dense", hidden, hidden)
    if "Sequence" in case.architecture:
        first, last = {
            "bert": (None, "classifier"),
            "distilbert": ("pre_classifier", "classifier"),
        }.get(kind, ("classifier.dense", "classifier.out_proj"))
        if first is not None:
            yield from _iter_layer(first, hidden, hidden)
        yield from _iter_layer(last, 1, hidden)


def _iter_modernbert(case: Case) -> Iterator[tuple[str, tuple[int, ...]]]:
    c, hidden, inner = case.config, 32, 48
    prefix = "" if case.architecture == "ModernBertModel" else "model."
    norm = c.get("norm_bias", False)
    yield f"{prefix}embeddings.tok_embeddings.weight", (VOCAB, hidden)
    for name in ("embeddings.norm", "final_norm"):
        yield from _iter_layer(prefix + name, hidden, bias=norm)
    for layer in range(3):
        block = f"{prefix}layers.{layer}."
        for name in ("attn_norm", "mlp_norm")[0 if layer else 1 :]:
            yield from _iter_layer(block + name, hidden, bias=norm)
        bias = c.get("attention_bias", False)
        yield from _iter_layer(f"{block}attn.Wqkv", 3 * hidden, hidden, bias=bias)
        yield from _iter_layer(f"{block}attn.Wo", hidden, hidden, bias=bias)
        yield from _iter_layer(f"{block}mlp.Wi", 2 * inner, hidden, bias=c.get("mlp_bias", False))
        yield from _iter_layer(f"{block}mlp.Wo", hidden, inner, bias=c.get("mlp_bias", False))
    if "Sequence" in case.architecture:
        bias = c.get("classifier_bias", False)
        yield from _iter_layer("head.dense", hidden, hidden, bias=bias)
        yield from _iter_layer("head.norm", hidden, bias=norm)
        yield from _iter_layer("classifier", 1, hidden)


def _iter_layer(name: str, *shape: int, bias: bool = True) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]


_MODERN = {"num_hidden_layers": 3, "local_attention": 8, "norm_eps": 1e-5}
CASES: dict[str, EncoderCase] = {
    "bert": EncoderCase("BertModel", "bert", shapes=_iter_bert, pooling="mean", is_normalised=True),
    "roberta": EncoderCase(
        "RobertaModel",
        "roberta",
        {**_ROBERTA, "type_vocab_size": 2},
        shapes=_iter_bert,
        pooling="cls",
    ),
    "mpnet": EncoderCase("MPNetForMaskedLM", "mpnet", _ROBERTA, shapes=_iter_bert, pooling="mean"),
    "distilbert": EncoderCase(
        "DistilBertForMaskedLM",
        "distilbert",
        _DISTIL,
        "bfloat16",
        shapes=_iter_bert,
        without=frozenset(_RENAMED),
        pooling="mean",
    ),
    "modernbert": EncoderCase(
        "ModernBertModel",
        "modernbert",
        {**_MODERN, "global_rope_theta": 900.0, "local_rope_theta": 50.0},
        shapes=_iter_modernbert,
        pooling="cls",
        is_normalised=True,
    ),
    "bert-ranker": EncoderCase(
        "BertForSequenceClassification", "bert", {"hidden_act": "relu"}, shapes=_iter_bert
    ),
    "xlm-roberta-ranker": EncoderCase(
        "XLMRobertaForSequenceClassification",
        "xlm-roberta",
        {**_ROBERTA, "type_vocab_size": 1},
        "float16",
        shapes=_iter_bert,
    ),
    "distilbert-ranker": EncoderCase(
        "DistilBertForSequenceClassification",
        "distilbert",
        _DISTIL,
        shapes=_iter_bert,
        without=frozenset(_RENAMED),
    ),
    "modernbert-ranker": EncoderCase(
        "ModernBertForSequenceClassification",
        "modernbert",
        {
            **_MODERN,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 700.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            },
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "classifier_bias": True,
            "classifier_pooling": "mean",
        },
        shapes=_iter_modernbert,
    ),
}


def save_encoder(directory: Path, case: EncoderCase) -> str:
    """Write a model directory, with the modules of sentence-transformers and a tokenizer."""
    save_checkpoint(directory, case)
    words = {"<pad>": 0, "<unk>": 1, "<s>": 2, "</s>": 3}
    words |= {f"w{number}": number for number in range(len(words), VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", 2), ("</s>", 3)],
    )
    # as published ones have it: it must not change what is computed
    tokenizer.enable_padding(length=8)
    tokenizer.enable_truncation(5)
    tokenizer.save(str(directory / "tokenizer.json"))
    if case.pooling is not None:
        save_modules(directory, case.pooling, is_normalised=case.is_normalised)
    return str(directory)


def save_modules(directory: Path, pooling: str, *, is_normalised: bool) -> None:
    """Write what sentence-transformers writes beside an encoder."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {
            "idx": place,
            "name": str(place),
            "path": path,
            "type": f"sentence_transformers.models.{name}",
        }
        for place, (path, name) in enumerate(kinds[: 3 if is_normalised else 2])
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    modes = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False}
    modes[{"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}[pooling]] = True
    table = {"word_embedding_dimension": 32, **modes, "include_prompt": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(table))
