"""Compute a part of a value from parts of its operands.

A **box** is an (offset, size) for every axis of a value. ``find_operands`` says which box of each
operand a node needs for a box of its own value; ``restrict_arg`` returns the node's argument for
the smaller value. The arithmetic of every element stays the same. A symbolic axis counts with its
largest size and is never divided: a box has all of it, or only the first row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from splitup.graph.ir import Arg, Dim, Dims, Graph
from splitup.graph.operations.spec import Value
from splitup.graph.operations.table import ARITHMETIC, CONVERSIONS

Box = tuple[tuple[int, int], ...]
_ELEMENTWISE: Final = frozenset(ARITHMETIC) | CONVERSIONS | {"CONTIGUOUS"}


class Indivisible(Exception):
    """The box cannot be computed from boxes of the operands."""


def make_full_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole value."""
    return tuple((0, size) for size in shape)


def is_full(box: Box, shape: Sequence[int]) -> bool:
    """Say whether a box is the whole value."""
    return box == make_full_box(shape)


def has(box: Box, part: Box) -> bool:
    """Say whether a box contains another one."""
    return all(
        start <= first and first + count <= start + size
        for (start, size), (first, count) in zip(box, part, strict=True)
    )


def join_boxes(boxes: Iterable[Box]) -> list[Box]:
    """Join boxes that touch along the last axis or contain each other.

    So the bytes of a quantised block stay together, its scale and its numbers, because a kernel
    reads them together; separate rows, as of gate and up, stay separate. The union is unchanged.
    """
    joined: list[Box] = []
    pending = sorted(boxes, reverse=True)
    while pending:
        box = pending.pop()
        for other in joined:
            if (both := _join_two(box, other)) is not None:
                joined.remove(other)
                pending.append(both)
                break
        else:
            joined.append(box)
    return joined


def _join_two(one: Box, two: Box) -> Box | None:
    for box, part in ((one, two), (two, one)):
        if has(box, part):
            return box
    (low, size), (high, count) = sorted((one[-1], two[-1]))
    if one[:-1] != two[:-1] or low + size < high:
        return None
    return (*one[:-1], (low, high + count - low))


def name_sizes(box: Box, dims: Dims) -> tuple[tuple[int, Dim], ...]:
    """Return a box in which the size of every whole symbolic axis is the symbol's name."""
    return tuple(
        (start, dim if isinstance(dim, str) and size > 1 else size)
        for (start, size), dim in zip(box, dims, strict=True)
    )


def find_operands(
    graph: Graph, values: Sequence[Value], index: int, box: Box
) -> list[tuple[int, Box]]:
    """Return (operand, box of it) for ``box`` of a node's value; raises Indivisible."""
    node = graph.nodes[index]
    shapes = [values[src].shape for src in node.srcs]
    if node.op in _ELEMENTWISE:
        return [(src, _unbroadcast(box, s)) for src, s in zip(node.srcs, shapes, strict=True)]
    if node.op == "LOOKUP":
        rank = len(shapes[1])
        return [(node.srcs[0], ((0, shapes[0][0]), *box[rank:])), (node.srcs[1], box[:rank])]
    if node.op == "SHRINK":
        pairs = zip(values[index].dims, values[node.srcs[0]].dims, strict=True)
        if any(isinstance(new, str) and new != old for new, old in pairs):
            raise Indivisible("SHRINK")
    if node.op == "STACK":
        offset, size = box[0]
        return [(src, box[1:]) for src in node.srcs[offset : offset + size]]
    if not node.srcs:
        return []
    return [(node.srcs[0], _find_operand(node.op, node.arg, box, shapes[0], values[index].shape))]


