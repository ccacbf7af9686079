"""Copies inputs into a device's buffers and outputs out of them, by rows where these vary."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from tinygrad.device import Buffer, Device

from splitup.core import tuning
from splitup.core.errors import InvalidInput
from splitup.core.tensors import ITEM_BYTES, TensorSpec
from splitup.graph.ir import count_rows
from splitup.graph.memory import get_stride

# Held while a GPU's driver is called: a task is loaded on a thread of its own, while steps run, and
# drivers' queues are not for several threads. On the CPU a step touches nothing that they share.
DRIVER_TURN: Final = threading.RLock()
COPIED_APART_BYTES: Final = 1 << 20  # less may be copied while Python goes on

Rows = dict[str, int]  # how many rows a step binds each symbol to
First = tuple[tuple[str, int], ...]  # first row by symbol; () where a step runs alone
Inputs = Sequence[bytes | memoryview]
Writer = Callable[[bytes | memoryview], None]


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """How to copy the inputs and outputs of a step, for inputs of certain lengths.

    With cold caches every Python object that a step touches costs 0.1 µs, so it holds few.
    """

    lengths: tuple[int, ...]
    rows: Rows
    bools: tuple[tuple[str, int], ...]  # name and position of inputs
    views: tuple[tuple[memoryview, int], ...]  # targets of contiguous inputs, by position
    writers: tuple[tuple[Writer, int], ...]  # for the other inputs, by position
    readers: tuple[Callable[[], bytes], ...]  # one per output
    states: tuple[tuple[int, int], ...]  # outputs that are new states: position, state

    def write(self, inputs: Inputs) -> None:
        """Copy the inputs, which have these lengths, into their buffers.

        Raises InvalidInput, before anything is written, for a bool that is neither 0 nor 1.
        """
        for name, index in self.bools:
            check_bools(name, inputs[index])
        for view, index in self.views:
            view[:] = inputs[index]
        for write, index in self.writers:
            write(inputs[index])

    def read(self, states: Sequence[Buffer]) -> list[bytes]:
        """Wait for the device and return the outputs."""
        outputs = [read() for read in self.readers]
        for index, state in self.states:
            outputs[index] = make_reader(states[state])()
        return outputs


class Ports:
    """The inputs and outputs of a task and their buffers; an output may be the n-th state."""

    def __init__(
        self,
        inputs: Sequence[tuple[TensorSpec, Buffer]],
        outputs: Sequence[tuple[TensorSpec, Buffer | int]],
    ) -> None:
        self._inputs, self._outputs = inputs, outputs
        self._specs = [spec for spec, _ in inputs]
        self._prepared: dict[tuple[tuple[int, ...], First], PreparedStep] = {}

    @property
    def reads_states(self) -> bool:
        """Return whether an output is among the new states."""
        return any(isinstance(place, int) for _, place in self._outputs)

    def prepare(self, inputs: Inputs, first: First = ()) -> PreparedStep:
        """Return how to copy inputs of such lengths, to rows from ``first`` of each symbol on.

        Raises InvalidInput when their number or a length is wrong, or when those of one symbol
        disagree on their rows.
        """
        key = (tuple(map(len, inputs)), first)
        if (found := self._prepared.get(key)) is None:
            found = self._prepare(inputs, dict(first))
            if len(self._prepared) >= tuning.PREPARED_STEPS:
                self._prepared.clear()
            self._prepared[key] = found
        return found

    def _prepare(self, inputs: Inputs, first: Mapping[str, int]) -> PreparedStep:
        if len(inputs) != len(self._specs):
            raise InvalidInput(f"the task takes {len(self._specs)} inputs and got {len(inputs)}")
        rows = count_rows(self._specs, inputs)

        def place(spec: TensorSpec) -> tuple[int, int]:
            return first.get(spec.rows, 0), rows.get(spec.rows, 0)

        targets = [_view_port(buffer, spec, *place(spec)) for spec, buffer in self._inputs]
        return PreparedStep(
            lengths=tuple(map(len, inputs)),
            rows=rows,
            bools=tuple((s.name, i) for i, s in enumerate(self._specs) if s.dtype == "bool"),
            views=tuple((view, i) for i, view in enumerate(targets) if view is not None),
            writers=tuple(
                (_make_port_writer(buffer, spec, *place(spec)), i)
                for i, (spec, buffer) in enumerate(self._inputs)
                if targets[i] is None
            ),
            readers=tuple(
                bytes if isinstance(buffer, int) else _make_port_reader(buffer, spec, *place(spec))
                for spec, buffer in self._outputs
            ),
            states=tuple((i, n) for i, (_, n) in enumerate(self._outputs) if isinstance(n, int)),
        )


def check_bools(name: str, data: bytes | memoryview) -> None:
    """Raise InvalidInput when a byte of bools is neither 0 nor 1."""
    if bytes(data).translate(None, b"\0\1"):
        raise InvalidInput(f"input '{name}' is bool and holds a byte other than 0, 1")


def make_writer(buffer: Buffer) -> Callable[[bytes | memoryview], None]:
    """Return a function that fills the buffer; on the CPU, by a view of its memory."""
    if buffer.device == "CPU":
        view = buffer.as_memoryview(force_zero_copy=True).cast("B")
        return functools.partial(view.__setitem__, slice(None))
    return functools.partial(_fill, buffer)


def make_reader(buffer: Buffer) -> Callable[[], bytes]:
    """Return a function that waits for the device and copies the buffer's bytes out."""
    if buffer.device == "CPU":
        view: memoryview = buffer.as_memoryview(force_zero_copy=True).cast("B")
        return view.tobytes
    return lambda: bytes(_copy_out(buffer, buffer._buf, buffer.nbytes))


