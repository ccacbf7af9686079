"""Recurrent layers with selective state spaces (Mamba-2), and what mixes the rows of each layer.

A head's memory S, of states by values, decays and takes a row's input x, stretched by its step dt:

    S <- exp(-A dt) S + B (dt x)^T,   and a row reads   S^T C + D x

That is the gated delta rule without its subtraction, with keys B and queries C; so rows and
memories are kept and read as there (``recurrent_layers``), and nothing has to be solved.
Source: arXiv 2405.21060, sections 3 and 7.
"""

from __future__ import annotations

from tinygrad.tensor import Tensor

from splitup_deploy.frontends.decoder.latent_attention import attend_compressed
from splitup_deploy.frontends.decoder.recurrent_layers import DeltaRule, compute_soft_plus
from splitup_deploy.frontends.decoder.row_operations import compute_sigmoid
from splitup_deploy.frontends.decoder.step_function import Step


def mix(step: Step, x: Tensor, layer: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return x plus a layer's attention, or what replaces it, and the new values of its states."""
    shape, latent = step.config.recurrent, step.config.latent
    if shape is not None and layer in shape.layers:
        return (StateSpace if shape.selective else DeltaRule)(step, shape, layer).compute(x)
    if latent is not None:
        return attend_compressed(step, x, layer, latent)
    return step.attend(x, layer)


class StateSpace(DeltaRule):
    """One layer of one step; key heads are its groups, and value heads its heads."""

    module = "mamba"
    columns = ("key", "update", "decay", "rate")

    def compute(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return x [rows, hidden] plus the layer's output, and its new states by name."""
        step, s, rows = self.step, self.shape, self.step.rows
        heads, width = s.value_heads, s.value_heads * s.value_dim
        name, out = f"{self.prefix}.in_proj", f"{self.prefix}.out_proj"
        h = step.norm(x, f"model.layers.{self.layer}.input_layernorm.weight", f"{self.label}: norm")
        total = width + s.channels + heads
        inputs = step.project(h, name, [(name, total)], step.config.hidden, s.bias)
        inputs = self._mark(inputs, "gate, x, B, C, dt")
        gate = inputs[:, :width]
        kernel = step.weights.get(f"{self.prefix}.conv1d.weight", s.channels, 1, s.taps)
        fresh = self._mark(inputs[:, width : width + s.channels], "x, B, C")
        mixed, conv = self._convolve_rows(fresh, kernel)
        value = mixed[:, :width].reshape(rows, heads, s.value_dim)
        sides = mixed[:, width:].reshape(rows, 2, s.key_heads, s.key_dim)
        sides = self._mark(Tensor.stack(sides[:, 1], sides[:, 0], dim=1), "C, B")
        bias = step.tensor(step.weights.get(f"{self.prefix}.dt_bias", heads))
        stretch = self._mark(compute_soft_plus(inputs[:, width + s.channels :] + bias), "dt")
        slope = step.tensor(step.weights.get(f"{self.prefix}.A_log", heads))
        slope = slope if s.exponentiated else -slope.exp()
        rate = self._mark((stretch * slope).reshape(rows, heads, 1), "decay of a row")
        seen = self._find_seen()
        decay, before = self._add_up(rate, seen)
        weights = self._weigh(sides, decay, before, seen)
        memory = self._move_memory()
        recalled = self._recall(memory, sides, (decay + before).exp())
        update = self._mark(value * stretch.reshape(rows, heads, 1), "update")
        fresh_rows = {"key": sides[:, 1], "update": update, "decay": decay, "rate": rate}
        table = self._keep_rows(fresh_rows)
        found = step.tracer.lookup(self._get_column(table, "update"), seen.places)
        read = recalled[:, 0] + (weights[:, 0].reshape(rows, 2 * self.span, heads, 1) * found).sum(
            1
        )
        through = step.tensor(step.weights.get(f"{self.prefix}.D", heads)).reshape(1, heads, 1)
        read = self._mark(read + through * value, "read")
        values = self._norm_gated(read.reshape(rows, width), gate)
        branch = step.project(values, out, [(out, step.config.hidden)], width, s.bias)
        x = step.tracer.mark(x + branch * step.config.residual_scale, f"{self.label}: output")
        states = {"rows": table, "memory": memory, "start": self.start, "conv": conv}
        return x, {f"layers.{self.layer}.{name}": state for name, state in states.items()}

    def _norm_gated(self, values: Tensor, gate: Tensor) -> Tensor:
        """Return values [rows, width] gated, and then normed group by group."""
        s, rows = self.shape, self.step.rows
        width = s.value_heads * s.value_dim
        gated = self._mark(values * gate * compute_sigmoid(gate), "gated values")
        weight = self.step.tensor(self.step.weights.get(f"{self.prefix}.norm.weight", width))
        shape = (s.key_heads, width // s.key_heads)
        normed = self.step.normalise(gated.reshape(rows, *shape), weight.reshape(1, *shape))
        return self._mark(normed.reshape(rows, width), "values")
