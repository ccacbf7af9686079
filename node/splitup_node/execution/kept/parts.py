"""One task that a node runs in an execution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitup.core.tensors import TensorSpec
from splitup.graph.manifest import Task
from splitup.protocol.execution.task_queue import Run
from splitup_node.execution.kept.digests import Digests
from splitup_node.execution.kept.routing import Outlet


@dataclass(frozen=True, slots=True)
class RowSymbol:
    """A number of rows that differs from step to step, and the input that has so many rows."""

    place: int
    row_bytes: int
    most: int

    def count(self, run: Run) -> int:
        """Return how many rows a run has; the worker checks that its other inputs agree."""
        return len(run.inputs[self.place].data) // self.row_bytes


@dataclass(slots=True)
class Part:
    """One task that this node runs in an execution."""

    task: int
    session: int  # in the worker, where it holds the task's state
    outlets: tuple[Outlet, ...]  # by output
    digests: Digests
    symbols: tuple[RowSymbol, ...]
    full_bytes: int  # of a step's inputs with all the rows that the task's flops are for
    state_bytes: int = 0  # on the device, once the first step has run


def make_part(index: int, task: Task, session: int, outlets: tuple[Outlet, ...]) -> Part:
    """Return the part of a task that begins."""
    specs = [port.spec for port in task.inputs]
    return Part(
        index,
        session,
        outlets,
        Digests(len(task.inputs), len(task.outputs)),
        _find_symbols(specs),
        sum(spec.nbytes for spec in specs),
    )


def _find_symbols(specs: Sequence[TensorSpec]) -> tuple[RowSymbol, ...]:
    """Return, for every symbolic number of rows, the first input that has so many rows."""
    places = {spec.rows: place for place, spec in reversed(list(enumerate(specs))) if spec.rows}
    return tuple(
        RowSymbol(
            place,
            specs[place].row_bytes,
            min(spec.shape[0] for spec in specs if spec.rows == symbol),
        )
        for symbol, place in places.items()
    )
