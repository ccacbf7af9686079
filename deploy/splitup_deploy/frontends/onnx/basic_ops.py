"""ONNX operations that tinygrad's importer lacks, or implements differently from the standard.

``OPERATIONS`` maps an operation to its versions: the function for opset v is the one with the
largest key up to v. Without such a key tinygrad's implementation is used.
Source: https://onnx.ai/onnx/operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from tinygrad.dtype import DType, dtypes
from tinygrad.tensor import Tensor
from tinygrad.uop.ops import Ops

from splitup_deploy.frontends.onnx.image_ops import (
    pool_lp,
    resize,
    resize_10,
    sample_grid,
    space_to_depth,
    unpool_max,
)
from splitup_deploy.frontends.onnx.sequence_ops import (
    compute_attention,
    compute_gru,
    compute_lstm,
    compute_rnn,
    reverse_sequence,
    rotate_embedding,
)
from splitup_deploy.frontends.onnx.tinygrad_ops import OnnxDataType, onnx_ops

Result: TypeAlias = "Tensor | tuple[Tensor | None, ...]"

MAX_SCATTERED: Final = 1_024  # updates; each is about ten operations

REFUSED: Final[dict[str, str]] = {
    **dict.fromkeys(
        ("NonMaxSuppression", "NonZero", "Unique"),
        "the shape of its result depends on the data",
    ),
    **dict.fromkeys(("Loop", "Scan"), "a task has no control flow: unroll it when you export"),
    **dict.fromkeys(
        (
            "Bernoulli",
            "Multinomial",
            "RandomNormal",
            "RandomNormalLike",
            "RandomUniform",
            "RandomUniformLike",
        ),
        "a task is a pure function, without random numbers",
    ),
    "ImageDecoder": "pictures must be decoded before they are sent",
    **dict.fromkeys(("Adagrad", "Adam", "Gradient", "Momentum"), "tasks do not train"),
}
CONSTANT_INPUTS: Final[dict[str, tuple[int, ...]]] = {"CumProd": (1,)}


def softmax_12(x: Tensor, axis: int = 1) -> Tensor:
    """Return the softmax over all axes from ``axis`` on, as it was before opset 13."""
    return _flatten_from(x, axis).softmax(-1).reshape(x.shape)


def log_softmax_12(x: Tensor, axis: int = 1) -> Tensor:
    """Return the logarithm of ``softmax_12``."""
    return _flatten_from(x, axis).log_softmax(-1).reshape(x.shape)


def hardmax_12(x: Tensor, axis: int = 1) -> Tensor:
    """Return 1 at the first largest of all elements from ``axis`` on, 0 elsewhere."""
    result: Tensor = onnx_ops["Hardmax"](_flatten_from(x, axis), axis=-1)
    return result.reshape(x.shape)


def _flatten_from(x: Tensor, axis: int) -> Tensor:
    return x.reshape(math.prod(x.shape[: axis % max(x.ndim, 1)]), -1)


def split(
    x: Tensor, split: Sequence[int] | None = None, num_outputs: int = 0, axis: int = 0
) -> Result:
    """Return the parts of an axis: of equal size, only the last may be smaller."""
    length = int(x.shape[axis])
    size = -(-length // max(num_outputs, 1))
    sizes = [min(size, length - size * part) for part in range(num_outputs)]
    result: Result = x.split(list(sizes if split is None else split), axis)
    return result


def concatenate(*parts: Tensor, axis: int) -> Tensor:
    """Return the concatenated parts; empty ones add nothing."""
    filled = [part for part in parts if 0 not in part.shape] or list(parts[:1])
    return Tensor.cat(*filled, dim=axis)


def drop_out(
    data: Tensor, ratio: Any = 0.5, training_mode: Any = False, seed: int | None = None
) -> Result:
    """Return the data unchanged, and a mask that keeps all of them."""
    if training_mode:
        raise NotImplementedError("random numbers: export the model for inference")
    return data, data.const_like(1).cast(dtypes.bool)


def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, reduction: str = "none") -> Tensor:
    """Return x with updates at the places that ``indices`` names, one row after the other."""
    if indices.shape[0] > MAX_SCATTERED:
        raise NotImplementedError(f"{indices.shape[0]} updates; at most {MAX_SCATTERED} are")
    if updates.shape != indices.shape[:-1] + x.shape[int(indices.shape[-1]) :]:
        raise ValueError(f"updates of shape {updates.shape} at places of shape {indices.shape}")
    combine = _REDUCTIONS[reduction]
    for row, update in zip(indices.split(1, 0), updates.split(1, 0), strict=True):
        place = tuple(index.squeeze(-1) for index in row.squeeze(0).split(1, -1))
        fresh = combine(x[place].cast(x.dtype), update.squeeze(0))
        x = x._getitem(place, fresh)  # x[place] = fresh would change an input's memory
    return x


_REDUCTIONS: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "none": lambda old, new: new,
    "add": Tensor.add,
    "mul": Tensor.mul,
    "max": Tensor.maximum,
    "min": Tensor.minimum,
}


def quantise_linear(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    saturate: int = 1,
    precision: int = 0,
) -> Tensor:
    """Return x / scale, rounded half to even, plus the zero point, within the type's range."""
    if precision not in (0, 1):
        raise NotImplementedError("only float32 precision is supported")
    if zero_point is not None:
        dtype = zero_point.dtype
    else:
        dtype = OnnxDataType(output_dtype).to_dtype() if output_dtype else dtypes.uint8
    shape = [int(size) for size in x.shape]
    q = (x.cast(dtypes.float32) / _spread(scale, shape, axis, block_size)).round()
    if zero_point is not None:
        q = q + _spread(zero_point, shape, axis, block_size).cast(dtypes.float32)
    return _saturate(q, dtype)


