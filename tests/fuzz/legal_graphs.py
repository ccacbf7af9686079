"""Random legal graphs, and inputs for them that no honest party would send.

Half of the graphs are of the forms for which there is native code: products, attention, caches,
joins. The others are chains of any operations. Numbers are small integers, so that sums of floats
are exact in any order, and the ends of each dtype's range.
"""

from __future__ import annotations

import functools
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
from splitup.graph.ir import Arg, Dim, Dims, encode_float
from splitup.graph.rules import CheckedGraph, check_graph
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
_FLOATS: Final = (math.nan, math.inf, -math.inf, -0.0, 3e9, -5e18, 6e4, 0.5)


@dataclass(frozen=True, slots=True)
class Case:
    """A graph, its weights by name, and what it is, in a word."""

    graph: CheckedGraph
    weights: dict[str, bytes]
    kind: str


def make_case(seed: int, kind: str = "") -> Case:
    """Return the graph of a seed: of one kind, or of any."""
    chance = random.Random(f"{seed} {kind}")
    while True:
        name = kind or chance.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0]
        b = Builder()
        make, _ = KINDS[name]
        outputs, updates = make(b, chance)
        try:
            return Case(check_graph(b.graph(outputs, updates)), b.weight_bytes, name)
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


# ---- chains of any operations ------------------------------------------------------------------


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


def _make_chain(b: Builder, chance: random.Random) -> tuple[dict[str, int], list[int]]:
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
            shrink(chain, node, dtype, dims)


def shrink(chain: _Chain, node: int, dtype: str, dims: Dims) -> None:
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


def _make_lookup(b: Builder, chance: random.Random) -> tuple[dict[str, int], list[int]]:
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


def _make_pairs(b: Builder, chance: random.Random) -> tuple[dict[str, int], list[int]]:
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


def _make_wide(b: Builder, chance: random.Random) -> tuple[dict[str, int], list[int]]:
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


# ---- what native code computes -----------------------------------------------------------------


def multiply_rows(b: Builder, x: int, w: int, rows: Dim, n: int) -> int:
    """Return x [rows, k] times the transpose of w [n, k], as tinygrad traces it."""
    wide = b.add("EXPAND", "float32", x, arg=(n,))
    many = b.add("PERMUTE", "float32", b.add("EXPAND", "float32", w, arg=(rows,)), arg=(1, 0, 2))
    products = b.add("PERMUTE", "float32", b.add("MUL", "float32", wide, many), arg=(2, 1, 0))
    return b.add("REDUCE", "float32", products, arg=("ADD", 1))


def _multiply_outer(b: Builder, x: int, w: int, rows: Dim, n: int, k: int) -> int:
    """Return x [rows, k] times w [k, n]."""
    turned = b.add(
        "RESHAPE", "float32", b.add("PERMUTE", "float32", x, arg=(1, 0)), arg=(k, rows, 1)
    )
    wide = b.add("RESHAPE", "float32", w, arg=(k, 1, n))
    return b.add("REDUCE", "float32", b.add("MUL", "float32", turned, wide), arg=("ADD", 1))


def _add_matrix(b: Builder, chance: random.Random, kind: str, n: int, k: int) -> int:
    """Add a weight [n, k] as it is stored, and what makes float32 of it."""
    numbers = np.random.default_rng(chance.getrandbits(64))
    values = numbers.integers(-9, 10, (n, k)).astype(np.float32)
    if kind == "float32":
        return b.weight("w", values)
    if kind == "float16":
        return b.add("CAST", "float32", b.weight("w", values.astype(np.float16)))
    if kind == "bfloat16":
        stored = b.weight("w", (values.view(np.uint32) >> 16).astype(np.uint16))
        shifted = b.add("SHL", "uint32", b.add("CAST", "uint32", stored), b.const("uint32", "16"))
        return b.add("BITCAST", "float32", shifted)
    blocks, block = k // 32, 34 if kind == "q8_0" else 18
    raw = numbers.integers(0, 256, (n, blocks, block)).astype(np.uint8)
    raw[..., :2] = (
        (2.0 ** numbers.integers(-4, 3, (n, blocks, 1))).astype(np.float16).view(np.uint8)
    )
    stored = b.weight("w", raw)
    cut = functools.partial(_cut_blocks, b, stored, n, blocks)
    high = b.add("SHL", "uint16", b.add("CAST", "uint16", cut(1, 1)), b.const("uint16", "8"))
    half = b.add("OR", "uint16", b.add("CAST", "uint16", cut(0, 1)), high)
    scale = b.add("CAST", "float32", b.add("BITCAST", "float16", half))
    if kind == "q8_0":
        q = b.add("CAST", "float32", b.add("BITCAST", "int8", cut(2, 32)))
    else:
        packed = b.add("RESHAPE", "uint8", cut(2, 16), arg=(n, blocks, 1, 16))
        low = b.add("AND", "uint8", packed, b.const("uint8", "15"))
        upper = b.add("SHR", "uint8", packed, b.const("uint8", "4"))
        both = b.add("PERMUTE", "uint8", b.add("STACK", "uint8", low, upper), arg=(1, 2, 3, 0, 4))
        q = b.add("CAST", "float32", b.add("RESHAPE", "uint8", both, arg=(n, blocks, 32)))
        q = b.add("ADD", "float32", q, b.const("float32", encode_float(-8.0)))
    return b.add("RESHAPE", "float32", b.add("MUL", "float32", q, scale), arg=(n, k))


