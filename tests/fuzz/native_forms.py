"""Random graphs of the forms for which there is native code, and a little beside them."""

from __future__ import annotations

import functools
import random

import numpy as np

from splitup.graph.ir import Dim, encode_float
from tests.fuzz.chains import Results
from tests.graph.graphs import Builder


def _multiply_rows(b: Builder, x: int, w: int, rows: Dim, n: int) -> int:
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
    blocks, block = k // 32, {"q8_0": 34, "q5_0": 22, "q4_0": 18}[kind]
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
        packed = b.add("RESHAPE", "uint8", cut(block - 16, 16), arg=(n, blocks, 1, 16))
        low = b.add("AND", "uint8", packed, b.const("uint8", "15"))
        upper = b.add("SHR", "uint8", packed, b.const("uint8", "4"))
        both = b.add("PERMUTE", "uint8", b.add("STACK", "uint8", low, upper), arg=(1, 2, 3, 0, 4))
        q = b.add("RESHAPE", "uint8", both, arg=(n, blocks, 32))
        if kind == "q5_0":
            q = b.add("OR", "uint8", q, _add_fifth_bits(b, cut(2, 4), n, blocks))
        q = b.add("CAST", "float32", q)
        q = b.add("ADD", "float32", q, b.const("float32", encode_float(-8.0)))
    return b.add("RESHAPE", "float32", b.add("MUL", "float32", q, scale), arg=(n, k))


def _add_fifth_bits(b: Builder, packed: int, n: int, blocks: int) -> int:
    shifted = [b.add("SHR", "uint8", packed, b.const("uint8", str(bit))) for bit in range(8)]
    turned = b.add("PERMUTE", "uint8", b.add("STACK", "uint8", *shifted), arg=(1, 2, 3, 0))
    bits = b.add("RESHAPE", "uint8", turned, arg=(n, blocks, 32))
    bits = b.add("AND", "uint8", bits, b.const("uint8", "1"))
    return b.add("SHL", "uint8", bits, b.const("uint8", "4"))


def _cut_blocks(b: Builder, stored: int, n: int, blocks: int, first: int, count: int) -> int:
    return b.add("SHRINK", "uint8", stored, arg=((0, n), (0, blocks), (first, count)))


def make_product(b: Builder, chance: random.Random) -> Results:
    kind = chance.choice(("float32", "float32", "float16", "bfloat16", "q8_0", "q5_0", "q4_0"))
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
        y = _multiply_rows(b, x, w, size, n)
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


def make_attention(b: Builder, chance: random.Random) -> Results:
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


def make_cache(b: Builder, chance: random.Random) -> Results:
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


def make_join(b: Builder, chance: random.Random) -> Results:
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


def make_rows(b: Builder, chance: random.Random) -> Results:
    """Add what normalisations, softmax and activations do along rows of numbers."""
    width, rows = chance.choice((8, 8, 16, 24, 40, 64, 12, 7)), chance.choice((2, 3, 5))
    values = [b.rows(name, "float32", "T", rows, width) for name in ("x", "z")]
    values.append(b.add("CAST", "float32", b.rows("h", "float16", "T", rows, width)))
    one = b.add("CAST", "float32", b.rows("one", "int32", "T", rows))
    values.append(b.add("RESHAPE", "float32", one, arg=("T", 1)))
    for _ in range(chance.randint(1, 6)):
        x, z = chance.choice(values), chance.choice(values[:3])
        number = b.const("float32", encode_float(chance.choice((-1.5, 0.0, 1.0, 2.0**20))))
        match chance.randrange(6):
            case 0:
                op = chance.choice(("EXP2", "LOG2", "SQRT", "RECIPROCAL"))
                y = b.add(op, "float32", z)
            case 1:
                op = chance.choice(("ADD", "SUB", "MUL", "FDIV", "MAX"))
                y = b.add(op, "float32", z, chance.choice((x, number)))
            case 2:
                op = chance.choice(("CMPLT", "CMPNE", "CMPEQ"))
                y = b.add("WHERE", "float32", b.add(op, "bool", z, x), number, z)
            case 3:
                whole = b.add("CAST", "int32", b.add("MAX", "float32", z, number))
                whole = b.add("SHL", "int32", whole, b.const("int32", str(chance.randint(0, 9))))
                y = b.add("CAST", "float32", whole)
            case 4:
                piece = b.add("SHRINK", "float32", z, arg=((0, "T"), (0, width // 2)))
                y = b.add("PAD", "float32", piece, arg=((0, "T"), (0, width)))
            case _:
                turned = b.add("PERMUTE", "float32", z, arg=(1, 0))
                op = chance.choice(("ADD", "MAX"))
                y = b.add("REDUCE", "float32", turned, arg=(op, 1))
                y = b.add("RESHAPE", "float32", b.store("float32", y), arg=("T", 1))
                y = b.add("ADD", "float32", z, y)
        values.insert(0, b.store("float32", y) if chance.random() < 0.3 else y)
    return {"y": b.store("float32", values[0])}, []
