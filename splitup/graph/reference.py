"""Every operation of a graph in numpy, in one fixed order: the same bytes on every machine.

It is what a dispute ends at: slow, plain, and independent of any kernel. Only additions,
multiplications, divisions and square roots of IEEE 754 are used, which round alike everywhere;
EXP2, LOG2, SIN and POW are polynomials over these in float64, rounded once to the node's dtype.
What the kernels of the determinism classes do differently is defined here in one way:

    sums           of the folded axes in C order, each partial sum rounded to the node's dtype
    NaN            every operation that makes one makes the positive quiet NaN; MAX gives NaN if
                   either operand is NaN
    float to int   towards zero, clamped to the range; NaN gives 0
    integers       wrap; CDIV and CMOD round towards zero, FLOORDIV and FLOORMOD downwards

The arrays have the dtype of their node; bfloat16, which numpy lacks, is held as float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Final

import numpy as np

from splitup.core import limits
from splitup.core.errors import InvalidInput
from splitup.core.tensors import TensorSpec, get_numpy_dtype
from splitup.graph.ir import Graph, Node, bind_rows, decode_float
from splitup.graph.rules import FLOATS, INTEGERS, PARAMS, Value

Array = np.ndarray[Any, Any]
_Operation = Callable[..., Array]


def get_array_dtype(dtype: str) -> np.dtype[Any]:
    """Return numpy's dtype of the arrays that stand for ``dtype`` here."""
    return np.dtype(np.float32) if dtype == "bfloat16" else get_numpy_dtype(dtype)


def decode_array(spec: TensorSpec, data: bytes | memoryview) -> Array:
    """Return the array of a tensor's bytes; raises InvalidInput when their number is wrong."""
    if len(data) != spec.nbytes:
        raise InvalidInput(f"'{spec.name}' has {len(data)} bytes; {spec} has {spec.nbytes}")
    array = np.frombuffer(data, get_numpy_dtype(spec.dtype)).reshape(spec.shape)
    if spec.dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def encode_array(dtype: str, array: Array) -> bytes:
    """Return the tensor's bytes."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(array).view(np.uint32) >> 16).astype("<u2").tobytes()
    return array.astype(get_numpy_dtype(dtype), copy=False).tobytes(order="C")


def list_region(graph: Graph, root: int) -> list[int]:
    """Return the nodes that are computed for the value in memory at ``root``, ascending.

    They end where other values in memory begin (``list_operands``) and hold every constant.
    """
    found, pending = {root}, list(graph.nodes[root].srcs)
    while pending:
        index = pending.pop()
        if index not in found and not is_in_memory(graph.nodes[index]):
            found.add(index)
            pending.extend(graph.nodes[index].srcs)
    return sorted(found)


def list_operands(graph: Graph, region: Iterable[int]) -> list[int]:
    """Return the values in memory that a region reads, ascending."""
    nodes = set(region)
    return sorted({src for index in nodes for src in graph.nodes[index].srcs} - nodes)


def is_computable(graph: Graph, nodes: Iterable[int], values: Sequence[Value]) -> bool:
    """Return whether ``compute_nodes`` will take these nodes; ``values`` are check_graph's."""
    for index in nodes:
        node = graph.nodes[index]
        if node.op in ("RESHAPE", "PAD", "LOOKUP"):
            shape = values[index].shape
        else:
            shape = np.broadcast_shapes(*(values[src].shape for src in node.srcs))
        if math.prod(shape) > limits.MAX_REFERENCE_ELEMENTS:
            return False
    return True


def is_in_memory(node: Node) -> bool:
    """Return whether a node's value is in memory before or after a kernel runs."""
    return node.op == "CONTIGUOUS" or node.op in PARAMS


def compute_nodes(graph: Graph, nodes: Iterable[int], values: MutableMapping[int, Array]) -> None:
    """Compute ``nodes``, which ascend, into ``values``, which holds what they read.

    The graph has no symbols (``bind_rows``). Raises InvalidInput when a value has more than
    ``MAX_REFERENCE_ELEMENTS`` elements.
    """
    for index in nodes:
        node = graph.nodes[index]
        values[index] = compute_node(node, [values[src] for src in node.srcs])


