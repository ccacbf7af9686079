"""Memory in which every access outside a buffer ends the process, or is seen afterwards.

tinygrad's CPU buffers, and the values within an arena, each lie between two pages that may not be
touched: right behind the first one, or right before the second. What is left of their last page is
filled with a byte, and so are buffers before they are written. Whoever runs a task twice, at both
places and with another byte, sees whether a result depends on what lies around.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal
from unittest.mock import patch

from tinygrad.runtime import ops_cpu

from splitup.backend.compiler import arena_layout
from splitup.backend.compiler.schedule import Place, Schedule
from splitup.backend.runtime import TaskProgram
from splitup.graph.memory import LiveRange

PAGE: Final = mmap.PAGESIZE
_kept: Final[list[mmap.mmap]] = []  # tinygrad's device keeps some buffers for its own use
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where buffers lie between the pages around them, and the byte that fills the rest."""

    side: Literal["start", "end"]
    fill: int


class GuardedMemory:
    """All buffers that were allocated while it was in force."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        self._fillings: list[tuple[int, int]] = []  # address, length

    def allocate(self, size: int, owner: Any) -> ops_cpu.HCQBuffer:
        """Return a buffer between two pages that may not be touched."""
        body = round_to_pages(size)
        area = mmap.mmap(-1, body + 2 * PAGE, mmap.MAP_ANON | mmap.MAP_PRIVATE)
        _kept.append(area)
        first = ctypes.addressof(ctypes.c_char.from_buffer(area)) + PAGE
        ctypes.memset(first, self._surroundings.fill, body)
        protect(first - PAGE)
        protect(first + body)
        is_last = self._surroundings.side == "end"
        address = first + body - size if is_last else first
        self._fillings.append((first if is_last else first + size, body - size))
        view = ops_cpu.MMIOInterface(address, size, fmt="B")
        return ops_cpu.HCQBuffer(address, size, view=view, owner=owner)

    def watch(self, address: int, length: int) -> None:
        """Protect the page before and the page behind a value in an arena; watch its last page."""
        body = round_to_pages(length)
        is_last = self._surroundings.side == "end"
        first = address + length - body if is_last else address
        protect(first - PAGE)
        protect(first + body)
        self._fillings.append((first if is_last else first + length, body - length))

    def is_intact(self) -> bool:
        """Return whether nothing was written around the buffers."""
        return all(
            ctypes.string_at(address, length) == bytes([self._surroundings.fill]) * length
            for address, length in self._fillings
        )


def round_to_pages(length: int) -> int:
    """Return the length of the pages that hold so many bytes."""
    return -(-length // PAGE) * PAGE


def protect(address: int) -> None:
    """Let every access to a page end the process."""
    if _libc.mprotect(address, PAGE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")


@contextmanager
def guard_allocations(memory: GuardedMemory) -> Iterator[None]:
    """Allocate all CPU buffers in this memory."""

    def allocate(self: Any, size: int, options: Any = None) -> ops_cpu.HCQBuffer:
        return memory.allocate(size, self.dev)

    with patch.object(ops_cpu.CPUAllocator, "alloc", allocate):
        yield


def keep_freed_buffers() -> None:
    """Never use a buffer again in this process, which would find it guarded and full."""

    def free(self: Any, *args: Any, **options: Any) -> None:
        pass

    ops_cpu.CPUAllocator.free = free


@contextmanager
def separate_values() -> Iterator[None]:
    """Lay out arenas so that no two values share a page, with a page between them and around."""

    def place(ranges: Sequence[LiveRange]) -> tuple[list[int], int]:
        offsets, end = [], PAGE
        for one in ranges:
            offsets.append(end)
            end += round_to_pages(one.nbytes) + PAGE
        return offsets, end

    with (
        patch.object(arena_layout, "place_buffers", place),
        patch.object(arena_layout, "round_up", lambda nbytes: nbytes),
    ):
        yield


def move_values(schedule: Schedule, surroundings: Surroundings) -> Schedule:
    """Return a schedule of separate values with each at its side of its pages."""

    def move(place: Place) -> Place:
        if place.role != "value" or surroundings.side == "start":
            return place
        return replace(place, offset=place.offset + round_to_pages(place.nbytes) - place.nbytes)

    launches = tuple(
        replace(launch, places=tuple(map(move, launch.places))) for launch in schedule.launches
    )
    blocks = tuple(
        replace(block, read=tuple(map(move, block.read)), kept=tuple(map(move, block.kept)))
        for block in schedule.blocks
    )
    outputs = tuple(map(move, schedule.outputs))
    return replace(schedule, launches=launches, blocks=blocks, outputs=outputs)


def watch_values(memory: GuardedMemory, program: TaskProgram, schedule: Schedule) -> None:
    """Protect what lies between the values of a program's arena."""
    places = {place for launch in schedule.launches for place in launch.places}
    for index, offset, nbytes in {
        (p.index, p.offset, p.nbytes) for p in places if p.role == "value"
    }:
        base = program._buffers["value"][index].get_buf("CPU").va_addr
        memory.watch(base + offset, nbytes)
