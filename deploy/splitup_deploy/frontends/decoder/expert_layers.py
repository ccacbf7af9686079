"""Mixtures of experts as a feed-forward part of the decoder.

For every row a router chooses ``active`` experts, the row's slots, and weights them by gates. The
weights of all experts of a layer are one tensor, in which every slot looks up its expert; tinygrad
turns that into a load, so a step reads only the weights of chosen experts. The experts of a layer
are a ``Bank``; a bank that is too large for a task is divided by experts
(``splitup_deploy.cutting.divide``). Shared experts are a dense MLP beside them that every row
passes. ``splitup_deploy.frontends.families.mixture_of_experts`` has each family's choice.
Sources: arXiv 2401.04088, section 2.1; arXiv 2505.09388, section 2; arXiv 2412.19437, section
2.1.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tinygrad.dtype import dtypes
from tinygrad.tensor import Tensor
from tinygrad.uop.ops import UOp

from splitup.core.errors import InvalidModel
from splitup.core.tensors import TensorSpec
from splitup_deploy.frontends.decoder.decoder_config import Experts, Shared
from splitup_deploy.frontends.decoder.quantised import dequantise
from splitup_deploy.frontends.decoder.row_operations import MASKED, compute_sigmoid
from splitup_deploy.frontends.decoder.step_function import (
    Step,
    compute_dense_mlp,
    compute_gated_mlp,
)
from splitup_deploy.frontends.weight_sources import WeightSource

# The sum by which a row's scores are divided is at least this, because sigmoids may all be zero. It
# is the smallest normal float16, as in llama.cpp.
MIN_SCORES: Final = 2.0**-14


def compute_feed_forward(step: Step, h: Tensor, x: Tensor, layer: int) -> Tensor:
    """Return a layer's experts, or its dense MLP, of h [rows, hidden], which is x normalised."""
    experts = step.config.experts
    if experts is None or layer in experts.dense_layers:
        return compute_dense_mlp(step, h, x, layer)
    if experts.beside_dense:
        return _add_experts(step, h, x, layer, experts)
    return compute_experts(step, h, h, layer, experts)


def _add_experts(step: Step, h: Tensor, x: Tensor, layer: int, experts: Experts) -> Tensor:
    """Return the dense MLP of h [rows, hidden] plus the experts of x, before the norm of h."""
    label, prefix = f"block {layer} experts", f"model.layers.{layer}"
    dense = step.tracer.mark(compute_dense_mlp(step, h, x, layer), f"block {layer} MLP: dense")
    name = f"{prefix}.post_feedforward_layernorm_1.weight"
    dense = step.norm(dense, name, f"block {layer} MLP: dense, norm")
    source = step.norm(x, f"{prefix}.pre_feedforward_layernorm_2.weight", f"{label}: norm")
    chosen = step.tracer.mark(compute_experts(step, source, x, layer, experts), f"{label}: sum")
    name = f"{prefix}.post_feedforward_layernorm_2.weight"
    return dense + step.norm(chosen, name, f"{label}: sum, norm")


def compute_experts(step: Step, h: Tensor, x: Tensor, layer: int, experts: Experts) -> Tensor:
    """Return the gated sum of the chosen experts' MLPs of h [rows, hidden]; the router reads x."""
    c, rows, slots = step.config, step.rows, experts.active
    mark, label = step.tracer.mark, f"block {layer} experts"
    chosen, gates = route(step, x, layer, experts)
    prefix = f"model.layers.{layer}.{experts.prefix}.experts"
    *ups, down = experts.names
    inner, width = experts.intermediate, experts.latent or c.hidden
    wide = 2 * inner if c.gated else inner
    into, back = (f"model.layers.{layer}.{experts.prefix}.fc{n}_latent_proj" for n in (1, 2))
    source = h
    if experts.latent is not None:
        source = mark(step.project(h, into, [(into, width)], c.hidden, c.mlp_bias), f"{label}: in")
    weight = _look_up(step, chosen, experts, prefix, ups, wide, width)
    both = (source.reshape(rows, 1, 1, width) * weight).sum(3)
    if experts.biased:
        both = both + _look_up_bias(step, chosen, experts, prefix, ups, wide)
    gate_of_slot = gates.reshape(rows, slots, 1)
    if experts.gated_input:
        both = both * gate_of_slot
    both = mark(both, f"{label}: gate and up")  # [rows, slots, intermediate of one or both]
    if len(ups) == 2 or not c.gated:
        active = step.activate(both[:, :, :inner], both[:, :, wide - inner :])
    else:
        pairs = both.reshape(rows, slots, inner, 2)
        active = step.activate(pairs[:, :, :, 0], pairs[:, :, :, 1])
    active = mark(active, f"{label}: activation")
    weight = _look_up(step, chosen, experts, prefix, [down], width, inner)
    result = (active.reshape(rows, slots, 1, inner) * weight).sum(3)
    if experts.biased:
        result = result + _look_up_bias(step, chosen, experts, prefix, [down], width)
    gated = result if experts.gated_input else result * gate_of_slot
    # exactly zero, also where a weight is infinite: a piece without chosen experts is not run
    result = (gate_of_slot != 0.0).where(gated, 0.0)
    result = mark(result, f"{label}: output")  # [rows, slots, hidden or latent]
    step.tracer.mark_bank(result, chosen, gates, [source], experts.count)
    total = result.sum(1)
    if experts.latent is not None:
        total = mark(total, f"{label}: sum")
        total = mark(step.project(total, back, [(back, c.hidden)], width, c.mlp_bias), label)
    if experts.shared is None:
        return total
    return total + compute_shared(step, h, layer, experts, experts.shared)


