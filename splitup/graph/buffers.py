"""Bytes into and out of a device's buffers, rows where a symbol counts them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tinygrad.device import Buffer

from splitup import limits
from splitup.errors import InvalidInput
from splitup.graph.ir import count_rows
from splitup.graph.memory import get_stride
from splitup.tensors import ITEM_BYTES, TensorSpec

Rows = dict[str, int]  # how many rows a step binds each symbol to
First = tuple[tuple[str, int], ...]  # of each symbol
Inputs = Sequence[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """How the inputs of a step get in and its outputs out, for inputs of certain lengths."""

    rows: Rows
    writers: tuple[Callable[[bytes | memoryview], None], ...]
    readers: tuple[Callable[[], bytes] | int, ...]

    def write(self, inputs: Inputs) -> None:
        """Fill the buffers of the inputs, which are of these lengths."""
        for write, data in zip(self.writers, inputs, strict=True):
            write(data)

    def read(self, states: Sequence[Buffer]) -> list[bytes]:
        """Wait for the device and return the outputs; some are among the new states."""
        return [
            make_reader(states[read])() if isinstance(read, int) else read()
            for read in self.readers
        ]


class Ports:
    """The inputs and outputs of a task and their buffers; an output may be the n-th state."""

    def __init__(
        self,
        inputs: Sequence[tuple[TensorSpec, Buffer]],
        outputs: Sequence[tuple[TensorSpec, Buffer | int]],
    ) -> None:
        self._inputs, self._outputs = inputs, outputs
        self._specs = [spec for spec, _ in inputs]
        self._bools = [i for i, spec in enumerate(self._specs) if spec.dtype == "bool"]
        self._prepared: dict[tuple[tuple[int, ...], First], PreparedStep] = {}

    @property
    def reads_states(self) -> bool:
        """Return whether an output is among the new states."""
        return any(isinstance(place, int) for _, place in self._outputs)

    def prepare(self, inputs: Inputs, first: First = ()) -> PreparedStep:
        """Return how to get these inputs in, at the ``first`` rows of each symbol.

        Raises InvalidInput when their number, a length or what a bool holds is wrong, or when
        those of one symbol disagree on their rows.
        """
        key = (tuple(map(len, inputs)), first)
        if (found := self._prepared.get(key)) is None:
            found = self._prepare(inputs, dict(first))
            if len(self._prepared) >= limits.PREPARED_STEPS:
                self._prepared.clear()
            self._prepared[key] = found
        for index in self._bools:
            if bytes(inputs[index]).translate(None, b"\0\1"):
                name = self._specs[index].name
                raise InvalidInput(f"input '{name}' is bool and holds a byte other than 0, 1")
        return found

    def _prepare(self, inputs: Inputs, first: Mapping[str, int]) -> PreparedStep:
        if len(inputs) != len(self._specs):
            raise InvalidInput(f"the task takes {len(self._specs)} inputs and got {len(inputs)}")
        rows = count_rows(self._specs, inputs)

        def place(spec: TensorSpec) -> tuple[int, int]:
            return first.get(spec.rows, 0), rows.get(spec.rows, 0)

        return PreparedStep(
            rows,
            tuple(make_port_writer(buffer, spec, *place(spec)) for spec, buffer in self._inputs),
            tuple(
                buffer if isinstance(buffer, int) else make_port_reader(buffer, spec, *place(spec))
                for spec, buffer in self._outputs
            ),
        )


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


def make_port_writer(
    buffer: Buffer, spec: TensorSpec, first: int = 0, count: int = 0
) -> Callable[[bytes | memoryview], None]:
    """Return a function that fills an input's buffer with ``count`` rows, from a row on.

    Only the CPU's can begin behind the first row. The counts do not matter to a port without rows.
    """
    if not spec.rows:
        return make_writer(buffer)
    stride, length = _get_row_stride(spec), spec.row_bytes
    if buffer.device != "CPU":
        write = make_writer(buffer)
        return lambda data: write(_spread_rows(data, length, stride))
    view = buffer.as_memoryview(force_zero_copy=True).cast("B")
    if stride == length or count == 1:
        part = view[first * stride : first * stride + count * length]
        return functools.partial(part.__setitem__, slice(None))
    rows = _view_rows(view, first, count, stride, length)

    def fill(data: bytes | memoryview) -> None:
        rows[:] = np.frombuffer(data, rows.dtype)

    return fill


def make_port_reader(
    buffer: Buffer, spec: TensorSpec, first: int = 0, count: int = 0
) -> Callable[[], bytes]:
    """Return a function that waits for the device and copies ``count`` rows of an output out.

    The counts do not matter to a port without rows.
    """
    read = make_reader(buffer)
    if not spec.rows:
        return read
    stride, length = _get_row_stride(spec), spec.row_bytes
    if buffer.device == "CPU":
        view: memoryview = buffer.as_memoryview(force_zero_copy=True).cast("B")
        if stride == length or count == 1:
            return view[first * stride : first * stride + count * length].tobytes
        return _view_rows(view, first, count, stride, length).tobytes

    def read_rows() -> bytes:
        table = np.frombuffer(read(), np.uint8).reshape(-1, stride)
        return table[first : first + count, :length].tobytes()

    return read_rows


def _view_rows(
    view: memoryview, first: int, count: int, stride: int, length: int
) -> np.ndarray[Any, np.dtype[np.void]]:
    """Return rows as items, which numpy copies as they are."""
    return np.ndarray((count,), np.dtype((np.void, length)), view, first * stride, (stride,))


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