def compute_graph(graph: Graph, params: Mapping[tuple[str, int], Array]) -> dict[int, Array]:
    """Return the value of every node; ``params`` by op (INPUT, WEIGHT, STATE) and position.

    The inputs bind the graph's symbols.
    """
    inputs = enumerate(graph.inputs)
    rows = {spec.rows: len(params["INPUT", place]) for place, spec in inputs if spec.rows}
    graph = bind_rows(graph, rows)
    values: dict[int, Array] = {}
    for index, node in enumerate(graph.nodes):
        if node.op in PARAMS:
            assert isinstance(node.arg, int)  # check_graph has seen to it
            values[index] = params[node.op, node.arg]
        else:
            compute_nodes(graph, (index,), values)
    return values


def compute_node(node: Node, sources: Sequence[Array]) -> Array:
    """Return the value of one operation, which is neither INPUT, WEIGHT nor STATE."""
    if node.op == "LOOKUP":
        return _lookup(*sources)
    _check_size(np.broadcast_shapes(*(source.shape for source in sources)))
    with np.errstate(all="ignore"):  # overflow, division by zero and NaN have defined results
        if node.op in ("CAST", "BITCAST"):
            return _CONVERSIONS[node.op](node, sources[0])
        if (movement := _MOVEMENT.get(node.op)) is not None:
            return movement(node.arg, sources)
        if node.op == "CONST":
            return _make_const(node)
        if node.op == "IOTA":
            return np.arange(node.arg, dtype=np.int32)  # type: ignore[arg-type]
        if node.op == "REDUCE":
            return _fold(node, sources[0])
        return round_array(node.dtype, _ARITHMETIC[node.op](*sources))


def round_array(dtype: str, array: Array) -> Array:
    """Return ``array`` in a node's dtype; of NaNs, only the positive quiet one is left."""
    if dtype not in FLOATS:
        return np.asarray(array, get_array_dtype(dtype))
    result = np.array(array, get_array_dtype(dtype))
    if dtype == "bfloat16":
        bits = result.view(np.uint32)
        carry = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        bits = (bits + carry) & np.uint32(0xFFFF0000)  # to nearest, ties to even
        result = np.where(np.isnan(result), np.float32(math.nan), bits.view(np.float32))
    result[np.isnan(result)] = math.nan
    return result


def _check_size(shape: tuple[int, ...]) -> None:
    if math.prod(shape) > limits.MAX_REFERENCE_ELEMENTS:
        raise InvalidInput(
            f"a value of shape {list(shape)} is too large for the reference, which takes "
            f"{limits.MAX_REFERENCE_ELEMENTS} elements; compare the kernel's output instead"
        )


def _make_const(node: Node) -> Array:
    text, dtype = str(node.arg), get_array_dtype(node.dtype)
    return np.array(decode_float(text) if node.dtype in FLOATS else int(text)).astype(dtype)


def _fold(node: Node, source: Array) -> Array:
    assert isinstance(node.arg, tuple) and isinstance(node.arg[1], int)  # as check_graph has seen
    operation = _FOLDS[str(node.arg[0])]
    rows = source.reshape(-1, *source.shape[node.arg[1] :])
    if node.dtype == "bfloat16":
        total: Array = rows[0]
        for row in rows[1:]:
            total = round_array("bfloat16", operation(total, row))
        return total
    # accumulate is sequential by its definition, r[i] = r[i-1] op x[i]; reduce is not
    return round_array(node.dtype, operation.accumulate(rows, axis=0, dtype=source.dtype)[-1])


# ---- movement ----------------------------------------------------------------------------------


def _expand(arg: Any, sources: Sequence[Array]) -> Array:
    return np.broadcast_to(sources[0], (*arg, *sources[0].shape))


def _reshape(arg: Any, sources: Sequence[Array]) -> Array:
    _check_size(arg)  # what was expanded is copied
    return sources[0].reshape(arg)


def _pad(arg: Any, sources: Sequence[Array]) -> Array:
    _check_size(tuple(size for _, size in arg))
    result = np.zeros([size for _, size in arg], sources[0].dtype)
    place = (slice(o, o + n) for (o, _), n in zip(arg, sources[0].shape, strict=True))
    result[tuple(place)] = sources[0]
    return result


def _shrink(arg: Any, sources: Sequence[Array]) -> Array:
    return sources[0][tuple(slice(offset, offset + size) for offset, size in arg)]


