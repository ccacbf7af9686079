"""Integer arithmetic as tinygrad operations whose ranges tinygrad cannot get wrong.

In a graph, integers wrap. tinygrad 0.14 derives from the ranges of an operation's operands what a
comparison gives, and which checks of an address are superfluous; it moves constants from one side
of a comparison to the other; and it takes for granted that no sum or product leaves its dtype, and
that a conversion to a signed dtype stops at its limits. A graph could use this to read memory
outside its buffers.

So whatever may wrap is computed on unsigned integers and masked with all ones, which tells tinygrad
the true range. No rule looks through the mask, and none looks through a BITCAST.
"""

from __future__ import annotations

from typing import Final

from tinygrad.dtype import DType, dtypes
from tinygrad.uop.ops import Ops, UOp

_UNSIGNED: Final[dict[DType, DType]] = {
    dtypes.int8: dtypes.uint8,
    dtypes.int16: dtypes.uint16,
    dtypes.int32: dtypes.uint32,
    dtypes.int64: dtypes.uint64,
}


def reinterpret(value: UOp, dtype: DType) -> UOp:
    """Return the value's bits as another dtype of the same size."""
    return value if value.dtype == dtype else UOp(Ops.BITCAST, src=(value,), arg=dtype)


def get_unsigned(dtype: DType) -> DType:
    """Return the unsigned dtype of an integer dtype's size."""
    return _UNSIGNED.get(dtype, dtype)


def hide_range(value: UOp) -> UOp:
    """Return an integer of which tinygrad knows no more than its bits."""
    unsigned = get_unsigned(value.dtype)
    ones = UOp.const(unsigned.max, unsigned)
    masked = UOp(Ops.AND, src=(reinterpret(value, unsigned), ones))
    return reinterpret(masked, value.dtype)


def compute_wrapped(op: Ops, *operands: UOp) -> UOp:
    """Return ADD, SUB or MUL of integers modulo 2 to the power of their bits."""
    dtype = operands[0].dtype
    unsigned = get_unsigned(dtype)
    result = UOp(op, src=tuple(reinterpret(operand, unsigned) for operand in operands))
    return reinterpret(hide_range(result), dtype)


def shift_left(value: UOp, bits: UOp) -> UOp:
    """Return ``value`` shifted by a constant. It stays plain, and may match, where it is small."""
    if value.vmin >= 0 and value.vmax << int(bits.val) <= value.dtype.max:
        return UOp(Ops.SHL, src=(value, bits))
    return compute_wrapped(Ops.SHL, value, bits)


def reduce_wrapped(op: Ops, value: UOp, axes: int) -> UOp:
    """Return the sum or product over the first axes, modulo 2 to the power of the bits."""
    bits = reinterpret(value, get_unsigned(value.dtype))
    total = UOp(Ops.REDUCE, src=(bits,), arg=(op, axes))
    return reinterpret(hide_range(total), value.dtype)


def convert(value: UOp, dtype: DType) -> UOp:
    """Return a CAST of any number. Integers wrap; a float beyond the range gives anything."""
    plain = UOp(Ops.CAST, src=(value,), arg=dtype)
    if dtypes.is_int(dtype) and dtypes.is_float(value.dtype):
        return hide_range(plain)
    if dtype not in _UNSIGNED or (dtype.min <= value.vmin and value.vmax <= dtype.max):
        return plain
    return reinterpret(UOp(Ops.CAST, src=(value,), arg=get_unsigned(dtype)), dtype)
