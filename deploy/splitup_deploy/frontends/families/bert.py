"""BERT (arXiv 1810.04805) and its relatives: RoBERTa, XLM-RoBERTa, DistilBERT and MPNet.

All have one block: attention, add, norm; feed-forward, add, norm. They differ in what is added to
the tokens' embeddings, in the names of their weights, and in a reranker's last layers:

- RoBERTa's table of positions begins after the index of its padding token; its tokenizers give all
  tokens the first type.
- DistilBERT has no token types.
- MPNet (arXiv 2004.09297) has no token types, and adds to the scores of attention a number for the
  distance of two rows, by buckets, one for each head in all layers.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Final

from tinygrad.tensor import Tensor

from splitup.core import tuning
from splitup_deploy.frontends.decoder.row_operations import Activation, compute_activation
from splitup_deploy.frontends.encoder.step_function import EncoderSizes, EncoderStep, apply_tanh
from splitup_deploy.frontends.families.config_fields import Fields
from splitup_deploy.frontends.families.encoder_fields import (
    check_sizes,
    ignore_training,
    read_activation,
)

_MAX_DISTANCE: Final = 128  # of MPNet; farther rows share a bucket

# A reranker's last layers, and the activation between them.
_BERT_HEAD: Final = ("pooler.dense", "tanh", "classifier")
ROBERTA_HEAD: Final = ("classifier.dense", "tanh", "classifier.out_proj")
DISTILBERT_HEAD: Final = ("pre_classifier", "relu", "classifier")

# The names of the relatives' weights -> BERT's.
_NAMES: Final = (
    # old checkpoints of BERT
    (re.compile(r"\.gamma$"), ".weight"),
    (re.compile(r"\.beta$"), ".bias"),
    # DistilBERT
    (re.compile(r"^transformer\.layer\."), "encoder.layer."),
    (re.compile(r"\.attention\.q_lin\."), ".attention.self.query."),
    (re.compile(r"\.attention\.k_lin\."), ".attention.self.key."),
    (re.compile(r"\.attention\.v_lin\."), ".attention.self.value."),
    (re.compile(r"\.attention\.out_lin\."), ".attention.output.dense."),
    (re.compile(r"\.sa_layer_norm\."), ".attention.output.LayerNorm."),
    (re.compile(r"\.ffn\.lin1\."), ".intermediate.dense."),
    (re.compile(r"\.ffn\.lin2\."), ".output.dense."),
    (re.compile(r"\.output_layer_norm\."), ".output.LayerNorm."),
    # MPNet
    (re.compile(r"\.attention\.attn\.q\."), ".attention.self.query."),
    (re.compile(r"\.attention\.attn\.k\."), ".attention.self.key."),
    (re.compile(r"\.attention\.attn\.v\."), ".attention.self.value."),
    (re.compile(r"\.attention\.attn\.o\."), ".attention.output.dense."),
    (re.compile(r"\.attention\.LayerNorm\."), ".attention.output.LayerNorm."),
)


@dataclass(frozen=True, slots=True)
class Bert:
    """``table`` are the rows of the table of positions, of which a text's first has ``first``.

    ``types`` and ``buckets`` are 0 where there are none. Without ``takes_types`` every row has the
    first type, also in the second text of a pair. ``head`` is a reranker's.
    """

    sizes: EncoderSizes
    activation: Activation
    table: int
    first: int = 0
    types: int = 0
    takes_types: bool = False
    buckets: int = 0
    head: tuple[str, str, str] = _BERT_HEAD

    def encode(self, step: EncoderStep) -> Tensor:
        """Return the last layer's rows [rows, hidden]."""
        x = step.embed(step.tokens, "embeddings.word_embeddings.weight", self.sizes.vocab)
        if self.types:
            name = "embeddings.token_type_embeddings.weight"
            if self.takes_types:
                x = x + step.embed(step.types, name, self.types)
            else:
                x = x + step.tensor(step.weights.get(name, self.types, self.sizes.hidden))[:1]
        place = step.positions + self.first
        x = x + step.embed(place, "embeddings.position_embeddings.weight", self.table)
        x = step.norm(step.tracer.mark(x, "embed: sum"), "embeddings.LayerNorm", "embed")
        for layer in range(self.sizes.layers):
            x = self._attend(step, x, layer)
            x = self._feed_forward(step, x, layer)
        return x

    def _attend(self, step: EncoderStep, x: Tensor, layer: int) -> Tensor:
        s, mark = self.sizes, step.tracer.mark
        label, prefix = f"block {layer} attention", f"encoder.layer.{layer}.attention"
        parts = [(f"{prefix}.self.{part}", s.hidden) for part in ("query", "key", "value")]
        qkv = step.project(x, f"{prefix}.self.qkv", parts, s.hidden, bias=True)
        qkv = mark(qkv, f"{label}: q, k, v").reshape(step.rows, 3 * s.heads, s.head_dim)
        mixed = step.attend(qkv, label, bias=self._weigh_distances(step, label))
        name = f"{prefix}.output.dense"
        x = x + step.project(mixed, name, [(name, s.hidden)], s.hidden, bias=True)
        return step.norm(mark(x, f"{label}: sum"), f"{prefix}.output.LayerNorm", f"{label}: output")

    def _feed_forward(self, step: EncoderStep, x: Tensor, layer: int) -> Tensor:
        s, mark = self.sizes, step.tracer.mark
        label, prefix = f"block {layer} MLP", f"encoder.layer.{layer}"
        up, down = f"{prefix}.intermediate.dense", f"{prefix}.output.dense"
        inner = mark(
            step.project(x, up, [(up, s.intermediate)], s.hidden, bias=True), f"{label}: up"
        )
        inner = mark(compute_activation(self.activation, inner), f"{label}: activation")
        x = x + step.project(inner, down, [(down, s.hidden)], s.intermediate, bias=True)
        return step.norm(mark(x, f"{label}: sum"), f"{prefix}.output.LayerNorm", f"{label}: output")

    def _weigh_distances(self, step: EncoderStep, label: str) -> Tensor | None:
        """Return what MPNet adds to the scores: [rows, heads, 1, context]."""
        if not self.buckets:
            return None
        context, half = self.sizes.context, self.buckets // 2
        place = step.tracer.iota(context).reshape(1, context)
        distance = place - step.positions.reshape(step.rows, 1)
        bucket = (distance > 0).where(half, 0)
        for edge in find_bucket_edges(half):
            bucket = bucket + ((distance >= edge) | (distance <= -edge)).where(1, 0)
        bucket = step.tracer.mark(bucket, f"{label}: buckets of distances")
        name = "encoder.relative_attention_bias.weight"
        table = step.tensor(step.weights.get(name, self.buckets, self.sizes.heads))
        found = step.tracer.lookup(step.tracer.mark(table, f"{label}: table of distances"), bucket)
        return found.permute(0, 2, 1).reshape(step.rows, self.sizes.heads, 1, context)

    def score(self, step: EncoderStep, x: Tensor) -> Tensor:
        """Return the reranker's score of each text [texts, 1]."""
        hidden, on = self.sizes.hidden, step.texts
        dense, kind, out = self.head
        y = on.project(step.take_first(x), dense, [(dense, hidden)], hidden, bias=True)
        y = apply_tanh(y) if kind == "tanh" else compute_activation("relu", y)
        y = on.tracer.mark(y, "head: dense")
        return on.project(y, out, [(out, 1)], hidden, bias=True)