def _flip(arg: Any, sources: Sequence[Array]) -> Array:
    axes = tuple(axis for axis, flipped in enumerate(arg) if flipped)
    return np.flip(sources[0], axes)


def _lookup(table: Array, index: Array) -> Array:
    _check_size(index.shape + table.shape[1:])
    inside = (index >= 0) & (index < len(table))
    result = table[np.where(inside, index, 0)]
    result[~inside] = 0
    return result


_MOVEMENT: Final[dict[str, Callable[[Any, Sequence[Array]], Array]]] = {
    "RESHAPE": _reshape,
    "EXPAND": _expand,
    "PERMUTE": lambda arg, sources: sources[0].transpose(arg),
    "PAD": _pad,
    "SHRINK": _shrink,
    "FLIP": _flip,
    "STACK": lambda arg, sources: np.stack(sources),
    "CONTIGUOUS": lambda arg, sources: np.ascontiguousarray(sources[0]),
}


# ---- conversions -------------------------------------------------------------------------------


def _cast(node: Node, source: Array) -> Array:
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


def _bitcast(node: Node, source: Array) -> Array:
    # a bfloat16 is the upper half of the float32 that holds it
    if source.dtype == np.float32 and get_numpy_dtype(node.dtype).itemsize == 2:
        data = encode_array("bfloat16", source)
    else:
        data = np.ascontiguousarray(source).tobytes()
    return decode_array(TensorSpec("", node.dtype, source.shape), data)


_CONVERSIONS: Final[dict[str, Callable[[Node, Array], Array]]] = {
    "CAST": _cast,
    "BITCAST": _bitcast,
}


# ---- functions ---------------------------------------------------------------------------------

_SPLIT_BITS: Final = 33  # k * (33 bits of π/2) is exact in float64 for k below 2^20
_LARGE_ANGLE: Final = 2.0**20
_PI_BITS: Final = 1_200  # exact reduction of the largest float64 needs 1,024 + 53 and some


def _exp2(x: Array) -> Array:
    """Return 2^x in float64 by Taylor's series of e^t, |t| ≤ ln 2 / 2, to the 14th power."""
    whole = np.rint(np.clip(x, -1_200.0, 1_200.0))
    t = (np.clip(x, -1_200.0, 1_200.0) - whole) * math.log(2.0)
    value = np.full_like(t, 1.0 / math.factorial(14))
    for power in range(13, -1, -1):
        value = value * t + 1.0 / math.factorial(power)
    result = np.ldexp(value, np.where(np.isnan(whole), 0.0, whole).astype(np.int32))
    return np.where(np.isnan(x), math.nan, result)


def _log2(x: Array) -> Array:
    """Return log2 in float64: exponent, plus 2/ln 2 · artanh((m - 1)/(m + 1)), √½ ≤ m < √2."""
    mantissa, exponent = np.frexp(np.where((x > 0) & np.isfinite(x), x, 1.0))
    small = mantissa < math.sqrt(0.5)
    mantissa = np.where(small, 2.0 * mantissa, mantissa)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    value = np.zeros_like(s)
    for odd in range(25, 0, -2):
        value = value * square + 1.0 / odd
    result = exponent - small + value * s * (2.0 / math.log(2.0))
    result = np.where(x == 0, -math.inf, np.where(x == math.inf, math.inf, result))
    return np.where((x < 0) | np.isnan(x), math.nan, result)


def _sin(x: Array) -> Array:
    """Return sin in float64: the rest after multiples of π/2, then Taylor's series."""
    finite = np.where(np.isfinite(x), x, 0.0)
    small = np.where(np.abs(finite) < _LARGE_ANGLE, finite, 0.0)
    quarter = np.rint(small * (2.0 / math.pi))
    rest = small
    for part in _split_half_pi():
        rest = rest - quarter * part
    for place in zip(*np.nonzero(np.abs(finite) >= _LARGE_ANGLE), strict=True):
        quarter[place], rest[place] = _reduce_large_angle(float(finite[place]))
    square = rest * rest
    sine, cosine = np.zeros_like(rest), np.zeros_like(rest)
    for power in range(9, -1, -1):
        sign = -1.0 if power % 2 else 1.0
        sine = sine * square + sign / math.factorial(2 * power + 1)
        cosine = cosine * square + sign / math.factorial(2 * power)
    turn = np.mod(quarter, 4.0)
    value = np.where(turn % 2 == 0, sine * rest, cosine)
    value = np.where(turn >= 2, -value, value)
    return np.where(np.isfinite(x), np.where(x == 0, x, value), math.nan)


