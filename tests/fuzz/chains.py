"""Random chains of any operations, and shorter ones of those that went wrong before."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from splitup.graph.dtypes import INTEGERS
from splitup.graph.ir import Arg, Dim, Dims, encode_float
from tests.graph.graphs import Builder

MAX_ELEMENTS: Final = 600  # of a value in a chain
_SIZES: Final = (1, 2, 3, 4, 5, 7, 8, 9, 17)
_DTYPES: Final = (
    "float32",
    "int32",
    "int32",
    "float16",
    "int8",
    "uint8",
    "int64",
    "uint32",
    "bool",
)
_CONSTANTS: Final = (0, 1, -1, 2, 3, 5, 7, 64, 255, 65_535, 2**16, 2**20)

Results = tuple[dict[str, int], list[int]]  # outputs by name; updates of states


@dataclass(slots=True)
class _Chain:
    """What has been computed: nodes with their dtypes and dimensions."""

    b: Builder
    chance: random.Random
    maxima: dict[str, int]
    values: list[tuple[int, str, Dims]]

    def pick(self, dtype: str = "", dims: Dims | None = None) -> tuple[int, str, Dims] | None:
        """Return a value, the later the likelier; None if there is none such."""
        found = [
            value
            for value in self.values
            if dtype in ("", value[1]) and (dims is None or value[2] == dims)
        ]
        if not found:
            return None
        return found[-1] if self.chance.random() < 0.6 else self.chance.choice(found)

    def count(self, dims: Dims) -> int:
        return math.prod(self.maxima[size] if isinstance(size, str) else size for size in dims)

    def add(self, op: str, dtype: str, dims: Dims, *srcs: int, arg: Arg = None) -> int:
        node = self.b.add(op, dtype, *srcs, arg=arg)
        self.values.append((node, dtype, dims))
        return node

    def const(self, dtype: str) -> int:
        """Add a constant, often one at which something wraps."""
        if dtype == "bool":
            return self.b.const(dtype, self.chance.choice("01"))
        number = self.chance.choice(_CONSTANTS)
        if dtype not in INTEGERS:
            return self.b.const(dtype, encode_float(float(min(number, 255))))
        info = np.iinfo(dtype)
        ends = (int(info.max), int(info.min), int(info.max) // 2)
        number = self.chance.choice((number, number, self.chance.choice(ends)))
        return self.b.const(dtype, str(min(max(number, int(info.min)), int(info.max))))


def make_chain(b: Builder, chance: random.Random) -> Results:
    chain = _Chain(b, chance, {"T": chance.choice((2, 3, 5, 8)), "R": chance.choice((2, 4))}, [])
    has_rows = chance.random() < 0.5  # all ports: such a task runs in batches
    for name in ("x", "y", "i"):
        _add_input(chain, name, "int32" if name == "i" else chance.choice(_DTYPES), has_rows)
    if chance.random() < 0.4:
        weight = np.arange(-12, 12).astype(
            chance.choice((np.float32, np.int32, np.uint8, np.int64))
        )
        shape = chance.choice(((24,), (6, 4), (2, 3, 4)))
        node = b.weight("w", weight.reshape(shape))
        chain.values.append((node, str(weight.dtype), shape))
    states = []
    if chance.random() < 0.4:
        shape = (chance.choice(_SIZES), chance.choice(_SIZES))
        chain.values.append((b.state("s", "int32", *shape), "int32", shape))
        states.append(shape)
    for _ in range(chance.randint(2, 9)):
        before = len(b.nodes)
        chance.choices(_STEPS, _WEIGHTS)[0](chain)
        if chain.values[-1][0] >= before and chain.count(chain.values[-1][2]) > MAX_ELEMENTS:
            chain.values.pop()
    outputs = {}
    for place in range(chance.randint(1, 2)):
        fits = [v for v in chain.values if all(isinstance(size, int) for size in v[2][1:])]
        fits = [v for v in fits if not has_rows or (v[2] and isinstance(v[2][0], str))] or fits
        node, dtype, _ = fits[-1 - place] if len(fits) > place else fits[-1]
        outputs[f"o{place}"] = b.store(dtype, node)
    updates = []
    for shape in states:
        found = chain.pick("int32", shape)
        assert found is not None
        total = b.add("ADD", "int32", found[0], b.const("int32", "1"))
        updates.append(b.store("int32", total))
    return outputs, updates


def _add_input(chain: _Chain, name: str, dtype: str, has_rows: bool) -> None:
    chance = chain.chance
    rest = tuple(chance.choice(_SIZES) for _ in range(chance.randint(0, 2)))
    symbol = chance.choice("TTR") if has_rows or chance.random() < 0.4 else ""
    if symbol:
        node = chain.b.rows(name, dtype, symbol, chain.maxima[symbol], *rest)
        chain.values.append((node, dtype, (symbol, *rest)))
    else:
        rest = rest or (chance.choice(_SIZES),)
        chain.values.append((chain.b.input(name, dtype, *rest), dtype, rest))


def _compute_one(chain: _Chain) -> None:
    node, dtype, dims = chain.pick() or chain.values[-1]
    if dtype in INTEGERS:
        chain.add("NEG", dtype, dims, node)
    elif dtype != "bool":
        chain.add(chain.chance.choice(("NEG", "TRUNC")), dtype, dims, node)


def _compute_two(chain: _Chain) -> None:
    node, dtype, dims = chain.pick() or chain.values[-1]
    op = chain.chance.choice(("ADD", "MUL", "MAX", "CMPLT", "CMPLT", "CMPNE", "CMPEQ"))
    other = chain.pick(dtype, dims)
    right = chain.const(dtype) if other is None or chain.chance.random() < 0.5 else other[0]
    pair = (node, right) if chain.chance.random() < 0.8 else (right, node)
    chain.add(op, "bool" if op.startswith("CMP") else dtype, dims, *pair)


def _compute_integer(chain: _Chain) -> None:
    """Add what wraps, shifts, masks or divides."""
    node, dtype, dims = (
        chain.pick(chain.chance.choice(INTEGERS)) or chain.pick("int32") or chain.values[0]
    )
    if dtype not in INTEGERS:
        return
    op = chain.chance.choice(
        (
            "ADD",
            "SUB",
            "MUL",
            "AND",
            "OR",
            "XOR",
            "SHL",
            "SHR",
            "CDIV",
            "CMOD",
            "FLOORDIV",
            "FLOORMOD",
        )
    )
    info = np.iinfo(dtype)
    if op in ("SHL", "SHR"):
        right = chain.b.const(dtype, str(chain.chance.randrange(info.bits)))
    elif "DIV" in op or "MOD" in op:
        right = chain.b.const(
            dtype, str(chain.chance.choice((1, 2, 3, 7, 100, int(info.max) // 2, int(info.max))))
        )
    elif chain.chance.random() < 0.3:
        right = node
    else:
        right = chain.const(dtype)
    chain.add(op, dtype, dims, node, right)


def _convert(chain: _Chain) -> None:
    node, dtype, dims = chain.pick() or chain.values[-1]
    wanted = chain.chance.choice(_DTYPES + INTEGERS)
    if (
        np.dtype(dtype).itemsize == np.dtype(wanted).itemsize
        and "bool" not in (dtype, wanted)
        and chain.chance.random() < 0.3
    ):
        chain.add("BITCAST", wanted, dims, node)
    else:
        chain.add("CAST", wanted, dims, node)


def _move(chain: _Chain) -> None:
    node, dtype, dims = chain.pick() or chain.values[-1]
    chance = chain.chance
    match chance.randrange(6):
        case 0 if len(dims) > 1:
            order = tuple(chance.sample(range(len(dims)), len(dims)))
            chain.add("PERMUTE", dtype, tuple(dims[i] for i in order), node, arg=order)
        case 1 if len(dims) > 1 and all(isinstance(size, int) for size in dims[1:]):
            rest = math.prod(size for size in dims[1:] if isinstance(size, int))
            chain.add("RESHAPE", dtype, (dims[0], rest), node, arg=(dims[0], rest))
        case 2 if len(dims) < 3:
            size: Dim = (
                chance.choice(("T", "R", 2, 3))
                if chance.random() < 0.3
                else chance.choice((1, 2, 3))
            )
            if size not in ("T", "R") or size in chain.b.symbols:
                chain.add("EXPAND", dtype, (size, *dims), node, arg=(size,))
        case 3:
            flips = tuple(int(isinstance(size, int) and chance.random() < 0.5) for size in dims)
            chain.add("FLIP", dtype, dims, node, arg=flips)
        case 4 if len(dims) < 4:
            chain.add("STACK", dtype, (2, *dims), node, (chain.pick(dtype, dims) or (node,))[0])
        case _:
            _shrink(chain, node, dtype, dims)


def _shrink(chain: _Chain, node: int, dtype: str, dims: Dims) -> None:
    """Cut axes, now and then to a symbol."""
    chance, pairs = chain.chance, []
    for size in dims:
        fits = [
            name for name in chain.b.symbols if isinstance(size, int) and chain.maxima[name] <= size
        ]
        if isinstance(size, str):
            pairs.append((0, size if chance.random() < 0.7 else 1))
        elif fits and chance.random() < 0.3:
            pairs.append((0, chance.choice(fits)))
        else:
            kept = chance.randint(1, size)
            pairs.append((chance.randint(0, size - kept), kept))
    chain.add("SHRINK", dtype, tuple(size for _, size in pairs), node, arg=tuple(pairs))


def _pad(chain: _Chain) -> None:
    node, dtype, dims = chain.pick() or chain.values[-1]
    pairs = tuple(
        (0, size)
        if isinstance(size, str)
        else ((low := chain.chance.choice((0, 1, 3))), low + size + chain.chance.choice((0, 2, 5)))
        for size in dims
    )
    chain.add("PAD", dtype, tuple(size for _, size in pairs), node, arg=pairs)


def _look_up(chain: _Chain) -> None:
    """Look up rows by numbers that nothing bounds, and often use them where they are padded."""
    index, table = chain.pick("int32"), chain.pick()
    if index is None or table is None or not table[2] or len(index[2]) + len(table[2]) > 4:
        return
    node, _, dims = index
    match chain.chance.randrange(4):
        case 0:
            node = _wrap_masked(chain, node, dims)
        case 1:
            node = chain.add("ADD", "int32", dims, node, chain.const("int32"))
    chain.add("LOOKUP", table[1], (*dims, *table[2][1:]), table[0], node)
    if chain.chance.random() < 0.5:
        _pad(chain)


def _wrap_masked(chain: _Chain, node: int, dims: Dims) -> int:
    """Compute a number that would be positive if it did not wrap."""
    chance = chain.chance
    mask = chain.b.const("int32", str(chance.choice((65_535, 2**31 - 1, 2**30, 255))))
    masked = chain.add("AND", "int32", dims, node, mask)
    op = chance.choice(("ADD", "MUL", "SHL"))
    if op == "SHL":
        return chain.add(
            op, "int32", dims, masked, chain.b.const("int32", chance.choice("1 8 16".split()))
        )
    return chain.add(op, "int32", dims, masked, masked)


def _reduce(chain: _Chain) -> None:
    node, dtype, dims = chain.pick() or chain.values[-1]
    if dims and dtype != "bool":
        count = chain.chance.randint(1, len(dims))
        op = chain.chance.choice(("ADD", "ADD", "MAX"))
        chain.add("REDUCE", dtype, dims[count:], node, arg=(op, count))


def _choose(chain: _Chain) -> None:
    condition = chain.pick("bool")
    if condition is not None:
        chosen = chain.pick(dims=condition[2]) or condition
        other = chain.pick(chosen[1], chosen[2]) or chosen
        right = chain.const(chosen[1]) if chain.chance.random() < 0.5 else other[0]
        chain.add("WHERE", chosen[1], condition[2], condition[0], chosen[0], right)


def _count_up(chain: _Chain) -> None:
    length = chain.chance.choice(_SIZES)
    chain.add("IOTA", "int32", (length,), arg=length)


def _store(chain: _Chain) -> None:
    node, dtype, dims = chain.pick() or chain.values[-1]
    chain.add("CONTIGUOUS", dtype, dims, node)


_STEPS: Final[list[Callable[[_Chain], None]]] = [
    *(_compute_one, _compute_two, _compute_integer, _convert, _move, _pad, _look_up, _reduce),
    *(_choose, _count_up, _store),
]
_WEIGHTS: Final = (2, 5, 6, 4, 6, 3, 7, 3, 3, 2, 4)


def make_lookup(b: Builder, chance: random.Random) -> Results:
    """Look up rows by converted numbers of any dtype, and pad or choose what is found."""
    chain = _Chain(b, chance, {"T": 5, "R": 2}, [])
    dtype = chance.choice(("int32", "int32", "uint32", "int64", "uint64", "uint8", "float32"))
    sizes: Dims = ("T",) if chance.random() < 0.3 else (chance.choice((1, 3, 4, 1_024)),)
    if sizes == ("T",):
        index = b.rows("i", dtype, "T", 5)
    else:
        index = b.input("i", dtype, *sizes)
    if dtype != "int32":
        if chance.random() < 0.5:
            index = b.add(
                "MAX", dtype, index, b.const(dtype, "0" if dtype != "float32" else "0" * 16)
            )
        index = b.add("CAST", "int32", index)
    if chance.random() < 0.5:
        index = _wrap_masked(chain, index, sizes)
    shape = chance.choice(((7,), (5, 3), (64, 16)))
    table = b.input("t", "float32", *shape)
    if chance.random() < 0.3 and shape[0] > 4:
        cut = ((2, 3), *((0, size) for size in shape[1:]))
        table = b.add("SHRINK", "float32", table, arg=cut)
    chain.add("LOOKUP", "float32", (*sizes, *shape[1:]), table, index)
    for step in chance.choices((_pad, _choose_places, _compute_two), k=chance.randint(0, 2)):
        step(chain)
    return {"y": b.store(chain.values[-1][1], chain.values[-1][0])}, []


def _choose_places(chain: _Chain) -> None:
    """Keep what lies before some place of the first axis, zeros elsewhere."""
    node, dtype, dims = chain.values[-1]
    if dtype == "float32" and isinstance(dims[0], int):
        place = chain.b.add("IOTA", "int32", arg=dims[0])
        place = chain.b.add("RESHAPE", "int32", place, arg=(dims[0], *(1,) * (len(dims) - 1)))
        end = chain.b.const("int32", str(chain.chance.randint(0, dims[0])))
        is_before = chain.b.add("CMPLT", "bool", place, end)
        chain.add("WHERE", dtype, dims, is_before, node, chain.b.const(dtype, "0" * 16))


def make_pairs(b: Builder, chance: random.Random) -> Results:
    """Compute a value per pair of rows, in memory or not, and reduce one of its axes."""
    dtype, symbols = chance.choice(("float32", "int32", "int8")), ("T", chance.choice("TR"))
    x = b.rows("x", dtype, "T", 4)
    z = b.rows("z", dtype, symbols[1], 4 if symbols[1] == "T" else 3)
    column = b.add("RESHAPE", dtype, x, arg=("T", 1))
    row = b.add("RESHAPE", dtype, z, arg=(1, symbols[1]))
    pairs = b.add(chance.choice(("ADD", "MUL", "MAX")), dtype, column, row)
    if chance.random() < 0.5:
        pairs = b.store(dtype, pairs)
    turned = b.add("PERMUTE", dtype, pairs, arg=(1, 0))
    op = chance.choice(("ADD", "MAX"))
    outputs = {"y": b.store(dtype, b.add("REDUCE", dtype, turned, arg=(op, 1)))}
    if chance.random() < 0.5:
        outputs["v"] = b.store(dtype, b.add("REDUCE", dtype, pairs, arg=(op, 1)))
    return outputs, []


def make_wide(b: Builder, chance: random.Random) -> Results:
    """Convert integers and use each several times, so that code runs out of registers."""
    first, second = (chance.choice(INTEGERS) for _ in range(2))
    size = chance.choice((5, 6, 7, 9, 11, 13))
    x, z = b.input("x", first, size), b.input("z", second, size)
    converted = b.add("CAST", second, x)
    value = z
    for _ in range(chance.randint(1, 3)):
        least = b.const(second, str(chance.choice((0, 1, 4, 100))))
        is_less = b.add("CMPLT", "bool", converted, least)
        pair = [
            b.add(op, second, converted, value)
            for op in chance.sample(("MAX", "XOR", "ADD", "AND", "MUL"), 2)
        ]
        value = b.add("WHERE", second, is_less, *pair)
    table = b.weight("t", np.arange(40, dtype=np.float32).reshape(20, 2))
    number = value if second == "int32" else b.add("CAST", "int32", value)
    found = b.add("LOOKUP", "float32", table, number)
    return {"y": b.store(second, value), "found": b.store("float32", found)}, []
