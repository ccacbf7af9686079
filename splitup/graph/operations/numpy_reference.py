"""The reference of every operation: its result in numpy, the same bytes on every machine.

Slow, plain, and independent of any kernel: a dispute ends with it. Only additions,
multiplications, divisions and square roots of IEEE 754 are used, which round alike everywhere;
EXP2, LOG2, SIN and POW are polynomials over these in float64
(``splitup.graph.operations.polynomials``), rounded once to the node's dtype. What kernels of
different determinism classes do differently is defined here in one way:

    sums           over the reduced axes in C order, each partial sum rounded to the node's dtype
    NaN            every operation that makes one makes the positive quiet NaN; MAX gives NaN if
                   either operand is NaN
    float to int   towards zero, clamped to the range; NaN gives 0
    integers       wrap; CDIV and CMOD round towards zero, FLOORDIV and FLOORMOD downwards
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from splitup.core import limits
from splitup.core.errors import InvalidInput
from splitup.core.tensors import TensorSpec, get_numpy_dtype
from splitup.graph.arrays import (
    Array,
    decode_array,
    encode_array,
    get_array_dtype,
    round_array,
)
from splitup.graph.dtypes import FLOATS, INTEGERS
from splitup.graph.ir import Node, decode_float
from splitup.graph.operations.spec import Compute

_REDUCTIONS: Final[dict[str, np.ufunc]] = {
    "ADD": np.add,
    "MUL": np.multiply,
    "MAX": np.maximum,
}


def check_size(shape: tuple[int, ...]) -> None:
    """Raise InvalidInput for a shape of more than ``MAX_REFERENCE_ELEMENTS`` elements."""
    if math.prod(shape) > limits.MAX_REFERENCE_ELEMENTS:
        raise InvalidInput(
            f"a value of shape {list(shape)} is too large for the reference, which takes "
            f"{limits.MAX_REFERENCE_ELEMENTS} elements; compare the kernel's output instead"
        )


def elementwise(function: Callable[..., Array]) -> Compute:
    """Return the reference of an operation on operands that numpy broadcasts."""
    return lambda node, operands: round_array(node.dtype, function(*operands))


def elementwise_float64(function: Callable[..., Array]) -> Compute:
    """Return the same of a function of float64 arrays with at least one axis."""

    def apply(*operands: Array) -> Array:
        shape = np.broadcast_shapes(*(operand.shape for operand in operands))
        return function(*(np.atleast_1d(x).astype(np.float64) for x in operands)).reshape(shape)

    return elementwise(apply)


# ---- constants, movement -----------------------------------------------------------------------


def compute_const(node: Node, operands: Sequence[Array]) -> Array:
    text, dtype = str(node.arg), get_array_dtype(node.dtype)
    return np.array(decode_float(text) if node.dtype in FLOATS else int(text)).astype(dtype)


def compute_iota(node: Node, operands: Sequence[Array]) -> Array:
    return np.arange(node.arg, dtype=np.int32)  # type: ignore[arg-type]


def compute_reshape(node: Node, operands: Sequence[Array]) -> Array:
    arg: Any = node.arg
    check_size(arg)  # of an expanded operand, numpy makes a copy
    return operands[0].reshape(arg)


def compute_expand(node: Node, operands: Sequence[Array]) -> Array:
    arg: Any = node.arg
    return np.broadcast_to(operands[0], (*arg, *operands[0].shape))


def compute_permute(node: Node, operands: Sequence[Array]) -> Array:
    arg: Any = node.arg
    return operands[0].transpose(arg)


def compute_pad(node: Node, operands: Sequence[Array]) -> Array:
    arg: Any = node.arg
    check_size(tuple(size for _, size in arg))
    result = np.zeros([size for _, size in arg], operands[0].dtype)
    place = (slice(o, o + n) for (o, _), n in zip(arg, operands[0].shape, strict=True))
    result[tuple(place)] = operands[0]
    return result


def compute_shrink(node: Node, operands: Sequence[Array]) -> Array:
    arg: Any = node.arg
    return operands[0][tuple(slice(offset, offset + size) for offset, size in arg)]


def compute_flip(node: Node, operands: Sequence[Array]) -> Array:
    arg: Any = node.arg
    return np.flip(operands[0], tuple(axis for axis, flipped in enumerate(arg) if flipped))


def compute_stack(node: Node, operands: Sequence[Array]) -> Array:
    return np.stack(operands)


def compute_contiguous(node: Node, operands: Sequence[Array]) -> Array:
    return np.asarray(operands[0], order="C")  # ascontiguousarray would add an axis to a scalar


def compute_lookup(node: Node, operands: Sequence[Array]) -> Array:
    table, index = operands
    check_size(index.shape + table.shape[1:])
    inside = (index >= 0) & (index < len(table))
    found = table[np.where(inside, index, 0)]
    is_found = inside.reshape(inside.shape + (1,) * (table.ndim - 1))
    return np.where(is_found, found, table.dtype.type(0))


# ---- reduction, conversions --------------------------------------------------------------------


def compute_reduce(node: Node, operands: Sequence[Array]) -> Array:
    (source,) = operands
    arg: Any = node.arg
    operation = _REDUCTIONS[arg[0]]
    rows = source.reshape(-1, *source.shape[arg[1] :])
    if node.dtype == "bfloat16":
        total: Array = rows[0]
        for row in rows[1:]:
            total = round_array("bfloat16", operation(total, row))
        return total
    # accumulate is sequential by its definition, r[i] = r[i-1] op x[i]; reduce is not
    return round_array(node.dtype, operation.accumulate(rows, axis=0, dtype=source.dtype)[-1])


def compute_cast(node: Node, operands: Sequence[Array]) -> Array:
    (source,) = operands
    if node.dtype == "bool":
        return np.not_equal(source, 0)
    if node.dtype not in INTEGERS or source.dtype.kind != "f":
        return round_array(node.dtype, source)
    dtype = get_array_dtype(node.dtype)
    info = np.iinfo(dtype)
    value = np.trunc(source.astype(np.float64))
    high = float(info.max) + 1.0 if dtype.itemsize < 8 else 2.0 ** (64 - (info.min < 0))
    inside = (value >= float(info.min)) & (value < high)
    result = np.where(inside, value, 0.0).astype(dtype)
    result = np.where(value >= high, dtype.type(info.max), result)
    return np.asarray(np.where(value < float(info.min), dtype.type(info.min), result), dtype)


def compute_bitcast(node: Node, operands: Sequence[Array]) -> Array:
    (source,) = operands
    # a bfloat16 is the upper half of the float32 that holds it
    if source.dtype == np.float32 and get_numpy_dtype(node.dtype).itemsize == 2:
        data = encode_array("bfloat16", source)
    else:
        data = np.ascontiguousarray(source).tobytes()
    return decode_array(TensorSpec("", node.dtype, source.shape), data)


# ---- functions for ``elementwise`` ---------------------------------------------------------------


def invert(x: Array) -> Array:
    """Return 1 / x."""
    return np.asarray(np.divide(x.dtype.type(1), x))


def divide_to_zero(a: Array, b: Array) -> Array:
    """Return a / b of integers, rounded towards zero; b is positive (rule 'division')."""
    quotient = a // b
    return np.asarray(quotient + ((quotient * b != a) & (a < 0)).astype(a.dtype))


def compute_remainder(a: Array, b: Array) -> Array:
    """Return the remainder of ``divide_to_zero``, which has the sign of a."""
    return np.asarray(a - divide_to_zero(a, b) * b)
