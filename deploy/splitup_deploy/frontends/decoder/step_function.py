"""The step function of decoder-only language models, traced with tinygrad.

One block is described once, with named variations (``DecoderConfig``); a family of models is a
choice of variations (``splitup_deploy.frontends.families.dense``).

A step processes T rows, 1 to C, and returns logits for R of them. ``splitup.decode.step`` describes
its inputs, ``docs/adr/0006-one-step-function.md`` the reasons. Every layer has one state,
``[context, 2, kv_heads, head_dim]`` (keys, then values), which the step returns updated; a
``Mixer``, which replaces attention, may have other states. All rows are looked up or selected, with
zeros for indices outside, so no input can read beyond a tensor.

A row's attention sums over positions, not over places in the cache, so the order of summation does
not depend on how its keys came there. So logits are the same bytes in every step in which a row
sees the same sequence.

A value is written to memory only where a later kernel would otherwise compute it again; these are
the places where the model can be cut. Arithmetic is float32, weights stay in their dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from tinygrad.dtype import dtypes
from tinygrad.tensor import Tensor
from tinygrad.uop.ops import UOp

from splitup.core.errors import InvalidModel
from splitup.core.tensors import TensorSpec
from splitup_deploy.frontends.decoder.decoder_config import DecoderConfig
from splitup_deploy.frontends.decoder.quantised import dequantise
from splitup_deploy.frontends.decoder.rotary import RopeTable
from splitup_deploy.frontends.decoder.row_layout import Layout
from splitup_deploy.frontends.tracing import TracedModel, Tracer, tracing
from splitup_deploy.frontends.weight_sources import WeightSource

CHUNK = 64  # default of the largest number of rows of one step
MASKED = -1e30  # finite, so that a row without visible keys gives no NaN


class Weights(Protocol):
    """Finds a model's weights by their Hugging Face names."""

    def get(self, name: str, *shape: int) -> WeightSource:
        """Return one weight; raises InvalidModel when it is absent or has another shape."""
        ...

    def can_join(self, names: list[str]) -> bool:
        """Say whether these weights have the same storage format."""
        ...

    def join(self, name: str, parts: list[tuple[str, int]], *shape: int) -> WeightSource:
        """Return the weights (name, rows) concatenated along the rows, called ``name``."""
        ...


# Computes a block's MLP from the step, the normalised rows [rows, hidden] and the layer.
FeedForward = Callable[["Step", Tensor, int], Tensor]
# Computes a block's attention, or what replaces it, from the step, x [rows, hidden] and the layer;
# returns x plus the result, and the new values of the layer's states by name.
Mixer = Callable[["Step", Tensor, int], tuple[Tensor, dict[str, Tensor]]]


def trace_decoder(
    config: DecoderConfig,
    weights: Weights,
    chunk: int | None = None,
    feed_forward: FeedForward | None = None,
    mixer: Mixer | None = None,
) -> TracedModel:
    """Trace a step of up to ``chunk`` rows: tokens, layout, outputs -> logits [R, vocab].

    The default of ``chunk`` is 64 rows, or the context if that is less. ``feed_forward`` replaces
    the dense MLP, ``mixer`` replaces attention. Raises InvalidModel for a chunk that is not within
    1 and the context.
    """
    if chunk is not None and not 1 <= chunk <= config.context:
        raise InvalidModel(
            f"a step of {chunk} rows is not possible; give --chunk 1 to {config.context}"
        )
    chunk = chunk or min(CHUNK, config.context)
    with tracing():
        tracer = Tracer()
        rows = tracer.symbol("T", chunk) if chunk > 1 else 1
        wanted = tracer.symbol("R", chunk) if chunk > 1 else 1
        names = ("T", "R") if chunk > 1 else ("", "")
        tokens = tracer.input(TensorSpec("tokens", "int32", (chunk,), names[0]))
        layout = tracer.input(TensorSpec("layout", "int32", (chunk, 2 + 2 * chunk), names[0]))
        outputs = tracer.input(TensorSpec("outputs", "int32", (chunk,), names[1]))
        step = Step(config, weights, tracer, Layout(tracer, layout, rows, chunk), rows)
        table = weights.get("model.embed_tokens.weight", config.vocab, config.hidden)
        x = step.select(tokens, config.vocab, step.tensor(table))
        if config.embedding_scale != 1.0:
            x = x * config.embedding_scale
        x = tracer.mark(x, "embed")
        updates: dict[str, Tensor] = {}
        for layer in range(config.layers):
            x, states = (mixer or Step.attend)(step, x, layer)
            updates |= states
            x = step.mlp(x, layer, feed_forward or compute_dense_mlp)
        x = step.norm(x, "model.norm.weight", "final norm")
        x = tracer.mark(tracer.lookup(x, outputs), "head: rows")
        if not config.tied:
            table = weights.get("lm_head.weight", config.vocab, config.hidden)
        logits = step.matmul(x, table, config.vocab, config.hidden, wanted)
        if config.logit_cap is not None:
            logits = soft_cap(logits, config.logit_cap)
        logits = tracer.mark(logits, "head")
        return tracer.finish({"logits": logits}, updates)


