"""Bytes into and out of a device's buffers, rows where a symbol counts them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
from tinygrad.device import Buffer

from splitup.graph.memory import get_stride
from splitup.tensors import ITEM_BYTES, TensorSpec


def make_writer(buffer: Buffer) -> Callable[[bytes | memoryview], None]:
    """Return a function that fills the buffer; on the CPU, where kernels run in step, by a view."""
    if buffer.device == "CPU":
        view = buffer.as_memoryview(force_zero_copy=True).cast("B")
        return functools.partial(view.__setitem__, slice(None))

    def write(data: bytes | memoryview) -> None:
        buffer.allocator._copyin(buffer._buf, memoryview(bytearray(data)))

    return write


def make_reader(buffer: Buffer) -> Callable[[], bytes]:
    """Return a function that waits for the device and copies the buffer's bytes out."""
    if buffer.device == "CPU":
        view: memoryview = buffer.as_memoryview(force_zero_copy=True).cast("B")
        return view.tobytes
    return lambda: bytes(buffer.as_memoryview())


def make_port_writer(buffer: Buffer, spec: TensorSpec) -> Callable[[bytes | memoryview, int], None]:
    """Return a function that fills an input's buffer with the rows it is given, from a row on.

    Only the CPU's can begin behind the first row.
    """
    stride = _get_row_stride(spec)
    if buffer.device != "CPU":
        write = make_writer(buffer)

        def write_padded(data: bytes | memoryview, first: int = 0) -> None:
            write(_spread_rows(data, spec.row_bytes, stride))

        return write_padded
    view = buffer.as_memoryview(force_zero_copy=True).cast("B")
    table = np.frombuffer(view, np.uint8)
    if spec.rows:
        table = table.reshape(spec.shape[0], stride)[:, : spec.row_bytes]

    def fill(data: bytes | memoryview, first: int = 0) -> None:
        if stride == spec.row_bytes or len(data) == spec.row_bytes:
            view[first * stride : first * stride + len(data)] = data
        else:
            rows = np.frombuffer(data, np.uint8).reshape(-1, spec.row_bytes)
            table[first : first + len(rows)] = rows

    return fill


def make_port_reader(buffer: Buffer, spec: TensorSpec) -> Callable[[int, int], bytes]:
    """Return a function that waits for the device and copies rows of an output out.

    It takes the first row and their number; without rows, it copies all whatever it gets.
    """
    read = make_reader(buffer)
    if not spec.rows:
        return lambda first, count: read()
    stride, length = _get_row_stride(spec), spec.row_bytes
    if buffer.device == "CPU":
        view = buffer.as_memoryview(force_zero_copy=True).cast("B")
        table = np.frombuffer(view, np.uint8).reshape(-1, stride)[:, :length]
        return lambda first, count: (
            bytes(view[first * stride : first * stride + length])
            if count == 1
            else table[first : first + count].tobytes()
        )

    def read_rows(first: int, count: int) -> bytes:
        table = np.frombuffer(read(), np.uint8).reshape(-1, stride)
        return table[first : first + count, :length].tobytes()

    return read_rows


def _get_row_stride(spec: TensorSpec) -> int:
    """Return how many bytes apart a port's rows are in memory."""
    length = math.prod(spec.shape[1:])
    return get_stride(length) * ITEM_BYTES[spec.dtype] if spec.rows else spec.nbytes


def _spread_rows(data: bytes | memoryview, length: int, stride: int) -> bytes:
    """Return rows of ``length`` bytes with gaps between them."""
    if length == stride:
        return bytes(data)
    rows = np.frombuffer(data, np.uint8).reshape(-1, length)
    return np.pad(rows, ((0, 0), (0, stride - length))).tobytes()