def _spread(value: Tensor, shape: list[int], axis: int, block_size: int) -> Tensor:
    """Return a scale or zero point so that it broadcasts: one, per channel, or per block."""
    if math.prod(value.shape) == 1:
        return value.reshape(())
    if block_size:
        return value.repeat_interleave(block_size, axis)
    return value.reshape([size if i == axis % len(shape) else 1 for i, size in enumerate(shape)])


def _saturate(q: Tensor, dtype: DType) -> Tensor:
    return q.clip(float(dtype.min), float(dtype.max)).cast(dtype)


def quantise_dynamically(x: Tensor) -> Result:
    """Return x as uint8 with the scale and zero point that cover its range and zero."""
    low, high = x.min().minimum(0.0).contiguous(), x.max().maximum(0.0).contiguous()
    scale = ((high - low) / 255.0).contiguous()
    zero = (-low / scale).round().clip(0.0, 255.0).contiguous()
    return _saturate((x / scale).round() + zero, dtypes.uint8), scale, zero.cast(dtypes.uint8)


def normalise_lp(x: Tensor, axis: int = -1, p: int = 2) -> Tensor:
    """Return x divided by its L1 or L2 norm along an axis, 0 where that is 0."""
    if p not in (1, 2):
        raise NotImplementedError(f"p = {p}; supported: 1, 2")
    norm = x.abs().sum(axis, keepdim=True) if p == 1 else x.square().sum(axis, keepdim=True).sqrt()
    return (norm == 0).where(0.0, x / (norm == 0).where(1.0, norm))


def divide(x: Tensor, y: Tensor) -> Tensor:
    """Return x / y; of integers, rounded towards zero. An integer divided by 0 stays as it is."""
    if dtypes.is_float(x.dtype):
        return x / y
    number = _get_number(y)
    if number is not None and number > 0:
        return x.div(number, rounding_mode="trunc")
    return _divide_integers(x, y)


def modulo(x: Tensor, y: Tensor, fmod: int = 0) -> Tensor:
    """Return the remainder: with y's sign, or with x's if ``fmod``."""
    if dtypes.is_float(x.dtype):
        if fmod:
            return x.fmod(y)
        far = ((x < 0) != (y < 0)) & (x != 0)  # of an infinite y; x is less than one period
        return (y.isinf() & ~x.isinf() & ~x.isnan()).where(far.where(y, x), x % y)
    rest = x - divide(x, y) * y
    if fmod or dtypes.is_unsigned(x.dtype):
        return rest
    return ((rest != 0) & ((rest < 0) != (y < 0))).where(rest + y, rest)


def _get_number(y: Tensor) -> int | None:
    """Return the value of a constant integer, None for a tensor."""
    return int(y.uop.base.arg) if y.uop.base.op is Ops.CONST else None


def _divide_integers(x: Tensor, y: Tensor) -> Tensor:
    """Divide integers in float64, because a processor traps when integers are divided by 0.

    One division is exact for 32-bit numbers; for 64-bit numbers the estimate is corrected twice.
    """
    if x.dtype == dtypes.uint64:
        raise NotImplementedError("division of uint64 by a tensor")
    y = (y == 0).where(y.const_like(1), y)
    if x.dtype.itemsize < 8:
        return (x.cast(dtypes.float64) / y.cast(dtypes.float64)).cast(dtypes.int64).cast(x.dtype)
    a, b = (x < 0).where(-x, x), (y < 0).where(-y, y)
    size = b.cast(dtypes.float64)
    first = (a.cast(dtypes.float64) / size).minimum(2.0**63 - 1024).cast(dtypes.int64)
    rest = a - first * b
    second = (rest.cast(dtypes.float64) / size).floor().cast(dtypes.int64)
    rest = rest - second * b
    q = first + second + (rest >= b).cast(dtypes.int64) - (rest < 0).cast(dtypes.int64)
    return ((x < 0) != (y < 0)).where(-q, q)


def power(x: Tensor, y: Tensor) -> Tensor:
    """Return x^y in the dtype of x; of integers by way of float64."""
    if dtypes.is_int(x.dtype):
        return x.cast(dtypes.float64).pow(y.cast(dtypes.float64)).round().cast(x.dtype)
    return x.pow(y).cast(x.dtype)


