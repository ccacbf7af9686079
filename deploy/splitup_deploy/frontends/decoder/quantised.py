"""Dequantise GGUF blocks inside the graph: weights stay in memory as the bytes of the file.

A block holds 32 or 256 neighbouring elements of a row: small integers, and scales for them. Byte
offsets within a block are written as in the source.
Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c (dequantize_row_*) and the
block structures of ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tinygrad.dtype import dtypes
from tinygrad.tensor import Tensor


def dequantise(blocks: Tensor, encoding: str) -> Tensor:
    """Return float32 [..., count * elements] of blocks uint8 [..., count, bytes per block]."""
    values = _DECODERS[encoding](blocks)
    return values.reshape(*blocks.shape[:-2], -1)


def _get_half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at a byte offset, as float32 [..., count, 1]."""
    low, high = (blocks[..., place : place + 1].cast(dtypes.uint16) for place in (at, at + 1))
    return (low | high.lshift(8)).bitcast(dtypes.float16).cast(dtypes.float32)


def _get_nibbles(data: Tensor) -> Tensor:
    """Return the low halves of bytes [..., n], then the high ones: uint8 [..., 2, n]."""
    return Tensor.stack(data & 15, data.rshift(4), dim=-2)


def _get_pairs(data: Tensor) -> Tensor:
    """Return the four 2-bit parts of bytes [..., n], lowest first: uint8 [..., 4, n]."""
    return Tensor.stack(*(data.rshift(2 * part) & 3 for part in range(4)), dim=-2)


def _get_bits(data: Tensor) -> Tensor:
    """Return the bits of bytes [..., n], lowest first: uint8 [..., 8, n]."""
    return Tensor.stack(*(data.rshift(bit) & 1 for bit in range(8)), dim=-2)


def _decode_q4_0(blocks: Tensor) -> Tensor:
    q = _get_nibbles(blocks[..., 2:18]).flatten(-2).cast(dtypes.float32)
    return (q - 8.0) * _get_half(blocks, 0)


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


def _decode_q8_0(blocks: Tensor) -> Tensor:
    return blocks[..., 2:34].bitcast(dtypes.int8).cast(dtypes.float32) * _get_half(blocks, 0)


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


_DECODERS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "Q4_0": _decode_q4_0,
    "Q4_1": _decode_q4_1,
    "Q5_0": _decode_q5_0,
    "Q5_1": _decode_q5_1,
    "Q8_0": _decode_q8_0,
    "Q4_K": _decode_q4_k,
    "Q5_K": _decode_q5_k,
    "Q6_K": _decode_q6_k,
}
