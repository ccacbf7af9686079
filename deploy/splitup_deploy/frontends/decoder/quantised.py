"""Dequantise blocks inside the graph: quantised weights stay in memory as they are in the file.

A block holds neighbouring elements of a row: small numbers, and scales for them. GGUF's blocks have
32 or 256 elements and are the bytes of the file; byte offsets within a block are written as in the
source. The blocks of other files (``splitup_deploy.frontends.huggingface.quantised_layers``) have
any even number of elements: a scale, a zero point if there is one, and the numbers. Their names are
those of the numbers and of the scale's dtype: "I4_BF16".
Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c (dequantize_row_*) and the
block structures of ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from tinygrad.dtype import dtypes
from tinygrad.tensor import Tensor

# Formats whose matmuls are left to tinygrad's scalar kernels on a CPU, because a number's value
# depends on a comparison, which ``splitup.cpu.decoder_match`` does not read.
SLOW_ON_CPU: Final = frozenset({"MXFP4", "F8_F16", "F8_BF16", "F8_F32"})


def describe_slow(encodings: Iterable[str]) -> tuple[str, ...]:
    """Return what a developer should know of the speed of these formats (docs/kernels.md)."""
    if not (slow := sorted(SLOW_ON_CPU & set(encodings))):
        return ()
    return (
        f"weights of {', '.join(slow)} are computed by slow kernels on a CPU: their matmuls take "
        "about 100 times as long as those of Q8_0 (GPUs are not concerned); publish the model in "
        "another format if nodes without a GPU should run it",
    )


def dequantise(blocks: Tensor, encoding: str) -> Tensor:
    """Return float32 [..., count * elements] of blocks uint8 [..., count, bytes per block]."""
    values = DECODERS[encoding](blocks)
    return values.reshape(*blocks.shape[:-2], -1)


def _get_half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at a byte offset, as float32 [..., count, 1]."""
    low, high = (blocks[..., place : place + 1].cast(dtypes.uint16) for place in (at, at + 1))
    return (low | high.lshift(8)).bitcast(dtypes.float16).cast(dtypes.float32)


def _get_brain(blocks: Tensor, at: int) -> Tensor:
    """Return the bfloat16 at a byte offset, as float32 [..., count, 1]."""
    low, high = (blocks[..., place : place + 1].cast(dtypes.uint32) for place in (at, at + 1))
    return (low.lshift(16) | high.lshift(24)).bitcast(dtypes.float32)


def _get_single(blocks: Tensor, at: int) -> Tensor:
    """Return the float32 at a byte offset: [..., count, 1]."""
    one, two, three, four = (
        blocks[..., place : place + 1].cast(dtypes.uint32) for place in range(at, at + 4)
    )
    return (one | two.lshift(8) | three.lshift(16) | four.lshift(24)).bitcast(dtypes.float32)


def _get_nibbles(data: Tensor) -> Tensor:
    """Return the low halves of bytes [..., n], then the high ones: uint8 [..., 2, n]."""
    return Tensor.stack(data & 15, data.rshift(4), dim=-2)


def _get_pairs(data: Tensor) -> Tensor:
    """Return the four 2-bit parts of bytes [..., n], lowest first: uint8 [..., 4, n]."""
    return Tensor.stack(*(data.rshift(2 * part) & 3 for part in range(4)), dim=-2)


def _get_bits(data: Tensor) -> Tensor:
    """Return the bits of bytes [..., n], lowest first: uint8 [..., 8, n]."""
    return Tensor.stack(*(data.rshift(bit) & 1 for bit in range(8)), dim=-2)


def _look_up(index: Tensor, values: Sequence[int]) -> Tensor:
    """Return the float32 at each index of a table whose length is a power of two."""
    half = len(values) // 2
    if half == 1:
        return (index & 1 == 0).where(float(values[0]), float(values[1]))
    low, high = _look_up(index, values[:half]), _look_up(index, values[half:])
    return (index & half == 0).where(low, high)


# ---- a scale, a zero point if there is one, numbers ----------------------------------------------


def _get_float8(data: Tensor) -> Tensor:
    """Return float8 (E4M3) as float32, the exponent 0 apart: devices may flush tiny numbers."""
    word = data.cast(dtypes.uint32)
    size = word & 127
    normal = (size.lshift(20) + (120 << 23)).bitcast(dtypes.float32)
    value = (size < 8).where(size.cast(dtypes.float32) * 2.0**-9, normal)
    return (word < 128).where(value, -value)