def compute_shared(step: Step, h: Tensor, layer: int, experts: Experts, shared: Shared) -> Tensor:
    """Return what the shared experts add to h [rows, hidden]."""
    label, hidden = f"block {layer} shared expert", step.config.hidden
    prefix = f"model.layers.{layer}.{shared.module}"
    result = compute_gated_mlp(step, h, prefix, shared.intermediate, label)
    if shared.gated:
        gate = step.matmul(h, step.weights.get(f"{prefix}_gate.weight", 1, hidden), 1, hidden)
        gate = step.tracer.mark(gate, f"{label}: gate")
        result = step.tracer.mark(result, f"{label}: ungated") * compute_sigmoid(gate)
    return step.tracer.mark(result, f"{label}: output")


def route(step: Step, h: Tensor, layer: int, experts: Experts) -> tuple[Tensor, Tensor]:
    """Return the chosen experts, int32 [rows, slots], and their gates, float32 [rows, slots].

    Of equal scores, the one of the first expert is taken.
    """
    mark, label, router = step.tracer.mark, f"block {layer} router", experts.router
    count, rows, slots = experts.count, step.rows, experts.active
    name = f"model.layers.{layer}.{experts.prefix}.{router.name}"
    beside, hidden = name.rpartition(".")[0], step.config.hidden
    if router.scaled:
        scale = step.tensor(step.weights.get(f"{beside}.scale", hidden)) * hidden**-0.5
        h = mark(step.normalise(h, scale), f"{label}: norm")
    logits = step.project(h, name, [(name, count)], step.config.hidden, router.linear_bias)
    logits = mark(logits, f"{label}: logits")
    if router.scoring == "mixer":
        return _mix(step, logits, experts, label)
    if router.scoring == "sigmoid":
        scores = mark(compute_sigmoid(logits), f"{label}: scores")
    else:
        powers = mark((logits - logits.max(1, keepdim=True)).exp(), f"{label}: softmax")
        scores = mark(powers / powers.sum(1, keepdim=True), f"{label}: scores")
    choice = scores
    if router.biased:
        bias = step.tensor(step.weights.get(f"{name}.e_score_correction_bias", count))
        choice = mark(scores + bias, f"{label}: scores with bias")
    if router.groups > 1:
        choice = _hide_groups(step, choice, experts, label)
    rank = mark(_rank(step, choice, rows, count), f"{label}: rank")
    taken = rank.reshape(rows, 1, count) == step.tracer.iota(slots).reshape(1, slots, 1)
    chosen = taken.where(step.tracer.iota(count).reshape(1, 1, count), 0).sum(2)
    chosen = mark(chosen, f"{label}: chosen experts")
    gates = mark(taken.where(scores.reshape(rows, 1, count), 0.0).sum(2), f"{label}: their scores")
    if router.renormalised:
        total = gates.sum(1, keepdim=True)
        gates = gates / (total.maximum(MIN_SCORES) if router.scoring == "sigmoid" else total)
    if router.scaled:
        scale = step.tensor(step.weights.get(f"{beside}.per_expert_scale", count))
        factors = taken.where(scale.reshape(1, 1, count), 0.0).sum(2)
        gates = gates * mark(factors, f"{label}: factors")
    return chosen, mark(gates * router.scale, f"{label}: gates")


