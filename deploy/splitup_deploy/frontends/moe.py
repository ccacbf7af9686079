"""Mixtures of experts: Mixtral and Qwen3-MoE, as a feed-forward part of the decoder.

For every row a router chooses ``active`` of the experts, its slots, and weighs them by gates. The
weights of all experts of a layer are one tensor, from which every slot looks its expert's up;
tinygrad turns that into a load, so a step reads the weights of chosen experts only. The experts of
a layer are a ``Bank``: one too large for a task is divided by experts (``splitup_deploy.divide``).
Sources: arXiv 2401.04088, section 2.1; arXiv 2505.09388, section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from dataclasses import fields as list_fields
from typing import Final

from tinygrad.dtype import dtypes
from tinygrad.tensor import Tensor

from splitup import limits
from splitup.errors import InvalidModel
from splitup.tensors import TensorSpec
from splitup_deploy.frontends.decoder import DecoderConfig, FeedForward, Step, compute_dense_mlp
from splitup_deploy.frontends.families import add_qwen_window, add_rope, add_window, read_shape
from splitup_deploy.frontends.fields import Fields
from splitup_deploy.frontends.quantised import dequantise
from splitup_deploy.weights import WeightSource


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of every layer but ``dense_layers``, and what their weights are called.

    ``prefix`` is their module in a block; ``names`` are gate, up and down projection.
    ``renormalised``: the gates of a row's chosen experts add up to one.
    """

    count: int
    active: int
    intermediate: int
    renormalised: bool
    prefix: str
    names: tuple[str, str, str]
    dense_layers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class MoeConfig(DecoderConfig):
    """A decoder with experts."""

    experts: Experts | None = None


def read_mixtral(fields: Fields, context: int | None) -> MoeConfig:
    """Read a MixtralForCausalLM configuration."""
    config = _add_rope(fields, read_shape(fields, context, epsilon=1e-5))
    if fields.get("sliding_window") is not None:
        config = add_window(fields, config, range(config.layers))
    experts = Experts(
        count=fields.get_integer("num_local_experts", most=limits.MAX_EXPERTS),
        active=fields.get_integer("num_experts_per_tok"),
        intermediate=config.intermediate,
        renormalised=True,
        prefix="block_sparse_moe",
        names=("w1", "w3", "w2"),
    )
    return _add_experts(fields, config, experts)


