"""A private model in this process: what its user sends to nodes, and what nodes send back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from splitup_deploy.cutting.build import CompiledModel

from splitup.backend.runtime import State, TaskProgram
from splitup.core.errors import InvalidInput
from splitup.core.tensors import TensorSpec, array_to_bytes, bytes_to_array
from splitup.decode.step import StepInput, make_arrays
from splitup.graph.dtypes import FLOATS
from splitup.graph.manifest import (
    InputSource,
    NetworkSource,
    TaskSource,
    get_task_key,
    get_weights_key,
)

Rows = npt.NDArray[np.float32]
_Place = tuple[str, int, int]  # "client" or "node", the task among theirs, and its output
_Values = dict[str | _Place, bytes | memoryview]  # the model's inputs by name, and tasks' outputs


@dataclass(frozen=True, slots=True)
class Crossing:
    """What one step sends to nodes and gets back, float32 [rows, features], and its logits."""

    sent: Rows
    returned: Rows
    logits: Rows


class AttackedModel:
    """All tasks of a private model, compiled for this process's device."""

    def __init__(self, compiled: CompiledModel) -> None:
        """Compile; raises InvalidInput for a model without a client's part, or with images."""
        manifest, client = compiled.manifest, compiled.manifest.client
        if client is None or not compiled.is_complete:
            raise InvalidInput("only a private model with weights can be attacked")
        if manifest.text is not None and manifest.text.images is not None:
            raise InvalidInput("the model takes images: measure it compiled without --images")
        self.manifest, self.client = manifest, client
        self.chunk = next(p.shape[0] for p in client.inputs if p.name == "tokens")
        self.early = client.find_early()
        self.late = [n for n in range(len(client.tasks)) if n not in self.early]
        stored = {blob.key: blob for blob in compiled.blobs}

        def load(task_id: str, weights: str) -> TaskProgram:
            keys = [get_task_key(task_id), *([get_weights_key(weights)] if weights else [])]
            graph, *rest = [b"".join(stored[key].open()) for key in keys]
            return TaskProgram(graph, rest[0] if rest else None, is_foreign=False)

        self.programs = {
            (owner, number): load(task.task_id, task.weights_digest)
            for owner, tasks in (("client", client.tasks), ("node", manifest.tasks))
            for number, task in enumerate(tasks)
        }
        self._sends = dict(zip([port.name for port in manifest.inputs], client.sends, strict=True))
        self._returns = {port.name: ("node", port.task, port.port) for port in manifest.outputs}

    def find(self, owner: str, source: InputSource | TaskSource | NetworkSource) -> str | _Place:
        """Return which value a task of the client or of nodes reads."""
        if isinstance(source, TaskSource):
            return owner, source.task, source.port
        if isinstance(source, NetworkSource):
            return self._returns[source.output]
        return source.input if owner == "client" else self.find("client", self._sends[source.input])

    def list_crossing(self) -> tuple[list[tuple[TensorSpec, Any]], list[tuple[TensorSpec, Any]]]:
        """Return the floats that are sent and returned: the port, and which value it is."""
        sent = [
            (port.spec, self.find("client", source))
            for port, source in zip(self.manifest.inputs, self.client.sends, strict=True)
        ]
        returned = [(port.spec, self._returns[port.name]) for port in self.manifest.outputs]
        pick = [
            [entry for entry in ports if entry[0].dtype in FLOATS] for ports in (sent, returned)
        ]
        return pick[0], pick[1]


class AttackedText:
    """One text that is fed to a model, step by step."""

    def __init__(self, model: AttackedModel) -> None:
        self._model = model
        self._states: dict[tuple[str, int], State] = {}
        self._sent, self._returned = model.list_crossing()

    def send(self, step: StepInput) -> Rows:
        """Run the user's tasks before the nodes; return what a node sees of every row."""
        return _stack(self._sent, self._begin(step), len(step.tokens))

    def feed(self, step: StepInput) -> Crossing:
        """Run a whole step; its logits are those of the rows that it wants."""
        model, values, count = self._model, self._begin(step), len(step.tokens)
        self._run("node", range(len(model.manifest.tasks)), values)
        self._run("client", model.late, values)
        (port,) = [port for port in model.client.outputs if port.name == "logits"]
        logits = bytes_to_array(port.spec, values["client", port.task, port.port])
        return Crossing(
            _stack(self._sent, values, count),
            _stack(self._returned, values, count),
            logits.astype(np.float32),
        )

    def _begin(self, step: StepInput) -> _Values:
        arrays = make_arrays(step, self._model.chunk)
        values: _Values = {
            port.name: array_to_bytes(port.spec, arrays[port.name])
            for port in self._model.client.inputs
        }
        self._run("client", self._model.early, values)
        return values

    def _run(self, owner: str, numbers: Iterable[int], values: _Values) -> None:
        model = self._model
        tasks: Sequence[Any] = model.client.tasks if owner == "client" else model.manifest.tasks
        for number in numbers:
            program = model.programs[owner, number]
            if (owner, number) not in self._states:
                self._states[owner, number] = program.new_state()
            inputs = [values[model.find(owner, port.source)] for port in tasks[number].inputs]
            outputs = program.run(self._states[owner, number], inputs)
            values.update({(owner, number, place): data for place, data in enumerate(outputs)})


def _stack(ports: Sequence[tuple[TensorSpec, Any]], values: _Values, rows: int) -> Rows:
    """Return all features of every row, float32 [rows, features]."""
    found = [bytes_to_array(spec, values[place]) for spec, place in ports]
    return np.concatenate([array.astype(np.float32).reshape(rows, -1) for array in found], axis=1)
