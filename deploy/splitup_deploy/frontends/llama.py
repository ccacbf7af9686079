"""The step function of Llama-family models, traced with tinygrad.

One step feeds T rows: ``tokens`` and ``positions``, int32 [T]. A position is the row's place in
the sequence and in the KV cache; -1 switches a row off. Every layer keeps one state, ``[context,
2, kv_heads, head_dim]`` (keys, then values), which the step returns updated: the new rows are
selected into it, never indexed, so no input can reach outside. A row attends to the cache rows at
or before its own position.

Values are written to memory where a later kernel would otherwise compute them again, and
nowhere else; these are the places where the model can be cut. Arithmetic is float32, weights stay
in the dtype they came in.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from decimal import Context as DecimalContext
from decimal import Decimal
from typing import Protocol

from tinygrad.dtype import dtypes
from tinygrad.tensor import Tensor

from splitup.tensors import TensorSpec
from splitup_deploy.trace import TracedModel, Tracer, tracing
from splitup_deploy.weights import WeightSource

MASKED = -1e30  # finite, so that a switched-off row, where everything is masked, gives no NaN


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The numbers that shape a Llama-family model."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_epsilon: float
    rope_theta: float
    tied: bool


class Weights(Protocol):
    """Finds a model's weights by their Hugging Face names."""

    def get(self, name: str, *shape: int) -> WeightSource:
        """Return one weight; raises InvalidModel when it is absent or has another shape."""
        ...

    def join(self, name: str, parts: list[tuple[str, int]], *shape: int) -> WeightSource:
        """Return weights of (name, rows) put under each other, called ``name``."""
        ...


def trace_llama(config: LlamaConfig, weights: Weights, rows: int = 1) -> TracedModel:
    """Trace one step of ``rows`` rows: tokens, positions -> logits float32 [rows, vocab]."""
    with tracing():
        tracer = Tracer()
        tokens = tracer.input(TensorSpec("tokens", "int32", (rows,)))
        positions = tracer.input(TensorSpec("positions", "int32", (rows,)))
        step = _Step(config, weights, tracer, positions, rows)
        table = weights.get("model.embed_tokens.weight", config.vocab, config.hidden)
        x = step.select(tokens, config.vocab, step.tensor(table))
        x = tracer.mark(x, "embed")
        updates = {}
        for layer in range(config.layers):
            x, update = step.attention(x, layer)
            updates[f"layers.{layer}.kv"] = update
            x = step.mlp(x, layer)
        x = step.norm(x, "model.norm.weight", "final norm")
        if not config.tied:
            table = weights.get("lm_head.weight", config.vocab, config.hidden)
        logits = step.matmul(x, table, config.vocab, config.hidden)
        logits = tracer.mark(logits, "head")
        return tracer.finish({"logits": logits}, updates)


