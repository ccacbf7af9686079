"""A schedule as bytes: the compiler's process makes them, a worker loads them.

    u32 header bytes | header, JSON | machine code

The header is a ``Schedule`` as nested lists in the order of its fields, with the length of each
piece of machine code in its place. Bytes of a stranger are never decoded: they hold machine code.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, Final

from splitup.backend.compiler.schedule import Block, Executable, Launch, Place, Schedule
from splitup.core import limits
from splitup.core.codec import parse_json
from splitup.cpu.native_kernels import decode_kernel, encode_kernel

_LENGTH: Final = struct.Struct("<I")


def encode_schedule(schedule: Schedule) -> bytes:
    """Return a schedule's bytes."""
    header = [
        schedule.inputs,
        schedule.weights,
        schedule.states,
        schedule.values,
        [_list_place(place) for place in schedule.outputs],
        [_list_executable(item) for item in schedule.executables],
        [encode_kernel(kernel) for kernel in schedule.natives],
        [
            [one.kind, one.index, one.is_shared, one.tiled, *map(_list_place, one.places)]
            for one in schedule.launches
        ],
        [
            [block.first, block.end, block.is_shared, *map(_list_places, (block.read, block.kept))]
            for block in schedule.blocks
        ],
    ]
    text = json.dumps(header, separators=(",", ":")).encode()
    codes = b"".join(item.code for item in schedule.executables)
    return _LENGTH.pack(len(text)) + text + codes


def decode_schedule(data: bytes) -> Schedule:
    """Return the schedule of ``encode_schedule``."""
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    header = parse_json(
        data[_LENGTH.size : end],
        max_values=limits.MAX_DOCUMENT_VALUES,
        max_growth=limits.DENSE_GROWTH,
    )
    inputs, weights, states, values, outputs, executables, natives, launches, blocks = header
    read = []
    for code_bytes, *numbers in executables:
        read.append(_read_executable(data[end : end + code_bytes], numbers))
        end += code_bytes
    return Schedule(
        inputs=tuple(inputs),
        weights=tuple(weights),
        states=tuple(states),
        values=tuple(values),
        outputs=tuple(Place(*place) for place in outputs),
        executables=tuple(read),
        natives=tuple(map(decode_kernel, natives)),
        launches=tuple(
            Launch(kind, index, tuple(Place(*place) for place in places), is_shared, tiled)
            for kind, index, is_shared, tiled, *places in launches
        ),
        blocks=tuple(
            Block(first, end, is_shared, *(tuple(Place(*one) for one in row) for row in places))
            for first, end, is_shared, *places in blocks
        ),
    )


def _list_place(place: Place) -> list[Any]:
    return list(astuple(place))


def _list_places(places: Sequence[Place]) -> list[list[Any]]:
    return [_list_place(place) for place in places]


def _list_executable(item: Executable) -> list[Any]:
    return [
        len(item.code),
        item.name,
        item.target,
        item.signature,
        item.variables,
        item.global_size,
        item.local_size,
    ]


def _read_executable(code: bytes, values: Sequence[Any]) -> Executable:
    name, target, signature, variables, global_size, local_size = values
    return Executable(
        code=code,
        name=name,
        target=target,
        signature=tuple((n, slot, dtype, tuple(shape)) for n, slot, dtype, shape in signature),
        variables=tuple(variables),
        global_size=tuple(global_size),
        local_size=None if local_size is None else tuple(local_size),
    )
