"""Find the matrix products in a schedule, and run them with code of their own.

tinygrad's assembler adds scalars; nearly all the time of a language model on a CPU is matrix
products, which ``productcode`` computes with vectors. A kernel is taken over when it sums products
of two operands whose addresses are linear in the loops, one float32 and the other float32, float16,
bfloat16, Q8_0 or Q4_0. ``split_product`` first cuts a kernel that does more with the sum (adds a
residual, masks scores) in two: tinygrad keeps the rest, and works on the sums in place.

Whether and how a kernel is taken over must not depend on the number of rows: the same row is to
give the same bits in a step of one row and of many. So only b's sizes count in the decision.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import mmap
import platform
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from tinygrad.dtype import AddrSpace, dtypes
from tinygrad.uop.ops import KernelInfo, Ops, UOp

from splitup.graph.productcode import (
    ARGUMENTS,
    BLOCK,
    BLOCK_BYTES,
    FLOAT_BYTES,
    ITEM_BYTES,
    LANES,
    Kind,
    ProductShape,
    assemble,
)
from splitup.graph.threads import KernelThreads

PRODUCTS_VERSION: Final = (
    1  # part of the determinism class: another order of additions, another one
)
MIN_WORK: Final = 1_024  # elements of b; a smaller product is not worth the second kernel
MAX_ENTRIES: Final = 65_536  # of the table of offsets: 1.5 MB
MAX_STRIDE_BYTES: Final = 2**31 // 16  # displacements of a tile's rows are 32 bits
THREAD_WORK: Final = 2**20  # multiplications below which handing work to threads costs more
_FEATURES: Final = frozenset({"avx2", "fma", "f16c"})
_DIVISIONS: Final = (Ops.FLOORDIV, Ops.CDIV)
_REMAINDERS: Final = (Ops.FLOORMOD, Ops.CMOD)


@functools.cache
def is_supported() -> bool:
    """Say whether this machine can run the code: Linux on x86-64 with AVX2, FMA and F16C."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return False
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return set(line.partition(":")[2].split()) >= _FEATURES
    return False


class Digit(NamedTuple):
    """A part of a loop counter: counter // weight % size. A symbolic loop's size is its bound."""

    loop: UOp
    weight: int
    size: int
    is_symbolic: bool = False


@dataclass(frozen=True, slots=True)
class Linear:
    """An index: const + sum of factor * digit."""

    const: int
    factors: dict[Digit, int]

    def get(self, digit: Digit) -> int:
        """Return the factor of a digit, 0 when the index does not depend on it."""
        return self.factors.get(digit, 0)


@dataclass(frozen=True, slots=True)
class Axis:
    """Digits that all indices run through as if they were one: its size, and the factors."""

    size: int
    out: int
    a: int
    b: int
    symbol: str = ""  # the variable that is the size, when it is known only at launch


@dataclass(frozen=True, slots=True)
class Operand:
    """What a product reads; the index is in elements, of blocks as if these were contiguous."""

    kind: Kind
    slot: int
    index: Linear
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Product:
    """A kernel that is a matrix product. Slots are the kernel's arguments."""

    shape: ProductShape
    slots: tuple[int, int, int]  # out, a, b
    n: int
    t: int  # or its bound
    symbol: str  # the variable that t is, "" for a fixed t
    table: tuple[tuple[int, int, int], ...]  # bytes to add to out, a, b

    @property
    def work(self) -> int:
        """Return the number of multiplications for one t."""
        return self.n * self.shape.length * len(self.table)


class _Unfit(Exception):
    """The kernel is no product that we can compute."""


# ---- splitting -----------------------------------------------------------------------------------


def split_product(call: UOp) -> tuple[UOp, ...]:
    """Return a kernel's call, or two of them if that gives its product a kernel of its own.

    The product writes its sums to where the results go, and the rest works there in place.

    So a cut product takes no memory of its own, and what is predicted holds on every device.
    """
    sink = call.src[0]
    try:
        store, loops, reduce = _get_parts(sink)
    except _Unfit:
        return (call,)
    target, value = store.src
    # a target of another type cannot hold the sums; one that is also read is still needed
    if value is reduce or target.src[0] in value.toposort():
        return (call,)
    inner = target.store(reduce).end(*loops).sink(arg=KernelInfo())
    if find_product(inner) is None:
        return (call,)
    return _replace_kernel(call, inner), _replace_kernel(call, sink.substitute({reduce: target}))