def _mix(step: Step, logits: Tensor, experts: Experts, label: str) -> tuple[Tensor, Tensor]:
    """Return the chosen experts and their gates, by a sparse mixer."""
    mark, rows, count = step.tracer.mark, step.rows, experts.count
    left, chosen, gates = logits, [], []
    for slot in range(experts.active):
        top = mark(left.max(1, keepdim=True), f"{label}: best logit {slot}")
        is_far = (top - logits) / logits.abs().maximum(top) > 2 * experts.router.jitter
        powers = is_far.where(0.0, (left - top).exp())  # zero for those that are taken
        total = powers.sum(1, keepdim=True)
        gates.append(mark(total.reciprocal(), f"{label}: gate {slot}"))
        rank = mark(_rank(step, left, rows, count), f"{label}: rank {slot}")
        number = (rank == 0).where(step.tracer.iota(count).reshape(1, count), 0)
        chosen.append(mark(number.sum(1, keepdim=True), f"{label}: expert {slot}"))
        left = mark((rank == 0).where(MASKED, left), f"{label}: left after {slot}")
    both = Tensor.cat(*chosen, dim=1), Tensor.cat(*gates, dim=1)
    return mark(both[0], f"{label}: chosen experts"), mark(both[1], f"{label}: gates")


def _hide_groups(step: Step, choice: Tensor, experts: Experts, label: str) -> Tensor:
    """Return the choice [rows, count] without the experts of groups that are not taken."""
    mark, rows, router = step.tracer.mark, step.rows, experts.router
    groups, size = router.groups, experts.count // router.groups
    split = choice.reshape(rows, groups, size)
    rank = mark(_rank(step, split, rows, groups, size), f"{label}: rank in group")
    best = mark((rank < router.group_best).where(split, 0.0).sum(2), f"{label}: groups")
    rank = mark(_rank(step, best, rows, groups), f"{label}: rank of groups")
    is_open = (rank < router.groups_taken).reshape(rows, groups, 1)
    return mark(is_open.where(split, MASKED).reshape(rows, experts.count), f"{label}: choice")


def _rank(step: Step, scores: Tensor, *shape: UOp | int) -> Tensor:
    """Return how many of the last axis come before each score: int32 ``shape``."""
    *outer, count = shape
    one, other = scores.reshape(*outer, count, 1), scores.reshape(*outer, 1, count)
    place, ones = step.tracer.iota(int(count)), (1,) * len(outer)
    earlier = place.reshape(*ones, 1, count) < place.reshape(*ones, count, 1)
    before = (one < other) | ((one == other) & earlier)
    return before.where(1, 0).cast(dtypes.int32).sum(len(outer) + 1)


def _look_up(
    step: Step,
    chosen: Tensor,
    experts: Experts,
    prefix: str,
    names: list[str],
    out: int,
    inner: int,
) -> Tensor:
    """Return every slot's weights, float32 [rows, slots, out, inner], of layers side by side."""
    count, size = experts.count, out // len(names)
    parts = [
        (f"{prefix}.{expert}.{name}.weight", size) for expert in range(count) for name in names
    ]
    name = f"{prefix}.{'.'.join(names)}.weight"
    if not step.weights.can_join([part for part, _ in parts]):
        raise InvalidModel(f"the experts' parts of '{name}' are stored in different ways")
    joined = step.weights.join(name, parts, count * out, inner)
    return _pick(step, chosen, experts, joined, out, *joined.spec.shape[1:])


def _look_up_bias(
    step: Step, chosen: Tensor, experts: Experts, prefix: str, names: list[str], out: int
) -> Tensor:
    """Return every slot's biases of projections, float32 [rows, slots, out]."""
    each = out // len(names)
    sources = [step.weights.get(f"{prefix}.{name}_bias", experts.count, each) for name in names]
    found = [_pick(step, chosen, experts, source, each) for source in sources]
    return found[0] if len(found) == 1 else Tensor.cat(*found, dim=2)


def _pick(
    step: Step, chosen: Tensor, experts: Experts, source: WeightSource, *shape: int
) -> Tensor:
    """Return every slot's part of a weight of all experts, ``shape`` of each.

    The expert's weights are looked up first and widened afterwards; otherwise all would be read.
    """
    count, rest = experts.count, shape[1:]  # blocks of bytes, when quantised
    kind = source.spec.dtype
    is_plain, is_brain = kind in ("float32", "float16"), kind == "bfloat16"
    raw = TensorSpec(source.spec.name, "uint16" if is_brain else kind, (count, *shape))
    encoding = "bfloat16" if is_brain else source.encoding
    table = step.tracer.weight(replace(source, spec=raw, encoding=encoding))
    table = table.cast(dtypes.float32 if is_plain else dtypes.uint32)
    rows, slots, ones = step.rows, experts.active, (1,) * (1 + len(rest))
    hit = step.tracer.iota(count).reshape(1, 1, count, *ones) == chosen.reshape(
        rows, slots, 1, *ones
    )
    found = hit.where(table.reshape(1, 1, *raw.shape), 0).sum(2)
    if source.encoding:
        return dequantise(found.cast(dtypes.uint8), source.encoding)
    return found if is_plain else found.lshift(16).bitcast(dtypes.float32)
