"""Trace a function of tinygrad tensors into a graph, without opening a device.

A ``Tracer`` hands out placeholder tensors for inputs, weights and states. What the function does
with them is recorded by tinygrad; ``finish`` reads the record. The record depends only on the
function, so the graph's bytes are the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice

from tinygrad.helpers import Context
from tinygrad.tensor import Tensor
from tinygrad.uop.ops import Ops, UOp

from splitup.backend.compiler.trace_reading import Placeholder, Repetition, read_tensors
from splitup.backend.tinygrad_types import get_dtype_name, get_tinygrad_dtype, make_variable
from splitup.core.tensors import TensorSpec
from splitup.graph.ir import Dims, Graph, Symbol
from splitup_deploy.frontends.decoder.quantised import describe_slow
from splitup_deploy.frontends.weight_sources import (
    Absent,
    WeightSource,
    describe_not_finite,
    start_hashing,
)

TRACE_DEVICE = "PYTHON"  # a name for placeholders; the device is never opened


@dataclass(frozen=True, slots=True)
class Bank:
    """A value [rows, slots, ...] of which every slot is computed by the expert chosen for it.

    ``root``, ``chosen`` (int32 [rows, slots]), ``gates`` (float32 [rows, slots]) and ``inputs`` are
    nodes that are written to memory. The nodes between ``inputs`` and ``root`` look up weights by
    ``chosen`` along an axis of length ``experts``; the result is zero where a gate is zero.
    """

    root: int
    chosen: int
    gates: int
    inputs: tuple[int, ...]
    experts: int


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A whole model before it is cut. ``labels`` are readable names of values in memory.

    ``notes`` are sentences that the model's developer should read. The graph's weights have no
    digests of their bytes until ``read_weights``: to read them may take hours.
    """

    graph: Graph
    labels: Mapping[int, str]
    weights: Mapping[str, WeightSource]
    banks: tuple[Bank, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Say whether the weights are known, and not only their shapes."""
        return not any(source.is_absent for source in self.weights.values())

    def forget_weights(self) -> TracedModel:
        """Return a model of which only the shapes are known: sizes and cuts are nearly the same."""
        weights = {name: replace(s, parts=(Absent(),)) for name, s in self.weights.items()}
        return replace(self, weights=weights)

    def read_weights(self) -> TracedModel:
        """Return the model with its weights' digests; the same one when only shapes are known.

        Reads every weight once, and adds a note when a number is not finite.
        """
        if not self.is_complete:
            return self
        sources = [self.weights[weight.name] for weight in self.graph.weights]
        start_hashing("weights", sum(source.spec.nbytes for source in sources))
        examined = [source.examine_weight() for source in sources]
        found = describe_not_finite([name for _, names in examined for name in names])
        graph = replace(self.graph, weights=tuple(weight for weight, _ in examined))
        return replace(self, graph=graph, notes=(*found, *self.notes))


@dataclass(frozen=True, slots=True)
class TracedPart:
    """A part of a function: what it takes, what it returns, and what it declared.

    ``updates`` are new states by name; ``weights`` and ``states`` are by their placeholders;
    ``banks`` are labels of each, with the number of experts. It ``is_closed`` if it is computed
    from nothing but the model's inputs, its own weights and states, and ``source``.
    """

    source: UOp
    value: Tensor
    updates: Mapping[str, Tensor]
    weights: Mapping[UOp, WeightSource]
    states: Mapping[UOp, TensorSpec]
    banks: tuple[tuple[tuple[str, ...], int], ...]
    is_closed: bool


@contextmanager
def tracing() -> Iterator[None]:
    """Make tinygrad record without choosing a device, and with fixed default dtypes."""
    with Context(DEV=TRACE_DEVICE, DEFAULT_FLOAT="float32", DEFAULT_INT="int32"):
        yield


class Tracer:
    """Collects a model's inputs, weights and states while its function is traced."""

    def __init__(self) -> None:
        self._inputs: list[TensorSpec] = []
        self._states: list[TensorSpec] = []
        self._weights: dict[str, WeightSource] = {}
        self._placeholders: dict[UOp, Placeholder] = {}
        self._labels: dict[UOp, str] = {}
        self._iotas: dict[int, Tensor] = {}
        self._banks: list[tuple[tuple[str, ...], int]] = []  # labels, and the number of experts
        self._weight_tensors: dict[str, Tensor] = {}
        self._symbols: dict[str, Symbol] = {}
        self._variables: dict[str, UOp] = {}
        self._repeated: dict[UOp, tuple[UOp, Repetition]] = {}

    def symbol(self, name: str, maximum: int) -> UOp:
        """Declare a dimension whose size every step sets; an input's spec names it as its rows."""
        self._symbols[name] = Symbol(name, maximum)
        self._variables[name] = make_variable(self._symbols[name])
        return self._variables[name]

    def input(self, spec: TensorSpec) -> Tensor:
        """Declare an input port and return its placeholder."""
        self._inputs.append(spec)
        return self._place("INPUT", len(self._inputs) - 1, spec)

    def state(self, spec: TensorSpec) -> Tensor:
        """Declare a state tensor and return the placeholder of its old value."""
        self._states.append(spec)
        return self._place("STATE", len(self._states) - 1, spec)

    def weight(self, source: WeightSource) -> Tensor:
        """Declare a weight and return its placeholder; the same name gives the same one."""
        name = source.spec.name
        if name not in self._weights:
            self._weights[name] = source
            self._weight_tensors[name] = self._place("WEIGHT", len(self._weights) - 1, source.spec)
        return self._weight_tensors[name]

    def adopt_weight(self, uop: UOp, source: WeightSource) -> None:
        """Declare that a tinygrad buffer in the traced function is this weight."""
        self._weights[source.spec.name] = source
        spec, place = source.spec, len(self._weights) - 1
        self._placeholders[uop] = Placeholder("WEIGHT", place, spec.dtype, spec.shape)

    def adopt_iota(self, uop: UOp, length: int) -> None:
        """Declare that a traced operation gives the int32 values 0 … length-1."""
        self._placeholders[uop] = Placeholder("IOTA", length, "int32", (length,))

    def label(self, uop: UOp, label: str) -> None:
        """Give an operation's value a readable name, in case a pass writes it to memory."""
        self._labels.setdefault(uop, label)

    def knows(self, uop: UOp) -> bool:
        """Say whether a tinygrad operation is one of the placeholders."""
        return uop in self._placeholders

    def count_weights(self) -> int:
        """Return the number of weights so far."""
        return len(self._weights)

    def iota(self, length: int) -> Tensor:
        """Return the int32 values 0 … length-1."""
        if length not in self._iotas:
            self._iotas[length] = self._place("IOTA", length, TensorSpec("", "int32", (length,)))
        return self._iotas[length]

    def mark(self, tensor: Tensor, label: str) -> Tensor:
        """Write a value to memory, with a readable name: the model can be cut there.

        Equal values that are marked twice are written twice.
        """
        uop = tensor.contiguous().uop
        known = self._placeholders.get(uop.base)
        if known is not None and known.op == "LOOKUP":  # tinygrad treats it as a buffer
            uop = uop.alu(Ops.CONTIGUOUS)
        result = Tensor(uop.replace(tag=len(self._labels)))
        self._labels[result.uop] = label
        return result

    def lookup(self, table: Tensor, index: Tensor) -> Tensor:
        """Return [*index.shape, *table.shape[1:]]: the table's rows, zeros where outside."""
        names = {variable: name for name, variable in self._variables.items()}
        dims = tuple(names.get(size, size) for size in (*index.shape, *table.shape[1:]))
        dtype = get_dtype_name(table.dtype)
        return self._make_view("LOOKUP", 0, dtype, dims, (table.uop, index.uop))

    def mark_bank(
        self, root: Tensor, chosen: Tensor, gates: Tensor, inputs: Sequence[Tensor], experts: int
    ) -> None:
        """Declare a ``Bank``; its tensors must be marked already."""
        labels = tuple(self._labels[t.uop] for t in (root, chosen, gates, *inputs))
        self._banks.append((labels, experts))

    def trace_part(
        self, x: Tensor, compute: Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]
    ) -> TracedPart:
        """Trace a part that takes ``x`` and returns a value and new states, all marked."""
        counts = [len(one) for one in (self._placeholders, self._labels, self._banks)]
        value, updates = compute(x)
        sources = list(self._weights.values())
        weights: dict[UOp, WeightSource] = {}
        states: dict[UOp, TensorSpec] = {}
        for uop, known in islice(self._placeholders.items(), counts[0], None):
            if known.op == "WEIGHT":
                weights[uop] = sources[known.index]
            elif known.op == "STATE":
                states[uop] = self._states[known.index]
        labelled = frozenset(islice(self._labels, counts[1], None))
        roots = [tensor.uop for tensor in (value, *updates.values())]
        is_closed = self._is_closed(x.uop, roots, labelled | weights.keys() | states.keys())
        banks = tuple(self._banks[counts[2] :])
        return TracedPart(x.uop, value, updates, weights, states, banks, is_closed)

    def repeat(
        self,
        part: TracedPart,
        x: Tensor,
        weights: Sequence[WeightSource],
        rename: Callable[[str], str],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what a closed part returns for another ``x`` and other weights, in its order.

        ``rename`` gives the names of states and the labels. Nothing is traced: ``finish`` reads the
        part's record once more.
        """
        tensors = [self.weight(source) for source in weights]
        tensors += [self.state(replace(s, name=rename(s.name))) for s in part.states.values()]
        own = (self._placeholders[tensor.uop.base] for tensor in tensors)
        placeholders = dict(zip((*part.weights, *part.states), own, strict=True))
        repetition = Repetition(part.source, x.uop, placeholders, rename)
        for labels, experts in part.banks:
            self._banks.append((tuple(map(rename, labels)), experts))

        def stand_in(tensor: Tensor) -> Tensor:
            uop = tensor.uop.replace(tag=-1 - len(self._repeated))
            self._repeated[uop] = (tensor.uop, repetition)
            return Tensor(uop)

        updates = {rename(name): stand_in(state) for name, state in part.updates.items()}
        return stand_in(part.value), updates

    def finish(self, outputs: Mapping[str, Tensor], updates: Mapping[str, Tensor]) -> TracedModel:
        """Return the traced model, which a pass still has to make legal.

        The passes are in ``splitup_deploy.cutting.passes``.
        """
        sources = list(self._weights.values())
        notes = describe_slow(source.encoding for source in sources)
        graph, labels = read_tensors(
            inputs=self._inputs,
            weights=[source.describe_weight() for source in sources],
            states=self._states,
            placeholders=self._placeholders,
            labels=self._labels,
            outputs=[(name, tensor.contiguous().uop) for name, tensor in outputs.items()],
            updates=[updates[spec.name].contiguous().uop for spec in self._states],
            symbols=list(self._symbols.values()),
            repeated=self._repeated,
        )
        place = {label: node for node, label in labels.items()}
        banks = []
        for names, experts in self._banks:
            root, chosen, gates, *inputs = (place[name] for name in names)
            banks.append(Bank(root, chosen, gates, tuple(inputs), experts))
        return TracedModel(graph, labels, dict(self._weights), tuple(banks), notes)

    def _is_closed(self, source: UOp, roots: Sequence[UOp], own: frozenset[UOp]) -> bool:
        """Say whether marked roots depend on no marks, weights and states but ``own`` ones."""
        pending, seen = list(roots), {source}
        while pending:
            uop = pending.pop()
            if uop in seen:
                continue
            seen.add(uop)
            known = self._placeholders.get(uop)
            is_declared = uop in self._labels or uop in self._repeated
            if is_declared or (known is not None and known.op in ("WEIGHT", "STATE")):
                if uop not in own:
                    return False
            pending.extend(uop.src if known is None else known.operands)
        return all(root in self._labels for root in roots)

    def _place(self, op: str, index: int, spec: TensorSpec) -> Tensor:
        dims: Dims = (spec.rows, *spec.shape[1:]) if spec.rows else spec.shape
        return self._make_view(op, index, spec.dtype, dims)

    def _make_view(
        self, op: str, index: int, dtype: str, dims: Dims, operands: tuple[UOp, ...] = ()
    ) -> Tensor:
        """Return a tensor with its own buffer, of which only the shape is used."""
        shape = tuple(self._symbols[d].maximum if isinstance(d, str) else d for d in dims)
        buffer = UOp.new_buffer(TRACE_DEVICE, math.prod(shape), get_tinygrad_dtype(dtype))
        view = Tensor(buffer).reshape(shape)
        placeholder = Placeholder(op, index, dtype, dims, operands)
        if not any(isinstance(d, str) for d in dims):
            self._placeholders[buffer] = placeholder  # tinygrad may drop the reshape again
            return view
        bound = [self._variables[d] if isinstance(d, str) else d for d in dims]
        view = view.shrink(tuple((0, size) for size in bound))
        self._placeholders[view.uop] = placeholder
        return view