def _get_unsigned4(data: Tensor) -> Tensor:
    return _get_nibbles(data).flatten(-2).cast(dtypes.float32)


_SCALES: Final[dict[str, tuple[int, Callable[[Tensor, int], Tensor]]]] = {
    "F16": (2, _get_half),
    "BF16": (2, _get_brain),
    "F32": (4, _get_single),
}
_NUMBERS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "I4": lambda data: _get_unsigned4(data) - 8.0,
    "I8": lambda data: data.bitcast(dtypes.int8).cast(dtypes.float32),
    "F8": _get_float8,
}
# With a byte before them that is subtracted from each.
_FROM_ZERO: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "U4": _get_unsigned4,
    "U8": lambda data: data.cast(dtypes.float32),
}


def _decode_scaled(blocks: Tensor, numbers: str, scale: str) -> Tensor:
    size, get_scale = _SCALES[scale]
    if numbers in _NUMBERS:
        return _NUMBERS[numbers](blocks[..., size:]) * get_scale(blocks, 0)
    zero = blocks[..., size : size + 1].cast(dtypes.float32)
    return (_FROM_ZERO[numbers](blocks[..., size + 1 :]) - zero) * get_scale(blocks, 0)


def count_bytes(encoding: str, elements: int) -> int:
    """Return the bytes of a block of ``elements`` in an encoding of directories."""
    if encoding == "MXFP4":
        return 1 + elements // 2
    numbers, _, scale = encoding.partition("_")
    return _SCALES[scale][0] + (numbers in _FROM_ZERO) + elements * int(numbers[1]) // 8


# ---- GGUF ----------------------------------------------------------------------------------------


def _decode_q4_1(blocks: Tensor) -> Tensor:
    q = _get_nibbles(blocks[..., 4:20]).flatten(-2).cast(dtypes.float32)
    return q * _get_half(blocks, 0) + _get_half(blocks, 2)


def _get_q5(blocks: Tensor, at: int) -> Tensor:
    """Return 5-bit numbers of 32: a bit each in 4 bytes, then the other four in 16 bytes."""
    fifth = _get_bits(blocks[..., at : at + 4]).transpose(-1, -2).flatten(-2)
    q = _get_nibbles(blocks[..., at + 4 : at + 20]).flatten(-2)
    return (q | fifth.lshift(4)).cast(dtypes.float32)


def _decode_q5_0(blocks: Tensor) -> Tensor:
    return (_get_q5(blocks, 2) - 16.0) * _get_half(blocks, 0)


def _decode_q5_1(blocks: Tensor) -> Tensor:
    return _get_q5(blocks, 4) * _get_half(blocks, 0) + _get_half(blocks, 2)


# The numbers of IQ4_NL and IQ4_XS.
_IQ4: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _decode_iq4_nl(blocks: Tensor) -> Tensor:
    return _look_up(_get_nibbles(blocks[..., 2:18]).flatten(-2), _IQ4) * _get_half(blocks, 0)


def _decode_mxfp4(blocks: Tensor) -> Tensor:
    """A scale is a power of two; a number has a sign, two bits of exponent and one of mantissa.

    Source: OCP Microscaling Formats (MX), version 1.0.
    """
    power = blocks[..., :1].cast(dtypes.uint32)
    bits = (power < 2).where((power + 1) * 0x200000, (power.maximum(1) - 1).lshift(23))
    q = _get_nibbles(blocks[..., 1:17]).flatten(-2).cast(dtypes.uint32)
    size = q & 7
    normal = (size.lshift(22) + (127 << 23)).bitcast(dtypes.float32)
    value = (size < 2).where(size.cast(dtypes.float32), normal)  # twice the number
    return (q < 8).where(value, -value) * bits.bitcast(dtypes.float32)


def _get_quarters(blocks: Tensor, at: int) -> Tensor:
    """Return 256 2-bit numbers as [..., 16, 16]: of every 32 bytes the lowest pairs first."""
    return (
        _get_pairs(blocks[..., at : at + 64].unflatten(-1, (2, 32)))
        .flatten(-3)
        .unflatten(-1, (16, 16))
    )


