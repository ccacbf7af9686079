"""Native code: kernels by hand-written machine code, beside those that tinygrad compiles.

``NativeCode`` is all that the backend asks of a device's native code. ``splitup.cpu`` has it for
CPUs; another device's would stand beside it in ``find_native_code``.

    match    which kernels of a schedule, and which updates of states, it computes
    keep     its kernels as nested lists, for the kernel cache
    bind     a kernel on certain memory; ``splitup.backend.launching`` runs what is bound
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

from tinygrad.uop.ops import UOp

from splitup.cpu import native_kernels as cpu_kernels
from splitup.graph.rules import CheckedGraph

# Plain data that only the native code itself understands; equal kernels are equal data.
NativeKernel: TypeAlias = Hashable


class StateCopies(Protocol):
    """What is known of the rows of an execution's states, of each of which there are two copies."""

    def pop_ends(self, state: int) -> tuple[int, int]:
        """Return behind which row each copy is zeros; from now on both count as all zeros."""
        ...


class NativeUpdate(Protocol):
    """Native code for the update of a state. Its arguments: new and old copy, fresh, layout."""

    @property
    def kernel(self) -> NativeKernel:
        """Return the kernel."""
        ...

    @property
    def fresh(self) -> int:
        """Return the node of the rows that are written: an input or a value in memory."""
        ...

    @property
    def layout(self) -> int:
        """Return the number of the input that says where they are written."""
        ...


class BoundKernel(Protocol):
    """Native code bound to memory."""

    @property
    def addresses(self) -> Sequence[Sequence[ctypes.c_uint64]]:
        """Return for each argument the words that hold its address; they may be changed."""
        ...

    @property
    def natives(self) -> Sequence[tuple[int, list[ctypes.c_uint64]]]:
        """Return the address of its function and the arguments, for each of its parts."""
        ...

    def __call__(self) -> None:
        """Compute."""
        ...


class NativeCode(Protocol):
    """The native code of one kind of device."""

    CLASS_PART: str  # of the determinism class

    def is_supported(self) -> bool:
        """Return whether this machine runs it."""
        ...

    def split_call(self, call: UOp) -> tuple[UOp, ...]:
        """Return a kernel's call, or several of which some match."""
        ...

    def match_kernel(self, kernel: UOp) -> tuple[NativeKernel, tuple[int, ...]] | None:
        """Return native code for a kernel, and the slots of the arguments it takes."""
        ...

    def match_updates(self, graph: CheckedGraph) -> Mapping[int, NativeUpdate]:
        """Return native code for the updates of states, by state."""
        ...

    def encode_kernel(self, kernel: NativeKernel) -> list[Any]:
        """Return a kernel as nested lists of numbers and texts."""
        ...

    def decode_kernel(self, fields: Sequence[Any]) -> NativeKernel:
        """Return the kernel of ``encode_kernel``."""
        ...

    def make_copies(self, states: int) -> StateCopies:
        """Return what is known of the rows of fresh states."""
        ...

    def count_threads(self, kernels: Iterable[NativeKernel], threads: int) -> int:
        """Return how many threads are worth waking for kernels that run in sequence."""
        ...

    def bind_kernel(
        self,
        kernel: NativeKernel,
        addresses: Sequence[int],
        rows: Mapping[str, ctypes.c_uint64],
        threads: int,
        state: Any,
    ) -> BoundKernel:
        """Return a kernel on certain memory, in at most a part for each of the threads.

        ``rows`` holds the value of each symbol. ``state`` is (copies, state, which of the two
        copies is the old one).
        """
        ...


CPU_CLASS_PART: Final = cpu_kernels.CLASS_PART
_CODES: Final[Mapping[str, NativeCode]] = {"CPU": cpu_kernels}


def find_native_code(device: str) -> NativeCode | None:
    """Return the native code for a device such as "CPU" or "CUDA:1", None where there is none."""
    found = _CODES.get(device.partition(":")[0])
    return None if found is None or not found.is_supported() else found
