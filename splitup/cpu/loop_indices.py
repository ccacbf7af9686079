"""The addresses of a kernel's loads as affine functions of its loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeVar

from tinygrad.dtype import AddrSpace, DType, dtypes
from tinygrad.uop.ops import Ops, UOp

from splitup.cpu.matmul_shape import BlockDecoder, Bound, ProductKind

_DIVISIONS: Final = (Ops.FLOORDIV, Ops.CDIV)
_REMAINDERS: Final = (Ops.FLOORMOD, Ops.CMOD)
_KINDS: Final[dict[DType, ProductKind]] = {
    dtypes.float32: "float32",
    dtypes.float16: "float16",
    dtypes.bfloat16: "bfloat16",
    dtypes.int8: "int8",
}


AxisKind = TypeVar("AxisKind", bound="Axis")


class SubLoop(NamedTuple):
    """One of the loops that a loop is split into; its counter is counter // weight % size.

    The size of a symbolic loop is its bound.
    """

    loop: UOp
    weight: int
    size: int
    is_symbolic: bool = False


@dataclass(frozen=True, slots=True)
class AffineIndex:
    """An index: const + the sum of factor * counter over sub-loops."""

    const: int
    factors: dict[SubLoop, int]

    def get(self, sub: SubLoop) -> int:
        """Return the factor of a sub-loop, 0 when the index does not depend on it."""
        return self.factors.get(sub, 0)


@dataclass(frozen=True, slots=True)
class Axis:
    """Sub-loops that every index runs through as if they were one loop."""

    size: int  # or its bound
    factors: tuple[int, ...]  # in each index
    symbol: str = ""  # the variable that is the size, when it is known only at launch


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand of a matmul. Its index is in elements, or as ``read_decoder`` says."""

    kind: ProductKind
    slot: int
    index: AffineIndex
    offset_bytes: int
    decoder: BlockDecoder | None = None


@dataclass(frozen=True, slots=True)
class Lookup:
    """The row numbers of a looked-up operand: int32, clamped or masked to 0 … largest."""

    slot: int
    index: AffineIndex  # of the number
    bound: Bound
    largest: int
    step: int  # elements of the operand from one row to the next


class NoMatch(Exception):
    """There is no machine code for the kernel."""


def refuse_if(condition: object) -> None:
    """Raise NoMatch if the condition holds."""
    if condition:
        raise NoMatch


def is_buffer(uop: UOp) -> bool:
    """Return whether a parameter of a kernel is memory."""
    return uop.op is Ops.PARAM and uop.addrspace is not AddrSpace.ALU


