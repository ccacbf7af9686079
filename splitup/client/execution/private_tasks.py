"""The first and last tasks of a model that its user runs, so that raw inputs stay on this machine.

Raw inputs and outputs never leave it; the nodes see only what lies between. Everything here that
computes blocks; a connection runs it on one thread of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from splitup.core.errors import InvalidInput, InvalidModel
from splitup.graph.manifest import ClientTask, InputSource, Manifest, NetworkSource, TaskSource

if TYPE_CHECKING:
    from splitup.backend.runtime import State, TaskProgram

Tensors = Sequence[bytes | memoryview]
_Key = tuple[str, int]  # "input" or "output" and its place; "task N" and the output's


@dataclass(frozen=True, slots=True)
class Begun:
    """A step whose first tasks have run: what is sent to nodes, and kept for the last tasks."""

    sends: tuple[bytes | memoryview, ...]
    kept: dict[_Key, bytes | memoryview]


class ClientPrograms:
    """A model's tasks of the client, compiled for this machine. Shared by its executions."""

    def __init__(self, manifest: Manifest, files: Sequence[tuple[Path, Path | None]]) -> None:
        """Load and compile: seconds of CPU. ``files`` are every task's graph and weights.

        Raises InvalidModel when a graph is invalid or differs from the manifest.
        """
        from splitup.backend.runtime import TaskProgram  # opens the device

        if manifest.client is None:
            raise InvalidInput("the model leaves no task to the client")
        self.part = manifest.client
        self.programs = [
            TaskProgram(graph.read_bytes(), weights, memory_bytes=task.vram_bytes)
            for task, (graph, weights) in zip(self.part.tasks, files, strict=True)
        ]
        for task, program in zip(self.part.tasks, self.programs, strict=True):
            _check_ports(task, program)
        early = set(self.part.find_early())
        self.early = sorted(early)
        self.late = [index for index in range(len(self.part.tasks)) if index not in early]
        outputs = {port.name: place for place, port in enumerate(manifest.outputs)}
        inputs = {port.name: place for place, port in enumerate(self.part.inputs)}

        def find(source: InputSource | TaskSource | NetworkSource) -> _Key:
            if isinstance(source, InputSource):
                return "input", inputs[source.input]
            if isinstance(source, NetworkSource):
                return "output", outputs[source.output]
            return f"task {source.task}", source.port

        self.sources = [[find(port.source) for port in task.inputs] for task in self.part.tasks]
        self.sends = [find(source) for source in self.part.sends]
        self.results = [(f"task {port.task}", port.port) for port in self.part.outputs]
        self.kept = {key for index in self.late for key in self.sources[index]} | set(self.results)

    def new_run(self) -> ClientRun:
        """Return the state of a new execution."""
        return ClientRun(self)


class ClientRun:
    """The client's tasks in one execution. Steps are begun in order, and completed in order."""

    def __init__(self, programs: ClientPrograms) -> None:
        self._programs = programs
        self._states: list[State] = [program.new_state() for program in programs.programs]

    def begin(self, inputs: Tensors) -> Begun:
        """Run the tasks before the nodes' on the model's inputs. Raises InvalidInput."""
        made = {("input", place): data for place, data in enumerate(inputs)}
        self._run(self._programs.early, made)
        sends = tuple(made[key] for key in self._programs.sends)
        return Begun(sends, {key: made[key] for key in self._programs.kept & set(made)})

    def complete(self, begun: Begun, outputs: Tensors) -> list[bytes | memoryview]:
        """Run the tasks after the nodes' on their outputs; return the model's outputs."""
        made = begun.kept | {("output", place): data for place, data in enumerate(outputs)}
        self._run(self._programs.late, made)
        return [made[key] for key in self._programs.results]

    def _run(self, tasks: Sequence[int], made: dict[_Key, bytes | memoryview]) -> None:
        programs = self._programs
        for index in tasks:
            inputs = [made[key] for key in programs.sources[index]]
            results = programs.programs[index].run(self._states[index], inputs)
            made.update({(f"task {index}", port): data for port, data in enumerate(results)})


def _check_ports(task: ClientTask, program: TaskProgram) -> None:
    given = [port.spec for port in task.inputs], [port.spec for port in task.outputs]
    if given != (list(program.inputs), list(program.outputs)):
        raise InvalidModel(f"the client's task '{task.label}' has other ports than its graph")
