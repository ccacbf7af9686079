"""The first and last tasks of a model that its user runs, so that raw inputs stay on this machine.

Raw inputs and outputs never leave it; the nodes see only what lies between. A confined process
computes: the model's developer is a stranger.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

from splitup.core import tuning
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.graph.manifest import ClientTask, InputSource, Manifest, NetworkSource, TaskSource
from splitup.sandbox.child import Child, ChildDied, ChildFailed, open_files

_MODULE: Final = "splitup.client.private.private_process"

Tensors = Sequence[bytes | memoryview]
_Key = tuple[str, int]  # "input" or "output" and its place; "task N" and the output's


@dataclass(frozen=True, slots=True)
class Begun:
    """A step whose first tasks have run: what is sent to nodes, and kept for the last tasks."""

    sends: tuple[bytes | memoryview, ...]
    kept: dict[_Key, bytes | memoryview]


class ClientPrograms:
    """A model's tasks of the client, compiled for this machine. Shared by its executions."""

    def __init__(self, manifest: Manifest, child: Child) -> None:
        """Take a process that has loaded the tasks; see ``load``."""
        if manifest.client is None:
            raise InvalidInput("the model leaves no task to the client")
        self.part = manifest.client
        self._child = child
        self._runs = itertools.count()
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

    @classmethod
    async def load(
        cls, manifest: Manifest, files: Sequence[tuple[Path, Path | None]]
    ) -> ClientPrograms:
        """Start the process, load and compile: seconds. ``files`` are graphs and weights.

        Raises InvalidModel when a graph is invalid or differs from the manifest, Unavailable when
        this machine took too long or lacks something.
        """
        paths = [path for pair in files for path in pair if path is not None]
        with open_files(paths) as opened:
            child = Child(_MODULE, files=opened)
            rest = iter(opened)
            numbers = [(next(rest), None if pair[1] is None else next(rest)) for pair in files]
            try:
                programs = cls(manifest, child)
                await programs._load(numbers)
            except BaseException:
                child.close()
                raise
        return programs

    async def _load(self, files: Sequence[tuple[int, int | None]]) -> None:
        try:
            answer, _ = await self._child.ask_apart(
                {"files": files, "vram_bytes": [task.vram_bytes for task in self.part.tasks]},
                timeout_s=tuning.LOAD_TIMEOUT_S,
                max_bytes=0,
            )
        except (ChildDied, ChildFailed) as error:
            raise InvalidModel(
                f"the model's tasks for the client cannot be loaded: {error}"
            ) from None
        ports = answer.get("ports", ())
        if len(ports) != len(self.part.tasks):
            raise InvalidModel(f"the model has {len(self.part.tasks)} tasks for the client")
        for task, found in zip(self.part.tasks, ports, strict=True):
            _check_ports(task, found)

    @property
    def is_running(self) -> bool:
        """Return whether its process is alive."""
        return self._child.is_running

    def new_run(self) -> ClientRun:
        """Return the state of a new execution."""
        return ClientRun(self, next(self._runs))

    async def ask(self, question: dict[str, int], inputs: Tensors = ()) -> Sequence[memoryview]:
        """Return the outputs of a task that is asked for. Raises ChildFailed, and ChildDied."""
        ports = self.part.tasks[question["task"]].outputs if "task" in question else ()
        _, outputs = await self._child.ask_apart(
            question,
            inputs,
            timeout_s=tuning.RUN_TIMEOUT_S,
            max_bytes=sum(port.spec.nbytes for port in ports),
        )
        if len(outputs) != len(ports):
            raise InvalidModel(f"a task of the client gave {len(outputs)} outputs")
        return outputs

    def close(self) -> None:
        """End the process."""
        self._child.close()


class ClientRun:
    """The client's tasks in one execution. Steps are begun in order, and completed in order."""

    def __init__(self, programs: ClientPrograms, number: int) -> None:
        self._programs = programs
        self._number = number

    async def begin(self, inputs: Tensors) -> Begun:
        """Run the tasks before the nodes' on the model's inputs. Raises InvalidInput."""
        made = {("input", place): data for place, data in enumerate(inputs)}
        await self._run(self._programs.early, made)
        sends = tuple(made[key] for key in self._programs.sends)
        return Begun(sends, {key: made[key] for key in self._programs.kept & set(made)})

    async def complete(self, begun: Begun, outputs: Tensors) -> list[bytes | memoryview]:
        """Run the tasks after the nodes' on their outputs; return the model's outputs."""
        made = begun.kept | {("output", place): data for place, data in enumerate(outputs)}
        await self._run(self._programs.late, made)
        return [made[key] for key in self._programs.results]

    async def end(self) -> None:
        """Free the states."""
        await self._programs.ask({"end": self._number})

    async def _run(self, tasks: Sequence[int], made: dict[_Key, bytes | memoryview]) -> None:
        programs = self._programs
        for index in tasks:
            inputs = [made[key] for key in programs.sources[index]]
            results = await programs.ask({"task": index, "run": self._number}, inputs)
            made.update({(f"task {index}", port): data for port, data in enumerate(results)})


def _check_ports(task: ClientTask, found: Any) -> None:
    """Compare a task's ports with those of its graph, as JSON."""
    given = [[astuple(port.spec) for port in ports] for ports in (task.inputs, task.outputs)]
    if json.loads(json.dumps(given)) != found:
        raise InvalidModel(f"the client's task '{task.label}' has other ports than its graph")