def _fill(buffer: Buffer, data: bytes | memoryview) -> None:
    """Copy to all of a buffer that is no view, in pieces if that is much.

    A runtime keeps what it is given until the device has it, CUDA's in memory of the host that is
    pinned. And between two pieces another thread may use the device.
    """
    if len(data) < COPIED_APART_BYTES:
        _copy_in(buffer, buffer._buf, data)
        return
    whole = memoryview(data).cast("B")
    for start in range(0, len(whole), COPIED_APART_BYTES):
        piece = whole[start : start + COPIED_APART_BYTES]
        with DRIVER_TURN:
            _copy_in(buffer, buffer.allocator._offset(buffer._buf, len(piece), start), piece)
            Device[buffer.device].synchronize()


def _copy_in(buffer: Buffer, part: Any, data: bytes | memoryview) -> None:
    with DRIVER_TURN:
        buffer.allocator._copyin(part, memoryview(bytearray(data)))


def release_in_turn(release: Callable[[Any], Any], handle: Any) -> None:
    """Release what a driver gave."""
    with DRIVER_TURN:
        release(handle)


def release_with(owner: object, release: Callable[[Any], Any], handle: Any) -> None:
    """Release a handle when its owner is gone, which may be noticed on any thread."""
    weakref.finalize(owner, release_in_turn, release, handle).atexit = False


def _copy_out(buffer: Buffer, part: Any, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    with DRIVER_TURN:
        buffer.allocator._copyout(memoryview(data), part)
    return data


def _view_port(buffer: Buffer, spec: TensorSpec, first: int, count: int) -> memoryview | None:
    """Return a view of ``count`` rows of a port, None unless they are contiguous host memory."""
    if buffer.device != "CPU":
        return None
    view: memoryview = buffer.as_memoryview(force_zero_copy=True).cast("B")
    if not spec.rows:
        return view
    stride, length = _get_row_stride(spec), spec.row_bytes
    if stride != length and count != 1:
        return None
    return view[first * stride : first * stride + count * length]


def _make_port_writer(buffer: Buffer, spec: TensorSpec, first: int, count: int) -> Writer:
    """Return a function that fills rows of an input's buffer that are not contiguous."""
    if buffer.device == "CPU":
        rows = _view_rows(buffer, spec, first, count)

        def fill(data: bytes | memoryview) -> None:
            rows[:] = np.frombuffer(data, rows.dtype)

        return fill
    if not spec.rows:
        return make_writer(buffer)
    stride, length = _get_row_stride(spec), spec.row_bytes
    part = buffer.allocator._offset(buffer._buf, count * stride, first * stride)
    return lambda data: _copy_in(buffer, part, _spread_rows(data, length, stride))


def _make_port_reader(
    buffer: Buffer, spec: TensorSpec, first: int, count: int
) -> Callable[[], bytes]:
    """Return a function that waits for the device and copies rows of an output out."""
    if (view := _view_port(buffer, spec, first, count)) is not None:
        return view.tobytes
    if buffer.device == "CPU":
        return _view_rows(buffer, spec, first, count).tobytes
    if not spec.rows:
        return make_reader(buffer)
    stride, nbytes = _get_row_stride(spec), count * _get_row_stride(spec)
    part = buffer.allocator._offset(buffer._buf, nbytes, first * stride)

    def read_rows() -> bytes:
        table = np.frombuffer(_copy_out(buffer, part, nbytes), np.uint8).reshape(count, stride)
        return table[:, : spec.row_bytes].tobytes()

    return read_rows


def _view_rows(
    buffer: Buffer, spec: TensorSpec, first: int, count: int
) -> np.ndarray[Any, np.dtype[np.void]]:
    """Return an array with one item of opaque bytes per row."""
    view = buffer.as_memoryview(force_zero_copy=True).cast("B")
    stride, item = _get_row_stride(spec), np.dtype((np.void, spec.row_bytes))
    return np.ndarray((count,), item, view, first * stride, (stride,))


def _get_row_stride(spec: TensorSpec) -> int:
    """Return the distance of a port's rows in memory, in bytes."""
    length = math.prod(spec.shape[1:])
    return get_stride(length) * ITEM_BYTES[spec.dtype] if spec.rows else spec.nbytes


def _spread_rows(data: bytes | memoryview, length: int, stride: int) -> bytes:
    """Return rows of ``length`` bytes with gaps between them."""
    if length == stride:
        return bytes(data)
    rows = np.frombuffer(data, np.uint8).reshape(-1, length)
    return np.pad(rows, ((0, 0), (0, stride - length))).tobytes()
