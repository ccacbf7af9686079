"""Decoders have few kinds of layers: one of each kind is traced, and repeated for the others.

Layers are of one kind if the configuration's sets of layers do not tell them apart, and their
weights are stored in the same way. A repeated layer gives the same graph as a traced one, byte for
byte, and takes a small part of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import TypeVar

from tinygrad.tensor import Tensor

from splitup_deploy.frontends.decoder.decoder_config import DecoderConfig
from splitup_deploy.frontends.decoder.row_operations import Weights
from splitup_deploy.frontends.tracing import TracedPart, Tracer
from splitup_deploy.frontends.weight_sources import WeightSource

# Computes a layer from x [rows, hidden] and its number; returns x after it, and the new values of
# its states by name.
ComputeLayer = Callable[[Tensor, int], tuple[Tensor, dict[str, Tensor]]]
_Rename = Callable[[str], str]
_T = TypeVar("_T", WeightSource, bool)


def find_kind(config: object, layer: int) -> tuple[bool, ...]:
    """Say for each set of layers in a configuration, or in its parts, whether it has the layer."""
    kind: tuple[bool, ...] = ()
    for field in fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if isinstance(value, frozenset):
            kind += (layer in value,)
        elif is_dataclass(value):
            kind += find_kind(value, layer)
    return kind


class RepeatedLayers:
    """Computes the layers of a decoder that is traced. ``weights`` are those to compute them of."""

    def __init__(self, config: DecoderConfig, weights: Weights, tracer: Tracer) -> None:
        self._config, self._tracer = config, tracer
        self.weights = _RecordedWeights(weights)
        self._traced: dict[tuple[bool, ...], list[_TracedLayer]] = {}

    def compute(
        self, compute: ComputeLayer, x: Tensor, layer: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what ``compute`` returns, traced or as the repetition of another layer."""
        alike = self._traced.setdefault(find_kind(self._config, layer), [])
        for one in alike:
            rename = partial(_rename, old=one.layer, new=layer)
            if (sources := _find_sources(one, rename)) is not None:
                return self._tracer.repeat(one.part, x, sources, rename)
        self.weights.answers = []
        part = self._tracer.trace_part(x, lambda before: compute(before, layer))
        names = [
            spec.name for spec in (*(w.spec for w in part.weights.values()), *part.states.values())
        ]
        if part.is_closed and all(_rename(name, layer, layer + 1) != name for name in names):
            alike.append(_TracedLayer(layer, part, tuple(self.weights.answers)))
        return part.value, dict(part.updates)


@dataclass(frozen=True, slots=True)
class _Answer:
    """A question about weights, to be asked with other names, and its answer."""

    ask: Callable[[_Rename], WeightSource | bool]
    answer: WeightSource | bool


@dataclass(frozen=True, slots=True)
class _TracedLayer:
    layer: int
    part: TracedPart
    answers: tuple[_Answer, ...]


class _RecordedWeights:
    """Weights that remember what was asked of them, and what they answered."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.answers: list[_Answer] = []

    def get(self, name: str, *shape: int) -> WeightSource:
        """Return one weight."""
        return self._answer(lambda rename: self._weights.get(rename(name), *shape))

    def can_join(self, names: list[str]) -> bool:
        """Say whether these weights have the same storage format."""
        return self._answer(lambda rename: self._weights.can_join([rename(name) for name in names]))

    def join(self, name: str, parts: list[tuple[str, int]], *shape: int) -> WeightSource:
        """Return the weights concatenated along the rows."""
        return self._answer(
            lambda rename: self._weights.join(
                rename(name), [(rename(part), rows) for part, rows in parts], *shape
            )
        )

    def _answer(self, ask: Callable[[_Rename], _T]) -> _T:
        answer = ask(str)
        self.answers.append(_Answer(ask, answer))
        return answer


def _find_sources(traced: _TracedLayer, rename: _Rename) -> list[WeightSource] | None:
    """Return the weights of a repetition; None if they are not stored as those of the layer."""
    found: dict[str, WeightSource] = {}
    for one in traced.answers:
        own, answer = one.answer, one.ask(rename)
        if isinstance(own, bool) or isinstance(answer, bool):
            if own != answer:
                return None
            continue
        if _describe(own) != _describe(answer):
            return None
        found[own.spec.name] = answer
    result = []
    for own in traced.part.weights.values():  # read as bits, or computed, as the layer's own
        name = rename(own.spec.name)
        result.append(
            replace(
                found.get(own.spec.name, own),
                spec=replace(own.spec, name=name),
                encoding=own.encoding,
            )
        )
    return result


def _describe(source: WeightSource) -> tuple[str, tuple[int, ...], str]:
    return source.spec.dtype, source.spec.shape, source.encoding


def _rename(name: str, old: int, new: int) -> str:
    """Return a name or label of one layer as that of another one."""
    return name.replace(f"layers.{old}.", f"layers.{new}.").replace(
        f"block {old} ", f"block {new} "
    )