def _cut_blocks(b: Builder, stored: int, n: int, blocks: int, first: int, count: int) -> int:
    return b.add("SHRINK", "uint8", stored, arg=((0, n), (0, blocks), (first, count)))


def _make_product(b: Builder, chance: random.Random) -> tuple[dict[str, int], list[int]]:
    kind = chance.choice(("float32", "float32", "float16", "bfloat16", "q8_0", "q4_0"))
    is_packed = kind.startswith("q")
    k = chance.choice((32, 64, 96) if is_packed else (7, 8, 16, 24, 40, 72, 128))
    n, rows = chance.choice((1, 7, 8, 13, 16, 33, 64)), chance.choice((2, 3, 5, 8))
    size: Dim = "T" if chance.random() < 0.7 else rows
    x = b.rows("x", "float32", "T", rows, k) if size == "T" else b.input("x", "float32", rows, k)
    if not is_packed and chance.random() < 0.3:
        y = _multiply_outer(b, x, _add_matrix(b, chance, kind, k, n), size, n, k)
    else:
        more = 0 if chance.random() < 0.6 else chance.choice((1, 8))
        w = _add_matrix(b, chance, kind, n + more, k + 32 * bool(more))
        if more:  # a piece of a wider matrix
            first = 32 * chance.randint(0, 1) if is_packed else chance.randint(0, 32)
            w = b.add("SHRINK", "float32", w, arg=((chance.randint(0, more), n), (first, k)))
        y = multiply_rows(b, x, w, size, n)
    match chance.randrange(4):
        case 0:
            y = b.add("MAX", "float32", y, b.const("float32", encode_float(0.0)))
        case 1 if size == "T":
            y = b.add("ADD", "float32", y, b.rows("z", "float32", "T", rows, n))
        case 2 if size != "T":
            y = b.add("PERMUTE", "float32", y, arg=(1, 0))
    return {"y": b.store("float32", y)}, []


def _bound(b: Builder, x: int, largest: int) -> int:
    """Return min(max(x, 0), largest) as tinygrad traces it."""
    inverse = b.const("int32", "-1")
    x = b.add("MAX", "int32", x, b.const("int32", "0"))
    x = b.add("MAX", "int32", b.add("XOR", "int32", x, inverse), b.const("int32", str(~largest)))
    return b.add("XOR", "int32", x, inverse)


