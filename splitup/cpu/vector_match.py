"""Find the kernels that compute along rows: softmax, normalisation, activations, residuals.

tinygrad's assembler for x86-64 has scalar arithmetic only. A kernel matches when it stores what a
few operations make of float32 that lie one behind the other, or their sum or maximum; every other
index is affine in its loops. Loops around rows may have a symbolic size; a row's is fixed, so that
whether a kernel matches does not depend on the number of rows of a step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tinygrad.codegen.decomp.transcendental import get_transcendental_patterns
from tinygrad.dtype import DType, dtypes
from tinygrad.uop.ops import Ops, UOp, graph_rewrite
from tinygrad.uop.symbolic import symbolic_simple

from splitup.cpu.kernel_parts import get_parts
from splitup.cpu.loop_indices import (
    AffineIndex,
    Axis,
    IndexReader,
    NoMatch,
    SubLoop,
    join_axes,
    refuse_if,
)
from splitup.cpu.machine_code import BoundCode, load_code
from splitup.cpu.matmul_shape import FLOAT_BYTES, LANES
from splitup.cpu.registers import allocate_registers
from splitup.cpu.vector_codegen import (
    COUNTER_REGISTERS,
    POINTER_REGISTERS,
    REGISTERS,
    ROW_LOADS,
    Pointer,
    Reduction,
    VectorShape,
    assemble_vectors,
    divide_vectors,
)

MAX_STRIDE_BYTES: Final = 2**30  # of a loop with all that it contains; constants have 32 bits

_REDUCTIONS: Final[Mapping[Any, Reduction]] = {(Ops.ADD, 0): "sum", (Ops.MAX, 0): "maximum"}
_INTEGERS: Final = (dtypes.int32, dtypes.uint32)
_KINDS: Final = (dtypes.float32, dtypes.bool, *_INTEGERS)
_NAMES: Final[Mapping[tuple[Ops, bool], str]] = {  # by operation, and whether it is of float32
    (Ops.ADD, True): "add",
    (Ops.SUB, True): "subtract",
    (Ops.MUL, True): "multiply",
    (Ops.FDIV, True): "divide",
    (Ops.CMPLT, True): "is less",
    (Ops.ADD, False): "add int32",
    (Ops.MUL, False): "multiply int32",
    (Ops.AND, False): "and",
    (Ops.OR, False): "or",
    (Ops.XOR, False): "xor",
}
_COMPARISONS: Final[Mapping[DType, tuple[str, bool]]] = {  # and whether of equality
    dtypes.float32: ("is not", False),
    dtypes.bool: ("xor", False),
    dtypes.int32: ("is equal int32", True),
    dtypes.uint32: ("is equal int32", True),
}
_COMMUTING: Final = ("add", "multiply", "add int32", "multiply int32", "and", "or", "xor")


@dataclass(frozen=True, slots=True)
class VectorKernel:
    """A kernel that computes along rows. Slots are the kernel's arguments."""

    shape: VectorShape
    slots: tuple[int, ...]
    symbol: str  # the variable of the outermost loop, "" if its size is fixed


def bind_vectors(
    kernel: VectorKernel,
    addresses: Sequence[int],
    threads: int,
    rows: Mapping[str, ctypes.c_uint64],
) -> BoundCode:
    """Return a kernel on certain memory.

    ``addresses`` are those of ``slots``; ``rows`` holds the value of each symbol.
    """
    symbol = rows[kernel.symbol] if kernel.symbol else ctypes.c_uint64(0)
    words = (*addresses, ctypes.addressof(symbol))
    parts = divide_vectors(kernel.shape, threads)
    codes = [(load_code(assemble_vectors, part), words) for part in parts]
    return BoundCode(codes, len(addresses), symbol)


