"""Graphs that are meant to compile slowly: those known, and random ones for a search."""

from __future__ import annotations

import math

import numpy as np

from splitup.core.errors import InvalidModel
from splitup.graph.ir import Arg, Graph, encode_float
from splitup.graph.rules import CheckedGraph, check_graph
from tests.graph.graphs import Builder

_UNARY = ("EXP2", "LOG2", "SIN", "SQRT", "RECIPROCAL", "TRUNC", "NEG")
_BINARY = ("ADD", "MUL", "MAX", "SUB", "POW", "FDIV")
_INTEGER = ("FLOORDIV", "FLOORMOD", "CDIV", "CMOD", "SHL", "SHR", "MUL", "ADD", "XOR")
_MOVES = ("RESHAPE", "PERMUTE", "SHRINK", "PAD", "FLIP", "SHIFT")
_SHAPES = ((64,), (1001,), (4096,), (7, 11, 13), (2, 3, 4, 5, 6), (7, 7, 64), (32, 32), (3, 3, 31))
_FLOATS = ("float32", "float64", "float16", "bfloat16")


def make_shifts(levels: int) -> Graph:
    """y = y * shift(y, 2^k) + c: twice as many loads for each level."""
    b, size = Builder(), 2 ** (levels + 1)
    y, c = b.input("x", "float32", size), b.const("float32", encode_float(1.5))
    for level in range(levels):
        part = b.add("SHRINK", "float32", y, arg=((2**level, size - 2**level),))
        shifted = b.add("PAD", "float32", part, arg=((0, size),))
        y = b.add("ADD", "float32", b.add("MUL", "float32", y, shifted), c)
    return b.graph({"y": b.store("float32", y)})


def make_functions(op: str, dtype: str, count: int, *shape: int) -> Graph:
    """A chain of SIN, or of POW with itself."""
    b = Builder()
    y = b.input("x", dtype, *(shape or (4,)))
    for _ in range(count):
        y = b.add(op, dtype, *([y] * (2 if op == "POW" else 1)))
    return b.graph({"y": b.store(dtype, y)})


def make_moves(rounds: int) -> Graph:
    """Reshapes that do not fit each other, and pads between them."""
    b = Builder()
    y = b.input("x", "float32", 1001)
    for _ in range(rounds):
        for op, arg in (
            ("RESHAPE", (7, 11, 13)),
            ("PERMUTE", (2, 0, 1)),
            ("RESHAPE", (1001,)),
            ("PAD", ((1, 1004),)),
            ("SHRINK", ((2, 1001),)),
        ):
            y = b.add(op, "float32", y, arg=arg)
    return b.graph({"y": b.store("float32", y)})


def make_swelling(megabytes: int) -> Graph:
    """A few hundred bytes with a state of so many megabytes."""
    b = Builder()
    x, s = b.input("x", "float32", 1), b.state("s", "float32", megabytes << 18)
    y = b.store("float32", b.add("ADD", "float32", x, s))
    first = b.add("SHRINK", "float32", y, arg=((0, 1),))
    return b.graph({"y": b.store("float32", first)}, [y])


def make_random(seed: int, most_nodes: int = 60) -> CheckedGraph:
    """Return a legal graph of one kernel that random operations made as expensive as is legal."""
    random = np.random.default_rng(seed)
    maker = _Maker(random)
    best: CheckedGraph | None = None
    refused = 0
    while len(maker.b.nodes) < most_nodes and refused < 8:
        kept = len(maker.b.nodes), maker.value, maker.shape, maker.dtype
        maker.add_one()
        try:
            best = check_graph(maker.finish())
        except InvalidModel:  # too expensive, or too large: something else
            del maker.b.nodes[kept[0] :]
            maker.value, maker.shape, maker.dtype = kept[1:]
            refused += 1
    assert best is not None
    return best


