"""Bytes into and out of a device's buffers, rows where a symbol counts them."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Mapping

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


def make_port_writer(buffer: Buffer, spec: TensorSpec) -> Callable[[bytes | memoryview], None]:
    """Return a function that fills an input's buffer, up to the rows that it is given."""
    stride = _get_row_stride(spec)
    if buffer.device != "CPU":
        write = make_writer(buffer)

        def write_padded(data: bytes | memoryview) -> None:
            write(_spread_rows(data, spec.row_bytes, stride))

        return write_padded
    view = buffer.as_memoryview(force_zero_copy=True).cast("B")
    table = np.frombuffer(view, np.uint8)
    if spec.rows:
        table = table.reshape(spec.shape[0], stride)[:, : spec.row_bytes]

    def fill(data: bytes | memoryview) -> None:
        if stride == spec.row_bytes or len(data) == spec.row_bytes:
            view[: len(data)] = data
        else:
            rows = np.frombuffer(data, np.uint8).reshape(-1, spec.row_bytes)
            table[: len(rows)] = rows

    return fill


def make_port_reader(
    buffer: Buffer, spec: TensorSpec, bound: Mapping[str, ctypes.c_uint64]
) -> Callable[[], bytes]:
    """Return a function that waits for the device and copies an output's rows out."""
    read = make_reader(buffer)
    if not spec.rows:
        return read
    stride, length, rows = _get_row_stride(spec), spec.row_bytes, bound[spec.rows]
    if buffer.device == "CPU":
        view = buffer.as_memoryview(force_zero_copy=True).cast("B")
        table = np.frombuffer(view, np.uint8).reshape(-1, stride)[:, :length]
        return lambda: bytes(view[:length]) if rows.value == 1 else table[: rows.value].tobytes()
    return lambda: (
        np.frombuffer(read(), np.uint8).reshape(-1, stride)[: rows.value, :length].tobytes()
    )


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
