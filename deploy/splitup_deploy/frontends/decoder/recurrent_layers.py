"""Recurrent layers whose memory is a matrix: the gated delta rule, in the decoder's step function.

Such a layer keeps, for each head, a matrix S of keys by values instead of a row per position. A
token with key k, value v, write strength b and decay a (one per head or per key channel) computes

    S <- diag(a) S,   u = b (v - S^T k),   S <- S + k u^T,   and reads   S^T q

after a convolution of queries, keys and values over the last few tokens. A row cannot be removed
from a matrix, and a decoder may keep only some rows of a step, so S lags behind
(``docs/adr/0005-state-is-functional.md``):

    Positions are divided into spans of G, a power of two and at least the chunk. A row reads S as
    it was one whole span before its own span, and all rows since then, at most 2 G, one by one.
    These are valid rows, or new ones on its own path; no branch of a tree begins before them.

With the decay D(j, t) of the positions behind j up to t, and u of earlier rows known,

    u_t = b_t (v_t - D(., t) S^T k_t - sum_j D(j, t) (k_t . k_j) u_j)

is a triangular system in the rows of t's own span. W, the inverse of its matrix, is computed for
one row by joining halves: a row in the second half of 2 m aligned positions adds the rows of the
first half (log2 G times). A path crosses at most one border between spans in a step, so u is solved
twice, the second time with the first span's u.

Every value of a row is computed along its path in the order of positions. So it is the same bytes
whatever else is in the step and however the text was divided into chunks, as with attention.
Sources: arXiv 2412.06464, section 3; arXiv 2510.26692, section 3 (decay by channel).
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from tinygrad.tensor import Tensor

from splitup.core.tensors import TensorSpec
from splitup_deploy.frontends.decoder.decoder_config import Recurrent
from splitup_deploy.frontends.decoder.row_operations import compute_activation, compute_sigmoid
from splitup_deploy.frontends.decoder.step_function import Step
from splitup_deploy.frontends.weight_sources import WeightSource

_TINY = 1e-6  # added to a head's squared length


class Seen(NamedTuple):
    """The places of rows that other rows see: int32 [rows, n]; outside the state for none.

    ``places`` are rows of the new state, in which new rows begin at 2 spans; ``old`` are rows of
    the old state.
    """

    places: Tensor
    old: Tensor

    def take(self, start: int, end: int) -> Seen:
        """Return columns ``start`` to ``end`` of both."""
        return Seen(self.places[:, start:end], self.old[:, start:end])


class DeltaRule:
    """One recurrent layer of one step while it is traced.

    Its states, with G the span, C the chunk, H value heads:

        memory  float32 [2, H, key_dim, value_dim]  S for rows of the start's span, and of the next
        rows    float32 [2 G + C, columns]          the last 2 G valid rows, then the new rows
        conv    float32 [taps - 1 + C, channels]    the same for the convolution's inputs
        start   int32 [1]                           the step's start
    """

    module = "linear_attn"
    columns: tuple[str, ...] = ("key", "update", "error", "inverse", "matrix", "decay", "rate")

    def __init__(self, step: Step, shape: Recurrent, layer: int) -> None:
        self.step, self.shape, self.layer = step, shape, layer
        self.chunk = step.layout.chunk
        self.span = 1 << (self.chunk - 1).bit_length()
        self.label = f"block {layer} memory"
        module = "self_attn" if shape.by_channel else self.module
        self.prefix = f"model.layers.{layer}.{module}"
        heads, span = shape.value_heads, self.span
        rates = shape.key_dim if shape.by_channel else 1
        sizes = {
            "key": (shape.key_heads, shape.key_dim),
            "update": (heads, shape.value_dim),
            "error": (heads, shape.value_dim),
            "inverse": (heads, span),
            "matrix": (heads, span),
            "decay": (heads, rates),
            "rate": (heads, rates),
        }
        self.sizes = {name: sizes[name] for name in sizes if name in self.columns}
        width = sum(math.prod(size) for size in self.sizes.values())
        self.old_rows = self._state("rows", 2 * span + self.chunk, width)
        self.old_conv = self._state("conv", shape.taps - 1 + self.chunk, shape.channels)
        self.old_memory = self._state("memory", 2, heads, shape.key_dim, shape.value_dim)
        spec = TensorSpec(f"layers.{layer}.start", "int32", (1,))
        self.old_start = step.tracer.state(spec)
        context = step.config.context
        self.start = self._mark(step.layout.get_start(context), "start")
        position = step.layout.positions.maximum(0).minimum(context)
        self.position = position.reshape(step.rows, 1)

    def compute(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return x [rows, hidden] plus the layer's output, and its new states by name."""
        step, s, span = self.step, self.shape, self.span
        rows, heads, width = step.rows, s.value_heads, s.value_heads * s.value_dim
        h = step.norm(x, f"model.layers.{self.layer}.input_layernorm.weight", f"{self.label}: norm")
        sides, value, states = self._convolve(h)
        rate, strength = self._compute_rates(h)
        seen = self._find_seen()
        decay, before = self._add_up(rate, seen)
        fresh = {"key": sides[:, 1], "rate": rate, "decay": decay}
        weights = self._weigh(sides, decay, before, seen)
        fresh |= self._invert(weights, strength, seen.take(span, 2 * span))
        memory = self._move_memory()
        recalled = self._recall(memory, sides, (decay + before).exp())
        lacking = value - recalled[:, 1]
        past = weights[:, 1].reshape(rows, 2 * span, heads, 1)[:, :span]
        update = value  # any value: rows of the first span read only old rows
        for _ in range(2):
            missed = (past * self._see("update", update, seen.take(0, span))).sum(1)
            error = (lacking - missed) * strength.reshape(rows, heads, 1)
            error = self._mark(error, "error")
            spread = fresh["inverse"].permute(0, 2, 1).reshape(rows, span, heads, 1)
            update = (spread * self._see("error", error, seen.take(span, 2 * span))).sum(1)
            update = self._mark(update, "update")
        table = self._keep_rows(fresh | {"error": error, "update": update})
        states |= {"rows": table, "memory": memory, "start": self.start}
        spread = weights[:, 0].reshape(rows, 2 * span, heads, 1)
        found = step.tracer.lookup(self._get_column(table, "update"), seen.places)
        read = recalled[:, 0] + (spread * found).sum(1)
        read = self._mark(read * s.key_dim**-0.5, "read")
        name = f"{self.prefix}.{'o_proj' if s.by_channel else 'out_proj'}"
        branch = step.project(self._gate(h, read), name, [(name, step.config.hidden)], width, False)
        x = step.tracer.mark(x + branch, f"{self.label}: output")
        return x, {f"layers.{self.layer}.{name}": state for name, state in states.items()}

    def _find_seen(self) -> Seen:
        """Return the rows of each row's span and the one before, up to the row itself."""
        step, span = self.step, self.span
        first = (self.position & -span) - span  # the beginning of the span before a row's own
        place = step.tracer.iota(2 * span).reshape(1, 2 * span)
        places = self._find(first + place, 2 * span)
        kept = self._find_kept(2 * span)[: 2 * span]
        old = self._mark(step.tracer.lookup(kept + 1, places) - 1, "old rows seen")
        return Seen(places, old)

    def _add_up(self, rate: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        """Return the decay since the beginning of a row's span, and of the span before it."""
        span = self.span
        decay = self._mark(self._see("rate", rate, seen.take(span, 2 * span)).sum(1), "decay")
        before = self._see("decay", decay, seen.take(span - 1, span))
        before = self._mark(before.reshape(self.step.rows, *self.sizes["decay"]), "decay before")
        return decay, before

    # ---- queries, keys, values, rates ----------------------------------------------------------

    def _convolve(self, h: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return queries and keys [rows, 2, key_heads, key_dim], values, and the new state."""
        step, s, rows, prefix = self.step, self.shape, self.step.rows, self.prefix
        parts, kernels = [(f"{prefix}.in_proj_qkv", s.channels)], [(f"{prefix}.conv1d", s.channels)]
        if s.by_channel:
            widths = zip("qkv", (s.key_heads * s.key_dim,) * 3, strict=True)
            parts = [(f"{prefix}.{part}_proj", width) for part, width in widths]
            kernels = [(part.replace("_proj", "_conv1d"), width) for part, width in parts]
        fresh = (
            self._project_by_head(h)[0]
            if s.grouped
            else self._project(h, "in_proj_qkv", parts, "q, k, v")
        )
        names = [(f"{name}.weight", width) for name, width in kernels]
        kernel = (
            step.weights.get(names[0][0], s.channels, 1, s.taps)
            if len(names) == 1
            else (step.weights.join(f"{prefix}.conv1d.weight", names, s.channels, 1, s.taps))
        )
        mixed, table = self._convolve_rows(fresh, kernel)
        split = 2 * s.key_heads * s.key_dim
        sides = mixed[:, :split].reshape(rows, 2, s.key_heads, s.key_dim)
        length = sides.square().sum(3, keepdim=True) + _TINY
        sides = self._mark(sides * length.rsqrt(), "q, k norm")
        value = mixed[:, split:].reshape(rows, s.value_heads, s.value_dim)
        return sides, self._mark(value, "v"), {"conv": table}

    def _convolve_rows(self, fresh: Tensor, kernel: WeightSource) -> tuple[Tensor, Tensor]:
        """Return the activated convolution of [rows, channels], and the new state."""
        step, s = self.step, self.shape
        back = step.tracer.iota(s.taps).reshape(1, s.taps) - (s.taps - 1)
        places = self._find(self.position + back, s.taps - 1)
        table = self._write(self.old_conv, fresh, s.taps - 1)
        weight = step.tensor(kernel).reshape(s.channels, s.taps).permute(1, 0)
        inputs = step.tracer.lookup(table, places)
        mixed = (inputs * weight.reshape(1, s.taps, s.channels)).sum(1)
        if s.conv_bias:
            mixed = mixed + step.tensor(step.weights.get(f"{self.prefix}.conv1d.bias", s.channels))
        mixed = self._mark(mixed, "convolution")
        return self._mark(compute_activation(s.activation, mixed), "activation"), table

    def _project_by_head(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries, keys and values [rows, channels], and gates, of a grouped projection."""
        s, rows, name = self.shape, self.step.rows, f"{self.prefix}.in_proj_qkvz"
        wide = s.value_heads // s.key_heads * s.value_dim
        width = s.key_heads * 2 * (s.key_dim + wide)
        both = self._project(h, name, [(name, width)], "q, k, v and gate")
        both = both.reshape(rows, s.key_heads, 2 * (s.key_dim + wide))
        ends = (0, s.key_dim, 2 * s.key_dim, 2 * s.key_dim + wide, 2 * (s.key_dim + wide))
        parts = [
            both[:, :, first:last].reshape(rows, s.key_heads * (last - first))
            for first, last in itertools.pairwise(ends)
        ]
        return self._mark(Tensor.cat(*parts[:3], dim=1), "q, k, v"), parts[3]

    def _compute_rates(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithm of the decay, [rows, value_heads, 1 or key_dim], and strengths."""
        step, s, prefix = self.step, self.shape, self.prefix
        heads, sizes = s.value_heads, self.sizes["rate"]
        if s.by_channel:
            alpha = self._project_twice(h, "f", "decay input")
            parts = [(f"{prefix}.b_proj", heads)]
            beta = self._project(h, "b_proj", parts, "strength input")
        elif s.grouped_rates:
            parts = [(f"{prefix}.in_proj_ba", 2 * heads)]
            both = self._project(h, "in_proj_ba", parts, "strength and decay inputs")
            both = both.reshape(step.rows, s.key_heads, 2, heads // s.key_heads)
            beta, alpha = (both[:, :, part].reshape(step.rows, heads) for part in (0, 1))
        else:
            parts = [(f"{prefix}.in_proj_{part}", heads) for part in "ab"]
            both = self._project(h, "in_proj_ab", parts, "decay and strength inputs")
            alpha, beta = both[:, :heads], both[:, heads:]
        bias = step.tensor(step.weights.get(f"{prefix}.dt_bias", math.prod(sizes)))
        soft = compute_soft_plus(alpha.reshape(step.rows, *sizes) + bias.reshape(1, *sizes))
        shape = (1, 1, heads, 1) if s.by_channel else (heads,)
        slope = step.tensor(step.weights.get(f"{prefix}.A_log", *shape)).reshape(1, heads, 1)
        rate = self._mark(soft * (slope if s.exponentiated else -slope.exp()), "decay of a row")
        return rate, self._mark(compute_sigmoid(beta), "strength")

    def _gate(self, h: Tensor, values: Tensor) -> Tensor:
        """Return values [rows, value_heads, value_dim] normed and gated."""
        s, name = self.shape, "o_norm" if self.shape.by_channel else "norm"
        weight = self.step.tensor(
            self.step.weights.get(f"{self.prefix}.{name}.weight", s.value_dim)
        )
        width = s.value_heads * s.value_dim
        normed = self.step.normalise(values, weight).reshape(self.step.rows, width)
        if s.by_channel:
            gate = compute_sigmoid(self._project_twice(h, "g", "gate"))
        else:
            parts = [(f"{self.prefix}.in_proj_z", width)]
            gate = (
                self._project_by_head(h)[1]
                if s.grouped
                else self._project(h, "in_proj_z", parts, "gate")
            )
            gate = gate * compute_sigmoid(gate)
        return self._mark(normed * gate, "values")

    def _project(
        self, h: Tensor, name: str, parts: list[tuple[str, int]], label: str, inner: int = 0
    ) -> Tensor:
        name = parts[0][0] if len(parts) == 1 else f"{self.prefix}.{name}"
        inner = inner or self.step.config.hidden
        return self._mark(self.step.project(h, name, parts, inner, False), label)

    def _project_twice(self, h: Tensor, name: str, label: str) -> Tensor:
        """Return h through two layers of which the inner one is as wide as a head."""
        s = self.shape
        parts = [(f"{self.prefix}.{name}_a_proj", s.value_dim)]
        low = self._project(h, name, parts, f"{label}, narrow")
        parts = [(f"{self.prefix}.{name}_b_proj", s.value_heads * s.value_dim)]
        return self._project(low, name, parts, label, s.value_dim)

    # ---- places of rows ------------------------------------------------------------------------

    def _find(self, positions: Tensor, count: int) -> Tensor:
        """Return the places of the rows at these positions of a row's path: int32 [rows, n].

        They are places in the new state, of the last ``count`` valid rows and the new rows; -1 for
        none.
        """
        step, chunk, n = self.step, self.chunk, positions.shape[1]
        ahead = positions - self.start.reshape(1, 1)
        number = step.tracer.iota(chunk).reshape(1, 1, chunk)
        sources = step.layout.sources.reshape(step.rows, 1, chunk)
        named = (number == ahead.reshape(step.rows, n, 1)).where(sources, 0).sum(2)
        is_new = (positions <= self.position) & (named > 0) & (named <= chunk)
        old = (ahead < 0).where((ahead + count).maximum(-1), -1)
        return self._mark(is_new.where(named + (count - 1), old), "rows seen")

    def _find_kept(self, count: int) -> Tensor:
        """Return which old row each of the last ``count`` before the start is: int32, -1 for none.

        The result has ``chunk`` further elements without meaning.
        """
        chunk, shifts = self.chunk, self.step.layout.shifts
        shifts = shifts.maximum(0).minimum(chunk)
        shifts = shifts[max(chunk - count, 0) :].pad(((max(count - chunk, 0), chunk),))
        place = self.step.tracer.iota(count + chunk)
        is_any = place + self.start >= count
        return is_any.where(place + (self.start - self.old_start) + shifts, -1)

    def _see(self, name: str, fresh: Tensor, seen: Seen) -> Tensor:
        """Return one column of the rows that each row sees: [rows, n, *size]; zeros for none."""
        lookup, old = self.step.tracer.lookup, self._get_column(self.old_rows, name)
        return lookup(old, seen.old) + lookup(fresh, seen.places - 2 * self.span)

    def _get_column(self, table: Tensor, name: str) -> Tensor:
        widths = {other: math.prod(size) for other, size in self.sizes.items()}
        start = sum(widths[other] for other in itertools.takewhile(name.__ne__, widths))
        column = table[:, start : start + widths[name]]
        return column.reshape(2 * self.span + self.chunk, *self.sizes[name])

    # ---- the rule ------------------------------------------------------------------------------

    def _weigh(self, sides: Tensor, decay: Tensor, before: Tensor, seen: Seen) -> Tensor:
        """Return a row's (q, k) . k of rows it sees, decayed: [rows, 2, 2 span, value_heads]."""
        s, rows, window = self.shape, self.step.rows, 2 * self.span
        heads, rates = self.sizes["decay"]
        is_before = self.step.tracer.iota(window).reshape(1, window, 1, 1) < self.span
        since = is_before.where(before.reshape(rows, 1, heads, rates), 0.0)
        since = since + decay.reshape(rows, 1, heads, rates)
        both = Seen(*(index.reshape(rows, 1, window).expand(rows, 2, window) for index in seen))
        keys = self._see("key", sides[:, 1], both)  # [rows, 2, window, key_heads, key_dim]
        dots = sides.reshape(rows, 2, 1, s.key_heads, s.key_dim) * keys
        if s.by_channel:
            since = since.reshape(rows, 1, window, heads, rates)
            faded = (since - self._see("decay", decay, both)).exp()
            return self._mark((dots * faded).sum(4), "weights")
        faded = (since - self._see("decay", decay, seen)).exp()
        faded = self._mark(faded.reshape(rows, 1, window, heads), "decay since")
        dots = self._mark(dots.sum(4), "q k, k k")
        return self._mark(self._spread(dots, 3) * faded, "weights")

    def _invert(self, weights: Tensor, strength: Tensor, own: Seen) -> dict[str, Tensor]:
        """Return each row of the triangular matrix of its span, and of its inverse."""
        span, rows, heads = self.span, self.step.rows, self.shape.value_heads
        place = self.step.tracer.iota(span).reshape(1, 1, span)
        offset = (self.position & (span - 1)).reshape(rows, 1, 1)
        matrix = weights[:, 1, span:].permute(0, 2, 1) * strength.reshape(rows, heads, 1)
        matrix = self._mark((place < offset).where(matrix, 0.0), "matrix")
        inverse = (place == offset).where(Tensor(1.0), 0.0).expand(rows, heads, span)
        half = 1
        while half < span:
            # the first half of 2 * half aligned positions, for a row in the second
            is_second = (offset & half) != 0
            is_first = is_second & ((place & -half) == (offset & -half) - half)
            if half == 1:
                inverse = inverse - is_first.where(matrix, 0.0)
            else:
                through = self._see("matrix", matrix, own)  # [rows, span, heads, span]
                through = (inverse.permute(0, 2, 1).reshape(rows, span, heads, 1) * through).sum(1)
                through = self._mark(is_first.where(through, 0.0), "joining halves")
                found = self._see("inverse", inverse, own)
                found = (through.permute(0, 2, 1).reshape(rows, span, heads, 1) * found).sum(1)
                inverse = inverse - is_first.where(found, 0.0)
            inverse = self._mark(inverse, "inverse")
            half *= 2
        if span == 1:
            inverse = self._mark(inverse, "inverse")
        return {"matrix": matrix, "inverse": inverse}

    def _recall(self, memory: Tensor, sides: Tensor, decay: Tensor) -> Tensor:
        """Return the memory read by queries and keys: [rows, 2, value_heads, value_dim]."""
        s, rows = self.shape, self.step.rows
        heads, rates = self.sizes["decay"]
        spread = self._spread(sides, 2) * decay.reshape(rows, 1, heads, rates)
        spread = self._mark(spread, "decayed q, k").reshape(rows, 2, heads, s.key_dim, 1)
        which = (self.position & -self.span) > (self.start.reshape(1, 1) & -self.span)
        which = which.where(Tensor(1), 0).expand(rows, 2)
        found = self.step.tracer.lookup(memory, which)
        return self._mark((spread * found).sum(3), "recalled")

    def _move_memory(self) -> Tensor:
        """Return the memory for this step, one span further when the start has reached the next."""
        s, span, lookup = self.shape, self.span, self.step.tracer.lookup
        heads, rates = self.sizes["decay"]
        groups = heads // s.key_heads
        begin = self.start & -span
        # the rows of the span before the start's own, by their places in the old state
        place = self.step.tracer.iota(span) + (begin - self.start) + span
        rows = self._mark(lookup(self._find_kept(2 * span) + 1, place) - 1, "rows to remember")
        decay = self._mark(lookup(self._get_column(self.old_rows, "decay"), rows), "their decay")
        last = decay[span - 1 :]
        # one index per head of a group: if broadcast later, the rows would be written to memory
        keys = lookup(
            self._get_column(self.old_rows, "key"), rows.reshape(span, 1).expand(span, groups)
        )
        keys = keys if s.converted else keys.permute(0, 2, 1, 3)
        keys = keys.reshape(span, heads, s.key_dim) * (last - decay).exp()
        keys = self._mark(keys, "their keys").reshape(span, heads, s.key_dim, 1)
        updates = self._mark(
            lookup(self._get_column(self.old_rows, "update"), rows), "their updates"
        )
        updates = updates.reshape(span, heads, 1, s.value_dim)
        faded = self.old_memory[1] * last.reshape(heads, rates, 1).exp()
        later = self._mark(faded + (keys * updates).sum(0), "remembered")
        is_same = begin.reshape(1, 1, 1, 1) == (self.old_start & -span).reshape(1, 1, 1, 1)
        moved = Tensor.stack(self.old_memory[1], later)
        moved = is_same.where(self.old_memory, moved)
        return self._mark((begin > 0).reshape(1, 1, 1, 1).where(moved, 0.0), "memory")

    def _spread(self, x: Tensor, axis: int) -> Tensor:
        """Return x with its axis of key heads repeated for the value heads."""
        s, shape = self.shape, x.shape
        groups = s.value_heads // s.key_heads
        ones, both = (1, s.key_heads), (groups, s.key_heads)
        if not s.converted:
            ones, both = ones[::-1], both[::-1]
        x = x.reshape(*shape[:axis], *ones, *shape[axis + 1 :])
        x = x.expand(*shape[:axis], *both, *shape[axis + 1 :])
        return x.reshape(*shape[:axis], s.value_heads, *shape[axis + 1 :])

    def _keep_rows(self, fresh: dict[str, Tensor]) -> Tensor:
        """Return the state of rows: those that are kept, then the new ones."""
        flat = [
            fresh[name].reshape(self.step.rows, math.prod(size))
            for name, size in self.sizes.items()
        ]
        rows = self._mark(Tensor.cat(*flat, dim=1), "new rows")
        return self._write(self.old_rows, rows, 2 * self.span)

    def _write(self, old: Tensor, fresh: Tensor, count: int) -> Tensor:
        """Return the last ``count`` valid rows, then the new rows, then zeros."""
        place = self.step.tracer.iota(count + self.chunk)
        kept = self.step.tracer.lookup(old, self._find_kept(count))
        new = self.step.tracer.lookup(fresh, place - count)
        is_kept = (place < count).reshape(count + self.chunk, 1)
        return self._mark(is_kept.where(kept, new), "rows kept")

    def _state(self, name: str, *shape: int) -> Tensor:
        spec = TensorSpec(f"layers.{self.layer}.{name}", "float32", shape)
        return self.step.tracer.state(spec)

    def _mark(self, value: Tensor, label: str) -> Tensor:
        return self.step.tracer.mark(value, f"{self.label}: {label}")


def compute_soft_plus(x: Tensor) -> Tensor:
    """Return ln(1 + exp(x))."""
    return x.maximum(0.0) + (1.0 + (-x.abs()).exp()).log()