def _replace_kernel(call: UOp, sink: UOp) -> UOp:
    """Return a call of another kernel with those of the arguments that it uses."""
    arguments = [item for item in call.src[1:] if not item.is_bound_var]
    bound = [item for item in call.src[1:] if item.is_bound_var]
    # its slots are dense, since tinygrad counts them to number the variables
    kept = sorted(filter(_is_buffer, sink.toposort()), key=lambda uop: int(uop.arg.slot))
    new = {
        param: param.replace(arg=replace(param.arg, slot=slot)) for slot, param in enumerate(kept)
    }
    used = (arguments[param.arg.slot] for param in kept)
    # in one walk: a parameter's new form may be the old form of another one of its size
    return call.replace(src=(sink.substitute(new, walk=True), *used, *bound))


def _is_buffer(uop: UOp) -> bool:
    return uop.op is Ops.PARAM and uop.addrspace is not AddrSpace.ALU


def _get_parts(sink: UOp) -> tuple[UOp, list[UOp], UOp]:
    """Return the store, its loops and the one sum of a kernel."""
    if sink.op is not Ops.SINK or len(sink.src) != 1 or sink.src[0].op is not Ops.END:
        raise _Unfit
    store, *loops = sink.src[0].src
    reduces = [uop for uop in sink.toposort() if uop.op is Ops.REDUCE]
    if store.op is not Ops.STORE or len(reduces) != 1 or reduces[0].arg != (Ops.ADD, 0):
        raise _Unfit
    if store.src[0].op is not Ops.INDEX or not _is_buffer(store.src[0].src[0]):
        raise _Unfit
    return store, list(loops), reduces[0]


# ---- finding -------------------------------------------------------------------------------------


def find_product(sink: UOp) -> Product | None:
    """Return the product that a kernel is, None when it is something else."""
    try:
        store, loops, reduce = _get_parts(sink)
        if store.src[1] is not reduce or reduce.src[0].op is not Ops.MUL:
            return None
        reader = _IndexReader(sink)
        out_slot, out = reader.read_load(store.src[0], dtypes.float32)
        found = [reader.read_operand(src) for src in reduce.src[0].src]
        digits = [digit for loop in loops for digit in reader.digits(loop)]
        summed = [digit for loop in reduce.src[1:] for digit in reader.digits(loop)]
    except _Unfit:
        return None
    # the larger operand is b: of a matrix and a few rows, the matrix
    sizes = [_count(operand.index) for operand in found]
    order = (0, 1) if sizes[1] >= sizes[0] else (1, 0)
    for first, second in (order, order[::-1]):
        with suppress(_Unfit):
            return _arrange(out_slot, out, found[first], found[second], digits, summed)
    return None


def _count(index: Linear) -> int:
    return math.prod(digit.size for digit in index.factors)


def _arrange(
    out_slot: int, out: Linear, a: Operand, b: Operand, digits: list[Digit], summed: list[Digit]
) -> Product:
    """Give each loop its role: n (b only), t (a only), or a column of the table."""
    if a.kind != "float32":
        raise _Unfit

    def join(some: list[Digit]) -> list[Axis]:
        return _join([_make_axis(digit, out, a.index, b.index) for digit in some if digit.size > 1])

    sums = join(summed)
    if len(sums) != 1 or sums[0].symbol:
        raise _Unfit
    k, axes = sums[0], join(digits)
    units = BLOCK if b.kind in BLOCK_BYTES else LANES
    is_dot = k.a == k.b == 1 and k.size % units == 0
    only_b = [axis for axis in axes if axis.b and not axis.a and not axis.symbol]
    if not is_dot:
        only_b = [axis for axis in only_b if axis.b == axis.out == 1 and axis.size % LANES == 0]
        if b.kind in BLOCK_BYTES or not only_b:
            raise _Unfit
    n = max(only_b, key=lambda axis: axis.size, default=Axis(1, 1, 0, 0))
    only_a = [axis for axis in axes if axis.a and not axis.b]
    t = max(only_a, key=lambda axis: (bool(axis.symbol), axis.size), default=Axis(1, 0, 0, 0))
    rest = [axis for axis in axes if axis is not n and axis is not t]
    if any(axis.symbol for axis in rest):
        raise _Unfit
    if math.prod(axis.size for axis in axes if axis.b) * k.size < MIN_WORK:
        raise _Unfit
    if math.prod(axis.size for axis in rest) > MAX_ENTRIES:
        raise _Unfit
    shape = ProductShape(
        style="dot" if is_dot else "outer",
        kind=b.kind,
        length=k.size,
        out_n=n.out * FLOAT_BYTES,
        out_t=t.out * FLOAT_BYTES,
        a_t=t.a * FLOAT_BYTES,
        a_k=k.a * FLOAT_BYTES,
        b_n=_get_bytes(b.kind, n.b),
        b_k=_get_bytes(b.kind, k.b) if not is_dot else 0,
    )
    strides = (shape.out_n, shape.out_t, shape.a_t, shape.a_k, shape.b_n, shape.b_k)
    if any(not 0 <= stride <= MAX_STRIDE_BYTES for stride in strides):
        raise _Unfit
    table = []
    for counts in itertools.product(*(range(axis.size) for axis in rest)):
        pairs = list(zip(counts, rest, strict=True))
        table.append(
            (
                FLOAT_BYTES * (out.const + sum(count * axis.out for count, axis in pairs)),
                FLOAT_BYTES * a.index.const
                + a.offset_bytes
                + FLOAT_BYTES * sum(count * axis.a for count, axis in pairs),
                _get_bytes(b.kind, b.index.const)
                + b.offset_bytes
                + sum(count * _get_bytes(b.kind, axis.b) for count, axis in pairs),
            )
        )
    return Product(shape, (out_slot, a.slot, b.slot), n.size, t.size, t.symbol, tuple(table))


