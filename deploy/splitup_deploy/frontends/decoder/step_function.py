"""The step function of decoder-only language models, traced with tinygrad.

One block is described once, with named variations (``DecoderConfig``); a family of models is a
choice of variations (``splitup_deploy.frontends.families.dense``).

A step processes T rows, 1 to C, and returns logits for R of them. ``splitup.decode.step`` describes
its inputs, ``docs/adr/0006-one-step-function.md`` the reasons. Every layer has a state
``[cache rows, 2, kv_heads, head_dim]`` (keys, then values), which the step returns updated
(``splitup_deploy.frontends.decoder.caches``); a ``Mixer``, which replaces attention, may have other
states. All rows are looked up or selected, with
zeros for indices outside, so no input can read beyond a tensor.

A row's attention sums over positions, not over places in the cache, so the order of summation does
not depend on how its keys came there. So logits are the same bytes in every step in which a row
sees the same sequence.

A value is written to memory only where a later kernel would otherwise compute it again; these are
the places where the model can be cut. Arithmetic is float32; weights stay in their dtype, and the
caches of a model whose numbers have two bytes have that dtype, too, or eight bits by choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tinygrad.dtype import dtypes
from tinygrad.tensor import Tensor
from tinygrad.uop.ops import UOp

from splitup.core.errors import InvalidModel
from splitup.core.tensors import TensorSpec
from splitup_deploy.frontends.decoder.caches import Cache, Layout, choose_cache_dtype, open_cache
from splitup_deploy.frontends.decoder.decoder_config import Clamped, DecoderConfig, TokenVectors
from splitup_deploy.frontends.decoder.repeated_layers import RepeatedLayers
from splitup_deploy.frontends.decoder.rotary import GrowthTable, RopeTable
from splitup_deploy.frontends.decoder.row_operations import (
    CacheKind,
    RowOperations,
    Weights,
    compute_activation,
    compute_sigmoid,
    pad_steps,
    rotate_heads,
    soft_cap,
)
from splitup_deploy.frontends.tracing import TracedModel, Tracer, tracing
from splitup_deploy.frontends.weight_sources import WeightSource, select_matrix

CHUNK = 64  # default of the largest number of rows of one step
_LEAST = 1e-30  # a largest number that is not zero, so that a row of zeros can be divided by it


# Computes a block's MLP from the step, the normalised rows [rows, hidden], the rows before their
# norm, and the layer.
FeedForward = Callable[["Step", Tensor, Tensor, int], Tensor]
# Computes a block's attention, or what replaces it, from the step, x [rows, hidden] and the layer;
# returns x plus the result, and the new values of the layer's states by name.
Mixer = Callable[["Step", Tensor, int], tuple[Tensor, dict[str, Tensor]]]


def choose_chunk(config: DecoderConfig, chunk: int | None) -> int:
    """Return the most rows of a step: those wanted, by default 64, or the context if that is less.

    Raises InvalidModel for a chunk that is not within 1 and the context, or less than a block.
    """
    if chunk is not None and not 1 <= chunk <= config.context:
        raise InvalidModel(
            f"a step of {chunk} rows is not possible; give --chunk 1 to {config.context}"
        )
    least, what = 1, ""
    if config.diffusion is not None:
        least = config.diffusion.block_size
        what = f"the model writes blocks of {least} tokens"
    if config.images is not None:
        least = config.images.rows
        what = f"an image has {least} rows"
    if least > (chunk or config.context):
        raise InvalidModel(
            f"{what}, which do not fit a step of {chunk or config.context} rows; give --chunk "
            f"{least} or more, within the context"
        )
    return chunk or max(least, min(CHUNK, config.context))


def trace_decoder(
    config: DecoderConfig,
    weights: Weights,
    chunk: int | None = None,
    feed_forward: FeedForward | None = None,
    mixer: Mixer | None = None,
    cache: CacheKind | None = None,
) -> TracedModel:
    """Trace a step of up to ``chunk`` rows: tokens, layout, outputs -> logits [R, vocab].

    ``feed_forward`` replaces the dense MLP, ``mixer`` replaces attention; ``cache`` chooses other
    numbers for caches. Raises what ``choose_chunk`` raises, and InvalidModel for a model without
    such caches.
    """
    chunk = choose_chunk(config, chunk)
    if cache is not None and (config.latent is not None or config.borrowed is not None):
        what = "compressed rows" if config.borrowed is None else "layers that read others' caches"
        raise InvalidModel(f"--cache {cache} is not there for a model with {what}: leave it out")
    with tracing():
        tracer = Tracer()
        rows = tracer.symbol("T", chunk) if chunk > 1 else 1
        wanted = tracer.symbol("R", chunk) if chunk > 1 else 1
        names = ("T", "R") if chunk > 1 else ("", "")
        tokens = tracer.input(TensorSpec("tokens", "int32", (chunk,), names[0]))
        layout = tracer.input(TensorSpec("layout", "int32", (chunk, 2 + 2 * chunk), names[0]))
        outputs = tracer.input(TensorSpec("outputs", "int32", (chunk,), names[1]))
        layers = RepeatedLayers(config, weights, tracer)
        step = Step(config, layers.weights, tracer, Layout(tracer, layout, rows, chunk), rows)
        step.tokens = tokens
        table = weights.get("model.embed_tokens.weight", config.vocab, config.hidden)
        step.cache_dtype = "int8" if cache == "8bit" else choose_cache_dtype(table)
        x = step.select(tokens, config.vocab, step.tensor(table))
        if config.embedding_scale != 1.0:
            x = x * config.embedding_scale
        x = step.embedded = tracer.mark(x, "embed")
        if config.images is not None:
            images = tracer.input(TensorSpec("images", "float32", (chunk, config.hidden), names[0]))
            is_image = tokens.shrink(((0, rows),)) == config.images.token
            images = images.shrink(((0, rows), (0, config.hidden)))
            x = tracer.mark(is_image.reshape(rows, 1).where(images, x), "images")
        updates: dict[str, Tensor] = {}

        def compute_layer(before: Tensor, layer: int) -> tuple[Tensor, dict[str, Tensor]]:
            x, states = before, dict[str, Tensor]()
            if config.mlp_layers is None or layer not in config.mlp_layers:
                x, states = (mixer or Step.attend)(step, x, layer)
            if config.mlp_layers is None or layer in config.mlp_layers:
                x = step.mlp(x, layer, feed_forward or compute_dense_mlp, before)
            return x, states

        for layer in range(config.layers):
            x, states = layers.compute(compute_layer, x, layer)
            updates |= states
        x = step.norm(x, "model.norm.weight", "final norm")
        x = tracer.mark(tracer.lookup(x, outputs), "head: rows")
        if not config.tied:
            table = weights.get("lm_head.weight", config.vocab, config.hidden)
        logits = step.matmul(x, table, config.vocab, config.hidden, wanted)
        if config.head_bias:
            logits = logits + step.tensor(weights.get("lm_head.bias", config.vocab))
        if config.logit_scale != 1.0:
            logits = logits * config.logit_scale
        if config.logit_cap is not None:
            logits = soft_cap(logits, config.logit_cap)
        logits = tracer.mark(logits, "head")
        return tracer.finish({"logits": logits}, updates)


class Step(RowOperations):
    """One step while it is traced: the model's parts, for ``trace_decoder`` and feed-forwards."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        tracer: Tracer,
        layout: Layout,
        rows: UOp | int,
    ) -> None:
        super().__init__(weights, tracer, rows)
        self.config, self.layout = config, layout
        self.tokens: Tensor  # [rows], what is embedded
        self.embedded: Tensor  # [rows, hidden]
        self.cache_dtype: str  # of keys and values
        # new keys and values for other layers, by whether these have a window
        self._lent: dict[bool, Tensor] = {}

    def norm(self, x: Tensor, name: str, label: str) -> Tensor:
        """Return the RMS norm or layer norm of x [rows, hidden]."""
        if self.config.layer_norms:
            x = self.tracer.mark(x - x.mean(1, keepdim=True), f"{label}: centred")
        result = self.normalise(x, self.norm_weight(name))
        if self.config.norm_bias:
            bias = self.weights.get(name.replace(".weight", ".bias"), self.config.hidden)
            result = result + self.tensor(bias)
        return self.tracer.mark(result, label)

    def norm_input(self, x: Tensor, name: str, label: str) -> Tensor:
        """Return the input of attention or MLP, which few models do not normalise."""
        return self.norm(x, name, label) if self.config.pre_norms else x

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
        if self.config.residual_scale != 1.0:
            branch = branch * self.config.residual_scale
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
        size = c.get_heads(layer).head_dim
        weights = [
            self.norm_weight(f"{prefix}.{name}_norm.weight", size)
            .reshape(1, size)
            .expand(count, size)
            for name, count in (("q", c.heads), ("k", int(qk.shape[1]) - c.heads))
            if count
        ]
        return self.tracer.mark(self.normalise(qk, Tensor.cat(*weights)), f"{label}: q, k norm")

    def rotate(
        self, heads: Tensor, count: int, layer: int, label: str, neighbours: bool | None = None
    ) -> Tensor:
        """Return the first ``count`` of heads [rows, heads, size], rotated by their position.

        ``neighbours``: element 2i is paired with 2i + 1, by default as the model does.
        Every layer has its own copy of the table: with a shared one, the first layer's task would
        send its rows to all other tasks.
        """
        c = self.config
        rope = c.local.rope if c.local is not None and layer in c.local.layers else c.rope
        spec = TensorSpec(f"layers.{layer}.rope", "float32", (c.context, 2, rope.pairs))
        table = self.tracer.weight(WeightSource(spec, (RopeTable(rope, c.context),)))
        angles = self.select(self.layout.positions, c.context, table)  # [rows, 2, half]
        angles = self.tracer.mark(angles, label + ": rope angles")
        if neighbours is None:
            neighbours = c.neighbours or c.latent is not None
        turned = rotate_heads(heads, count, angles, neighbours=neighbours)
        return self.tracer.mark(turned, label + ": rope")

    def grow(self, query: Tensor, layer: int, label: str) -> Tensor:
        """Return queries [rows, heads, size] times what their positions ask for."""
        growth, context = self.config.growth, self.config.context
        if growth is None or (growth.unturned_only and layer not in self.config.unturned):
            return query
        count = (context - 1 + growth.offset) // growth.positions + 1
        spec = TensorSpec(f"layers.{layer}.growth", "float32", (count,))
        table = self.tracer.weight(WeightSource(spec, (GrowthTable(growth.rate, count),)))
        place = self.layout.positions.maximum(0).minimum(context - 1)
        step = (place + growth.offset) // growth.positions
        factor = self.tracer.mark(self.select(step, count, table), f"{label}: growth")
        return query * factor.reshape(self.rows, 1, 1)

    def attend(self, x: Tensor, layer: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return x plus the attention of one layer, and the layer's new KV cache."""
        c, rows, mark = self.config, self.rows, self.tracer.mark
        label, prefix = f"block {layer} attention", f"model.layers.{layer}"
        own = c.get_heads(layer)
        kv_heads, size = own.kv_heads, own.head_dim
        groups, width = c.heads // kv_heads, c.heads * size
        h = self.norm_input(x, f"{prefix}.input_layernorm.weight", f"{label}: norm")
        borrows = c.borrowed is not None and layer in c.borrowed.layers
        turned = c.heads if borrows else c.heads + kv_heads
        heads = turned if own.values_are_keys or borrows else turned + kv_heads
        name = f"{prefix}.self_attn.qkv_proj"
        counts = ("q", c.heads), ("k", turned - c.heads), ("v", heads - turned)
        parts = [
            (f"{prefix}.self_attn.{part}_proj", count * size) for part, count in counts if count
        ]
        if c.fused:
            parts = [(name, heads * size)]
        gates = c.heads if c.output_gate else 0
        if gates:
            parts[0] = (parts[0][0], 2 * gates * size)
        qkv = mark(self.project(h, name, parts, c.hidden, c.qkv_bias), f"{label}: q, k, v")
        qkv = qkv.reshape(rows, heads + gates, size)
        if gates:
            pairs = qkv[:, : 2 * gates].reshape(rows, gates, 2, size)
            gate, qkv = pairs[:, :, 1], pairs[:, :, 0].cat(qkv[:, 2 * gates :], dim=1)
        is_normed = c.qk_norm or c.wide_qk_norm
        qk = self.norm_heads(qkv[:, :turned], layer, label) if is_normed else qkv
        is_turned = layer not in c.unturned
        qk = self.rotate(qk, turned, layer, label) if is_turned else qk[:, :turned]
        if c.late_qk_norm and is_turned:
            qk = mark(self.normalise(qk, Tensor(1.0)), f"{label}: q, k norm")
        if borrows:  # what they keep is the same, but a task cannot read another's state
            fresh, steps = self._lent[c.is_local(layer)], None
        else:
            values = qkv[:, heads - kv_heads :]
            if c.value_norm:
                values = mark(self.normalise(values, Tensor(1.0)), f"{label}: v norm")
            fresh = Tensor.stack(qk[:, c.heads :], values, dim=1)
            steps = self.find_steps(fresh, f"{label}: steps of k, v")
            fresh = self.round_for_cache(fresh, f"{label}: k, v", steps)
        if c.borrowed is not None and layer in c.borrowed.lenders:
            self._lent[c.is_local(layer)] = fresh
        cache = open_cache(self, layer)
        held = cache.write(fresh)
        factors = None if steps is None else cache.write(steps, "steps")
        query = self.grow(qk[:, : c.heads], layer, label)
        query = query.reshape(rows, kv_heads, groups, 1, size)
        mixed = self.read_cache(layer, cache, query, held[:, 0], held[:, 1], factors)
        if gates:
            mixed = mark(
                mixed * compute_sigmoid(gate.reshape(rows, width)), f"{label}: gated values"
            )
        name = f"{prefix}.self_attn.o_proj"
        branch = self.project(mixed, name, [(name, c.hidden)], width, c.output_bias)
        x = self.add(x, branch, f"{prefix}.post_attention_layernorm.weight", label)
        return x, cache.updates

    def find_steps(self, fresh: Tensor, label: str) -> Tensor | None:
        """Return by what new rows [rows, 2, kv_heads, size] are divided for a cache of int8.

        [rows, n], of which the first 2 kv_heads are used; None for another cache. The quotients are
        within ±127.
        """
        if self.cache_dtype != "int8":
            return None
        largest = fresh.maximum(-fresh).max(3).reshape(self.rows, 2 * int(fresh.shape[2]))
        steps = largest.maximum(_LEAST) * (1.0 / 127.0)
        return self.tracer.mark(pad_steps(steps), label)

    def round_for_cache(self, fresh: Tensor, label: str, steps: Tensor | None = None) -> Tensor:
        """Return new rows in the cache's dtype, in memory: it is written in vectors then.

        They are divided by ``steps`` before.
        """
        if steps is not None:
            shape = (self.rows, 2, int(fresh.shape[2]), 1)
            fresh = fresh / steps[:, : 2 * shape[2]].reshape(shape)
            fresh = fresh + (fresh < 0.0).where(-0.5, 0.5)  # a cast rounds towards 0
        return self.tracer.mark(fresh.cast(getattr(dtypes, self.cache_dtype)), label)

    def read_cache(
        self,
        layer: int,
        cache: Cache,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        steps: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of query [rows, kv_heads, groups, 1, size] over a layer's cache.

        Keys and values are [cache rows, kv_heads, size]; the result is [rows, heads * size of a
        value]. ``steps`` [cache rows, n] are those of ``find_steps``.
        """
        c, label = self.config, f"block {layer} attention"
        slots = self.tracer.mark(cache.find_slots(), f"{label}: cache rows seen")
        scale = c.attention_scale or 1.0 / math.sqrt(c.head_dim)
        sinks = None
        if c.sinks:
            sinks = self.tensor(self.weights.get(f"model.layers.{layer}.self_attn.sinks", c.heads))
        return self.attend_rows(
            query, keys, values, slots, scale, label, cap=c.attention_cap, sinks=sinks, steps=steps
        )

    def mlp(self, x: Tensor, layer: int, feed_forward: FeedForward, before: Tensor) -> Tensor:
        """Return x plus the feed-forward part of one layer; ``before`` is attention's input."""
        label, prefix = f"block {layer} MLP", f"model.layers.{layer}"
        name = "pre_feedforward" if self.config.post_norms else "post_attention"
        source = x
        if self.config.parallel or self.config.mlp_layers is not None:
            name, source = "input", before
        h = self.norm_input(source, f"{prefix}.{name}_layernorm.weight", f"{label}: norm")
        branch = feed_forward(self, h, source, layer)
        x = self.add(x, branch, f"{prefix}.post_feedforward_layernorm.weight", label)
        if self.config.token_vectors is not None:
            x = self.add_token_vectors(x, layer, self.config.token_vectors)
        if self.config.layer_scales:
            scale = self.tensor(self.weights.get(f"{prefix}.layer_scalar", 1))
            x = self.tracer.mark(x * scale, f"{label}: scaled")
        return x

    def add_token_vectors(self, x: Tensor, layer: int, vectors: TokenVectors) -> Tensor:
        """Return x plus what a layer makes of its vectors of the rows' tokens.

        Every layer looks up its own columns of the table, so that no task holds all of it.
        """
        c, size, mark = self.config, vectors.size, self.tracer.mark
        label, prefix = f"block {layer} token vectors", f"model.layers.{layer}"
        first, width = layer * size, c.layers * size
        table = self.weights.get("model.embed_tokens_per_layer.weight", vectors.vocab, width)
        name = f"{prefix}.token_table.weight"
        table = select_matrix(table, name, (0, vectors.vocab), (first, size), width)
        known = self.select(self.tokens, vectors.vocab, self.tensor(table)) * math.sqrt(size)
        matrix = self.weights.get("model.per_layer_model_projection.weight", width, c.hidden)
        name = f"{prefix}.token_proj.weight"
        matrix = select_matrix(matrix, name, (first, size), (0, c.hidden), c.hidden)
        made = self.matmul(self.embedded, matrix, size, c.hidden) * c.hidden**-0.5
        made = mark(made, f"{label}: computed")
        weight = self.norm_weight("model.per_layer_projection_norm.weight", size)
        vector = mark((self.normalise(made, weight) + known) * math.sqrt(0.5), label)
        name = f"{prefix}.per_layer_input_gate"
        gate = mark(self.project(x, name, [(name, size)], c.hidden, False), f"{label}: gate")
        active = mark(self.activate(gate, vector), f"{label}: activation")
        name = f"{prefix}.per_layer_projection"
        branch = mark(self.project(active, name, [(name, c.hidden)], size, False), f"{label}: out")
        weight = self.norm_weight(f"{prefix}.post_per_layer_input_norm.weight")
        return mark(x + self.normalise(branch, weight), f"{label}: output")

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the activation of ``gate``, times ``up``."""
        form = self.config.activation
        if isinstance(form, Clamped):
            gate, up = gate.minimum(form.limit), up.maximum(-form.limit).minimum(form.limit)
            return gate * (1.0 + (gate * -form.alpha).exp()).reciprocal() * (up + 1.0)
        return compute_activation(form, gate) * up


def compute_dense_mlp(step: Step, h: Tensor, _: Tensor, layer: int) -> Tensor:
    """Return the gated MLP of h [rows, hidden]."""
    prefix = f"model.layers.{layer}.mlp"
    inner = step.config.get_intermediate(layer)
    return compute_gated_mlp(step, h, prefix, inner, f"block {layer} MLP")


def compute_gated_mlp(step: Step, h: Tensor, prefix: str, inner: int, label: str) -> Tensor:
    """Return the MLP of h [rows, hidden] whose weights are called ``prefix``.*_proj."""
    c, name = step.config, f"{prefix}.gate_up_proj"
    parts = [(f"{prefix}.{part}_proj", inner) for part in ("gate", "up")[not c.gated :]]
    name = name if c.gated else f"{prefix}.up_proj"
    if c.fused:
        parts = [(name, 2 * inner)]
    both = step.tracer.mark(
        step.project(h, name, parts, c.hidden, c.mlp_bias), f"{label}: gate and up"
    )
    active = step.activate(both[:, :inner], both[:, inner if c.gated else 0 :])
    active = step.tracer.mark(active, f"{label}: activation")
    down = f"{prefix}.down_proj"
    return step.project(active, down, [(down, c.hidden)], inner, c.mlp_bias)
