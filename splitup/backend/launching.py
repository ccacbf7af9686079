"""Compiled kernels bound to memory, as functions without arguments.

In a batch, a kernel that is not shared runs once per execution, on views of that execution's rows.
The words that hold its addresses are then **cells**, which ``RowViews`` changes. That is done on
processors and with OpenCL; elsewhere the steps of several executions run one after the other.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

from tinygrad.device import Buffer, Device, TinyELF
from tinygrad.dtype import dtypes
from tinygrad.helpers import Target
from tinygrad.runtime.ops_cpu import CPUProgram

from splitup.backend.buffers import DRIVER_TURN
from splitup.backend.compiler.launch_sizes import LaunchTerms, compute_sizes
from splitup.backend.compiler.row_sums import is_for_tiles
from splitup.backend.compiler.schedule import Executable, Launch, Place
from splitup.cpu import kernel_sequence
from splitup.cpu.cache_writes import Copies
from splitup.cpu.kernel_sequence import LaunchFunction, Native, Parts
from splitup.cpu.native_kernels import NativeKernel, bind_kernel

Argument: TypeAlias = "Buffer | tuple[int, int]"  # the pair stands for (old or new, state)
# other code generators assume that a buffer begins at a multiple of 16 bytes
_MOVABLE_TARGET: Final = "X86"


class States(NamedTuple):
    """Both copies of an execution's state tensors; ``parity`` says which are the old ones."""

    pair: tuple[list[Buffer], list[Buffer]]
    copies: Copies
    parity: int

    def get(self, argument: tuple[int, int]) -> Buffer:
        """Return the old (0) or new (1) copy of a state."""
        side, state = argument
        return self.pair[side ^ self.parity][state]


class Word(Protocol):
    """What holds an address that a kernel reads when it is launched: a number, or a region."""

    value: Any


class Cell(NamedTuple):
    """The word that holds the address of a place, or of a part ``offset`` behind it."""

    value: Word
    start: Any
    place: Place
    offset: int


@runtime_checkable
class Joinable(Protocol):
    """A launch that its device takes together with those before and after it."""

    def join(self, launches: Sequence[Any]) -> LaunchFunction:
        """Return what launches all of these, in order."""
        ...


class Bound(NamedTuple):
    """A kernel on certain memory: a function, its machine code by part if it has any, its cells."""

    launch: LaunchFunction
    parts: Parts
    cells: list[Cell]


class Call(Protocol):
    """One launch of a task's schedule."""

    @property
    def is_movable(self) -> bool:
        """Return whether its addresses can be changed after it was bound."""
        ...

    def bind(self, states: States) -> Bound:
        """Return what launches the kernel on these state tensors."""
        ...


class Tiled(NamedTuple):
    """A kernel that does the same as another, faster where there are many rows."""

    runtime: Any
    sizes: tuple[Sequence[Any], Sequence[Any] | None]  # how many groups, of how many threads


class ExecutableCall:
    """One kernel of tinygrad's. ``rows`` holds the values of its variables at launch."""

    __slots__ = ("_arguments", "_device", "_executable", "_places", "_rows", "_runtime", "_tiled")

    def __init__(
        self,
        device: str,
        executable: Executable,
        runtime: Any,
        arguments: Sequence[Argument],
        places: Sequence[Place],
        rows: Mapping[str, ctypes.c_uint64],
        tiled: Tiled | None = None,
    ) -> None:
        self._device, self._executable, self._arguments = device, executable, arguments
        self._runtime, self._places, self._rows, self._tiled = runtime, places, rows, tiled

    @property
    def is_movable(self) -> bool:
        if getattr(self._runtime, "is_movable", False):
            alignments = self._runtime.alignments
            return all(
                place.row_bytes % alignments.get(slot, 1) == 0
                for slot, place in enumerate(self._places)
            )
        return self._is_plain and _MOVABLE_TARGET in self._executable.target

    @property
    def _is_plain(self) -> bool:
        return isinstance(self._runtime, CPUProgram) and self._executable.global_size[0] == 1

    def bind(self, states: States) -> Bound:
        raw = _resolve(self._device, self._arguments, states)
        executable = self._executable
        bound = [self._rows[name] for name in executable.variables]
        if self._is_plain:
            # tinygrad's own call builds these arguments for every launch: 5 µs instead of 1
            addresses = [ctypes.c_uint64(buffer.va_addr) for buffer in raw]
            cells = _list_cells([[address] for address in addresses], self._places)
            native = Native(self._runtime.addr, (*addresses, *bound))
            return Bound(functools.partial(self._runtime.fxn, *native.arguments), [native], cells)
        if hasattr(self._runtime, "make_launch"):
            variables = dict(zip(executable.variables, bound, strict=True))
            terms = LaunchTerms(raw, variables, executable.global_size, executable.local_size)
            tiled = () if self._tiled is None else (self._tiled,)  # by CUDA alone
            joinable = self._runtime.make_launch(terms, *tiled)
            cells = self._runtime.is_movable and _list_cells(
                [[one] for one in joinable.addresses], self._places
            )
            return Bound(joinable, [], cells or [])
        if not bound:
            launch_fixed = functools.partial(
                self._runtime,
                *raw,
                global_size=executable.global_size,
                local_size=executable.local_size,
            )
            return Bound(launch_fixed, [], [])

        def launch() -> None:
            values = {name: self._rows[name].value for name in executable.variables}
            chosen = Tiled(self._runtime, (executable.global_size, executable.local_size))
            if self._tiled is not None and is_for_tiles(values.values()):
                chosen = self._tiled
            groups, threads = (compute_sizes(sizes, values) for sizes in chosen.sizes)
            vals = tuple(values.values())
            chosen.runtime(*raw, global_size=groups, local_size=threads, vals=vals)

        return Bound(launch, [], [])


