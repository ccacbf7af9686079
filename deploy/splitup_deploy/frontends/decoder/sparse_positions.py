"""The positions that a row of sparse attention sees: those to which a light indexer gives most.

The indexer has heads of its own. Position j gets from a row the score

    sum over heads h of w_h relu(q_h . k_j),

and the row sees the ``count`` best of the positions that it could see; of equal ones the earliest.
They are found without sorting: the score that ``count`` positions reach is built from its highest
eight bits to its lowest, by counting. Attention still computes the scores of all positions.
Source: arXiv 2512.02556, section 2.1 (DeepSeek-V3.2).
"""

from __future__ import annotations

from typing import Final

from tinygrad.dtype import dtypes
from tinygrad.tensor import Tensor

from splitup_deploy.frontends.decoder.caches import Cache
from splitup_deploy.frontends.decoder.decoder_config import Indexer
from splitup_deploy.frontends.decoder.row_operations import bound_slots
from splitup_deploy.frontends.decoder.step_function import Step

_EPSILON: Final = 1e-6  # of the norm of keys
_BITS: Final = 8  # of a number that one pass finds: few passes keep the graph's chains short


def compute_index_key(step: Step, h: Tensor, layer: int, indexer: Indexer) -> Tensor:
    """Return a row's key for the indexer, [rows, size], from the normalised rows h."""
    label, prefix = f"block {layer} indexer", f"model.layers.{layer}.self_attn.indexer"
    name, size = f"{prefix}.wk", indexer.size
    key = step.project(h, name, [(name, size)], step.config.hidden, bias=False)
    key = step.tracer.mark(key, f"{label}: k")
    key = step.tracer.mark(key - key.mean(1, keepdim=True), f"{label}: k centred")
    weight, bias = (
        step.tensor(step.weights.get(f"{prefix}.k_norm.{part}", size))
        for part in ("weight", "bias")
    )
    key = step.tracer.mark(step.normalise(key, weight, _EPSILON) + bias, f"{label}: k norm")
    key = key.reshape(step.rows, 1, size)
    return step.rotate(key, 1, layer, label, indexer.neighbours).reshape(step.rows, size)


class SparseCache:
    """A cache of which each row sees the positions that the indexer chooses.

    ``low_query`` is what the indexer's queries are expanded from; ``keys`` [cache rows, size].
    """

    def __init__(
        self,
        cache: Cache,
        step: Step,
        h: Tensor,
        low_query: Tensor,
        keys: Tensor,
        layer: int,
        indexer: Indexer,
    ) -> None:
        self._cache, self._step, self._indexer = cache, step, indexer
        self._h, self._low_query, self._keys, self._layer = h, low_query, keys, layer
        self._label = f"block {layer} indexer"
        self.updates = cache.updates

    def write(self, fresh: Tensor, part: str = "kv") -> Tensor:
        """Return a part of the cache, as without an indexer."""
        return self._cache.write(fresh, part)

    def find_slots(self) -> Tensor:
        """Return the cache rows that each row sees: int32 [rows, positions]."""
        rows = self._step.rows
        slots = self._mark(self._cache.find_slots(), "cache rows to choose from")
        positions = int(slots.shape[1])
        bits = self._score(slots).bitcast(dtypes.uint32)
        is_negative = bits >= 1 << 31
        order = is_negative.where(bits ^ 0xFFFFFFFF, bits | 1 << 31)
        order = self._mark((slots >= 0).where(order, 0), "order of positions")
        count = self._indexer.count
        least = self._find_largest(order, 32, count)  # the score of the last one that is chosen
        is_above = order > least.reshape(rows, 1)
        is_equal = order == least.reshape(rows, 1)
        # of equal ones, the positions counted from the end
        behind = (positions - 1) - self._step.tracer.iota(positions).reshape(1, positions)
        behind = is_equal.where(behind + 1, 0).cast(dtypes.uint32)
        above = is_above.where(1, 0).cast(dtypes.int32).sum(1)
        above = self._mark(above, "positions above")
        behind = self._mark(behind, "equal positions from the end")
        last = self._find_largest(behind, positions.bit_length(), count - above)
        is_chosen = is_above | (is_equal & (behind >= last.reshape(rows, 1)))
        return is_chosen.where(slots, -int(self._keys.shape[0]))

    def _score(self, slots: Tensor) -> Tensor:
        """Return the score of each position, float32 [rows, positions]; zero has no sign."""
        step, rows, s = self._step, self._step.rows, self._indexer
        prefix, positions = f"model.layers.{self._layer}.self_attn.indexer", int(slots.shape[1])
        name, inner = f"{prefix}.wq_b", int(self._low_query.shape[1])
        query = step.project(self._low_query, name, [(name, s.heads * s.size)], inner, bias=False)
        query = self._mark(query, "q").reshape(rows, s.heads, s.size)
        query = step.rotate(query, s.heads, self._layer, self._label, s.neighbours)
        name = f"{prefix}.weights_proj"
        weight = step.project(self._h, name, [(name, s.heads)], step.config.hidden, bias=False)
        weight = self._mark(weight * (s.heads * s.size) ** -0.5, "weights of heads")
        found = step.tracer.lookup(self._keys, bound_slots(slots, int(self._keys.shape[0])))
        found = found.cast(dtypes.float32)
        dots = query.reshape(rows, 1, s.heads, s.size) * found.reshape(rows, positions, 1, s.size)
        dots = self._mark(dots.sum(3).maximum(0.0), "scores by head")
        score = (dots * weight.reshape(rows, 1, s.heads)).sum(2)
        return self._mark((score == 0.0).where(0.0, score), "scores")

    def _find_largest(self, order: Tensor, bits: int, count: Tensor | int) -> Tensor:
        """Return the largest number that ``count`` of a row's [rows, n] reach: uint32 [rows]."""
        rows, n, most = self._step.rows, int(order.shape[1]), 1 << _BITS
        digits = (self._step.tracer.iota(most - 1) + 1).cast(dtypes.uint32)
        wanted = count.reshape(rows, 1) if isinstance(count, Tensor) else count
        found = (order[:, 0] & 0).reshape(rows, 1)
        for shift in reversed(range(0, bits, _BITS)):
            bounds = found + (digits << shift).reshape(1, most - 1)
            reach = order.reshape(rows, 1, n) >= bounds.reshape(rows, most - 1, 1)
            reached = self._mark(reach.where(1, 0).cast(dtypes.int32).sum(2), "positions counted")
            digit = (reached >= wanted).where(1, 0).cast(dtypes.uint32).sum(1, keepdim=True)
            found = self._mark(found + (digit << shift), "digits found")
        return found.reshape(rows)

    def _mark(self, value: Tensor, label: str) -> Tensor:
        return self._step.tracer.mark(value, f"{self._label}: {label}")