def restrict_arg(graph: Graph, dims: Dims, index: int, box: Box, operand: Box) -> Arg:
    """Return the node's argument for computing ``box`` from the box ``operand`` of its operand.

    ``dims`` are the node's own dimensions.
    """
    node = graph.nodes[index]
    named = name_sizes(box, dims)
    if node.op == "RESHAPE":
        return tuple(size for _, size in named)
    if node.op == "EXPAND":
        return tuple(size for _, size in named[: len(box) - len(operand)])
    if node.op == "SHRINK":
        return tuple((0, size) for _, size in named)  # the operand's box has the offset
    if node.op == "PAD":
        pads = _get_pairs(node.arg)
        return tuple(
            (max(before - offset, 0), name)
            for (before, _), (offset, _), (_, name) in zip(pads, box, named, strict=True)
        )
    return node.arg


def _unbroadcast(box: Box, shape: tuple[int, ...]) -> Box:
    tail = box[len(box) - len(shape) :]
    return tuple((0, 1) if size == 1 else axis for axis, size in zip(tail, shape, strict=True))


def _find_operand(
    op: str, arg: Arg, box: Box, shape: tuple[int, ...], result: tuple[int, ...]
) -> Box:
    if op == "RESHAPE":
        return _unreshape(box, result, shape)
    if op == "EXPAND":
        return box[len(box) - len(shape) :]
    if op == "REDUCE":
        return make_full_box(shape[: len(shape) - len(box)]) + box
    if op in ("PAD", "SHRINK"):
        pairs = _get_pairs(arg)
        if op == "SHRINK":
            return tuple(
                (start + offset, size)
                for (start, _), (offset, size) in zip(pairs, box, strict=True)
            )
        return tuple(
            axis if size == whole else _unpad(before, axis, size)
            for (before, _), axis, size, whole in zip(pairs, box, shape, result, strict=True)
        )
    assert isinstance(arg, tuple)  # PERMUTE or FLIP; check_graph has seen to it
    if op == "PERMUTE":
        places = [arg.index(axis) for axis in range(len(shape))]
        return tuple(box[place] for place in places)
    return tuple(
        (whole - offset - size, size) if flipped else (offset, size)
        for (offset, size), flipped, whole in zip(box, arg, shape, strict=True)
    )


def _get_pairs(arg: Arg) -> tuple[tuple[int, int], ...]:
    assert isinstance(arg, tuple)  # check_graph has seen to it
    return arg  # type: ignore[return-value]


def _unpad(before: int, axis: tuple[int, int], inner: int) -> tuple[int, int]:
    start, end = max(axis[0] - before, 0), min(axis[0] + axis[1] - before, inner)
    if end <= start:
        raise Indivisible("PAD")
    return start, end - start


def _unreshape(box: Box, result: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    """Map a box through a reshape, group by group of axes with equal products."""
    operand: list[tuple[int, int]] = []
    i = j = 0
    while i < len(result) or j < len(shape):
        first_i, first_j = i, j
        left = right = 1
        while True:
            if left <= right and i < len(result) and (left < right or i == first_i):
                left, i = left * result[i], i + 1
            elif j < len(shape) and (right < left or j == first_j):
                right, j = right * shape[j], j + 1
            else:
                break
        operand += _map_group(box[first_i:i], result[first_i:i], shape[first_j:j])
    return tuple(operand)


def _map_group(box: Box, result: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    """Map the box of a group of axes; only an interval of the group's first axis is possible."""
    if is_full(box, result):
        return make_full_box(shape)
    axes = [(axis, size) for axis, size in zip(box, result, strict=True) if size > 1]
    if not is_full(tuple(axis for axis, _ in axes[1:]), [size for _, size in axes[1:]]):
        raise Indivisible("RESHAPE")
    inner = math.prod(size for _, size in axes[1:])
    start, length = axes[0][0][0] * inner, axes[0][0][1] * inner
    mapped: list[tuple[int, int]] = []
    rest = math.prod(shape)
    found = False
    for size in shape:
        rest //= size
        if found or size == 1:
            mapped.append((0, size))
        elif start % rest or length % rest:
            raise Indivisible("RESHAPE")
        else:
            mapped.append((start // rest, length // rest))
            found = True
    return tuple(mapped)