class _Step:
    def __init__(
        self, config: LlamaConfig, weights: Weights, tracer: Tracer, positions: Tensor, rows: int
    ) -> None:
        self.config, self.weights, self.tracer = config, weights, tracer
        self.positions, self.rows = positions, rows
        self.rope_table = compute_rope_table(config.context, config.head_dim, config.rope_theta)

    def tensor(self, source: WeightSource) -> Tensor:
        """Return a weight as float32. bfloat16 is widened by hand: few CPUs and compilers can."""
        if source.spec.dtype == "bfloat16":
            raw = TensorSpec(source.spec.name, "uint16", source.spec.shape)
            bits = self.tracer.weight(WeightSource(raw, source.parts))
            return bits.cast(dtypes.uint32).lshift(16).bitcast(dtypes.float32)
        return self.tracer.weight(source).cast(dtypes.float32)

    def select(self, index: Tensor, length: int, table: Tensor) -> Tensor:
        """Return ``table[index]``, zero where an index is outside: [rows, *table.shape[1:]].

        tinygrad turns the one-hot sum into a guarded load.
        """
        rest = table.shape[1:]
        ones = (1,) * len(rest)
        hit = self.tracer.iota(length).reshape(1, length, *ones) == index.reshape(-1, 1, *ones)
        return hit.where(table.reshape(1, length, *rest), 0.0).sum(1)

    def matmul(self, x: Tensor, source: WeightSource, out: int, inner: int) -> Tensor:
        """Return x [rows, inner] times the transpose of a weight [out, inner]."""
        weight = self.tensor(source)
        return (x.reshape(self.rows, 1, inner) * weight.reshape(1, out, inner)).sum(2)

    def norm(self, x: Tensor, name: str, label: str) -> Tensor:
        """Return the RMS norm of x [rows, hidden]."""
        weight = self.tensor(self.weights.get(name, self.config.hidden))
        scale = (x.square().mean(1, keepdim=True) + self.config.norm_epsilon).rsqrt()
        return self.tracer.mark(x * scale * weight, label)

    def rotate(self, qkv: Tensor, layer: int, label: str) -> Tensor:
        """Turn the query and key heads of [rows, all heads, head_dim] by their position.

        Every layer has the table under its own name: a shared one would make the first layer's
        task send its rows to all others.
        """
        c, half = self.config, self.config.head_dim // 2
        spec = TensorSpec(f"layers.{layer}.rope", "float32", (c.context, 2, half))
        table = self.tracer.weight(WeightSource(spec, (self.rope_table,)))
        angles = self.select(self.positions, c.context, table)  # [rows, 2, half]
        angles = self.tracer.mark(angles, label + ": rope angles")
        cosine, sine = angles[:, 0:1, :], angles[:, 1:2, :]
        turned = c.heads + c.kv_heads
        first, second = qkv[:, :turned, :half], qkv[:, :turned, half:]
        qk = Tensor.cat(first * cosine - second * sine, second * cosine + first * sine, dim=2)
        return self.tracer.mark(qk, label + ": rope")

    def attention(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return x plus the attention of one layer, and the layer's new KV cache."""
        c, rows, mark = self.config, self.rows, self.tracer.mark
        label, prefix = f"block {layer} attention", f"model.layers.{layer}"
        groups, width = c.heads // c.kv_heads, c.heads * c.head_dim
        h = self.norm(x, f"{prefix}.input_layernorm.weight", f"{label}: norm")
        heads = c.heads + 2 * c.kv_heads
        parts = [("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)]
        source = self.weights.join(
            f"{prefix}.self_attn.qkv_proj.weight",
            [(f"{prefix}.self_attn.{p}_proj.weight", n * c.head_dim) for p, n in parts],
            heads * c.head_dim,
            c.hidden,
        )
        qkv = mark(self.matmul(h, source, heads * c.head_dim, c.hidden), f"{label}: q, k, v")
        qkv = qkv.reshape(rows, heads, c.head_dim)
        qk = self.rotate(qkv, layer, label)
        fresh = Tensor.stack(qk[:, c.heads :], qkv[:, c.heads + c.kv_heads :], dim=1)
        cache = mark(self.write_cache(layer, fresh), f"{label}: KV cache")
        keys = cache[:, 0].permute(1, 0, 2)  # [kv_heads, context, head_dim]
        values = cache[:, 1].permute(1, 0, 2)
        query = qk[:, : c.heads].reshape(rows, c.kv_heads, groups, 1, c.head_dim)
        scores = (query * keys.reshape(1, c.kv_heads, 1, c.context, c.head_dim)).sum(4)
        place = self.positions.reshape(rows, 1, 1, 1)
        seen = self.tracer.iota(c.context).reshape(1, 1, 1, c.context) <= place
        scores = seen.where(scores * (1.0 / math.sqrt(c.head_dim)), MASKED)
        scores = mark(scores, f"{label}: scores")
        powers = mark((scores - scores.max(3, keepdim=True)).exp(), f"{label}: softmax")
        total = mark(powers.sum(3), f"{label}: softmax sum")  # [rows, kv_heads, groups]
        spread = powers.reshape(rows, c.kv_heads, groups, c.context, 1)
        mixed = (spread * values.reshape(1, c.kv_heads, 1, c.context, c.head_dim)).sum(3)
        mixed = mark((mixed / total.unsqueeze(3)).reshape(rows, width), f"{label}: values")
        source = self.weights.get(f"{prefix}.self_attn.o_proj.weight", c.hidden, width)
        return mark(x + self.matmul(mixed, source, c.hidden, width), f"{label}: output"), cache

    def write_cache(self, layer: int, fresh: Tensor) -> Tensor:
        """Return the layer's KV cache with the rows [rows, 2, kv_heads, head_dim] written in."""
        c, rows = self.config, self.rows
        row = (2, c.kv_heads, c.head_dim)
        old = self.tracer.state(TensorSpec(f"layers.{layer}.kv", "float32", (c.context, *row)))
        iota = self.tracer.iota(c.context).reshape(c.context, 1, 1, 1, 1)
        hit = iota == self.positions.reshape(1, rows, 1, 1, 1)  # [context, rows, 1, 1, 1]
        if rows == 1:
            return hit.reshape(c.context, 1, 1, 1).where(fresh.reshape(1, *row), old)
        written = hit.where(fresh.reshape(1, rows, *row), 0.0).sum(1)
        return hit.max(1).where(written, old)

    def mlp(self, x: Tensor, layer: int) -> Tensor:
        """Return x plus the gated MLP of one layer."""
        c, mark = self.config, self.tracer.mark
        label, prefix = f"block {layer} MLP", f"model.layers.{layer}"
        h = self.norm(x, f"{prefix}.post_attention_layernorm.weight", f"{label}: norm")
        names = [(f"{prefix}.mlp.{name}_proj.weight", c.intermediate) for name in ("gate", "up")]
        source = self.weights.join(
            f"{prefix}.mlp.gate_up_proj.weight", names, 2 * c.intermediate, c.hidden
        )
        both = self.matmul(h, source, 2 * c.intermediate, c.hidden)
        both = mark(both, f"{label}: gate and up")
        gate, up = both[:, : c.intermediate], both[:, c.intermediate :]
        active = mark(gate * (1.0 + (-gate).exp()).reciprocal() * up, f"{label}: activation")
        source = self.weights.get(f"{prefix}.mlp.down_proj.weight", c.hidden, c.intermediate)
        down = self.matmul(active, source, c.hidden, c.intermediate)
        return mark(x + down, f"{label}: output")


def compute_rope_table(context: int, head_dim: int, theta: float) -> bytes:
    """Return cos and sin of position x theta^(-2i/head_dim), float32 [context, 2, head_dim / 2].

    In integers of 128 binary places, each position from the one before by one rotation: libm's
    sine differs between machines in its last bit, and the table is part of a task's identity.
    Source: RoFormer, arXiv 2104.09864, section 3.2.2.
    """
    places = 128
    exact = DecimalContext(prec=60)
    columns: list[tuple[list[float], list[float]]] = []
    for pair in range(head_dim // 2):
        exponent = exact.divide(Decimal(-2 * pair), Decimal(head_dim))
        angle = exact.power(Decimal(theta), exponent)
        step = int(exact.multiply(angle, Decimal(2**places)).to_integral_value())
        cos_step, sin_step = _compute_cos_sin(step, places)
        cosine, sine = 1 << places, 0
        cosines, sines = [], []
        for _ in range(context):
            cosines.append(cosine / (1 << places))  # integer division is correctly rounded
            sines.append(sine / (1 << places))
            cosine, sine = (
                (cosine * cos_step - sine * sin_step) >> places,
                (sine * cos_step + cosine * sin_step) >> places,
            )
        columns.append((cosines, sines))
    flat = [
        column[part][position]
        for position in range(context)
        for part in range(2)
        for column in columns
    ]
    return struct.pack(f"<{len(flat)}f", *flat)


def _compute_cos_sin(angle: int, places: int) -> tuple[int, int]:
    """Return cos and sin of a fixed-point angle in [0, 1] by their Taylor series."""
    one = 1 << places
    sums = [0, 0]
    term, order = one, 0
    while term:
        sign = -1 if order % 4 >= 2 else 1
        sums[order % 2] += sign * term
        order += 1
        term = (term * angle >> places) // order
    return sums[0], sums[1]
