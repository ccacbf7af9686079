"""The dtype and shape rules of the operations, and their arithmetic work.

A rule recomputes what a node gives from its operands, so that no index can leave its operand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from splitup.core import limits
from splitup.core.tensors import ITEM_BYTES, TensorSpec
from splitup.graph.dtypes import INTEGERS, NUMBERS, round_float
from splitup.graph.ir import Arg, Dim, Dims, Graph, Node, Weight, decode_float, encode_float
from splitup.graph.operations.spec import Infer, Scope, Value, require

REDUCTIONS: Final = ("ADD", "MUL", "MAX")
_FLOAT = re.compile(r"[0-9a-f]{16}")
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,19}")

Inferred = tuple[str, Dims]


# ---- work --------------------------------------------------------------------------------------


def no_work(shape: tuple[int, ...], operands: Sequence[Value]) -> int:
    """Return 0: the operation moves or names elements."""
    return 0


def work_per_result(shape: tuple[int, ...], operands: Sequence[Value]) -> int:
    """Return one operation per element of the result."""
    return math.prod(shape)


def work_per_operand(shape: tuple[int, ...], operands: Sequence[Value]) -> int:
    """Return one operation per element of the first operand."""
    return math.prod(operands[0].shape)


# ---- params and constants ----------------------------------------------------------------------


def infer_param(get_table: Callable[[Graph], Sequence[TensorSpec | Weight]]) -> Infer:
    """Return the rule of INPUT, WEIGHT or STATE: that of the entry in its table."""

    def infer(scope: Scope, node: Node, operands: Sequence[Value]) -> Inferred:
        table = get_table(scope.graph)
        require(
            type(node.arg) is int and 0 <= node.arg < len(table),
            "argument",
            "it names no entry of its table",
        )
        assert isinstance(node.arg, int)  # for the type checker
        entry = table[node.arg]
        return entry.dtype, scope.graph.get_dims(entry)

    return infer


def infer_iota(scope: Scope, node: Node, operands: Sequence[Value]) -> Inferred:
    require(
        type(node.arg) is int and 1 <= node.arg <= limits.MAX_DIMENSION,
        "argument",
        "it wants a length",
    )
    assert isinstance(node.arg, int)  # for the type checker
    return "int32", (node.arg,)


def infer_const(scope: Scope, node: Node, operands: Sequence[Value]) -> Inferred:
    """Check that the dtype can represent the value, and that it is written in the one way."""
    text = node.arg
    require(isinstance(text, str), "argument", "it wants its value as text")
    assert isinstance(text, str)  # for the type checker
    if node.dtype == "bool":
        require(text in ("0", "1"), "const", "bool is 0 or 1")
    elif node.dtype in INTEGERS:
        require(bool(_INTEGER.fullmatch(text)), "const", "not a decimal integer")
        bits = 8 * ITEM_BYTES[node.dtype]
        low, high = (0, 2**bits) if node.dtype[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1))
        require(low <= int(text) < high, "const", f"{text} is no {node.dtype}")
    else:
        require(bool(_FLOAT.fullmatch(text)), "const", "not 16 hexadecimal digits")
        rounded = encode_float(round_float(decode_float(text), node.dtype))
        require(text == rounded, "const", f"no {node.dtype} has this value")
    return node.dtype, ()


# ---- movement ----------------------------------------------------------------------------------


def infer_reshape(scope: Scope, node: Node, operands: Sequence[Value]) -> Inferred:
    (source,) = operands
    sizes = _read_sizes(node, scope.maxima)
    require(_measure(sizes) == _measure(source.dims), "shape", "the number of elements changes")
    return source.dtype, sizes


def infer_expand(scope: Scope, node: Node, operands: Sequence[Value]) -> Inferred:
    (source,) = operands
    return source.dtype, _read_sizes(node, scope.maxima) + source.dims


def infer_permute(scope: Scope, node: Node, operands: Sequence[Value]) -> Inferred:
    (source,) = operands
    numbers = _read_integers(node)
    in_order = list(range(len(source.dims)))
    require(sorted(numbers) == in_order, "shape", "it is no order of the axes")
    return source.dtype, tuple(source.dims[axis] for axis in numbers)


def infer_flip(scope: Scope, node: Node, operands: Sequence[Value]) -> Inferred:
    (source,) = operands
    numbers, dims = _read_integers(node), source.dims
    require(
        len(numbers) == len(dims) and set(numbers) <= {0, 1},
        "argument",
        "it wants a 0 or 1 per axis",
    )
    require(
        not any(flip and isinstance(size, str) for flip, size in zip(numbers, dims, strict=True)),
        "shape",
        "it reverses a symbolic axis",
    )
    return source.dtype, dims


def infer_pad_or_shrink(scope: Scope, node: Node, operands: Sequence[Value]) -> Inferred:
    (source,) = operands
    require(_is_pairs(node.arg, len(source.dims)), "argument", "it wants (offset, size) per axis")
    pairs: tuple[tuple[int, Dim], ...] = node.arg  # type: ignore[assignment]
    for (offset, size), old in zip(pairs, source.dims, strict=True):
        require(
            _fits(node.op, offset, size, old, scope.maxima),
            "shape",
            f"({offset}, {size!s:.40}) does not fit an axis of {old}",
        )
    return source.dtype, tuple(size for _, size in pairs)


def _read_list(node: Node) -> Dims:
    arg = node.arg
    require(
        isinstance(arg, tuple) and all(isinstance(item, int | str) for item in arg),
        "argument",
        "it wants a list of integers or symbols",
    )
    sizes: Dims = arg  # type: ignore[assignment]
    require(len(sizes) <= limits.MAX_RANK, "size", f"more than {limits.MAX_RANK} axes")
    return sizes


def _read_integers(node: Node) -> tuple[int, ...]:
    sizes = _read_list(node)
    require(all(type(item) is int for item in sizes), "argument", "it wants a list of integers")
    return sizes  # type: ignore[return-value]


def _read_sizes(node: Node, maxima: Mapping[str, int]) -> Dims:
    sizes = _read_list(node)
    require(
        all(
            size in maxima if isinstance(size, str) else 1 <= size <= limits.MAX_DIMENSION
            for size in sizes
        ),
        "size",
        "a size is impossible",
    )
    return sizes


def _fits(op: str, offset: int, size: Dim, old: Dim, maxima: Mapping[str, int]) -> bool:
    """Return whether an axis may be padded or shrunk like this for all values of the symbols."""
    if isinstance(size, str):
        if size not in maxima or offset != 0:
            return False
        return size == old or (op == "SHRINK" and isinstance(old, int) and maxima[size] <= old)
    if isinstance(old, str):
        return op == "SHRINK" and (offset, size) == (0, 1)
    inner, outer = (old, size) if op == "PAD" else (size, old)
    return offset >= 0 and size >= 1 and offset + inner <= outer


def _measure(dims: Dims) -> list[Dim]:
    """Return the symbols in order, and the number of elements before, between and behind them."""
    result: list[Dim] = []
    product = 1
    for size in dims:
        if isinstance(size, str):
            result += [product, size]
            product = 1
        else:
            product *= size
    return [*result, product]


def _is_pairs(arg: Arg, length: int) -> bool:
    return (
        isinstance(arg, tuple)
        and len(arg) == length
        and all(isinstance(pair, tuple) and len(pair) == 2 and type(pair[0]) is int for pair in arg)
    )


# ---- elementwise -------------------------------------------------------------------------------


def infer_arithmetic(scope: Scope, node: Node, operands: Sequence[Value]) -> Inferred:
    return _get_shared_dtype(operands), _broadcast(operands)


def infer_comparison(scope: Scope, node: Node, operands: Sequence[Value]) -> Inferred:
    _get_shared_dtype(operands)
    return "bool", _broadcast(operands)


def infer_where(scope: Scope, node: Node, operands: Sequence[Value]) -> Inferred:
    require(operands[0].dtype == "bool", "dtype", "its condition is not bool")
    return _get_shared_dtype(operands[1:]), _broadcast(operands)


def infer_division(scope: Scope, node: Node, operands: Sequence[Value]) -> Inferred:
    """Check that the divisor is a positive constant."""
    dtype = _get_shared_dtype(operands)
    number = _read_divisor(scope, node)
    require(number >= 1, "division", f"it divides by {number}")
    return dtype, _broadcast(operands)


def infer_shift(scope: Scope, node: Node, operands: Sequence[Value]) -> Inferred:
    """Check that the shift is a constant below the width of the dtype."""
    dtype = _get_shared_dtype(operands)
    number, bits = _read_divisor(scope, node), 8 * ITEM_BYTES[dtype]
    require(0 <= number < bits, "division", f"it shifts {bits} bits by {number}")
    return dtype, _broadcast(operands)


def infer_cast(scope: Scope, node: Node, operands: Sequence[Value]) -> Inferred:
    return node.dtype, operands[0].dims


def infer_bitcast(scope: Scope, node: Node, operands: Sequence[Value]) -> Inferred:
    (source,) = operands
    require(
        node.dtype != "bool" and ITEM_BYTES[node.dtype] == ITEM_BYTES[source.dtype],
        "dtype",
        f"{source.dtype} cannot be read as {node.dtype}",
    )
    return node.dtype, source.dims


def _get_shared_dtype(operands: Sequence[Value]) -> str:
    dtype = operands[0].dtype
    require(
        all(operand.dtype == dtype for operand in operands),
        "dtype",
        f"its operands differ: {', '.join(operand.dtype for operand in operands)}",
    )
    return dtype


def _broadcast(operands: Sequence[Value]) -> Dims:
    shapes = [operand.dims for operand in operands]
    rank = max(len(shape) for shape in shapes)
    result: list[Dim] = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            require(
                size == result[axis] or size == 1 or result[axis] == 1,
                "shape",
                f"operands of sizes {result[axis]} and {size} do not broadcast",
            )
            result[axis] = size if result[axis] == 1 else result[axis]
    return tuple(result)


def _read_divisor(scope: Scope, node: Node) -> int:
    divisor = scope.graph.nodes[node.srcs[1]]
    require(divisor.op == "CONST", "division", "its second operand is no constant")
    return int(str(divisor.arg))  # its text has been checked: it is an earlier node


# ---- the others --------------------------------------------------------------------------------


def infer_same(scope: Scope, node: Node, operands: Sequence[Value]) -> Inferred:
    return operands[0].dtype, operands[0].dims


def infer_reduce(scope: Scope, node: Node, operands: Sequence[Value]) -> Inferred:
    (source,) = operands
    arg: Any = node.arg
    require(
        isinstance(arg, tuple)
        and len(arg) == 2
        and arg[0] in REDUCTIONS
        and type(arg[1]) is int
        and 1 <= arg[1] <= len(source.shape),
        "argument",
        "it wants (ADD, MUL or MAX, number of axes)",
    )
    require(source.dtype in NUMBERS or arg[0] != "ADD", "dtype", "bool cannot be added up")
    return source.dtype, source.dims[arg[1] :]


def infer_lookup(scope: Scope, node: Node, operands: Sequence[Value]) -> Inferred:
    table, index = operands
    require(index.dtype == "int32", "dtype", "its index is not int32")
    require(len(table.dims) >= 1, "shape", "its table has no axis")
    dims = index.dims + table.dims[1:]
    require(len(dims) <= limits.MAX_RANK, "size", f"more than {limits.MAX_RANK} axes")
    return table.dtype, dims


def infer_stack(scope: Scope, node: Node, operands: Sequence[Value]) -> Inferred:
    first = operands[0]
    require(
        all((one.dtype, one.dims) == (first.dtype, first.dims) for one in operands),
        "shape",
        "its operands differ",
    )
    return first.dtype, (len(operands), *first.dims)