@functools.cache
def _compute_pi(bits: int) -> int:
    """Return π · 2^bits, rounded down a little, by Machin's formula."""

    def arctan_inverse(n: int) -> int:
        term = total = (1 << (bits + 32)) // n
        k, sign = 3, -1
        while term:
            term //= n * n
            total += sign * (term // k)
            k, sign = k + 2, -sign
        return total

    return (16 * arctan_inverse(5) - 4 * arctan_inverse(239)) >> 32


@functools.cache
def _split_half_pi() -> tuple[float, float, float]:
    """Return π/2 as the sum of three float64, the first two of 33 bits."""
    half, parts = _compute_pi(_PI_BITS) >> 1, []
    for _ in range(2):
        shift = half.bit_length() - _SPLIT_BITS
        parts.append(math.ldexp(float(half >> shift), shift - _PI_BITS))
        half &= (1 << shift) - 1
    shift = half.bit_length() - 53
    return parts[0], parts[1], math.ldexp(float(half >> shift), shift - _PI_BITS)


def _reduce_large_angle(x: float) -> tuple[float, float]:
    """Return the multiple of π/2 next to ``x``, modulo 4, and the rest."""
    mantissa, exponent = math.frexp(x)
    scaled = int(math.ldexp(mantissa, 53)) << (exponent - 53 + _PI_BITS)
    half = _compute_pi(_PI_BITS) >> 1
    quarter = (2 * scaled + half) // (2 * half)
    rest = scaled - quarter * half
    shift = max(0, rest.bit_length() - 60)
    return float(quarter % 4), math.ldexp(float(rest >> shift), shift - _PI_BITS)


def _pow(x: Array, y: Array) -> Array:
    """Return x^y; of a negative x with the sign of an odd y, NaN for one that is not whole."""
    value = _exp2(np.where(x == 0, np.sign(y) * -math.inf, y * _log2(np.abs(x))))
    odd = np.mod(np.abs(y), 2.0) == 1.0
    value = np.where((x < 0) & odd, -value, value)
    value = np.where((x < 0) & (y != np.trunc(y)) & np.isfinite(x), math.nan, value)
    return np.where((y == 0) | (x == 1), 1.0, value)


def _in_float64(function: _Operation) -> _Operation:
    def apply(*sources: Array) -> Array:
        shape = np.broadcast_shapes(*(source.shape for source in sources))
        return function(*(np.atleast_1d(s).astype(np.float64) for s in sources)).reshape(shape)

    return apply


def _divide_to_zero(a: Array, b: Array) -> Array:
    quotient = a // b  # the divisor is a positive constant (rule 'division')
    return np.asarray(quotient + ((quotient * b != a) & (a < 0)).astype(a.dtype))


_FOLDS: Final[dict[str, np.ufunc]] = {"ADD": np.add, "MUL": np.multiply, "MAX": np.maximum}
_ARITHMETIC: Final[dict[str, _Operation]] = {
    **_FOLDS,
    "EXP2": _in_float64(_exp2),
    "LOG2": _in_float64(_log2),
    "SIN": _in_float64(_sin),
    "POW": _in_float64(_pow),
    "SQRT": np.sqrt,
    "RECIPROCAL": lambda x: np.divide(x.dtype.type(1), x),
    "TRUNC": np.trunc,
    "NEG": np.negative,
    "SUB": np.subtract,
    "FDIV": np.divide,
    "CMPLT": np.less,
    "CMPNE": np.not_equal,
    "CMPEQ": np.equal,
    "AND": np.bitwise_and,
    "OR": np.bitwise_or,
    "XOR": np.bitwise_xor,
    "CDIV": _divide_to_zero,
    "CMOD": lambda a, b: a - _divide_to_zero(a, b) * b,
    "FLOORDIV": np.floor_divide,
    "FLOORMOD": np.mod,
    "SHL": np.left_shift,
    "SHR": np.right_shift,
    "WHERE": np.where,
}
