"""The rope fields of a config.json, in the old spelling and the new.

Old: ``rope_theta`` beside ``rope_scaling``. New: all in ``rope_parameters``. What the scalings
mean is in ``splitup_deploy.frontends.decoder.rotary``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.decoder.decoder_config import Growth
from splitup_deploy.frontends.decoder.rotary import (
    Rope,
    compute_longrope_scale,
    compute_yarn_scale,
    make_rope,
    scale_linear,
    scale_llama3,
    scale_yarn,
)
from splitup_deploy.frontends.families.config_fields import Fields

SCALINGS: Final = ("default", "linear", "llama3", "yarn")
_NAMES: Final = ("rope_parameters", "rope_scaling")
LONG_SCALINGS: Final = ("default", "longrope", "su")  # Phi-3's; "su" is the old name


@dataclass(frozen=True, slots=True)
class RopeDefaults:
    """The values of absent parameters. ``trained`` and ``context`` are positions."""

    head_dim: int
    trained: int
    context: int
    theta: float = 10_000.0
    kinds: tuple[str, ...] = SCALINGS
    partial: float | None = None  # the rotated part of a head; None if it is always all
    original: int | None = None  # positions before scaling, if that is no rope parameter
    mscales: bool = False  # LongRoPE's corrections are parameters


def find_rope_parameters(fields: Fields) -> Fields | None:
    """Return the nested parameters under their new or old name, None when there are none."""
    new, old = fields.get_fields("rope_parameters"), fields.get_fields("rope_scaling")
    same = _says_no_more(fields.get("rope_scaling"), fields.get("rope_parameters"))
    if new is not None and old is not None and not same:
        raise fields.refuse("rope_scaling", "null beside rope_parameters")
    return old if new is None else new


def _says_no_more(old: Any, new: Any) -> bool:
    """Say whether an object with parameters' old names has nothing that the new one has not."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return bool(old == new)
    plain = {"rope_type": new.get("type"), **new}
    return all(plain.get("rope_type" if k == "type" else k) == value for k, value in old.items())


def read_growth(fields: Fields) -> Growth | None:
    """Take the growth of queries out of the rope parameters, where Llama 4 and Mistral have it."""
    found = [fields.take(name, "llama_4_scaling_beta") for name in _NAMES]
    for name in _NAMES:
        fields.take(name, "max_position_embeddings")  # says once more what the outer field is
    rate = next((one for one in found if one is not None), None)
    if rate is None or (type(rate) in (int, float) and rate == 0):
        return None
    parameters = find_rope_parameters(fields) or Fields({})
    beta = Fields({"llama_4_scaling_beta": rate}, "config.json's rope_parameters")
    return Growth(
        beta.get_number("llama_4_scaling_beta"),
        parameters.get_integer("original_max_position_embeddings"),
    )


def read_two_ropes(
    fields: Fields, defaults: RopeDefaults, local: RopeDefaults
) -> tuple[Rope, Rope]:
    """Return the rope of layers that see all positions, and the one of layers with a window.

    New: two objects in ``rope_parameters``. Old: ``rope_scaling`` is for the former alone.
    """
    new, old = fields.get_fields("rope_parameters"), fields.get_fields("rope_scaling")
    if new is not None and old is not None:
        scaling, table = fields.get("rope_scaling"), fields.get("rope_parameters")
        if not any(_says_no_more(scaling, one) for one in (table, table.get("full_attention"))):
            raise fields.refuse("rope_scaling", "null beside rope_parameters")
    whole = old if new is None else new.get_fields("full_attention")
    near = None if new is None else new.get_fields("sliding_attention")
    if new is not None:
        new.check_all_read()
    return read_rope(whole, defaults), read_rope(near, local)