class Step:
    """One step while it is traced: the model's parts, for ``trace_decoder`` and feed-forwards."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        tracer: Tracer,
        layout: Layout,
        rows: UOp | int,
    ) -> None:
        self.config, self.weights, self.tracer = config, weights, tracer
        self.layout, self.rows = layout, rows

    def tensor(self, source: WeightSource) -> Tensor:
        """Return a weight as float32; bfloat16 by bit operations, which every CPU has."""
        if source.encoding:
            return dequantise(self.tracer.weight(source), source.encoding)
        if source.spec.dtype == "bfloat16":
            raw = TensorSpec(source.spec.name, "uint16", source.spec.shape)
            bits = self.tracer.weight(replace(source, spec=raw, encoding="bfloat16"))
            return bits.cast(dtypes.uint32).lshift(16).bitcast(dtypes.float32)
        return self.tracer.weight(source).cast(dtypes.float32)

    def select(self, index: Tensor, length: int, table: Tensor) -> Tensor:
        """Return ``table[index]``, zero where an index is outside: [rows, *table.shape[1:]].

        tinygrad turns the one-hot sum into a guarded load.
        """
        rest = table.shape[1:]
        ones = (1,) * len(rest)
        shape = (index.shape[0], 1, *ones)
        hit = self.tracer.iota(length).reshape(1, length, *ones) == index.reshape(shape)
        return hit.where(table.reshape(1, length, *rest), 0.0).sum(1)

    def matmul(
        self, x: Tensor, source: WeightSource, out: int, inner: int, rows: UOp | int | None = None
    ) -> Tensor:
        """Return x [rows, inner] times the transpose of a weight [out, inner]."""
        weight = self.tensor(source)
        rows = self.rows if rows is None else rows
        return (x.reshape(rows, 1, inner) * weight.reshape(1, out, inner)).sum(2)

    def project(
        self, x: Tensor, name: str, parts: list[tuple[str, int]], inner: int, bias: bool
    ) -> Tensor:
        """Return x [rows, inner] times the transposes of the layers (name, outputs), joined.

        ``name`` is what the joined layer is called, or a layer's own name.
        """
        if len(parts) > 1 and not self.weights.can_join([part + ".weight" for part, _ in parts]):
            single = [self.project(x, part, [(part, n)], inner, bias) for part, n in parts]
            return Tensor.cat(*(self.tracer.mark(y, name) for y in single), dim=1)
        out = sum(size for _, size in parts)
        result = self.matmul(x, self._join(name, ".weight", parts, out, inner), out, inner)
        if bias:
            result = result + self.tensor(self._join(name, ".bias", parts, out))
        return result

    def _join(
        self, name: str, kind: str, parts: list[tuple[str, int]], *shape: int
    ) -> WeightSource:
        if len(parts) == 1:
            return self.weights.get(parts[0][0] + kind, *shape)
        return self.weights.join(name + kind, [(part + kind, n) for part, n in parts], *shape)

    def norm(self, x: Tensor, name: str, label: str) -> Tensor:
        """Return the RMS norm of x [rows, hidden]."""
        return self.tracer.mark(self.normalise(x, self.norm_weight(name)), label)

    def norm_weight(self, name: str, size: int = 0) -> Tensor:
        """Return what a norm multiplies by: [size], by default [hidden]."""
        weight = self.tensor(self.weights.get(name, size or self.config.hidden))
        return weight + 1.0 if self.config.unit_norms else weight

    def normalise(self, x: Tensor, weight: Tensor, epsilon: float | None = None) -> Tensor:
        """Return x divided by the root of its last axis's mean square, times ``weight``."""
        mean = x.square().mean(x.ndim - 1, keepdim=True)
        return x * (mean + (epsilon or self.config.norm_epsilon)).rsqrt() * weight

    def add(self, x: Tensor, branch: Tensor, norm: str, label: str) -> Tensor:
        """Return x plus a branch; a model with ``post_norms`` normalises the branch first."""
        if self.config.post_norms:
            branch = self.tracer.mark(branch, f"{label}: branch")
            branch = self.normalise(branch, self.norm_weight(norm))
        return self.tracer.mark(x + branch, f"{label}: output")

    def norm_heads(self, qk: Tensor, layer: int, label: str) -> Tensor:
        """Return the RMS norm of every query and key head of [rows, heads, head_dim]."""
        c, prefix = self.config, f"model.layers.{layer}.self_attn"
        if c.wide_qk_norm:
            wide = []
            for name, first, count in (("q", 0, c.heads), ("k", c.heads, c.kv_heads)):
                part = qk[:, first : first + count].reshape(self.rows, count * c.head_dim)
                weight = self.norm_weight(f"{prefix}.{name}_norm.weight", count * c.head_dim)
                wide.append(self.normalise(part, weight).reshape(self.rows, count, c.head_dim))
            return self.tracer.mark(Tensor.cat(*wide, dim=1), f"{label}: q, k norm")
        query, key = (
            self.norm_weight(f"{prefix}.{name}_norm.weight", c.head_dim)
            .reshape(1, c.head_dim)
            .expand(count, c.head_dim)
            for name, count in (("q", c.heads), ("k", c.kv_heads))
        )
        return self.tracer.mark(self.normalise(qk, query.cat(key)), f"{label}: q, k norm")

    def rotate(self, heads: Tensor, count: int, layer: int, label: str) -> Tensor:
        """Return the first ``count`` of heads [rows, heads, size], rotated by their position.

        Every layer has its own copy of the table: with a shared one, the first layer's task would
        send its rows to all other tasks.
        """
        c = self.config
        rope = c.local.rope if c.local is not None and layer in c.local.layers else c.rope
        half, size = rope.pairs, int(heads.shape[2])
        spec = TensorSpec(f"layers.{layer}.rope", "float32", (c.context, 2, half))
        table = self.tracer.weight(WeightSource(spec, (RopeTable(rope, c.context),)))
        angles = self.select(self.layout.positions, c.context, table)  # [rows, 2, half]
        angles = self.tracer.mark(angles, label + ": rope angles")
        cosine, sine = angles[:, 0:1, :], angles[:, 1:2, :]
        if c.latent is None:
            first, second = heads[:, :count, :half], heads[:, :count, half : 2 * half]
        else:  # elements of a pair are neighbours, and half a head apart in the result
            pairs = heads[:, :count, : 2 * half].reshape(self.rows, count, half, 2)
            first, second = pairs[:, :, :, 0], pairs[:, :, :, 1]
        turned = [first * cosine - second * sine, second * cosine + first * sine]
        if 2 * half < size:
            turned.append(heads[:, :count, 2 * half :])
        return self.tracer.mark(Tensor.cat(*turned, dim=2), label + ": rope")

    def attend(self, x: Tensor, layer: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return x plus the attention of one layer, and the layer's new KV cache."""
        c, rows, mark = self.config, self.rows, self.tracer.mark
        label, prefix = f"block {layer} attention", f"model.layers.{layer}"
        groups, width = c.heads // c.kv_heads, c.heads * c.head_dim
        h = self.norm(x, f"{prefix}.input_layernorm.weight", f"{label}: norm")
        heads, turned = c.heads + 2 * c.kv_heads, c.heads + c.kv_heads
        name = f"{prefix}.self_attn.qkv_proj"
        parts = [
            (f"{prefix}.self_attn.{part}_proj", count * c.head_dim)
            for part, count in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads))
        ]
        if c.fused:
            parts = [(name, heads * c.head_dim)]
        gates = c.heads if c.output_gate else 0
        if gates:
            parts[0] = (parts[0][0], 2 * gates * c.head_dim)
        qkv = mark(self.project(h, name, parts, c.hidden, c.qkv_bias), f"{label}: q, k, v")
        qkv = qkv.reshape(rows, heads + gates, c.head_dim)
        if gates:
            pairs = qkv[:, : 2 * gates].reshape(rows, gates, 2, c.head_dim)
            gate, qkv = pairs[:, :, 1], pairs[:, :, 0].cat(qkv[:, 2 * gates :], dim=1)
        is_normed = c.qk_norm or c.wide_qk_norm
        qk = self.norm_heads(qkv[:, :turned], layer, label) if is_normed else qkv
        qk = self.rotate(qk, turned, layer, label)
        fresh = Tensor.stack(qk[:, c.heads :], qkv[:, turned:], dim=1)
        fresh = mark(fresh, f"{label}: k, v")  # otherwise the cache is not written in vectors
        cache = mark(self.write_cache(layer, fresh), f"{label}: KV cache")
        query = qk[:, : c.heads].reshape(rows, c.kv_heads, groups, 1, c.head_dim)
        mixed = self.read_cache(layer, query, cache[:, 0], cache[:, 1])
        if gates:
            mixed = mark(
                mixed * compute_sigmoid(gate.reshape(rows, width)), f"{label}: gated values"
            )
        name = f"{prefix}.self_attn.o_proj"
        branch = self.project(mixed, name, [(name, c.hidden)], width, c.output_bias)
        x = self.add(x, branch, f"{prefix}.post_attention_layernorm.weight", label)
        return x, {f"layers.{layer}.kv": cache}

    def read_cache(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the attention of query [rows, kv_heads, groups, 1, size] over a layer's cache.

        Keys and values are [context, kv_heads, size]; the result [rows, heads * size of a value].
        """
        c, rows, mark = self.config, self.rows, self.tracer.mark
        label, groups = f"block {layer} attention", int(query.shape[2])
        width = int(query.shape[1]) * groups * int(values.shape[2])
        slots = mark(self.find_slots(layer), f"{label}: cache rows seen")  # [rows, context]
        # one index per query head: if broadcast later, the rows found would be written to memory
        index = (
            bound_slots(slots, c.context)
            .reshape(rows, 1, c.context)
            .expand(rows, groups, c.context)
        )
        keys, values = (
            self.tracer.lookup(table, index).permute(0, 3, 1, 2, 4) for table in (keys, values)
        )  # [rows, kv_heads, groups, context, size]
        scores = (query * keys).sum(4) * (c.attention_scale or 1.0 / math.sqrt(c.head_dim))
        if c.attention_cap is not None:
            scores = soft_cap(scores, c.attention_cap)
        is_seen = slots.reshape(rows, 1, 1, c.context) >= 0
        scores = mark(is_seen.where(scores, MASKED), f"{label}: scores")
        powers = mark((scores - scores.max(3, keepdim=True)).exp(), f"{label}: softmax")
        total = mark(powers.sum(3), f"{label}: softmax sum")  # [rows, kv_heads, groups]
        spread = powers.reshape(rows, *powers.shape[1:3], c.context, 1)
        mixed = (spread * values).sum(3)
        return mark((mixed / total.unsqueeze(3)).reshape(rows, width), f"{label}: values")

    def find_slots(self, layer: int) -> Tensor:
        """Return the cache rows that a layer's rows see, by position: int32 [rows, context]."""
        c = self.config
        slots = self.layout.find_slots(c.context)
        if c.local is None or layer not in c.local.layers or c.local.window >= c.context:
            return slots
        place = self.layout.positions.reshape(self.rows, 1)
        is_near = place < self.tracer.iota(c.context).reshape(1, c.context) + c.local.window
        return is_near.where(slots, -c.context)

    def write_cache(self, layer: int, fresh: Tensor) -> Tensor:
        """Return the layer's KV cache: kept rows, new rows [rows, *shape of one], then zeros.

        Rows that are not kept become zeros.
        """
        c = self.config
        row = tuple(int(size) for size in fresh.shape[1:])
        old = self.tracer.state(TensorSpec(f"layers.{layer}.kv", "float32", (c.context, *row)))
        place, start = self.tracer.iota(c.context), self.layout.get_start(c.context)
        kept = self.tracer.lookup(old, self.layout.find_kept(c.context))
        new = self.tracer.lookup(fresh, place - start)
        return (place < start).reshape(c.context, *(1,) * len(row)).where(kept, new)

    def mlp(self, x: Tensor, layer: int, feed_forward: FeedForward) -> Tensor:
        """Return x plus the feed-forward part of one layer."""
        label, prefix = f"block {layer} MLP", f"model.layers.{layer}"
        name = "pre_feedforward" if self.config.post_norms else "post_attention"
        h = self.norm(x, f"{prefix}.{name}_layernorm.weight", f"{label}: norm")
        branch = feed_forward(self, h, layer)
        return self.add(x, branch, f"{prefix}.post_feedforward_layernorm.weight", label)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the activation of ``gate``, times ``up``."""
        if self.config.activation == "silu":
            return gate * (1.0 + (-gate).exp()).reciprocal() * up
        # 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u)); arXiv 1606.08415
        inner = gate * (1.0 + gate.square() * 0.044715) * (2.0 * math.sqrt(2.0 / math.pi))
        return gate * (1.0 + (-inner).exp()).reciprocal() * up


def compute_dense_mlp(step: Step, h: Tensor, layer: int) -> Tensor:
    """Return the gated MLP of h [rows, hidden]."""
    prefix = f"model.layers.{layer}.mlp"
    return compute_gated_mlp(step, h, prefix, step.config.intermediate, f"block {layer} MLP")


def compute_gated_mlp(step: Step, h: Tensor, prefix: str, inner: int, label: str) -> Tensor:
    """Return the gated MLP of h [rows, hidden] whose weights are called ``prefix``.*_proj."""
    c, name = step.config, f"{prefix}.gate_up_proj"
    parts = [(f"{prefix}.{part}_proj", inner) for part in ("gate", "up")]
    if c.fused:
        parts = [(name, 2 * inner)]
    both = step.tracer.mark(
        step.project(h, name, parts, c.hidden, c.mlp_bias), f"{label}: gate and up"
    )
    active = step.activate(both[:, :inner], both[:, inner:])
    active = step.tracer.mark(active, f"{label}: activation")
    down = f"{prefix}.down_proj"
    return step.project(active, down, [(down, c.hidden)], inner, c.mlp_bias)


def bound_slots(slots: Tensor, context: int) -> Tensor:
    """Return slots bounded to the rows of a cache; a slot for "sees nothing" becomes any row.

    The compiler sees that no index is outside. Otherwise each load would need a guard, which costs
    as much as the load.
    """
    if context & (context - 1) == 0:
        return slots & (context - 1)
    return slots.maximum(0).minimum(context - 1)


def compute_sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)), which is 0 where the power is infinite."""
    return (1.0 + (-x).exp()).reciprocal()


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap), without overflow at either end."""
    return cap - (2.0 * cap) * (1.0 + (x * (2.0 / cap)).exp()).reciprocal()
