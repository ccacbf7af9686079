"""Layers that repeat a traced one give the graph that they give when they are traced themselves."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from splitup_deploy.frontends.decoder import repeated_layers
from splitup_deploy.frontends.decoder.row_operations import Weights
from splitup_deploy.frontends.families.architectures import trace_language_model
from splitup_deploy.frontends.huggingface.directory import ShapeWeights, parse_config
from splitup_deploy.frontends.tracing import TracedModel, Tracer, tracing
from splitup_deploy.frontends.weight_sources import Absent, WeightSource
from tinygrad.tensor import Tensor

from splitup.core.tensors import TensorSpec
from tests.deploy import checkpoints, hybrids, mixtures, moes, variations
from tests.deploy.llamas import TINY
from tests.parameters import some_of

_ALL = (
    *(case.config for part in (checkpoints, mixtures, hybrids) for case in part.CASES.values()),
    *(case.config for case in variations.CASES.values()),
    *moes.CASES.values(),
)
FAMILIES = {table["architectures"][0]: table for table in _ALL}
WITH_SYMBOLS = ("Gemma2ForCausalLM", "Qwen3NextForCausalLM", "DeepseekV32ForCausalLM")


def double(config: Any, layers: int) -> Any:
    """Return the configuration, or a part of it, of a model in which all layers come twice."""
    changes: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, frozenset):
            changes[field.name] = value | {layer + layers for layer in value}
        elif is_dataclass(value):
            changes[field.name] = double(value, layers)
    return replace(config, **changes)


@pytest.fixture
def traced_parts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each part that is traced is closed, in order."""
    found: list[bool] = []
    trace_part = Tracer.trace_part

    def watch(*arguments: Any) -> Any:
        part = trace_part(*arguments)
        found.append(part.is_closed)
        return part

    monkeypatch.setattr(Tracer, "trace_part", watch)
    return found


def trace_all(config: Any, weights: Weights, chunk: int) -> TracedModel:
    """Trace every layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeated_layers, "find_kind", lambda config, layer: (layer,))
        return trace_language_model(config, weights, chunk)


SOME = ("LlamaForCausalLM", "Gemma3ForCausalLM", "Qwen3NextForCausalLM")


@pytest.mark.parametrize("name", some_of(FAMILIES, *SOME))
def test_repeated_layers_give_the_same_graph(name: str, traced_parts: list[bool]) -> None:
    table = FAMILIES[name]
    once = parse_config(table, None)
    config = replace(double(once, once.layers), layers=2 * once.layers)
    chunk = 2 if name in WITH_SYMBOLS else 1
    repeated = trace_language_model(config, ShapeWeights(table), chunk)
    assert all(traced_parts) and len(traced_parts) <= once.layers
    assert repeated == trace_all(config, ShapeWeights(table), chunk)


class MixedWeights(ShapeWeights):
    """One layer is stored with fewer bits than the others."""

    def get(self, name: str, *shape: int) -> WeightSource:
        found = super().get(name, *shape)
        if ".layers.1.mlp." not in name:
            return found
        return replace(found, spec=replace(found.spec, dtype="bfloat16"))


def test_a_layer_that_is_stored_in_another_way_is_traced(traced_parts: list[bool]) -> None:
    config = replace(parse_config(TINY, None), layers=4)
    repeated = trace_language_model(config, MixedWeights(TINY), 2)
    assert len(traced_parts) == 2
    assert repeated == trace_all(config, MixedWeights(TINY), 2)
    kinds = {w.name: w.dtype for w in repeated.graph.weights if "down_proj" in w.name}
    assert list(kinds.values()) == ["float32", "uint16", "float32", "float32"]


def test_only_what_depends_on_nothing_else_can_be_repeated() -> None:
    """What reads another layer's value, weight or state would read it in every repetition."""
    spec = TensorSpec("w", "float32", (4,))
    with tracing():
        tracer = Tracer()
        x = tracer.mark(tracer.input(TensorSpec("x", "float32", (4,))) + 1.0, "x")
        weight = tracer.weight(WeightSource(spec, (Absent(),)))
        state = tracer.state(TensorSpec("s", "float32", (4,)))
        other = tracer.mark(x * 2.0, "other")

        def is_closed(compute: Any) -> bool:
            def mark(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                return tracer.mark(compute(x), "y"), {}

            return tracer.trace_part(x, mark).is_closed

        assert is_closed(lambda x: x * tracer.iota(4))
        own = WeightSource(replace(spec, name="own"), (Absent(),))
        assert is_closed(lambda x: x * tracer.weight(own))
        assert not is_closed(lambda x: x * weight)
        assert not is_closed(lambda x: x * state)
        assert not is_closed(lambda x: x * other)
        assert not tracer.trace_part(x, lambda x: (x * 2.0, {})).is_closed  # not marked