class IndexReader:
    """Reads the indices of one kernel."""

    def __init__(self, sink: UOp) -> None:
        self._divisors: dict[UOp, set[int]] = {}
        for uop in sink.toposort():
            if uop.op in (*_DIVISIONS, *_REMAINDERS) and uop.src[0].op is Ops.RANGE:
                self._divisors.setdefault(uop.src[0], set()).add(_get_const(uop.src[1]))

    def split_loop(self, loop: UOp) -> list[SubLoop]:
        """Return a loop's sub-loops, split where some index divides the counter."""
        size = loop.src[0]
        if size.op is not Ops.CONST:
            refuse_if(self._divisors.get(loop))
            return [SubLoop(loop, 1, int(loop.vmax) + 1, is_symbolic=True)]
        result, weight = [], 1
        for cut in sorted({*self._divisors.get(loop, ()), int(size.val)}):
            refuse_if(cut % weight)
            result.append(SubLoop(loop, weight, cut // weight))
            weight = cut
        refuse_if(weight != size.val)
        return result

    def read_load(self, uop: UOp, dtype: object) -> tuple[int, AffineIndex]:
        """Return slot and index of an element of a buffer."""
        refuse_if(uop.op is not Ops.INDEX or len(uop.src) != 2 or not is_buffer(uop.src[0]))
        refuse_if(uop.src[0].dtype != dtype)
        return int(uop.src[0].arg.slot), self.read(uop.src[1])

    def read_operand(self, uop: UOp) -> Operand:
        """Return how an operand is stored."""
        if uop.op is Ops.INDEX:
            return Operand("float32", *self.read_load(uop, dtypes.float32), 0)
        if uop.op is Ops.CAST and uop.dtype == dtypes.float32 and uop.src[0].op is Ops.INDEX:
            return Operand("float16", *self.read_load(uop.src[0], dtypes.float16), 0)
        if uop.op is Ops.BITCAST and uop.dtype == dtypes.float32:
            shifted = _expect(uop.src[0], Ops.SHL, dtypes.uint32)
            refuse_if(_get_const(shifted.src[1]) != 16)
            wide = _expect(shifted.src[0], Ops.CAST, dtypes.uint32)
            return Operand("bfloat16", *self.read_load(wide.src[0], dtypes.uint16), 0)
        raise NoMatch

    def read_lookup(self, uop: UOp) -> tuple[Operand, Lookup]:
        """Return rows that a LOOKUP chooses, as the backend lowers it; none may be outside.

        The operand's index is that of row 0.
        """
        if uop.op is Ops.CAST:
            uop = _expect(uop, Ops.CAST, dtypes.float32).src[0]
        kind = _KINDS.get(uop.dtype)
        if kind is None:
            raise NoMatch
        choice = _expect(uop, Ops.REDUCE, uop.dtype).src[0]
        refuse_if(uop.arg != (Ops.ADD, 0) or len(uop.src) != 2 or uop.src[1].op is not Ops.RANGE)
        place = uop.src[1]
        differs, zero, row = _expect(choice, Ops.WHERE, uop.dtype).src
        refuse_if(zero.op is not Ops.CONST or zero.val != 0.0)
        counter, hidden = _expect(differs, Ops.CMPNE, dtypes.bool).src
        refuse_if(_expect(counter, Ops.CAST, dtypes.int32).src[0] is not place)
        masked = _expect(_expect(hidden, Ops.BITCAST, dtypes.int32).src[0], Ops.AND, dtypes.uint32)
        refuse_if(_get_const(masked.src[1]) != dtypes.uint32.max)
        number = _expect(masked.src[0], Ops.BITCAST, dtypes.uint32).src[0]
        (sub,) = self.split_loop(place) if place.src[0].op is Ops.CONST else [None]
        bound, largest, load = self._read_bound(number)
        if sub is None or largest >= sub.size:
            raise NoMatch  # an index outside the table would give zeros
        slot, index = self.read_load(row, uop.dtype)
        factors = {one: factor for one, factor in index.factors.items() if one != sub}
        operand = Operand(kind, slot, AffineIndex(index.const, factors), 0)
        return operand, Lookup(*self.read_load(load, dtypes.int32), bound, largest, index.get(sub))

    @staticmethod
    def _read_bound(uop: UOp) -> tuple[Bound, int, UOp]:
        """Read ``x & largest`` or ``min(max(x, 0), largest)``, of which tinygrad makes XORs."""
        if uop.op is Ops.AND:
            largest = _get_const(uop.src[1])
            refuse_if(largest < 0)
            return "mask", largest, uop.src[0]
        inverted = _expect(uop, Ops.XOR, dtypes.int32)
        highest = _expect(inverted.src[0], Ops.MAX, dtypes.int32)
        start = _expect(highest.src[0], Ops.XOR, dtypes.int32)
        lowest = _expect(start.src[0], Ops.MAX, dtypes.int32)
        minus = [_get_const(each.src[1]) for each in (inverted, start)]
        refuse_if(minus != [-1, -1] or _get_const(lowest.src[1]) != 0)
        largest = -1 - _get_const(highest.src[1])
        refuse_if(largest < 0)
        return "clamp", largest, lowest.src[0]

    def read(self, uop: UOp) -> AffineIndex:
        """Return an index as an affine function of sub-loops."""
        if uop.op is Ops.CONST:
            return AffineIndex(int(uop.val), {})
        if uop.op is Ops.RANGE:
            return AffineIndex(0, {sub: sub.weight for sub in self.split_loop(uop) if sub.size > 1})
        if uop.op is Ops.ADD:
            one, two = map(self.read, uop.src)
            factors = dict(one.factors)
            for sub, factor in two.factors.items():
                factors[sub] = factors.get(sub, 0) + factor
            return AffineIndex(one.const + two.const, factors)
        if uop.op is Ops.MUL:
            times = _get_const(uop.src[1])
            one = self.read(uop.src[0])
            return AffineIndex(
                one.const * times,
                {sub: factor * times for sub, factor in one.factors.items()},
            )
        if uop.op in (*_DIVISIONS, *_REMAINDERS):
            return self._divide(self.read(uop.src[0]), _get_const(uop.src[1]), uop.op)
        raise NoMatch

    @staticmethod
    def _divide(index: AffineIndex, by: int, operation: Ops) -> AffineIndex:
        """Divide an index that is a multiple of ``by`` plus a remainder below ``by``."""
        refuse_if(
            by <= 0 or index.const < 0 or any(factor < 0 for factor in index.factors.values())
        )
        whole = {sub: factor for sub, factor in index.factors.items() if factor % by == 0}
        rest = {sub: factor for sub, factor in index.factors.items() if factor % by}
        left = index.const % by
        refuse_if(left + sum(factor * (sub.size - 1) for sub, factor in rest.items()) >= by)
        if operation in _REMAINDERS:
            return AffineIndex(left, rest)
        return AffineIndex(index.const // by, {sub: factor // by for sub, factor in whole.items()})


def _get_const(uop: UOp) -> int:
    refuse_if(uop.op is not Ops.CONST)
    return int(uop.val)


def _expect(uop: UOp, op: Ops, dtype: object) -> UOp:
    refuse_if(uop.op is not op or uop.dtype != dtype)
    return uop


def join_axes(
    subs: Iterable[SubLoop], indices: Sequence[AffineIndex], kind: Callable[..., AxisKind]
) -> list[AxisKind]:
    """Return the axes of sub-loops; those that continue each other in every index are one."""
    done: list[AxisKind] = []
    axes = [_make_axis(sub, indices, kind) for sub in subs if sub.size > 1]
    # the innermost first: of a loop's sub-loops it has the smallest factors
    for axis in sorted(axes, key=lambda axis: sum(axis.factors)):
        for place, low in enumerate(done):
            steps = tuple(factor * low.size for factor in low.factors)
            fixed = not low.symbol and not axis.symbol
            if fixed and axis.factors == steps:
                done[place] = replace(low, size=low.size * axis.size)
                break
        else:
            done.append(axis)
    return done


def _make_axis(
    sub: SubLoop, indices: Sequence[AffineIndex], kind: Callable[..., AxisKind]
) -> AxisKind:
    symbol = ""
    if sub.is_symbolic:
        size = sub.loop.src[0]
        refuse_if(size.op is not Ops.PARAM or size.addrspace is not AddrSpace.ALU)
        symbol = str(size.expr)
    return kind(sub.size, tuple(index.get(sub) for index in indices), symbol)
