"""GGUF files of encoders: MiniLM, BGE, E5, their rerankers, and ModernBERT.

llama.cpp calls BERT and its relatives "bert". Which one a file has, and so the layers of a
reranker, is known by its tokenizer and by whether tokens have types. Of RoBERTa it keeps no
positions before a text's first.

A file does not say that vectors have length one; llama.cpp's server makes them so, and so does
this. It computes GELU by a formula that only approximates it; this uses the one that the models
were trained with. Sources: llama.cpp's conversion/bert.py, gguf-py's tensor_mapping.py,
src/models/bert.cpp and src/models/modern-bert.cpp.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.encoder.step_function import Encoder, Pooling, trace_encoder
from splitup_deploy.frontends.families.bert import DISTILBERT_HEAD, ROBERTA_HEAD, read_bert
from splitup_deploy.frontends.families.config_fields import Fields
from splitup_deploy.frontends.families.encoders import Use
from splitup_deploy.frontends.families.modernbert import read_modernbert
from splitup_deploy.frontends.gguf.header import GgufFile, GgufTensor
from splitup_deploy.frontends.gguf.model_file import GgufWeights
from splitup_deploy.frontends.gguf.tokenizer import make_tokenizer
from splitup_deploy.frontends.huggingface.encoder_directory import DEFAULT_CONTEXT
from splitup_deploy.frontends.source_model import Sizes, SourceModel, SourceText

BERT: Final = "bert"
MODERN_BERT: Final = "modern-bert"
# What llama.cpp converts. Of a reranker with BERT it drops a layer.
CONVERTED: Final = {
    BERT: (
        *("BertModel", "BertForMaskedLM"),
        *("RobertaModel", "RobertaForSequenceClassification"),
        *("XLMRobertaModel", "XLMRobertaForSequenceClassification"),
        *("DistilBertModel", "DistilBertForMaskedLM", "DistilBertForSequenceClassification"),
    ),
    MODERN_BERT: (
        *("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
    ),
}
FAMILIES: Final = tuple(CONVERTED)
_SHARED_FIELDS: Final = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_FIELDS: Final = {
    BERT: {**_SHARED_FIELDS, "attention.layer_norm_epsilon": "layer_norm_eps"},
    MODERN_BERT: {
        **_SHARED_FIELDS,
        "attention.layer_norm_epsilon": "norm_eps",
        "attention.layer_norm_rms_epsilon": "norm_eps",  # the one of these two that is used
        "attention.sliding_window": "local_attention",
        "attention.sliding_window_pattern": "global_attn_every_n_layers",
        "rope.freq_base": "global_rope_theta",
        "rope.freq_base_swa": "local_rope_theta",
        "hidden_activation": "hidden_activation",
        "classifier.activation": "classifier_activation",
    },
}
_OPTIONAL: Final = (  # whose defaults are llama.cpp's
    *("attention.layer_norm_rms_epsilon", "attention.sliding_window_pattern"),
    *("rope.freq_base_swa", "hidden_activation", "classifier.activation"),
)
_POOLING: Final[dict[int, Any]] = {1: "mean", 2: "cls"}  # llama.cpp's numbers
_RANK: Final = 4
_SHARED_FIXED: Final = {"attention.causal": (False,), "pooling_type": (*_POOLING, _RANK)}
_FIXED: Final[dict[str, dict[str, tuple[Any, ...]]]] = {
    BERT: _SHARED_FIXED,
    MODERN_BERT: {
        **_SHARED_FIXED,
        "classifier.pooling_type": tuple(_POOLING),
        "rope.scaling.type": ("none",),
    },
}
_LABELS: Final = "classifier.output_labels"
_UNREAD: Final = (_LABELS, "vocab_size")
# What a tokenizer puts around texts, and between two, where the file says nothing.
_AROUND: Final = {
    family: {"add_bos_token": True, "add_eos_token": True, "add_sep_token": family == BERT}
    for family in FAMILIES
}
_TYPES: Final = "token_types.weight"
_NAMES: Final = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.LayerNorm": "token_embd_norm",
    "embeddings.tok_embeddings": "token_embd",
    "embeddings.norm": "token_embd_norm",
    "final_norm": "output_norm",
    **dict.fromkeys(("pooler.dense", "classifier.dense", "pre_classifier", "head.dense"), "cls"),
    "head.norm": "cls.norm",
    **dict.fromkeys(("classifier", "classifier.out_proj"), "cls.output"),
}
_BLOCK: Final = re.compile(r"(?:encoder\.layer|layers)\.([0-9]+)\.(.+)")
_BLOCK_NAMES: Final = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.Wo": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.Wi": "ffn_up",
    "mlp.Wo": "ffn_down",
}


def load_encoder_gguf(file: GgufFile, family: str, sizes: Sizes) -> SourceModel:
    """Trace a file of FAMILIES; raises InvalidModel naming the file and what is not supported."""
    if sizes.without is not None:
        raise InvalidModel(f"'{file.path}' is an encoder, which takes texts: leave out --without")
    keys = _read_keys(file, family)
    kind = keys.get("pooling_type")
    is_ranker = kind == _RANK or (kind is None and "cls.output.weight" in file.tensors)
    if is_ranker and "cls.weight" not in file.tensors:
        raise InvalidModel(
            f"'{file.path}' has no tensor 'cls.weight': llama.cpp's converter drops this layer of "
            "a reranker with BERT, whose scores change; give the directory that it was made from"
        )
    encoder, notes = _read_encoder(file, family, keys, sizes.context)
    others: dict[str, str] = {}
    pooling: Pooling | None = None
    if not is_ranker:
        others = {"cls.": "of a head for another use"}
        pooling = Pooling(_POOLING[kind or 1], is_normalised=True)
        if kind is None:
            notes += ("no pooling_type: a text's vector is the mean of its rows",)
    elif family == MODERN_BERT and "classifier.pooling_type" not in keys:
        notes += ("no classifier.pooling_type: a score is of the mean of a text's rows",)
    around = {f"tokenizer.ggml.{key}": value for key, value in _AROUND[family].items()}
    tokenizer = make_tokenizer({**around, **file.metadata}, encoder.sizes.vocab)
    weights = EncoderWeights(file)
    traced = trace_encoder(encoder, weights, pooling, sizes.chunk)
    notes = (*notes, *traced.notes, *weights.check_all_read(others))
    text = SourceText(tokenizer, (), encoder.sizes.vocab, encoder.sizes.context)
    use: Use = "text-embedding" if pooling else "text-ranking"
    return SourceModel(use, replace(traced, notes=notes), text)


def _read_keys(file: GgufFile, family: str) -> dict[str, Any]:
    """Return the family's metadata; raises InvalidModel for what is not supported."""
    prefix, fixed = f"{family}.", _FIXED[family]
    keys = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    for key, value in keys.items():
        if key not in (*_FIELDS[family], *fixed, *_UNREAD):
            raise InvalidModel(f"'{file.path}' has the key '{prefix}{key:.80}', which is unknown")
        if value not in fixed.get(key, (value,)):
            raise InvalidModel(f"'{file.path}' has {prefix}{key} = {value!r:.40}: not supported")
    if missing := [key for key in _FIELDS[family] if key not in (*keys, *_OPTIONAL)]:
        raise InvalidModel(f"'{file.path}' has no {prefix}{missing[0]}: convert the model again")
    labels = keys.get(_LABELS, [""])
    if not isinstance(labels, list) or len(labels) != 1:
        raise InvalidModel(
            f"'{file.path}' has {prefix}{_LABELS} = {labels!r:.40}: a reranker has one; a "
            "classifier of texts is not supported"
        )
    return keys


