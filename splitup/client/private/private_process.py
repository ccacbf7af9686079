"""A confined process that computes the tasks of one model that its user keeps.

    {"files": [[graph, weights], …],    descriptors of open files; weights null for a task without
     "vram_bytes": […]}                 the memory that the manifest says each task needs
                                        -> {"ports": [[inputs, outputs], …]}
    {"task": n, "run": r} and inputs    one step of a task -> its outputs
    {"end": r}                          forget the states of a run

``splitup.client.private.private_tasks`` starts it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from splitup.sandbox.confinement import serve_confined
from splitup.sandbox.serving import Answer

if TYPE_CHECKING:
    from splitup.backend.runtime import State, TaskProgram


class Tasks:
    """The programs of a model's tasks, and their states in each run."""

    def __init__(self) -> None:
        self._programs: list[TaskProgram] = []
        self._states: dict[int, dict[int, State]] = {}  # by run and task

    def answer(self, question: Mapping[str, Any], buffers: Sequence[memoryview]) -> Answer:
        """Answer one question."""
        if "files" in question:
            return self._load(question["files"], question["vram_bytes"]), ()
        if "end" in question:
            self._states.pop(question["end"], None)
            return {}, ()
        states = self._states.setdefault(question["run"], {})
        task = question["task"]
        program = self._programs[task]
        if task not in states:
            states[task] = program.new_state()
        return {}, program.run(states[task], buffers)

    def _load(
        self, files: Sequence[tuple[int, int | None]], sizes: Sequence[int]
    ) -> dict[str, Any]:
        from splitup.backend.runtime import TaskProgram  # opens the device

        for (graph, weights), memory_bytes in zip(files, sizes, strict=True):
            with os.fdopen(graph, "rb") as file:
                data = file.read()
            opened = None if weights is None else os.fdopen(weights, "rb")
            self._programs.append(TaskProgram(data, opened, memory_bytes=memory_bytes))
        return {
            "ports": [
                [[astuple(spec) for spec in specs] for specs in (program.inputs, program.outputs)]
                for program in self._programs
            ]
        }


def main() -> None:
    serve_confined(Tasks().answer, os.environ.get("DEV", ""), forks=True)


if __name__ == "__main__":
    main()
