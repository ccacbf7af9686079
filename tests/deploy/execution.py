"""Runs a compiled model's tasks one after another in this process, as nodes would."""

from __future__ import annotations

from collections.abc import Mapping

from splitup_deploy.cutting.build import CompiledModel

from splitup.backend.runtime import State, TaskProgram
from splitup.graph.manifest import (
    InputSource,
    Manifest,
    get_task_key,
    get_weights_key,
    load_manifest,
)


class CutModel:
    """Every task compiled; ``step`` takes and gives bytes by the model's port names."""

    def __init__(self, compiled: CompiledModel) -> None:
        stored = {blob.key: b"".join(blob.open()) for blob in compiled.blobs}
        self.manifest: Manifest = load_manifest(compiled.manifest_bytes)
        self.inputs = self.manifest.inputs
        self.programs = [
            TaskProgram(
                stored[get_task_key(task.task_id)],
                stored[get_weights_key(task.weights_digest)] if task.weights_digest else None,
                is_foreign=False,
            )
            for task in self.manifest.tasks
        ]

    def new_states(self) -> list[State]:
        return [program.new_state() for program in self.programs]

    def step(self, states: list[State], inputs: Mapping[str, bytes]) -> dict[str, bytes]:
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
