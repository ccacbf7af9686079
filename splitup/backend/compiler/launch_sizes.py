"""Launch sizes of GPU kernels that depend on a step's rows, as plain data.

A size is a number, the name of a variable, or (operation, size, size).
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from tinygrad.uop.ops import Ops, UOp

from splitup.core.errors import InvalidModel

_OPERATIONS: Final[Mapping[str, Callable[[int, int], int]]] = MappingProxyType(
    {
        "ADD": operator.add,
        "SUB": operator.sub,
        "MUL": operator.mul,
        "MAX": max,
        "XOR": operator.xor,
        "FLOORDIV": operator.floordiv,
        "FLOORMOD": operator.mod,
        "SHR": operator.rshift,
    }
)


class LaunchTerms(NamedTuple):
    """What a kernel is launched on: its memory, and how many groups of how many threads."""

    regions: Sequence[Any]
    variables: Mapping[str, ctypes.c_uint64]
    groups: Sequence[Any]
    threads: Sequence[Any] | None


def read_size(size: int | UOp) -> Any:
    """Return a size of tinygrad's; raises InvalidModel for an operation that is not listed."""
    if isinstance(size, int):
        return size
    if size.op in (Ops.PARAM, Ops.BUFFER):  # a variable
        return str(size.expr)
    if size.op is Ops.CONST:
        return int(size.val)
    if size.op.name not in _OPERATIONS:
        raise InvalidModel(f"a kernel's launch size is a {size.op.name} of the rows")
    return (size.op.name, *(read_size(one) for one in size.src))


def compute_size(size: Any, values: Mapping[str, int]) -> int:
    """Return a size for the values of the variables."""
    if isinstance(size, int):
        return size
    if isinstance(size, str):
        return values[size]
    name, *operands = size
    first, second = (compute_size(one, values) for one in operands)
    return _OPERATIONS[name](first, second)


def compute_sizes(sizes: Sequence[Any] | None, values: Mapping[str, int]) -> tuple[int, ...] | None:
    """Return all sizes of a launch; None when there are none."""
    return None if sizes is None else tuple(compute_size(size, values) for size in sizes)
