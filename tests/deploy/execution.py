"""Runs a compiled model's tasks one after another in this process, as nodes would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from splitup_deploy.cutting.build import CompiledModel

from splitup.backend.runtime import TaskProgram
from splitup.graph.manifest import InputSource, Manifest, get_task_key, get_weights_key
from splitup.graph.manifest_rules import load_manifest
from tests.deploy.reference_program import ReferenceProgram, load_task
from tests.deploy.steps import Program

P = TypeVar("P", bound=Program[Any])


class CutTasks(Generic[P]):
    """Every task of a model; ``step`` takes and gives bytes by the model's port names."""

    def __init__(
        self, compiled: CompiledModel, load_task: Callable[[bytes, bytes | None], P]
    ) -> None:
        stored = {blob.key: b"".join(blob.open()) for blob in compiled.blobs}
        self.manifest: Manifest = load_manifest(compiled.manifest_bytes)
        self.inputs = self.manifest.inputs
        self.programs = [
            load_task(
                stored[get_task_key(task.task_id)],
                stored[get_weights_key(task.weights_digest)] if task.weights_digest else None,
            )
            for task in self.manifest.tasks
        ]

    def new_states(self) -> list[Any]:
        return [program.new_state() for program in self.programs]

    def step(self, states: list[Any], inputs: Mapping[str, bytes]) -> dict[str, bytes]:
        made: dict[tuple[int, int], bytes] = {}
        for index, (task, program) in enumerate(
            zip(self.manifest.tasks, self.programs, strict=True)
        ):
            data = [
                inputs[port.source.input]
                if isinstance(port.source, InputSource)
                else made[port.source.task, port.source.port]
                for port in task.inputs
            ]
            for port, value in enumerate(program.run(states[index], data)):
                made[index, port] = value
        return {port.name: made[port.task, port.port] for port in self.manifest.outputs}


class CutModel(CutTasks[TaskProgram]):
    """Every task compiled."""

    def __init__(self, compiled: CompiledModel) -> None:
        super().__init__(compiled, partial(TaskProgram, is_foreign=False))


class CutReference(CutTasks[ReferenceProgram]):
    """Every task computed in numpy, for tests of what a cut means, and not of its kernels."""

    def __init__(self, compiled: CompiledModel) -> None:
        super().__init__(compiled, load_task)