def _read_encoder(
    file: GgufFile, family: str, keys: dict[str, Any], context: int | None
) -> tuple[Encoder, tuple[str, ...]]:
    """Return the encoder, and what to say of its context."""
    table = {name: keys[key] for key, name in _FIELDS[family].items() if key in keys}
    table["vocab_size"] = file.get_shape("token_embd.weight")[0]
    notes: tuple[str, ...] = ()
    trained = table.get("max_position_embeddings")
    if context is None and type(trained) is int and trained > DEFAULT_CONTEXT:
        context = DEFAULT_CONTEXT
        notes = (f"texts of up to {context} tokens; the model has {trained}, see --context",)
    if family == MODERN_BERT:
        table["classifier_pooling"] = _POOLING[keys.get("classifier.pooling_type", 1)]
    else:
        table["hidden_act"] = "gelu"
        if has_types := _TYPES in file.tensors:
            table["type_vocab_size"] = file.get_shape(_TYPES)[0]
    fields = Fields(table, f"'{file.path}'")
    if family == MODERN_BERT:
        modern = read_modernbert(fields, context)
        fields.check_all_read()
        return modern, notes
    encoder = read_bert(fields, context)
    fields.check_all_read()
    if file.metadata.get("tokenizer.ggml.model") != "bert":
        encoder = replace(encoder, takes_types=False, head=ROBERTA_HEAD)
    elif not has_types:
        encoder = replace(encoder, head=DISTILBERT_HEAD)
    if not has_types:
        encoder = replace(encoder, types=0, takes_types=False)
    return encoder, notes


class EncoderWeights(GgufWeights):
    """The tensors of a file by their names in a BERT or ModernBERT."""

    def _find(self, name: str) -> tuple[GgufTensor, int | None, int | None]:
        stem, _, kind = name.rpartition(".")
        found = _NAMES.get(stem, stem)
        if (match := _BLOCK.fullmatch(stem)) is not None:
            found = f"blk.{match[1]}.{_BLOCK_NAMES.get(match[2], match[2])}"
        return self.take(f"{found}.{kind}"), None, None