class _Maker:
    """A value, and the operations on it; each seed prefers other kinds of operations."""

    def __init__(self, random: np.random.Generator) -> None:
        self.b, self._random = Builder(), random
        self.shape: tuple[int, ...] = _SHAPES[random.integers(len(_SHAPES))]
        is_integer = random.random() < 0.3
        self.dtype = "int32" if is_integer else _FLOATS[min(3, int(random.exponential(0.8)))]
        self._input = self.value = self.b.input("x", self.dtype, *self.shape)
        self._other = self.b.input("z", self.dtype, *self.shape[-1:])
        self._weights = random.dirichlet([0.6] * 6)

    def finish(self) -> Graph:
        """Return the graph so far."""
        count = len(self.b.nodes)
        graph = self.b.graph({"y": self.b.store(self.dtype, self.value)})
        del self.b.nodes[count:]
        return graph

    def add_one(self) -> None:
        """Add an operation, or a few that belong together."""
        kinds = (self._compute, self._move, self._join, self._reduce, self._look_up, self._choose)
        kinds[self._random.choice(len(kinds), p=self._weights)]()

    def _add(self, op: str, *srcs: int, arg: Arg = None) -> int:
        return self.b.add(op, self.dtype, *srcs, arg=arg)

    def _pick(self, options: tuple[str, ...]) -> str:
        return options[self._random.integers(len(options))]

    def _compute(self) -> None:
        if self.dtype == "int32":
            op = self._pick(_INTEGER)
            number = self.b.const("int32", str(self._random.integers(1, 31)))
            self.value = self._add(op, self.value, number)
        elif self._random.random() < 0.4:
            self.value = self._add(self._pick(_UNARY), self.value)
        else:
            self.value = self._add(self._pick(_BINARY), self.value, self.value)

    def _move(self) -> None:
        self.value, self.shape = self._moved(self.value, self.shape)

    def _moved(self, value: int, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        op, random = self._pick(_MOVES), self._random
        axis = int(random.integers(len(shape)))
        offset = int(random.integers(1, 4))
        whole: tuple[tuple[int, int], ...] = tuple((0, size) for size in shape)
        size = shape[axis]
        if op == "RESHAPE":
            shape = self._factor(math.prod(shape))
            return self._add("RESHAPE", value, arg=shape), shape
        if op == "PERMUTE":
            order = tuple(int(item) for item in random.permutation(len(shape)))
            return self._add("PERMUTE", value, arg=order), tuple(shape[item] for item in order)
        if op == "FLIP":
            flips = tuple(int(item == axis) for item in range(len(shape)))
            return self._add("FLIP", value, arg=flips), shape
        if op == "PAD" or size <= offset:
            pads = (*whole[:axis], (offset, size + offset), *whole[axis + 1 :])
            shape = (*shape[:axis], size + offset, *shape[axis + 1 :])
            return self._add("PAD", value, arg=pads), shape
        part = (*whole[:axis], (offset, size - offset), *whole[axis + 1 :])
        value = self._add("SHRINK", value, arg=part)
        if op == "SHRINK":
            return value, (*shape[:axis], size - offset, *shape[axis + 1 :])
        return self._add("PAD", value, arg=whole), shape

    def _factor(self, count: int) -> tuple[int, ...]:
        sizes = []
        while count > 1 and len(sizes) < 5:
            divisors = [n for n in range(2, min(count, 64) + 1) if count % n == 0] or [count]
            sizes.append(divisors[self._random.integers(len(divisors))])
            count //= sizes[-1]
        order = self._random.permutation(len(sizes) + 1)
        return tuple(int([*sizes, count][item]) for item in order)

    def _join(self) -> None:
        """Combine the value with itself under another view."""
        value, shape = self._moved(self.value, self.shape)
        if shape != self.shape:
            if math.prod(shape) != math.prod(self.shape):
                self.value, self.shape = value, shape
                return
            value = self._add("RESHAPE", value, arg=self.shape)
        op = self._pick(("ADD", "MUL", "MAX"))
        self.value = self._add(op, self.value, value)

    def _reduce(self) -> None:
        """Sum over a new axis of copies, or over the first one."""
        if self._random.random() < 0.5 and len(self.shape) > 1:
            self.value = self._add("REDUCE", self.value, arg=(self._pick(("ADD", "MAX")), 1))
            self.shape = self.shape[1:]
            return
        size = int(self._random.integers(2, 33))
        wide = self._add("EXPAND", self.value, arg=(size,))
        number = self.b.add("IOTA", "int32", arg=size)
        number = self.b.add("RESHAPE", "int32", number, arg=(size, *[1] * len(self.shape)))
        scaled = self._add("MUL", wide, self.b.add("CAST", self.dtype, number))
        self.value = self._add("REDUCE", scaled, arg=("ADD", 1))

    def _look_up(self) -> None:
        if self.dtype == "int32":
            index = self.value
        else:
            index = self.b.add("CAST", "int32", self.value)
        table = self._other if self._random.random() < 0.5 else self.value
        rank = len(self.shape) - 1
        if table == self.value and rank:
            table = self._add("RESHAPE", table, arg=(math.prod(self.shape),))
        self.value = self._add("LOOKUP", table, index)

    def _choose(self) -> None:
        if self._random.random() < 0.3:
            copies = [self.value] * int(self._random.integers(2, 6))
            stacked = self._add("STACK", *copies)
            self.value = self._add("REDUCE", stacked, arg=("MAX", 1))
            return
        size = self.shape[-1]
        number = self.b.add("IOTA", "int32", arg=size)
        bound = self.b.const("int32", str(self._random.integers(1, size + 1)))
        hit = self.b.add("CMPLT", "bool", number, bound)
        value, shape = self._moved(self.value, self.shape)
        if math.prod(shape) != math.prod(self.shape):
            value = self._add("NEG", self.value)
        elif shape != self.shape:
            value = self._add("RESHAPE", value, arg=self.shape)
        self.value = self._add("WHERE", hit, self.value, value)
