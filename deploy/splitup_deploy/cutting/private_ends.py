"""Keep the first and last tasks of a model with the client.

The first and last blocks of a decoder, with embedding and head, become tasks that the client runs
itself. Nodes receive the hidden states after the first blocks and return those before the last
blocks. That hides tokens and logits from anybody who only sees the traffic. It does not hide them
from a node that knows the weights, which can usually reconstruct the text from activations.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from splitup.core.errors import InvalidInput, InvalidModel
from splitup.core.tensors import TensorSpec
from splitup.graph.manifest import InputSource, NetworkSource, TaskSource
from splitup_deploy.cutting.partition import Region
from splitup_deploy.cutting.task_graphs import CutTask

_BLOCK: Final = re.compile(r"block (\d+)\b")


@dataclass(frozen=True, slots=True)
class Separation:
    """A cut model in two parts: the tasks of the nodes, and those of the client.

    Sources of the nodes' tasks are numbered among the nodes' tasks. ``inputs`` are the values that
    nodes receive, each with the client's value that it is; ``outputs`` map the name of a returned
    value to the task's output that it is. ``sources`` are those of the client's tasks' inputs.
    """

    nodes: tuple[CutTask, ...]
    inputs: tuple[tuple[TensorSpec, InputSource | TaskSource], ...]
    outputs: dict[str, tuple[int, int]]
    client: tuple[CutTask, ...]
    sources: tuple[tuple[InputSource | TaskSource | NetworkSource, ...], ...]


def find_borders(regions: Sequence[Region], blocks: int) -> tuple[int, int]:
    """Return the roots of the nodes' first region and of the first region after theirs.

    ``blocks`` at each end stay with the client, and all that is before the first and after the last
    block. Raises InvalidInput when the model has no blocks, or none would be left for nodes.
    """
    found = [_BLOCK.match(region.label) for region in regions]
    numbers = [None if match is None else int(match[1]) for match in found]
    count = 1 + max((number for number in numbers if number is not None), default=-1)
    if count <= 2 * blocks:
        raise InvalidInput(
            f"the model has {count} blocks: --private {blocks} leaves none for nodes"
            if count
            else "the model is not made of blocks: --private is for language models"
        )
    middle = range(blocks, count - blocks)
    places = [place for place, number in enumerate(numbers) if number in middle]
    start, end = places[0], places[-1] + 1
    if end == len(regions) or start == 0:
        raise InvalidModel("the model begins or ends with a block: --private keeps nothing")
    if any(number is not None and number not in middle for number in numbers[start:end]):
        raise InvalidModel("the model's blocks do not stand one after another")
    return regions[start].root, regions[end].root


def list_ends(regions: Sequence[Region], borders: tuple[int, int]) -> frozenset[int]:
    """Return the roots of the client's regions, which no card of a node has to hold.

    Its device has all of them, and divided parts of a table that embedding and head share would be
    two tables.
    """
    start, end = borders
    return frozenset(region.root for region in regions if not start <= region.root < end)


def separate(
    tasks: Sequence[CutTask], parts: Sequence[Sequence[Region]], borders: tuple[int, int]
) -> Separation:
    """Split tasks at the borders. Raises InvalidModel where a state is used on both sides."""
    begins = [part[0].root for part in parts]
    if any(border not in begins for border in borders):
        raise InvalidModel("the model's first or last blocks share a state with the others")
    start, end = (begins.index(border) for border in borders)
    inputs: dict[str, tuple[TensorSpec, InputSource | TaskSource]] = {}
    nodes = []
    for task in tasks[start:end]:
        sources: list[str | tuple[int, int]] = []
        for spec, source in zip(task.graph.inputs, task.sources, strict=True):
            if isinstance(source, tuple) and source[0] >= start:
                sources.append((source[0] - start, source[1]))
                continue
            origin = _make_source(source)
            if inputs.setdefault(spec.name, (spec, origin)) != (spec, origin):
                raise InvalidModel(f"two values that nodes would get are called '{spec.name}'")
            sources.append(spec.name)
        nodes.append(replace(task, sources=tuple(sources)))
    outputs: dict[str, tuple[int, int]] = {}
    client_sources = []
    for task in (*tasks[:start], *tasks[end:]):
        found: list[InputSource | TaskSource | NetworkSource] = []
        for spec, source in zip(task.graph.inputs, task.sources, strict=True):
            if isinstance(source, tuple) and start <= source[0] < end:
                outputs[spec.name] = (source[0] - start, source[1])
                found.append(NetworkSource(output=spec.name))
            elif isinstance(source, tuple) and source[0] >= end:
                found.append(TaskSource(task=source[0] - (end - start), port=source[1]))
            else:
                found.append(_make_source(source))
        client_sources.append(tuple(found))
    if any(source == InputSource(input="tokens") for _, source in inputs.values()):
        raise InvalidModel(
            "every layer of this model looks up the tokens: --private would show them to nodes"
        )
    return Separation(
        nodes=tuple(nodes),
        inputs=tuple(inputs.values()),
        outputs=outputs,
        client=(*tasks[:start], *tasks[end:]),
        sources=tuple(client_sources),
    )


def _make_source(source: str | tuple[int, int]) -> InputSource | TaskSource:
    if isinstance(source, str):
        return InputSource(input=source)
    return TaskSource(task=source[0], port=source[1])