def read_qwen3_moe(fields: Fields, context: int | None) -> MoeConfig:
    """Read a Qwen3MoeForCausalLM configuration; some layers may have a dense MLP."""
    bias = fields.get_flag("attention_bias", False)
    config = add_qwen_window(fields, _add_rope(fields, read_shape(fields, context)))
    config = replace(config, qkv_bias=bias, output_bias=bias, qk_norm=True)
    period = fields.get_integer("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise fields.refuse("mlp_only_layers", "a list of layers")
    experts = Experts(
        count=fields.get_integer("num_experts", most=limits.MAX_EXPERTS),
        active=fields.get_integer("num_experts_per_tok"),
        intermediate=fields.get_integer("moe_intermediate_size"),
        renormalised=fields.get_flag("norm_topk_prob", False),
        prefix="mlp",
        names=("gate_proj", "up_proj", "down_proj"),
        dense_layers=frozenset(
            layer for layer in range(config.layers) if layer in dense or (layer + 1) % period
        ),
    )
    return _add_experts(fields, config, experts)


ARCHITECTURES: Final[dict[str, Callable[[Fields, int | None], MoeConfig]]] = {
    "MixtralForCausalLM": read_mixtral,
    "Qwen3MoeForCausalLM": read_qwen3_moe,
}


def choose_feed_forward(config: DecoderConfig) -> FeedForward | None:
    """Return the feed-forward part of a model with experts, None for a dense one."""
    if not isinstance(config, MoeConfig) or config.experts is None:
        return None
    experts = config.experts

    def compute(step: Step, h: Tensor, layer: int) -> Tensor:
        if layer in experts.dense_layers:
            return compute_dense_mlp(step, h, layer)
        return compute_experts(step, h, layer, experts)

    return compute


def compute_experts(step: Step, h: Tensor, layer: int, experts: Experts) -> Tensor:
    """Return the gated sum of the chosen experts' MLPs of h [rows, hidden]."""
    c, rows, slots = step.config, step.rows, experts.active
    mark, label = step.tracer.mark, f"block {layer} experts"
    chosen, gates = route(step, h, layer, experts)
    prefix = f"model.layers.{layer}.{experts.prefix}.experts"
    gate, up, down = experts.names
    inner = experts.intermediate
    weight = _look_up(step, chosen, experts, prefix, (gate, up), inner, c.hidden)
    both = (h.reshape(rows, 1, 1, c.hidden) * weight).sum(3)
    both = mark(both, f"{label}: gate and up")  # [rows, slots, 2 intermediate]
    active = mark(step.activate(both[:, :, :inner], both[:, :, inner:]), f"{label}: activation")
    weight = _look_up(step, chosen, experts, prefix, (down,), c.hidden, inner)
    result = (active.reshape(rows, slots, 1, inner) * weight).sum(3)
    gate_of_slot = gates.reshape(rows, slots, 1)
    # exactly zero, also where a weight is infinite: a piece without chosen experts is not run
    result = (gate_of_slot != 0.0).where(result * gate_of_slot, 0.0)
    result = mark(result, f"{label}: output")  # [rows, slots, hidden]
    step.tracer.mark_bank(result, chosen, gates, [h], experts.count)
    return result.sum(1)


def route(step: Step, h: Tensor, layer: int, experts: Experts) -> tuple[Tensor, Tensor]:
    """Return the chosen experts, int32 [rows, slots], and their gates, float32 [rows, slots].

    Of equal scores, the first expert's is taken.
    """
    mark, label = step.tracer.mark, f"block {layer} router"
    count, rows, slots = experts.count, step.rows, experts.active
    name = f"model.layers.{layer}.{experts.prefix}.gate.weight"
    logits = step.matmul(
        h, step.weights.get(name, count, step.config.hidden), count, step.config.hidden
    )
    logits = mark(logits, f"{label}: logits")
    powers = mark((logits - logits.max(1, keepdim=True)).exp(), f"{label}: softmax")
    scores = mark(powers / powers.sum(1, keepdim=True), f"{label}: scores")
    one, other = scores.reshape(rows, count, 1), scores.reshape(rows, 1, count)
    place = step.tracer.iota(count)
    earlier = place.reshape(1, 1, count) < place.reshape(1, count, 1)
    before = (one < other) | ((one == other) & earlier)
    rank = mark(before.where(1, 0).cast(dtypes.int32).sum(2), f"{label}: rank")
    taken = rank.reshape(rows, 1, count) == step.tracer.iota(slots).reshape(1, slots, 1)
    chosen = taken.where(place.reshape(1, 1, count), 0).sum(2)
    chosen = mark(chosen, f"{label}: chosen experts")
    gates = mark(taken.where(scores.reshape(rows, 1, count), 0.0).sum(2), f"{label}: their scores")
    if experts.renormalised:
        gates = gates / gates.sum(1, keepdim=True)
    return chosen, mark(gates * 1.0, f"{label}: gates")


def _look_up(
    step: Step,
    chosen: Tensor,
    experts: Experts,
    prefix: str,
    names: tuple[str, ...],
    size: int,
    inner: int,
) -> Tensor:
    """Return every slot's weights, float32 [rows, slots, len(names) * size, inner].

    The expert is looked up first and widened then: the other way round, all would be read.
    """
    count, out = experts.count, len(names) * size
    parts = [
        (f"{prefix}.{expert}.{name}.weight", size) for expert in range(count) for name in names
    ]
    name = f"{prefix}.{'.'.join(names)}.weight"
    if not step.weights.can_join([part for part, _ in parts]):
        raise InvalidModel(f"the experts' parts of '{name}' are stored in different ways")
    joined = step.weights.join(name, parts, count * out, inner)
    kind, rest = joined.spec.dtype, joined.spec.shape[1:]  # blocks of bytes, when quantised
    raw = TensorSpec(name, "uint16" if kind == "bfloat16" else kind, (count, out, *rest))
    is_plain = kind in ("float32", "float16")
    table = step.tracer.weight(WeightSource(raw, joined.parts))
    table = table.cast(dtypes.float32 if is_plain else dtypes.uint32)
    rows, slots, ones = step.rows, experts.active, (1,) * (1 + len(rest))
    hit = step.tracer.iota(count).reshape(1, 1, count, *ones) == chosen.reshape(
        rows, slots, 1, *ones
    )
    found = hit.where(table.reshape(1, 1, *raw.shape), 0).sum(2)
    if joined.encoding:
        return dequantise(found.cast(dtypes.uint8), joined.encoding)
    return found if is_plain else found.lshift(16).bitcast(dtypes.float32)


def _add_rope(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    if "rope_parameters" not in fields:
        fields.get_number("rope_theta")  # the families' own default is not the plain one
    return add_rope(fields, config)


def _add_experts(fields: Fields, config: DecoderConfig, experts: Experts) -> MoeConfig:
    for key in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"):
        fields.get(key)  # matter in training only
    if experts.active > experts.count:
        raise InvalidModel(
            f"config.json asks for {experts.active} active experts of {experts.count}"
        )
    values = {field.name: getattr(config, field.name) for field in list_fields(DecoderConfig)}
    return MoeConfig(**values, experts=experts)
