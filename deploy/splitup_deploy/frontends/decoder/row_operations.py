"""What decoders and encoders compute of rows: products with weights, lookups, attention.

Rows are T of at most C, and T is a symbol. All rows are looked up or selected, with zeros for
indices outside, so no input can read beyond a tensor. Arithmetic is float32, weights stay in their
dtype.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, Protocol

from tinygrad.dtype import dtypes
from tinygrad.tensor import Tensor
from tinygrad.uop.ops import UOp

from splitup.core.tensors import TensorSpec
from splitup_deploy.frontends.decoder.quantised import dequantise
from splitup_deploy.frontends.tracing import Tracer
from splitup_deploy.frontends.weight_sources import WeightSource

Activation = Literal["gelu", "gelu-tanh", "relu", "silu"]
CacheKind = Literal["8bit"]  # int8 with a float32 step for each row and head
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


class RowOperations:
    """Operations on ``rows`` rows of a model that is traced."""

    def __init__(self, weights: Weights, tracer: Tracer, rows: UOp | int) -> None:
        self.weights, self.tracer, self.rows = weights, tracer, rows

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

    def attend_rows(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        scale: float,
        label: str,
        *,
        cap: float | None = None,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
        steps: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of query [rows, kv_heads, groups, 1, size]: [rows, heads * size].

        Keys and values are [places, kv_heads, size]. ``slots`` [rows, positions] says where the key
        of each position is, negative where a row sees none. ``bias`` is added to the scores
        [rows, kv_heads, groups, positions]. ``sinks`` [heads] are scores without a value.
        ``steps`` [places, n] are what int8 keys, then values, of each head are multiples of: they
        multiply scores and softmax, so that a sum is of products with whole numbers.
        """
        rows, mark = self.rows, self.tracer.mark
        groups, positions = int(query.shape[2]), int(slots.shape[1])
        width = int(query.shape[1]) * groups * int(values.shape[2])
        # one index per query head: if broadcast later, the rows found would be written to memory
        index = (
            bound_slots(slots, int(keys.shape[0]))
            .reshape(rows, 1, positions)
            .expand(rows, groups, positions)
        )
        keys, values = (
            self.tracer.lookup(table, index).cast(dtypes.float32).permute(0, 3, 1, 2, 4)
            for table in (keys, values)
        )  # [rows, kv_heads, groups, positions, size]
        scores = (query * keys).sum(4) * scale
        if steps is not None:
            factors = self._find_factors(steps, slots, 2 * int(query.shape[1]), label)
            key_steps, value_steps = (
                factors[:, first : first + int(query.shape[1])].unsqueeze(2)
                for first in (0, int(query.shape[1]))
            )
            scores = scores * key_steps
        if cap is not None:
            scores = soft_cap(scores, cap)
        if bias is not None:
            scores = scores + bias
        is_seen = slots.reshape(rows, 1, 1, positions) >= 0
        scores = mark(is_seen.where(scores, MASKED), f"{label}: scores")
        top = scores.max(3, keepdim=True)
        if sinks is not None:
            sinks = sinks.reshape(1, int(query.shape[1]), groups, 1)
            top = mark(top.maximum(sinks), f"{label}: largest score")
        powers = mark((scores - top).exp(), f"{label}: softmax")
        total = powers.sum(3)  # [rows, kv_heads, groups]
        if sinks is not None:
            total = total + (sinks - top).exp().squeeze(3)
        total = mark(total, f"{label}: softmax sum")
        if steps is not None:
            powers = mark(powers * value_steps, f"{label}: softmax by values' steps")
        spread = powers.reshape(rows, *powers.shape[1:3], positions, 1)
        mixed = (spread * values).sum(3)
        return mark((mixed / total.unsqueeze(3)).reshape(rows, width), f"{label}: values")

    def _find_factors(self, steps: Tensor, slots: Tensor, count: int, label: str) -> Tensor:
        """Return the first ``count`` of the steps at each slot: [rows, count, positions].

        They are looked up as products with the unit vectors, for which CPUs have vector code.
        """
        rows, positions, width = self.rows, int(slots.shape[1]), int(steps.shape[1])
        number = self.tracer.iota(count).reshape(count, 1)
        unit = (number == self.tracer.iota(width).reshape(1, width)).where(1.0, 0.0)
        unit = self.tracer.mark(unit.cast(dtypes.float32), f"{label}: unit vectors")
        index = bound_slots(slots, int(steps.shape[0])).reshape(rows, 1, positions)
        found = self.tracer.lookup(steps, index.expand(rows, count, positions))
        product = found * unit.reshape(1, count, 1, width)
        return self.tracer.mark(product.sum(3), f"{label}: steps seen")


def pad_steps(steps: Tensor) -> Tensor:
    """Return [rows, n] with zeros to a multiple of eight, which is what vectors are written by."""
    rest = -int(steps.shape[1]) % 8
    return steps.pad(((0, 0), (0, rest))) if rest else steps


def rotate_heads(heads: Tensor, count: int, angles: Tensor, *, neighbours: bool = False) -> Tensor:
    """Return the first ``count`` of heads [rows, heads, size], rotated by angles [rows, 2, half].

    ``neighbours``: element 2i is paired with 2i + 1, and they are half a head apart in the result.
    """
    half, size = int(angles.shape[2]), int(heads.shape[2])
    cosine, sine = angles[:, 0:1, :], angles[:, 1:2, :]
    if not neighbours:
        first, second = heads[:, :count, :half], heads[:, :count, half : 2 * half]
    else:
        pairs = heads[:, :count, : 2 * half].reshape(heads.shape[0], count, half, 2)
        first, second = pairs[:, :, :, 0], pairs[:, :, :, 1]
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    if 2 * half < size:
        turned.append(heads[:, :count, 2 * half :])
    return Tensor.cat(*turned, dim=2)


def compute_activation(form: Activation, x: Tensor) -> Tensor:
    """Return the activation of x; "gelu" is the exact one (arXiv 1606.08415)."""
    if form == "relu":
        return x.maximum(0.0)
    if form == "gelu":
        return x * 0.5 * (1.0 + (x * math.sqrt(0.5)).erf())
    # 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u))
    widened = x * (1.0 + x.square() * 0.044715) * (2.0 * math.sqrt(2.0 / math.pi))
    return x * compute_sigmoid(x if form == "silu" else widened)


def compute_sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)), which is 0 where the power is infinite."""
    return (1.0 + (-x).exp()).reciprocal()


def bound_slots(slots: Tensor, context: int) -> Tensor:
    """Return slots bounded to the rows of a cache; a slot for "sees nothing" becomes any row.

    The compiler sees that no index is outside. Otherwise each load would need a guard, which costs
    as much as the load.
    """
    if context & (context - 1) == 0:
        return slots & (context - 1)
    return slots.maximum(0).minimum(context - 1)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap), without overflow at either end."""
    return cap - (2.0 * cap) * (1.0 + (x * (2.0 / cap)).exp()).reciprocal()