def _decode_q2_k(blocks: Tensor) -> Tensor:
    scale, minimum = (
        part.cast(dtypes.float32) * _get_half(blocks, at)
        for part, at in ((blocks[..., :16] & 15, 80), (blocks[..., :16].rshift(4), 82))
    )
    q = _get_quarters(blocks, 16).cast(dtypes.float32)
    return q * scale.unsqueeze(-1) - minimum.unsqueeze(-1)


def _decode_q3_k(blocks: Tensor) -> Tensor:
    low = _get_nibbles(blocks[..., 96:104]).flatten(-2)
    high = _get_pairs(blocks[..., 104:108]).flatten(-2)
    scale = ((low | high.lshift(4)).cast(dtypes.float32) - 32.0) * _get_half(blocks, 108)
    third = _get_bits(blocks[..., :32]).flatten(-2).unflatten(-1, (16, 16))
    q = (_get_quarters(blocks, 32) | third.lshift(2)).cast(dtypes.float32) - 4.0
    return q * scale.unsqueeze(-1)


def _decode_iq4_xs(blocks: Tensor) -> Tensor:
    low = _get_nibbles(blocks[..., 4:8]).transpose(-1, -2).flatten(-2)
    high = _get_pairs(blocks[..., 2:4]).transpose(-1, -2).flatten(-2)
    scale = ((low | high.lshift(4)).cast(dtypes.float32) - 32.0) * _get_half(blocks, 0)
    q = _get_nibbles(blocks[..., 8:136].unflatten(-1, (8, 16))).flatten(-2)
    return _look_up(q, _IQ4) * scale.unsqueeze(-1)


def _get_scales_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and the 8 minima of a K block, times their own scales: [..., 8, 1]."""
    first, second, last = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scale = Tensor.cat(first & 63, (last & 15) | first.rshift(6).lshift(4), dim=-1)
    minimum = Tensor.cat(second & 63, last.rshift(4) | second.rshift(6).lshift(4), dim=-1)
    scales = scale.cast(dtypes.float32) * _get_half(blocks, 0)
    minima = minimum.cast(dtypes.float32) * _get_half(blocks, 2)
    return scales.unsqueeze(-1), minima.unsqueeze(-1)


def _get_nibbles_k(blocks: Tensor, at: int) -> Tensor:
    """Return 256 nibbles as [..., 8, 32]: of every 32 bytes the low halves, then the high ones."""
    data = blocks[..., at : at + 128].unflatten(-1, (4, 32))
    return _get_nibbles(data).flatten(-3, -2)


def _decode_q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _get_scales_k(blocks)
    return _get_nibbles_k(blocks, 16).cast(dtypes.float32) * scales - minima


def _decode_q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _get_scales_k(blocks)
    q = _get_nibbles_k(blocks, 48) | _get_bits(blocks[..., 16:48]).lshift(4)
    return q.cast(dtypes.float32) * scales - minima


def _decode_q6_k(blocks: Tensor) -> Tensor:
    low = _get_nibbles(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-2)  # [..., 2, 128]
    high = _get_pairs(blocks[..., 128:192].unflatten(-1, (2, 32))).flatten(-2)
    q = (low | high.lshift(4)).cast(dtypes.float32) - 32.0
    scale = blocks[..., 192:208].bitcast(dtypes.int8).cast(dtypes.float32).unsqueeze(-1)
    scales = scale * _get_half(blocks, 208).unsqueeze(-1)
    return q.flatten(-2).unflatten(-1, (16, 16)) * scales


DECODERS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "Q4_0": partial(_decode_scaled, numbers="I4", scale="F16"),
    "Q4_1": _decode_q4_1,
    "Q5_0": _decode_q5_0,
    "Q5_1": _decode_q5_1,
    "Q8_0": partial(_decode_scaled, numbers="I8", scale="F16"),
    "Q2_K": _decode_q2_k,
    "Q3_K": _decode_q3_k,
    "Q4_K": _decode_q4_k,
    "Q5_K": _decode_q5_k,
    "Q6_K": _decode_q6_k,
    "IQ4_NL": _decode_iq4_nl,
    "IQ4_XS": _decode_iq4_xs,
    "MXFP4": _decode_mxfp4,
    **{
        f"{numbers}_{scale}": partial(_decode_scaled, numbers=numbers, scale=scale)
        for numbers in (*_NUMBERS, *_FROM_ZERO)
        for scale in _SCALES
    },
}