def _get_bytes(kind: Kind, elements: int) -> int:
    if kind in ITEM_BYTES:
        return elements * ITEM_BYTES[kind]
    if elements % BLOCK:
        raise _Unfit
    return elements // BLOCK * BLOCK_BYTES[kind]


def _make_axis(digit: Digit, out: Linear, a: Linear, b: Linear) -> Axis:
    symbol = ""
    if digit.is_symbolic:
        size = digit.loop.src[0]
        if size.op is not Ops.PARAM or size.addrspace is not AddrSpace.ALU:
            raise _Unfit
        symbol = str(size.expr)
    return Axis(digit.size, out.get(digit), a.get(digit), b.get(digit), symbol)


def _join(axes: list[Axis]) -> list[Axis]:
    """Join axes that continue each other in every index."""
    done: list[Axis] = []
    # the fastest first; of a loop's digits the lower one has the smaller factors
    for axis in sorted(axes, key=lambda axis: axis.out + axis.a + axis.b):
        for place, low in enumerate(done):
            steps = (low.out * low.size, low.a * low.size, low.b * low.size)
            fixed = not low.symbol and not axis.symbol
            if fixed and (axis.out, axis.a, axis.b) == steps:
                done[place] = replace(low, size=low.size * axis.size)
                break
        else:
            done.append(axis)
    return done


