"""GGUF files of BERT, whose rows become a text's vector: MiniLM, BGE and their like.

A file does not say that vectors have length one; llama.cpp's server makes them so, and so does
this. It computes GELU by a formula that only approximates it; this uses the one that the models
were trained with. Sources: llama.cpp's conversion/bert.py and src/models/bert.cpp.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.chat import offer_way_out
from splitup_deploy.frontends.encoder.step_function import Pooling, trace_encoder
from splitup_deploy.frontends.families.bert import Bert, read_bert
from splitup_deploy.frontends.families.config_fields import Fields
from splitup_deploy.frontends.gguf.header import GgufFile, GgufTensor
from splitup_deploy.frontends.gguf.model_file import GgufWeights
from splitup_deploy.frontends.gguf.tokenizer import make_tokenizer
from splitup_deploy.frontends.huggingface.encoder_directory import DEFAULT_CONTEXT
from splitup_deploy.frontends.source_model import Sizes, SourceModel, SourceText

FAMILY: Final = "bert"
_FIELDS: Final = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_epsilon": "layer_norm_eps",
}
_MEAN, _CLS = 1, 2  # llama.cpp's numbers
_FIXED: Final = {"attention.causal": (False,), "pooling_type": (_MEAN, _CLS)}
_TYPES: Final = "token_types.weight"
_NAMES: Final = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.LayerNorm": "token_embd_norm",
}
_BLOCK: Final = re.compile(r"encoder\.layer\.([0-9]+)\.(.+)")
_BLOCK_NAMES: Final = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}


def load_encoder_gguf(file: GgufFile, sizes: Sizes) -> SourceModel:
    """Trace a file of BERT; raises InvalidModel naming the file and what is not supported."""
    if sizes.without is not None:
        raise InvalidModel(f"'{file.path}' is an encoder, which takes texts: leave out --without")
    if file.metadata.get("tokenizer.ggml.model") != "bert":
        raise InvalidModel(
            f"'{file.path}' has another tokenizer than BERT's, as RoBERTa's files have: give the "
            "directory that it was made from"
        )
    encoder, pooling, notes = _read_config(file, sizes.context)
    with offer_way_out("text"):
        tokenizer = make_tokenizer(file.metadata, encoder.sizes.vocab)
    weights = EncoderWeights(file)
    traced = trace_encoder(encoder, weights, pooling, sizes.chunk)
    notes = (*notes, *traced.notes, *weights.check_all_read({}))
    text = SourceText(tokenizer, (), encoder.sizes.vocab, encoder.sizes.context)
    return SourceModel("text-embedding", replace(traced, notes=notes), text)


def _read_config(file: GgufFile, context: int | None) -> tuple[Bert, Pooling, tuple[str, ...]]:
    """Return the encoder, how rows become a vector, and what to say of both."""
    prefix = f"{FAMILY}."
    keys = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    for key, value in keys.items():
        if key not in _FIELDS and key not in _FIXED:
            raise InvalidModel(f"'{file.path}' has the key '{prefix}{key:.80}', which is unknown")
        if value not in _FIXED.get(key, (value,)):
            raise InvalidModel(f"'{file.path}' has {prefix}{key} = {value!r:.40}: not supported")
    table: dict[str, Any] = {name: keys[key] for key, name in _FIELDS.items() if key in keys}
    table |= {"hidden_act": "gelu", "vocab_size": file.get_shape("token_embd.weight")[0]}
    if has_types := _TYPES in file.tensors:
        table["type_vocab_size"] = file.get_shape(_TYPES)[0]
    notes: tuple[str, ...] = ()
    trained = table.get("max_position_embeddings")
    if context is None and type(trained) is int and trained > DEFAULT_CONTEXT:
        context = DEFAULT_CONTEXT
        notes += (f"texts of up to {context} tokens; the model has {trained}, see --context",)
    fields = Fields(table, f"'{file.path}'")
    encoder = read_bert(fields, context)
    fields.check_all_read()
    if "pooling_type" not in keys:
        notes += ("no pooling_type: a text's vector is the mean of its rows",)
    if not has_types:  # as of a DistilBERT
        encoder = replace(encoder, types=0, takes_types=False)
    return encoder, Pooling("cls" if keys.get("pooling_type") == _CLS else "mean", True), notes


class EncoderWeights(GgufWeights):
    """The tensors of a file by their names in a BERT."""

    def _find(self, name: str) -> tuple[GgufTensor, int | None, int | None]:
        stem, _, kind = name.rpartition(".")
        found = _NAMES.get(stem, stem)
        if (match := _BLOCK.fullmatch(stem)) is not None:
            found = f"blk.{match[1]}.{_BLOCK_NAMES.get(match[2], match[2])}"
        return self.take(f"{found}.{kind}"), None, None