def match_vectors(sink: UOp) -> VectorKernel | None:
    """Return the kernel that computes along rows, None when it is something else."""
    try:
        store, loops, reduce = get_parts(sink)
        value = store.src[1]
        if reduce is None:
            return _match(sink, store, value, loops, None)
        is_sum = reduce.arg in _REDUCTIONS and reduce.dtype == dtypes.float32
        if value is not reduce or len(reduce.src) != 2 or not is_sum:
            return None
        return _match(sink, store, reduce.src[0], loops, reduce)
    except NoMatch:
        return None


def _match(
    sink: UOp, store: UOp, value: UOp, loops: Sequence[UOp], reduce: UOp | None
) -> VectorKernel:
    value = graph_rewrite(value, get_transcendental_patterns((Ops.SQRT,), False) + symbolic_simple)
    reader = IndexReader(sink)
    kind = store.src[0].dtype
    refuse_if(kind not in (dtypes.float32, dtypes.int32))
    slot, out = reader.read_load(store.src[0], kind)
    loads = _find_loads(value)
    read = {load: reader.read_load(load, load.src[0].dtype) for load in loads}
    # what it reads may have been written
    refuse_if(any(other == slot and (reduce or index != out) for other, index in read.values()))
    indices = [out, *(index for _, index in read.values())]
    subs = [sub for loop in loops for sub in reader.split_loop(loop)]
    row, axes = _find_row(subs, indices, [] if reduce is None else reader.split_loop(reduce.src[1]))
    refuse_if(len(axes) > len(COUNTER_REGISTERS) or sum(bool(axis.symbol) for axis in axes) > 1)
    axes.sort(key=lambda axis: (not axis.symbol, -axis.factors[0]))
    slots = tuple(dict.fromkeys([slot, *(other for other, _ in read.values())]))
    program = _Program(slots)
    pointer, offset = program.point(slot, FLOAT_BYTES, 0, out.const, row, axes)
    assert pointer == 0
    for place, (load, (other, index)) in enumerate(read.items(), 1):
        program.add_load(load, other, place, index.const, row, axes)
    result = program.add(value, kind)
    if isinstance(result, tuple) or result != len(program.instructions) - 1:
        raise NoMatch  # a constant, or a number that is only moved
    _, instructions = allocate_registers(program.instructions, REGISTERS, ROW_LOADS)
    shape = VectorShape(
        arguments=len(slots),
        pointers=tuple(program.pointers),
        offset=offset,
        sizes=tuple(0 if axis.symbol else axis.size for axis in axes),
        vectors=row.size // LANES,
        reduction="" if reduce is None else _REDUCTIONS[reduce.arg],
        instructions=instructions,
    )
    _check_strides(shape)
    symbol = axes[0].symbol if axes else ""
    return VectorKernel(shape, slots, symbol)


def _find_loads(value: UOp) -> list[UOp]:
    """Return the loads of an expression, not those that their indices would need."""
    found, rest = dict[UOp, None](), [value]
    while rest:
        uop = rest.pop()
        if uop not in found:
            found[uop] = None
            rest += [] if uop.op is Ops.INDEX else uop.src
    return [uop for uop in found if uop.op is Ops.INDEX]


def _find_row(
    subs: Sequence[SubLoop], indices: Sequence[AffineIndex], summed: Sequence[SubLoop]
) -> tuple[Axis, list[Axis]]:
    """Return the axis along which numbers lie one behind the other, and the others."""
    axes = join_axes(subs, indices, Axis)
    rows = join_axes(summed, indices, Axis) if summed else list(axes)
    refuse_if(summed and len(rows) != 1)
    wanted = 0 if summed else 1  # the result's step
    rows = [
        axis
        for axis in rows
        if not axis.symbol
        and axis.size % LANES == 0
        and axis.factors[0] == wanted
        and set(axis.factors[1:]) <= {0, 1}
    ]
    row = max(rows, key=lambda axis: axis.size, default=None)
    # a sum of products of two rows is a matmul, if a small one
    if row is None or sum(row.factors[1:]) < 1 or (summed and sum(row.factors) > 1):
        raise NoMatch
    return row, axes if summed else [axis for axis in axes if axis is not row]