class _IndexReader:
    """Reads the indices of one kernel."""

    def __init__(self, sink: UOp) -> None:
        self._divisors: dict[UOp, set[int]] = {}
        for uop in sink.toposort():
            if uop.op in (*_DIVISIONS, *_REMAINDERS) and uop.src[0].op is Ops.RANGE:
                self._divisors.setdefault(uop.src[0], set()).add(_get_const(uop.src[1]))

    def digits(self, loop: UOp) -> list[Digit]:
        """Return a loop's digits, cut where some index divides it."""
        size = loop.src[0]
        if size.op is not Ops.CONST:
            if self._divisors.get(loop):
                raise _Unfit
            return [Digit(loop, 1, int(loop.vmax) + 1, is_symbolic=True)]
        result, weight = [], 1
        for cut in sorted({*self._divisors.get(loop, ()), int(size.val)}):
            if cut % weight:
                raise _Unfit
            result.append(Digit(loop, weight, cut // weight))
            weight = cut
        if weight != size.val:
            raise _Unfit
        return result

    def read_load(self, uop: UOp, dtype: object) -> tuple[int, Linear]:
        """Return slot and index of an element of a buffer."""
        if uop.op is not Ops.INDEX or len(uop.src) != 2 or not _is_buffer(uop.src[0]):
            raise _Unfit
        if uop.src[0].dtype != dtype:
            raise _Unfit
        return int(uop.src[0].arg.slot), self.read(uop.src[1])

    def read_operand(self, uop: UOp) -> Operand:
        """Return how an operand is stored."""
        if uop.op is Ops.INDEX:
            return Operand("float32", *self.read_load(uop, dtypes.float32), 0)
        if uop.op is Ops.CAST and uop.dtype == dtypes.float32 and uop.src[0].op is Ops.INDEX:
            return Operand("float16", *self.read_load(uop.src[0], dtypes.float16), 0)
        if uop.op is Ops.BITCAST and uop.dtype == dtypes.float32:
            shifted = _expect(uop.src[0], Ops.SHL, dtypes.uint32)
            if _get_const(shifted.src[1]) != 16:
                raise _Unfit
            wide = _expect(shifted.src[0], Ops.CAST, dtypes.uint32)
            return Operand("bfloat16", *self.read_load(wide.src[0], dtypes.uint16), 0)
        return self._read_blocks(uop)

    def _read_blocks(self, uop: UOp) -> Operand:
        """Read small numbers times a float16 of two bytes, as frontends.quantised writes them."""
        number, scale = _expect(uop, Ops.MUL, dtypes.float32).src
        half = _expect(_expect(scale, Ops.CAST, dtypes.float32).src[0], Ops.BITCAST, dtypes.float16)
        both = _expect(half.src[0], Ops.OR, dtypes.uint16)
        high = _expect(both.src[1], Ops.SHL, dtypes.uint16)
        if _get_const(high.src[1]) != 8:
            raise _Unfit
        read = self._read_q8 if number.op is Ops.CAST else self._read_q4
        kind, slot, index, within = read(number)
        block_bytes, inside = BLOCK_BYTES[kind], set(within)
        blocks = {digit: f for digit, f in index.factors.items() if digit not in inside}
        start = index.const - 2
        places = [
            self.read_load(_expect(byte, Ops.CAST, dtypes.uint16).src[0], dtypes.uint8)
            for byte in (both.src[0], high.src[0])
        ]
        if places != [(slot, Linear(start + at, blocks)) for at in (0, 1)]:
            raise _Unfit
        if any(factor % block_bytes for factor in blocks.values()):
            raise _Unfit
        factors = {digit: f // block_bytes * BLOCK for digit, f in blocks.items()}
        return Operand(kind, slot, Linear(0, {**factors, **within}), start)

    def _read_q8(self, number: UOp) -> tuple[Kind, int, Linear, dict[Digit, int]]:
        """Return what an int8 of a block is read from, and how its place counts within."""
        small = _expect(_expect(number, Ops.CAST, dtypes.float32).src[0], Ops.BITCAST, dtypes.int8)
        slot, index = self.read_load(small.src[0], dtypes.uint8)
        within = {d: f for d, f in index.factors.items() if f % BLOCK_BYTES["q8_0"]}
        if sum(factor * (digit.size - 1) for digit, factor in within.items()) >= BLOCK:
            raise _Unfit
        return "q8_0", slot, index, within

    def _read_q4(self, number: UOp) -> tuple[Kind, int, Linear, dict[Digit, int]]:
        """Return the same of the lower or upper half of a byte, less 8."""
        wide, eight = _expect(number, Ops.ADD, dtypes.float32).src
        if eight.op is not Ops.CONST or eight.val != -8.0:
            raise _Unfit
        choice = _expect(_expect(wide, Ops.CAST, dtypes.float32).src[0], Ops.WHERE, dtypes.uint8)
        is_upper = _expect(choice.src[0], Ops.CMPNE, dtypes.bool)
        upper = _expect(choice.src[1], Ops.SHR, dtypes.uint8)
        lower = _expect(choice.src[2], Ops.AND, dtypes.uint8)
        numbers = [_get_const(uop.src[1]) for uop in (is_upper, upper, lower)]
        if numbers != [0, 4, 15] or upper.src[0] is not lower.src[0]:
            raise _Unfit
        slot, index = self.read_load(lower.src[0], dtypes.uint8)
        half = self.read(is_upper.src[0])
        within = {d: f for d, f in index.factors.items() if f % BLOCK_BYTES["q4_0"]}
        places = [(digit.loop, digit.weight, digit.size, f) for digit, f in within.items()]
        halves = [(digit.loop, digit.weight, digit.size, f) for digit, f in half.factors.items()]
        if len(places) != 1 or half.const or places[0][1:] != (1, 16, 1):
            raise _Unfit
        if halves != [(places[0][0], 16, 2, 1)]:
            raise _Unfit
        return "q4_0", slot, index, {**within, next(iter(half.factors)): 16}

    def read(self, uop: UOp) -> Linear:
        """Return an index as a linear function of digits."""
        if uop.op is Ops.CONST:
            return Linear(int(uop.val), {})
        if uop.op is Ops.RANGE:
            return Linear(0, {digit: digit.weight for digit in self.digits(uop) if digit.size > 1})
        if uop.op is Ops.ADD:
            one, two = map(self.read, uop.src)
            factors = dict(one.factors)
            for digit, factor in two.factors.items():
                factors[digit] = factors.get(digit, 0) + factor
            return Linear(one.const + two.const, factors)
        if uop.op is Ops.MUL:
            times = _get_const(uop.src[1])
            one = self.read(uop.src[0])
            return Linear(
                one.const * times, {digit: factor * times for digit, factor in one.factors.items()}
            )
        if uop.op in (*_DIVISIONS, *_REMAINDERS):
            return self._divide(self.read(uop.src[0]), _get_const(uop.src[1]), uop.op)
        raise _Unfit

    @staticmethod
    def _divide(index: Linear, by: int, operation: Ops) -> Linear:
        """Divide what is a multiple of ``by`` plus something that stays below it."""
        if by <= 0 or index.const < 0 or any(factor < 0 for factor in index.factors.values()):
            raise _Unfit
        whole = {digit: factor for digit, factor in index.factors.items() if factor % by == 0}
        rest = {digit: factor for digit, factor in index.factors.items() if factor % by}
        left = index.const % by
        if left + sum(factor * (digit.size - 1) for digit, factor in rest.items()) >= by:
            raise _Unfit
        if operation in _REMAINDERS:
            return Linear(left, rest)
        return Linear(index.const // by, {digit: factor // by for digit, factor in whole.items()})


def _get_const(uop: UOp) -> int:
    if uop.op is not Ops.CONST:
        raise _Unfit
    return int(uop.val)


def _expect(uop: UOp, op: Ops, dtype: object) -> UOp:
    if uop.op is not op or uop.dtype != dtype:
        raise _Unfit
    return uop


# ---- running -------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4_096)
def _make_function(shape: ProductShape) -> tuple[Callable[..., None], mmap.mmap]:
    """Return the machine code as a function, and the memory that it is in."""
    code = assemble(shape)
    memory = mmap.mmap(-1, len(code), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return ctypes.CFUNCTYPE(None)(address), memory


class BoundProduct:
    """A product on certain buffers; call it."""

    __slots__ = ("_blocks", "_function", "_keep", "_pool", "addresses")

    def __init__(
        self,
        product: Product,
        addresses: Sequence[int],
        pool: KernelThreads,
        rows: Mapping[str, ctypes.c_uint64],
    ) -> None:
        """``addresses`` are those of out, a and b; ``rows`` holds the value of each symbol."""
        self._pool = pool
        t = rows[product.symbol] if product.symbol else ctypes.c_uint64(product.t)
        self._function, memory = _make_function(product.shape)
        table = array("q", itertools.chain(*product.table))
        entry_bytes = 3 * table.itemsize
        start = table.buffer_info()[0]
        out, a, b = addresses
        blocks = []
        for first, count, entry, entries in _divide_work(product, pool.threads):
            values = (
                out + first * product.shape.out_n,
                a,
                b + first * _get_b_step(product.shape),
                start + entry * entry_bytes,
                entries,
                count,
                ctypes.addressof(t),
            )
            blocks.append((ctypes.c_int64 * len(ARGUMENTS))(*values))
        self._blocks = [ctypes.c_uint64(ctypes.addressof(block)) for block in blocks]
        # of out, a and b in every block: what stands there may be changed between calls
        self.addresses = [
            [ctypes.c_uint64.from_buffer(block, 8 * place) for block in blocks]
            for place in range(len(addresses))
        ]
        self._keep = (table, memory, t)

    def __call__(self) -> None:
        """Compute."""
        if len(self._blocks) == 1:
            self._function(self._blocks[0])
        else:
            self._pool.run(self._function, self._blocks)


def _get_b_step(shape: ProductShape) -> int:
    return shape.b_n if shape.style == "dot" else ITEM_BYTES[shape.kind]


def _divide_work(product: Product, threads: int) -> list[tuple[int, int, int, int]]:
    """Return parts of a product: first n, number of n, first entry of the table, number."""
    entries = len(product.table)
    if threads < 2 or product.work * product.t < THREAD_WORK:
        return [(0, product.n, 0, entries)]
    unit = 8 * product.shape.n_unit  # whole tiles
    if product.n >= 2 * unit * threads or entries == 1:
        edges = _cut(-(-product.n // unit), threads)
        return [
            (unit * one, min(unit * two, product.n) - unit * one, 0, entries)
            for one, two in itertools.pairwise(edges)
        ]
    return [
        (0, product.n, one, two - one) for one, two in itertools.pairwise(_cut(entries, threads))
    ]


def _cut(length: int, parts: int) -> list[int]:
    """Return the edges of at most ``parts`` nearly equal parts."""
    parts = min(parts, length)
    return [length * part // parts for part in range(parts + 1)]
