"""Random legal graphs, and inputs for them that no honest party would send.

Half of the graphs are of the forms for which there is native code: products, attention, rows,
caches, joins. The others are chains of any operations. Numbers are small integers, so that sums of
floats are exact in any order, and the ends of each dtype's range.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from splitup.core.errors import InvalidModel
from splitup.core.tensors import TensorSpec
from splitup.graph.arrays import Array
from splitup.graph.dtypes import INTEGERS
from splitup.graph.rules import CheckedGraph, check_graph
from tests.fuzz import chains, native_forms
from tests.fuzz.chains import Results
from tests.graph.graphs import Builder

_FLOATS: Final = (math.nan, math.inf, -math.inf, -0.0, 3e9, -5e18, 6e4, 0.5)


@dataclass(frozen=True, slots=True)
class Case:
    """A graph, its weights by name, and what it is, in a word."""

    graph: CheckedGraph
    weights: dict[str, bytes]
    kind: str


def make_case(number: int) -> Case:
    """Return the graph of this number."""
    chance = random.Random(f"{number} ")
    while True:
        (kind,) = chance.choices(list(KINDS), [weight for _, weight in KINDS.values()])
        b = Builder()
        make, _ = KINDS[kind]
        outputs, updates = make(b, chance)
        try:
            return Case(check_graph(b.graph(outputs, updates)), b.weight_bytes, kind)
        except InvalidModel:
            continue


def draw_rows(graph: CheckedGraph, chance: random.Random, share: int = 1) -> dict[str, int]:
    """Return the numbers of rows of a step that takes up to one ``share``-th of a batch."""
    most = {symbol.name: max(1, symbol.maximum // share) for symbol in graph.symbols}
    return {name: chance.choice((1, n, chance.randint(1, n))) for name, n in most.items()}


def draw_inputs(graph: CheckedGraph, rows: dict[str, int], chance: random.Random) -> list[bytes]:
    """Return one step's inputs."""
    numbers = np.random.default_rng(chance.getrandbits(64))
    inputs = []
    for spec in graph.inputs:
        shape = (rows[spec.rows], *spec.shape[1:]) if spec.rows else spec.shape
        inputs.append(_draw(spec, shape, numbers, chance).tobytes())
    return inputs


def _draw(
    spec: TensorSpec, shape: tuple[int, ...], numbers: np.random.Generator, chance: random.Random
) -> Array:
    if spec.dtype == "bool":
        return numbers.integers(0, 2, shape).astype(np.bool_)
    small = numbers.integers(-3, chance.choice((4, 20, 70)), shape)
    if spec.dtype not in INTEGERS:
        values = small.astype(spec.dtype)
        if chance.random() < 0.3:
            values[numbers.random(shape) < 0.1] = np.clip(chance.choice(_FLOATS), -6e4, 6e4)
        if shape and chance.random() < 0.3:
            values[..., shape[-1] // 2 :] = 0.0
        return values
    info = np.iinfo(spec.dtype)
    ends = (info.min, info.min + 1, info.max, info.max - 1, info.max // 2, info.max // 2 + 1, 0, 1)
    values = small.astype(spec.dtype)
    values = np.where(
        numbers.random(shape) < 0.3, numbers.choice(np.array(ends, spec.dtype), shape), values
    )
    if shape and chance.random() < 0.3:
        values[..., int(numbers.integers(0, shape[-1])) :] = chance.choice(ends)
    return values.astype(spec.dtype)


_Make = Callable[[Builder, random.Random], Results]
KINDS: Final[dict[str, tuple[_Make, float]]] = {
    "chain": (chains.make_chain, 6.0),
    "lookup": (chains.make_lookup, 3.0),
    "pairs": (chains.make_pairs, 0.7),
    "wide": (chains.make_wide, 1.0),
    "product": (native_forms.make_product, 2.0),
    "attention": (native_forms.make_attention, 1.0),
    "cache": (native_forms.make_cache, 1.0),
    "join": (native_forms.make_join, 0.5),
    "rows": (native_forms.make_rows, 1.5),
}