def find_bucket_edges(half: int) -> list[int]:
    """Return the distances from which on a row is in the next bucket of its side, ascending.

    Up to half of the buckets each has one distance, then their widths grow as powers.
    """
    exact = half // 2
    edges = list(range(1, exact + 1))
    for extra in range(1, half - exact):
        edge = exact
        while math.log(edge / exact) / math.log(_MAX_DISTANCE / exact) * (half - exact) < extra:
            edge += 1
        edges.append(edge)
    return edges


def read_bert(fields: Fields, context: int | None) -> Bert:
    """Read the configuration of a BERT."""
    return replace(_read(fields, context, types=True), takes_types=True)


def read_roberta(fields: Fields, context: int | None) -> Bert:
    """Read the configuration of a RoBERTa or XLM-RoBERTa."""
    return _read(fields, context, types=True, padding=1, head=ROBERTA_HEAD)


def read_mpnet(fields: Fields, context: int | None) -> Bert:
    """Read the configuration of an MPNet."""
    buckets = fields.get_integer("relative_attention_num_buckets", 32, most=256)
    if buckets < 4 or buckets & (buckets - 1):
        raise fields.refuse("relative_attention_num_buckets", "a power of two from 4 on")
    return _read(fields, context, padding=1, head=ROBERTA_HEAD, buckets=buckets)


def read_distilbert(fields: Fields, context: int | None) -> Bert:
    """Read the configuration of a DistilBERT."""
    fields.rename(
        {
            "dim": "hidden_size",
            "hidden_dim": "intermediate_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
            "activation": "hidden_act",
        }
    )
    fields.skip("sinusoidal_pos_embds", "tie_weights_")  # the table is stored all the same
    return _read(fields, context, head=DISTILBERT_HEAD, epsilon=1e-12)


def _read(
    fields: Fields,
    context: int | None,
    *,
    types: bool = False,
    padding: int | None = None,
    head: tuple[str, str, str] = _BERT_HEAD,
    buckets: int = 0,
    epsilon: float | None = None,
) -> Bert:
    """Read what all have; ``padding`` is the default of the padding token of RoBERTa and MPNet."""
    ignore_training(fields)
    fields.expect("position_embedding_type", "absolute")
    table = fields.get_integer("max_position_embeddings", 512)
    first = 0
    if padding is not None:
        value = fields.get("pad_token_id", padding)
        if type(value) is not int or not 0 <= value < table - 1:
            raise fields.refuse("pad_token_id", f"0 to {table - 2}")
        first = value + 1
    sizes = EncoderSizes(
        layers=fields.get_integer("num_hidden_layers", most=tuning.MAX_LAYERS),
        hidden=fields.get_integer("hidden_size"),
        intermediate=fields.get_integer("intermediate_size"),
        heads=fields.get_integer("num_attention_heads"),
        vocab=fields.get_integer("vocab_size"),
        context=table - first if context is None else context,
        norm_epsilon=epsilon or fields.get_number("layer_norm_eps", 1e-12),
    )
    check_sizes(sizes, table - first)
    return Bert(
        sizes,
        read_activation(fields, "hidden_act"),
        table,
        first,
        fields.get_integer("type_vocab_size", 2) if types else 0,
        buckets=buckets,
        head=head,
    )


def rename_weight(name: str) -> str:
    """Return BERT's own name of a weight of a relative."""
    for prefix in ("bert.", "roberta.", "distilbert.", "mpnet."):
        name = name.removeprefix(prefix)
    for pattern, ours in _NAMES:
        name = pattern.sub(ours, name)
    return name
