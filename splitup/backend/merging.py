"""Consecutive steps of one execution in one pass over the weights, with the bytes of single steps.

Whoever computes a task again has all inputs at hand. The kernels are divided into blocks
(``splitup.backend.batching.find_spans``):

    shared   every kernel runs once over the rows of all steps, as in a batch of executions
    others   all kernels of the block run for the first step, then for the second one, and so on,
             as in steps of their own: on rows from the first one on, with the number of rows and
             the copies of the states that the step would have alone

All kernels that touch a state are in one block of the second kind, so that each step finds the
state that the one before it left. What such a block reads of earlier blocks is saved before its
first step and put in place for each, since steps overwrite each other's memory. What later blocks
need of it is collected, and put in place when the block has ended.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from splitup.backend.buffers import Rows
from splitup.backend.compiler.schedule import Block, Place
from splitup.backend.launching import Bound, join_launches
from splitup.core import tuning

_ALIGNMENT: Final = 64

Words = Mapping[str, ctypes.c_uint64]
LaunchFunction = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class _Value:
    """A value that crosses the borders of a block: where it is, and where steps' shares are saved.

    A value without rows has one share for each step, ``row_bytes`` long.
    """

    address: int
    saved: int  # offset
    rows: str
    row_bytes: int
    is_read: bool
    is_kept: bool


class _Memory:
    """The memory for saved values, one for all tasks of a process: one pass runs at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._buffer = ctypes.create_string_buffer(1)

    def get_address(self, nbytes: int) -> int:
        """Return the address of at least so many bytes; the caller holds the lock."""
        if len(self._buffer) < nbytes:
            self._buffer = ctypes.create_string_buffer(nbytes)
        return ctypes.addressof(self._buffer)


_memory: Final = _Memory()


class StepLaunches:
    """What launches a state's kernels, block by block, with either copy of the state as old one."""

    __slots__ = ("_bound", "blocks")

    def __init__(
        self, blocks: Sequence[Block], bound: tuple[list[Bound], list[Bound]], threads: int
    ) -> None:
        self._bound = bound  # keeps the words that machine code reads its arguments from
        self.blocks = [
            [join_launches(one[block.first : block.end], threads) for block in blocks]
            for one in bound
        ]


class MergedSteps:
    """The blocks of a task, and where its values are saved meanwhile."""

    def __init__(
        self,
        blocks: Sequence[Block],
        most_steps: int,
        most_rows: Rows,
        get_address: Callable[[Place], int],
    ) -> None:
        self.blocks = blocks
        own: dict[Place, int] = {}
        end = 0
        for place in (place for block in blocks for place in (*block.read, *block.kept)):
            if not place.rows and place not in own:  # no shared block mentions it
                own[place] = end
                end += _round_up(most_steps * place.nbytes)
        self._values: list[list[_Value]] = []
        self._saved_bytes = first = end
        for block in blocks:
            values, end = [], first
            for place in dict.fromkeys((*block.read, *block.kept)):
                is_read, is_kept = place in block.read, place in block.kept
                address, row_bytes, saved = get_address(place), place.row_bytes, end
                if place.rows:
                    end += _round_up(most_rows[place.rows] * row_bytes)
                else:
                    row_bytes, saved = place.nbytes, own[place]
                values.append(_Value(address, saved, place.rows, row_bytes, is_read, is_kept))
            self._values.append(values)
            self._saved_bytes = max(self._saved_bytes, end)

    @property
    def is_small(self) -> bool:
        """Return whether the memory for saved values is within its bound."""
        return self._saved_bytes <= tuning.MERGE_BYTES

    def run(
        self,
        launches: Sequence[Sequence[Sequence[LaunchFunction]]],
        steps: Sequence[tuple[Rows, Mapping[str, int]]],
        total: Rows,
        words: tuple[Words, Words],
    ) -> None:
        """Compute ``steps``: the rows of each, and its first row among all, by symbol.

        ``launches`` are those of each step by block. ``words`` are the numbers of rows that kernels
        read, those of a step and those of a batch.
        """
        with _memory.lock:
            self._run(launches, steps, total, words, _memory.get_address(self._saved_bytes))

    def _run(
        self,
        launches: Sequence[Sequence[Sequence[LaunchFunction]]],
        steps: Sequence[tuple[Rows, Mapping[str, int]]],
        total: Rows,
        words: tuple[Words, Words],
        memory: int,
    ) -> None:
        for number, (block, values) in enumerate(zip(self.blocks, self._values, strict=True)):
            if block.is_shared:
                _set_words(words, total)
                _launch(launches[0][number])
                continue
            with_rows = [value for value in values if value.rows]
            for value in with_rows:
                if value.is_read:
                    nbytes = total[value.rows] * value.row_bytes
                    ctypes.memmove(memory + value.saved, value.address, nbytes)
            for step, (rows, first) in enumerate(steps):
                shares = []
                for value in values:
                    place, count = first.get(value.rows, step), rows.get(value.rows, 1)
                    saved = memory + value.saved + place * value.row_bytes
                    shares.append((value, saved, count * value.row_bytes))
                for value, saved, nbytes in shares:
                    if value.is_read:
                        ctypes.memmove(value.address, saved, nbytes)
                _set_words(words, rows)
                _launch(launches[step][number])
                for value, saved, nbytes in shares:
                    if value.is_kept:
                        ctypes.memmove(saved, value.address, nbytes)
            for value in with_rows:
                if value.is_kept:
                    nbytes = total[value.rows] * value.row_bytes
                    ctypes.memmove(value.address, memory + value.saved, nbytes)


def _launch(launches: Sequence[LaunchFunction]) -> None:
    for launch in launches:
        launch()


def _set_words(words: tuple[Words, Words], rows: Rows) -> None:
    for group in words:
        for name, count in rows.items():
            group[name].value = count


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
