"""ModernBERT (arXiv 2412.13663): norms before each part, rotary positions, GeGLU.

Every third layer sees the whole text; the others see ``local_attention // 2`` positions before and
after, with a rope of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tinygrad.tensor import Tensor

from splitup.core import tuning
from splitup_deploy.frontends.decoder.rotary import Rope
from splitup_deploy.frontends.decoder.row_operations import Activation, compute_activation
from splitup_deploy.frontends.encoder.step_function import (
    EncoderSizes,
    EncoderStep,
    apply_layer_norm,
)
from splitup_deploy.frontends.families.config_fields import Fields
from splitup_deploy.frontends.families.dense import read_local_layers
from splitup_deploy.frontends.families.encoder_fields import (
    check_sizes,
    ignore_training,
    read_activation,
)
from splitup_deploy.frontends.families.rope_fields import RopeDefaults, read_rope


@dataclass(frozen=True, slots=True)
class ModernBert:
    """``local`` layers see ``window`` positions on either side; the flags say what has a bias."""

    sizes: EncoderSizes
    activation: Activation
    rope: Rope
    local_rope: Rope
    local: frozenset[int]
    window: int
    attention_bias: bool
    mlp_bias: bool
    norm_bias: bool
    classifier_bias: bool
    classifier_activation: Activation
    classifier_pooling: Literal["cls", "mean"]
    takes_types: bool = False

    def encode(self, step: EncoderStep) -> Tensor:
        """Return the last layer's rows [rows, hidden]."""
        x = step.embed(step.tokens, "embeddings.tok_embeddings.weight", self.sizes.vocab)
        x = self._norm(step, step.tracer.mark(x, "embed: rows"), "embeddings.norm", "embed")
        for layer in range(self.sizes.layers):
            x = self._attend(step, x, layer)
            x = self._feed_forward(step, x, layer)
        return self._norm(step, x, "final_norm", "final norm")

    def _norm(self, step: EncoderStep, x: Tensor, name: str, label: str) -> Tensor:
        return step.norm(x, name, label, bias=self.norm_bias)

    def _attend(self, step: EncoderStep, x: Tensor, layer: int) -> Tensor:
        s, mark = self.sizes, step.tracer.mark
        label, prefix = f"block {layer} attention", f"layers.{layer}"
        is_local = layer in self.local
        h = x  # the embedding is normalised already
        if layer:
            h = self._norm(step, x, f"{prefix}.attn_norm", f"{label}: norm")
        name = f"{prefix}.attn.Wqkv"
        qkv = step.project(h, name, [(name, 3 * s.hidden)], s.hidden, self.attention_bias)
        qkv = mark(qkv, f"{label}: q, k, v").reshape(step.rows, 3 * s.heads, s.head_dim)
        rope = self.local_rope if is_local else self.rope
        qkv = mark(step.rotate(qkv, 2 * s.heads, rope, f"{prefix}.rope", label), f"{label}: rope")
        mixed = step.attend(qkv, label, window=self.window if is_local else None)
        name = f"{prefix}.attn.Wo"
        branch = step.project(mixed, name, [(name, s.hidden)], s.hidden, self.attention_bias)
        return mark(x + branch, f"{label}: output")

    def _feed_forward(self, step: EncoderStep, x: Tensor, layer: int) -> Tensor:
        s, mark = self.sizes, step.tracer.mark
        label, prefix = f"block {layer} MLP", f"layers.{layer}"
        h = self._norm(step, x, f"{prefix}.mlp_norm", f"{label}: norm")
        name = f"{prefix}.mlp.Wi"
        both = step.project(h, name, [(name, 2 * s.intermediate)], s.hidden, self.mlp_bias)
        both = mark(both, f"{label}: input and gate")
        inner = (
            compute_activation(self.activation, both[:, : s.intermediate])
            * both[:, s.intermediate :]
        )
        inner = mark(inner, f"{label}: activation")
        name = f"{prefix}.mlp.Wo"
        branch = step.project(inner, name, [(name, s.hidden)], s.intermediate, self.mlp_bias)
        return mark(x + branch, f"{label}: output")

    def score(self, step: EncoderStep, x: Tensor) -> Tensor:
        """Return the reranker's score of each text [texts, 1]."""
        hidden, on = self.sizes.hidden, step.texts
        y = step.take_first(x) if self.classifier_pooling == "cls" else step.take_mean(x)
        y = on.project(y, "head.dense", [("head.dense", hidden)], hidden, self.classifier_bias)
        y = on.tracer.mark(compute_activation(self.classifier_activation, y), "head: dense")
        y = apply_layer_norm(on, y, "head.norm", self.sizes, "head: norm", bias=self.norm_bias)
        return on.project(y, "classifier", [("classifier", 1)], hidden, bias=True)


def read_modernbert(fields: Fields, context: int | None) -> ModernBert:
    """Read the configuration of a ModernBERT, in its old and new spellings."""
    ignore_training(fields)
    fields.skip(  # of other heads, of how it is computed, or without a meaning
        *("decoder_bias", "deterministic_flash_attn", "sparse_prediction", "reference_compile"),
        *("sparse_pred_ignore_index", "repad_logits_with_grad", "layer_norm_eps", "hidden_act"),
        "position_embedding_type",
    )
    trained = fields.get_integer("max_position_embeddings", 8192)
    sizes = EncoderSizes(
        layers=fields.get_integer("num_hidden_layers", 22, most=tuning.MAX_LAYERS),
        hidden=fields.get_integer("hidden_size", 768),
        intermediate=fields.get_integer("intermediate_size", 1152),
        heads=fields.get_integer("num_attention_heads", 12),
        vocab=fields.get_integer("vocab_size", 50_368),
        context=trained if context is None else context,
        norm_epsilon=fields.get_number("norm_eps", 1e-5),
    )
    check_sizes(sizes, trained)
    pooling = fields.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise fields.refuse("classifier_pooling", "cls, mean")
    every = fields.get_integer("global_attn_every_n_layers", 3)
    rope, local_rope = _read_ropes(fields, sizes, trained)
    return ModernBert(
        sizes,
        read_activation(fields, "hidden_activation"),
        rope,
        local_rope,
        read_local_layers(fields, sizes.layers, lambda layer: layer % every != 0),
        fields.get_integer("local_attention", 128) // 2,
        fields.get_flag("attention_bias", False),
        fields.get_flag("mlp_bias", False),
        fields.get_flag("norm_bias", False),
        fields.get_flag("classifier_bias", False),
        read_activation(fields, "classifier_activation"),
        pooling,
    )


def _read_ropes(fields: Fields, sizes: EncoderSizes, trained: int) -> tuple[Rope, Rope]:
    """Return the ropes of the layers that see the whole text, and of the others."""
    fields.expect("rope_scaling", None)
    parameters = fields.get_fields("rope_parameters")
    ropes = []
    for kind, old, theta in (
        ("full_attention", "global_rope_theta", 160_000.0),
        ("sliding_attention", "local_rope_theta", 10_000.0),
    ):
        defaults = RopeDefaults(
            sizes.head_dim, trained, sizes.context, fields.get_number(old, theta)
        )
        ropes.append(
            read_rope(None if parameters is None else parameters.get_fields(kind), defaults)
        )
    if parameters is not None:
        parameters.check_all_read()
    return ropes[0], ropes[1]


def rename_weight(name: str) -> str:
    """Return a weight's name without that of the encoder inside a larger model."""
    return name.removeprefix("model.")