class NativeCall:
    """One native kernel and its buffers; ``updated`` is the state that it updates, if any."""

    __slots__ = (
        "_arguments",
        "_device",
        "_kernel",
        "_places",
        "_rows",
        "_threads",
        "updated",
    )

    def __init__(
        self,
        kernel: NativeKernel,
        device: str,
        arguments: Sequence[Argument],
        launch: Launch,
        rows: Mapping[str, ctypes.c_uint64],
        threads: int,
    ) -> None:
        self._kernel, self._device = kernel, device
        self._arguments, self._places, self._rows = arguments, launch.places, rows
        self._threads = threads
        self.updated = launch.places[0].index if launch.kind == "state update" else None

    @property
    def is_movable(self) -> bool:
        return True

    def bind(self, states: States) -> Bound:
        addresses = [raw.va_addr for raw in _resolve(self._device, self._arguments, states)]
        state = (states.copies, self.updated or 0, states.parity)
        bound = bind_kernel(self._kernel, addresses, self._rows, self._threads, state)
        parts = [Native(*native) for native in bound.natives]
        return Bound(bound, parts, _list_cells(bound.addresses, self._places))


class RowViews:
    """The cells of the kernels that one execution runs on its own rows."""

    __slots__ = ("_cells", "_where", "is_moved")

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._cells = cells
        self._where: tuple[int, Mapping[str, int]] = (0, {})
        self.is_moved = False

    def move(
        self, slot: int, first: Mapping[str, int], find_own: Callable[[int, Place], Any]
    ) -> None:
        """Let the kernels work from these rows on; an execution that runs alone has slot 0 and {}.

        ``find_own`` gives the address of a buffer that every slot but the first has of its own.
        """
        if (slot, first) == self._where:
            return
        self.is_moved = bool(slot or first)
        self._where = (slot, first)
        for value, start, place, offset in self._cells:
            if place.rows:
                value.value = start + first.get(place.rows, 0) * place.row_bytes
            elif slot:
                own = find_own(slot, place)
                value.value = own + offset if offset else own
            else:
                value.value = start


def join_launches(bound: Sequence[Bound], threads: int) -> list[LaunchFunction]:
    """Return functions that launch the kernels in order; what is machine code goes together."""
    if bound and isinstance(first := bound[0].launch, Joinable):
        with DRIVER_TURN:
            return [first.join([one.launch for one in bound])]
    return kernel_sequence.join_launches(
        [one.launch for one in bound], [one.parts for one in bound], threads
    )


def encode_records(bound: Bound, threads: int) -> tuple[bytes, ...] | None:
    """Return what ``launch_records`` runs the kernel by; None unless it is machine code."""
    if not bound.parts or not kernel_sequence.is_supported():
        return None
    return kernel_sequence.encode_records(bound.parts, threads)


def launch_records(records: Sequence[tuple[bytes, ...]]) -> None:
    """Run kernels one after the other, at least one."""
    kernel_sequence.make_launch(records)()


def load_executable(device: str, executable: Executable) -> Any:
    """Return tinygrad's runtime object of a kernel."""
    signature = tuple(
        (name, slot, getattr(dtypes, dtype), shape)
        for name, slot, dtype, shape in executable.signature
    )
    target = Target.parse(executable.target)
    with DRIVER_TURN:
        return Device[device].runtime(TinyELF(executable.code, executable.name, target, signature))


def _list_cells(addresses: Sequence[Sequence[Word]], places: Sequence[Place]) -> list[Cell]:
    return [
        Cell(value, value.value, place, value.value - values[0].value if part else 0)
        for values, place in zip(addresses, places, strict=True)
        if place.rows or place.is_own
        for part, value in enumerate(values)
    ]


def _resolve(device: str, arguments: Sequence[Argument], states: States) -> list[Any]:
    """Return the device's own handles of a kernel's buffers."""
    buffers = [states.get(item) if isinstance(item, tuple) else item for item in arguments]
    return [buffer.get_buf(device) for buffer in buffers]