def bit_shift(x: Tensor, y: Tensor, direction: str) -> Tensor:
    """Shift by y bits, one power of two after the other; all bits go when y is out of range."""
    bits = 8 * x.dtype.itemsize
    result = x
    for place in range(bits.bit_length() - 1):
        moved = result.lshift(1 << place) if direction == "LEFT" else result.rshift(1 << place)
        result = ((y & (1 << place)) != 0).where(moved, result)
    gone = x.const_like(0)
    if direction != "LEFT" and not dtypes.is_unsigned(x.dtype):
        gone = (x < 0).where(x.const_like(-1), gone)
    outside = (y >= bits) if dtypes.is_unsigned(y.dtype) else (y >= bits) | (y < 0)
    return outside.where(gone, result)


def bit_cast(x: Tensor, to: int) -> Tensor:
    """Return the same bits as another type of equal size."""
    dtype = OnnxDataType(to).to_dtype()
    if dtypes.bool in (x.dtype, dtype):
        return x.cast(dtype)
    return x.bitcast(dtype)


def cumulate_product(x: Tensor, axis: Any, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """Return the running product along an axis."""
    axis = (axis[0] if isinstance(axis, list) else axis) % x.ndim
    length = int(x.shape[axis])
    x = x.flip(axis) if reverse else x
    if exclusive:
        one = [(1, 0) if i == axis else None for i in range(x.ndim)]
        cut = [(0, length) if i == axis else None for i in range(x.ndim)]
        x = x.pad(tuple(one), value=1).shrink(tuple(cut))
    x = x.cumprod(axis)
    return x.flip(axis) if reverse else x


def convolve_integers(
    x: Tensor,
    w: Tensor,
    x_zero_point: Tensor | None = None,
    w_zero_point: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Return the int32 convolution of x and w less their zero points, w's per output channel."""
    x, w = x.cast(dtypes.int32), w.cast(dtypes.int32)
    if x_zero_point is not None:
        x = x - x_zero_point.reshape(()).cast(dtypes.int32)
    if w_zero_point is not None:
        w = w - w_zero_point.cast(dtypes.int32).reshape(-1, *(1,) * (w.ndim - 1))
    result: Tensor = onnx_ops["Conv"](x, w, **options)
    return result


def multiply_integers(
    a: Tensor,
    b: Tensor,
    a_zero_point: Tensor | None = None,
    b_zero_point: Tensor | None = None,
) -> Tensor:
    """Return the int32 product of matrices less their zero points, a's per row, b's per column."""
    a, b = a.cast(dtypes.int32), b.cast(dtypes.int32)
    if a_zero_point is not None:
        zero = a_zero_point.cast(dtypes.int32)
        a = a - (zero.unsqueeze(-1) if zero.ndim == 1 and a.ndim > 1 else zero)
    if b_zero_point is not None:
        b = b - b_zero_point.cast(dtypes.int32)
    return a @ b


def multiply_quantised(*operands: Tensor) -> Tensor:
    """Return the product of quantised matrices, each with one scale and zero point."""
    if any(math.prod(operands[place].shape) > 1 for place in (1, 2, 4, 5, 6, 7)):
        raise NotImplementedError("scales per row or column")
    result: Tensor = onnx_ops["QLinearMatMul"](*operands)
    return result


def gate_swish(a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """Return a * sigmoid(alpha * a) * b."""
    return a * (a * alpha).sigmoid() * b


OPERATIONS: Final[dict[str, dict[int, Callable[..., Result]]]] = {
    "Attention": {23: compute_attention},
    "BitCast": {26: bit_cast},
    "BitShift": {11: bit_shift},
    "Concat": {4: concatenate},
    "ConvInteger": {10: convolve_integers},
    "CumProd": {26: cumulate_product},
    "Div": {7: divide},
    "Dropout": {7: drop_out},
    "DynamicQuantizeLinear": {11: quantise_dynamically},
    "GridSample": {16: sample_grid},
    "GRU": {7: compute_gru},
    "Hardmax": {1: hardmax_12, 13: onnx_ops["Hardmax"]},
    "LSTM": {7: compute_lstm},
    "LogSoftmax": {1: log_softmax_12, 13: onnx_ops["LogSoftmax"]},
    "LpNormalization": {1: normalise_lp},
    "LpPool": {2: pool_lp},
    "MatMulInteger": {10: multiply_integers},
    "MaxUnpool": {9: unpool_max},
    "Mod": {10: modulo},
    "Pow": {7: power},
    "QLinearMatMul": {10: multiply_quantised},
    "QuantizeLinear": {10: quantise_linear},
    "RNN": {7: compute_rnn},
    "Resize": {10: resize_10, 11: resize},
    "ReverseSequence": {10: reverse_sequence},
    "RotaryEmbedding": {23: rotate_embedding},
    "ScatterND": {11: scatter_nd},
    "SpaceToDepth": {1: space_to_depth},
    "Softmax": {1: softmax_12, 13: Tensor.softmax},
    "Split": {2: split},
    "SwiGLU": {27: gate_swish},
    "Upsample": {7: resize_10},
}