def read_rope(parameters: Fields | None, defaults: RopeDefaults) -> Rope:
    """Return the rope that the parameters describe; raises InvalidModel naming what is not known.

    A field that the kind of scaling does not use is refused.
    """
    parameters = Fields({}) if parameters is None else parameters
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in defaults.kinds:
        key = "rope_type" if "rope_type" in parameters else "type"
        raise parameters.refuse(key, ", ".join(defaults.kinds))
    parameters.get("type")  # beside rope_type it is the old name of the same
    theta = parameters.get_number("rope_theta", defaults.theta)
    dims = defaults.head_dim
    if defaults.partial is not None:
        share = parameters.get_number("partial_rotary_factor", defaults.partial)
        dims = int(dims * share)
        if share > 1 or dims < 2 or dims % 2:
            raise InvalidModel(
                f"config.json has partial_rotary_factor = {share:g}; supported: an even number "
                f"of a head's {defaults.head_dim} elements"
            )
    elif parameters.get_number("partial_rotary_factor", 1.0) != 1:
        raise parameters.refuse("partial_rotary_factor", "1")
    rope = _read_scaling(parameters, defaults, str(kind), make_rope(theta, dims), theta)
    parameters.check_all_read()
    return rope


def _read_scaling(
    parameters: Fields, defaults: RopeDefaults, kind: str, rope: Rope, theta: float
) -> Rope:
    if kind == "default":
        return rope
    if kind == "linear":
        return scale_linear(rope, parameters.get_number("factor"))
    original = parameters.get_integer("original_max_position_embeddings", defaults.trained)
    original = defaults.original or original
    if kind == "llama3":
        low = parameters.get_number("low_freq_factor")
        high = parameters.get_number("high_freq_factor")
        if low >= high:
            raise parameters.refuse("high_freq_factor", f"more than low_freq_factor, {low:g}")
        return scale_llama3(rope, parameters.get_number("factor"), low, high, original)
    if kind == "yarn":
        if theta <= 1:
            raise InvalidModel(f"config.json has rope_theta = {theta:g}; yarn wants more than 1")
        factor = parameters.get_number("factor")
        return scale_yarn(
            rope,
            theta=theta,
            factor=factor,
            original=original,
            fast=parameters.get_number("beta_fast", 32.0),
            slow=parameters.get_number("beta_slow", 1.0),
            truncate=parameters.get_flag("truncate", True),
            scale=_read_yarn_scale(parameters, factor),
        )
    return _read_longrope(parameters, defaults, rope, original)


def _read_longrope(parameters: Fields, defaults: RopeDefaults, rope: Rope, original: int) -> Rope:
    """Return a LongRoPE (arXiv 2402.13753), with its long factors when the context is a long one.

    As in llama.cpp, the context for which a model is compiled decides once for all positions: a
    key in the cache is rotated already, so a text cannot change factors in its middle. For
    Phi-MoE vLLM and transformers 4 choose in the same way; transformers 5 always takes the short
    factors, with the long correction.
    """
    factor = parameters.get_number("factor", defaults.trained / original)
    long = parameters.get_numbers("long_factor", rope.pairs)
    short = parameters.get_numbers("short_factor", rope.pairs)
    kind = "long" if defaults.context > original else "short"
    divisors = long if kind == "long" else short
    if kind == "long":
        own = ", as in vLLM (in transformers 5 the short ones)" if defaults.mscales else ""
        rope = replace(
            rope,
            note=f"LongRoPE's long factors turn all of {defaults.context} positions{own}; "
            f"--context {original} takes the short factors",
        )
    if defaults.mscales:
        scales = {name: parameters.get_number(f"{name}_mscale") for name in ("long", "short")}
        return rope.divide(divisors, scales[kind])
    if parameters.get("attention_factor") is None:
        if original < 2:  # its logarithm divides
            raise InvalidModel(
                f"config.json has original_max_position_embeddings = {original}; longrope wants "
                "more than 1"
            )
        return rope.divide(divisors, compute_longrope_scale(factor, original))
    return rope.divide(divisors, parameters.get_number("attention_factor"))


def _read_yarn_scale(parameters: Fields, factor: float) -> float:
    weights = [parameters.get(key) for key in ("mscale", "mscale_all_dim")]
    if parameters.get("attention_factor") is not None:
        return parameters.get_number("attention_factor")
    if all(weights):  # zero means absent, as in the original
        over, under = (parameters.get_number(key) for key in ("mscale", "mscale_all_dim"))
        return compute_yarn_scale(factor, over) / compute_yarn_scale(factor, under)
    return compute_yarn_scale(factor)