def _check_strides(shape: VectorShape) -> None:
    sizes = [*shape.sizes, shape.vectors * LANES]
    for pointer in shape.pointers:
        strides = [*pointer.strides, pointer.step]
        if any(
            abs(stride) * max(size, 1) > MAX_STRIDE_BYTES
            for stride, size in zip(strides, sizes, strict=True)
        ):
            raise NoMatch


class _Program:
    """Instructions in the order of their numbers, and the addresses that they load from."""

    def __init__(self, slots: tuple[int, ...]) -> None:
        self._slots = slots
        self.pointers: list[Pointer] = []
        self.instructions: list[tuple[Any, ...]] = []
        self._numbers: dict[UOp, int] = {}
        self._loads: dict[UOp, tuple[int, int, bool]] = {}

    def point(
        self, slot: int, size: int, place: int, const: int, row: Axis, axes: Sequence[Axis]
    ) -> tuple[int, int]:
        """Return a pointer to the elements of an index, and the offset from it in bytes."""
        strides = tuple(axis.factors[place] * size for axis in axes)
        pointer = Pointer(self._slots.index(slot), row.factors[place] * size, strides)
        if pointer not in self.pointers:
            refuse_if(len(self.pointers) == len(POINTER_REGISTERS))
            self.pointers.append(pointer)
        return self.pointers.index(pointer), const * size

    def add_load(
        self, load: UOp, slot: int, place: int, const: int, row: Axis, axes: Sequence[Axis]
    ) -> None:
        """Add an element of a buffer; it is loaded where it is needed."""
        pointer, offset = self.point(slot, load.dtype.itemsize, place, const, row, axes)
        self._loads[load] = pointer, offset, row.factors[place] == 1

    def add(self, uop: UOp, kind: DType) -> int | tuple[Any, ...]:
        """Return the number of the instruction of a value, or eight times a constant."""
        if uop.op is Ops.CONST:
            return (_encode_constant(uop.val, kind),) * LANES
        refuse_if(uop.dtype != kind)
        if uop not in self._numbers:
            self._numbers[uop] = self._compute(uop)
        return self._numbers[uop]

    def _compute(self, uop: UOp) -> int:
        if (kind := _get_load_kind(uop)) is not None:
            return self._load(*kind)
        if uop.op is Ops.WHERE:
            condition = self._get_register(uop.src[0], dtypes.bool)
            one, two = (self._get_register(src, uop.dtype) for src in uop.src[1:])
            return self._append("choose", two, one, condition)
        if uop.op is Ops.CAST:
            return self._cast(uop.dtype, uop.src[0])
        if uop.op is Ops.BITCAST and uop.dtype.itemsize == uop.src[0].dtype.itemsize == 4:
            return self._get_register(uop.src[0], uop.src[0].dtype)
        if uop.op is Ops.SQRT:
            return self._append("square root", self._get_register(uop.src[0], dtypes.float32))
        if uop.op is Ops.RECIPROCAL:
            return self._divide((1.0,) * LANES, uop.src[0])
        if uop.op is Ops.MUL and (reciprocals := [s for s in uop.src if s.op is Ops.RECIPROCAL]):
            # tinygrad's assembler divides here, too
            other = uop.src[1] if uop.src[0] is reciprocals[0] else uop.src[0]
            return self._divide(self.add(other, dtypes.float32), reciprocals[0].src[0])
        if uop.op is Ops.MAX and uop.dtype == dtypes.float32:
            one, two = (self._get_register(src, uop.dtype) for src in uop.src)
            return self._append("greater", two, one)
        return self._combine(uop)

    def _combine(self, uop: UOp) -> int:
        """Add an operation of two operands of one type."""
        kinds = [src.dtype for src in uop.src if src.op is not Ops.CONST]
        refuse_if(len(uop.src) != 2 or not kinds or kinds[0] not in _KINDS)
        kind = kinds[0]
        one, two = (self.add(src, kind) for src in uop.src)
        if kind == dtypes.int32 and uop.op is Ops.CMPLT:
            return self._append("is greater int32", self._hold(two), one)
        if uop.op in (Ops.CMPEQ, Ops.CMPNE):
            comparison, is_equality = _COMPARISONS[kind]
            result = self._append(comparison, self._hold(one), two)
            if is_equality == (uop.op is Ops.CMPNE):
                result = self._append("xor", result, (-1,) * LANES)
            return result
        if uop.op in (Ops.SHL, Ops.SHR, Ops.FLOORDIV) and isinstance(two, tuple):
            return self._shift(uop.op, kind, self._hold(one), two)
        name = _NAMES.get((uop.op, kind == dtypes.float32))
        if name is None or (kind == dtypes.bool and name not in ("and", "or", "xor")):
            raise NoMatch
        if isinstance(one, tuple) and not isinstance(two, tuple) and name in _COMMUTING:
            one, two = two, one
        return self._append(name, self._hold(one), two)

    def _shift(self, op: Ops, kind: DType, value: int, by: tuple[int, ...]) -> int:
        if op is Ops.FLOORDIV:
            refuse_if(by[0] <= 0 or by[0] & (by[0] - 1))
            by = (by[0].bit_length() - 1,) * LANES
        if op is Ops.SHL:
            return self._append("shift left", value, by)
        name = "shift right" if kind == dtypes.uint32 else "shift right signed"
        return self._append(name, value, by)

    def _cast(self, dtype: DType, source: UOp) -> int:
        value = self._get_register(source, source.dtype)
        if source.dtype == dtypes.bool and dtype in (dtypes.float32, dtypes.int32):
            one = 1.0 if dtype == dtypes.float32 else 1
            return self._append("and", value, (one,) * LANES)
        if (source.dtype, dtype) == (dtypes.float32, dtypes.int32):
            return self._append("truncate", value)
        if (source.dtype, dtype) == (dtypes.int32, dtypes.float32):
            return self._append("float", value)
        raise NoMatch

    def _divide(self, one: int | tuple[Any, ...], two: UOp) -> int:
        return self._append("divide", self._hold(one), self.add(two, dtypes.float32))

    def _load(self, kind: str, load: UOp) -> int:
        pointer, offset, is_row = self._loads[load]
        if not is_row:
            refuse_if(kind != "float32")
            kind = "one float32"
        return self._append(kind, pointer, offset)

    def _get_register(self, uop: UOp, kind: DType) -> int:
        return self._hold(self.add(uop, kind))

    def _hold(self, value: int | tuple[Any, ...]) -> int:
        """Return the number of an instruction whose result is a value."""
        return value if isinstance(value, int) else self._append("constant", value)

    def _append(self, *instruction: Any) -> int:
        self.instructions.append(instruction)
        return len(self.instructions) - 1


def _encode_constant(value: float, kind: DType) -> float:
    if kind == dtypes.bool:
        return -1 if value else 0
    if kind == dtypes.float32:
        return float(value)
    if kind not in _INTEGERS or not isinstance(value, int):
        raise NoMatch
    return value - 2**32 if value >= 2**31 else value


def _get_load_kind(uop: UOp) -> tuple[str, UOp] | None:
    """Return how a load becomes vectors, None if a value is none."""
    if uop.op is Ops.INDEX and uop.dtype in (dtypes.float32, dtypes.int32):
        return "float32", uop  # all 32 bits alike
    if uop.op is Ops.CAST and uop.src[0].op is Ops.INDEX and uop.src[0].dtype == dtypes.float16:
        refuse_if(uop.dtype != dtypes.float32)
        return "float16", uop.src[0]
    return None