def _make_attention(b: Builder, chance: random.Random) -> tuple[dict[str, int], list[int]]:
    heads, groups, width = chance.randint(1, 2), chance.randint(1, 3), chance.choice((8, 16, 24))
    context, rows = chance.choice((8, 9, 16, 17, 24, 33)), chance.choice((2, 3, 5))
    x = b.rows("x", "float32", "T", rows, heads, groups, width)
    w = b.rows("w", "float32", "T", rows, heads, groups, context)
    numbers = b.rows("numbers", "int32", "T", rows, context)
    places = context + chance.choice((0, 0, 1, 5))
    is_state = chance.random() < 0.5
    shape = places, 2, heads, width
    cache = b.state("c", "float32", *shape) if is_state else b.input("c", "float32", *shape)
    largest = chance.choice((places - 1, places - 1, 0, places // 2, places, 2 * places, 2**31 - 1))
    if chance.random() < 0.4:
        numbers = b.add("AND", "int32", numbers, b.const("int32", str(largest)))
    elif chance.random() < 0.9:
        numbers = _bound(b, numbers, largest)
    numbers = b.add(
        "PERMUTE", "int32", b.add("EXPAND", "int32", numbers, arg=(groups,)), arg=(1, 0, 2)
    )
    found = []
    for part in range(2):
        cut = ((0, places), (part, 1), (0, heads), (0, width))
        table = b.add("SHRINK", "float32", cache, arg=cut)
        table = b.add("RESHAPE", "float32", table, arg=(places, heads, width))
        chosen = b.add("LOOKUP", "float32", table, numbers)
        found.append(b.add("PERMUTE", "float32", chosen, arg=(0, 3, 1, 2, 4)))
    wide = b.add("RESHAPE", "float32", x, arg=("T", heads, groups, 1, width))
    products = b.add(
        "PERMUTE", "float32", b.add("MUL", "float32", wide, found[0]), arg=(4, 0, 1, 2, 3)
    )
    y = b.add("ADD", "float32", b.add("REDUCE", "float32", products, arg=("ADD", 1)), w)
    wide = b.add("RESHAPE", "float32", w, arg=("T", heads, groups, context, 1))
    products = b.add(
        "PERMUTE", "float32", b.add("MUL", "float32", wide, found[1]), arg=(3, 0, 1, 2, 4)
    )
    z = b.add("REDUCE", "float32", products, arg=("ADD", 1))
    outputs = {"y": b.store("float32", y), "z": b.store("float32", z)}
    if not is_state:
        return outputs, []
    grown = b.add("ADD", "float32", cache, b.const("float32", encode_float(1.0)))
    return outputs, [b.store("float32", grown)]


def _make_cache(b: Builder, chance: random.Random) -> tuple[dict[str, int], list[int]]:
    most, width = chance.choice((2, 3, 4, 8)), chance.choice((4, 8, 12))
    context = chance.choice((2, 5, 9, 16))
    dtype = chance.choice(("float32", "float32", "float16", "uint8"))
    width *= 8 if dtype == "uint8" else 2 if dtype == "float16" else 1
    chunk = most if chance.random() < 0.7 else chance.randint(1, context + 5)
    largest = chance.choice((most, most, 0, 1, context, 5 * context, 2**31 - 1))
    if chance.random() < 0.7:
        fresh = b.rows("fresh", dtype, "T", most, 2, width)
        layout = b.rows("layout", "int32", "T", most, 2 + chunk)
    else:
        fresh = b.input("fresh", dtype, most, 2, width)
        layout = b.input("layout", "int32", most, 2 + chunk)
    old, place = b.state("kv", dtype, context, 2, width), b.add("IOTA", "int32", arg=context)
    minus = b.const("int32", "-1")

    def take(first: int, count: int) -> int:
        piece = b.add("SHRINK", "int32", layout, arg=((0, 1), (first, count)))
        return b.add("RESHAPE", "int32", piece, arg=(count,))

    def subtract(y: int) -> int:
        return b.add("ADD", "int32", place, b.add("MUL", "int32", y, minus))

    start = _bound(b, take(1, 1), context)
    first = b.add("ADD", "int32", start, b.const("int32", str(-chunk)))
    shift = _bound(b, b.add("LOOKUP", "int32", take(2, chunk), subtract(first)), largest)
    kept = b.add("LOOKUP", dtype, old, b.add("ADD", "int32", place, shift))
    new = b.add("LOOKUP", dtype, fresh, subtract(start))
    is_kept = b.add("RESHAPE", "bool", b.add("CMPLT", "bool", place, start), arg=(context, 1, 1))
    cache = b.store(dtype, b.add("WHERE", dtype, is_kept, kept, new))
    return {"y": b.store(dtype, b.add("ADD", dtype, fresh, fresh))}, [cache]


def _make_join(b: Builder, chance: random.Random) -> tuple[dict[str, int], list[int]]:
    sizes = [chance.choice((1, 2, 3, 8)) for _ in range(chance.randint(2, 4))]
    dtype, rows, total = chance.choice(("float32", "int8", "float16", "bool")), 3, sum(sizes)
    place = b.add("RESHAPE", "int32", b.add("IOTA", "int32", arg=total), arg=(1, total))
    joined, end = -1, total
    for number, size in reversed(list(enumerate(sizes))):
        end -= size
        x = b.rows(f"x{number}", dtype, "T", rows, size)
        piece = b.add("PAD", dtype, x, arg=((0, "T"), (end, total)))
        if joined < 0:
            joined = piece
            continue
        middle = end + size + (chance.randint(-1, 1) if chance.random() < 0.15 else 0)
        is_left = b.add("CMPLT", "bool", place, b.const("int32", str(middle)))
        joined = b.add("WHERE", dtype, is_left, piece, joined)
    return {"y": b.store(dtype, joined)}, []


_Make = Callable[[Builder, random.Random], tuple[dict[str, int], list[int]]]
KINDS: Final[dict[str, tuple[_Make, float]]] = {
    "chain": (_make_chain, 6.0),
    "lookup": (_make_lookup, 3.0),
    "pairs": (_make_pairs, 0.7),
    "wide": (_make_wide, 1.0),
    "product": (_make_product, 2.0),
    "attention": (_make_attention, 1.0),
    "cache": (_make_cache, 1.0),
    "join": (_make_join, 0.5),
}
