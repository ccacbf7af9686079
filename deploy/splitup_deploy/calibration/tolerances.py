"""What a manifest says for verification: the tolerances of tasks, and self-test vectors.

Both are optional and change the model's id. Without tolerances only equal bytes count, so only
nodes of one determinism class can check each other; without self-test vectors no node can test
itself before it serves a task. The vectors depend on the determinism class of the machine that
makes them, so by default only machines of the most common class make them: equal models then get
equal ids wherever they are registered from.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from splitup.core import limits
from splitup.core.codec import compute_digest
from splitup.core.errors import InvalidInput
from splitup.graph.dtypes import FLOATS
from splitup.graph.manifest import Manifest, Task, get_blob_key, get_task_key, get_weights_key
from splitup.graph.self_test_vectors import SelfTestVectors, make_inputs, make_vectors
from splitup.graph.tolerances import Tolerance
from splitup.messages.determinism import find_device
from splitup_deploy.cutting.build import Blob, CompiledModel, change_tasks, make_blob
from splitup_deploy.publishing.measured_files import load_measured

SEED: Final = 1  # any number does: a node that prepares for known inputs deceives only itself

_MAX_CLASSES: Final = 32  # of one machine
_Class = Annotated[str, Field(max_length=limits.MAX_DETERMINISM_CHARS)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ToleranceFile(BaseModel):
    """What ``splitup-deploy calibrate --output`` writes: the tolerances of tasks, by id.

    ``classes`` are the determinism classes between which they were measured.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    classes: Annotated[tuple[_Class, ...], Field(max_length=_MAX_CLASSES)] = ()
    tasks: dict[_Digest, Annotated[tuple[Tolerance, ...], Field(max_length=len(FLOATS))]]


def load_tolerances(path: Path) -> ToleranceFile:
    """Read a tolerance file. Raises InvalidInput."""
    command = "splitup-deploy calibrate --output"
    return load_measured(path, ToleranceFile, "tolerance file", command)


def describe_tolerances(manifest: Manifest, classes: Sequence[str]) -> str:
    """Return which devices may serve a model verified; ``classes`` are those that were measured."""
    count = sum(task.crosses_classes for task in manifest.tasks)
    if not count:
        return (
            "no tolerances: only equal bytes count, so on devices that committee members do not "
            "have, as with most GPUs, no task is sold as verified; to change that, run "
            "'splitup-deploy calibrate --output FILE' on a machine with the devices that are to "
            "serve the model, and register with --tolerance FILE"
        )
    kinds = ", ".join(sorted({find_device(name) or name for name in classes}))
    return (
        f"{count} of {len(manifest.tasks)} tasks have tolerances, measured on "
        f"{kinds or 'devices that the file does not name'}; nodes of other kinds may compute "
        "correctly and yet differ more, so calibrate on every kind that is to serve the model"
    )


def attach_tolerances(
    compiled: CompiledModel, tolerances: Mapping[str, tuple[Tolerance, ...]]
) -> CompiledModel:
    """Put tolerances into the manifest. Raises InvalidInput when they are for another cut."""
    unknown = set(tolerances) - {task.task_id for task in compiled.manifest.tasks}
    if unknown:
        raise InvalidInput(
            f"the tolerances are for other tasks ({min(unknown)[:12]}): calibrate the model again, "
            "with the same flags as 'register'"
        )
    return change_tasks(compiled, lambda _, task: {"tolerances": tolerances.get(task.task_id, ())})


def makes_vectors() -> bool:
    """Return whether this machine's self-test vectors are those that most machines would make."""
    from splitup.backend.devices.device_choice import (  # opens the device
        get_common_class,
        select_device,
    )

    return select_device().determinism_class == get_common_class()


def attach_vectors(
    compiled: CompiledModel, say: Callable[[str], None] = lambda _: None
) -> CompiledModel:
    """Run every task on this machine's device and publish its self-test vectors; seconds per task.

    ``say`` is told which task is computed.
    """
    blobs = {blob.key: blob for blob in compiled.blobs}
    vectors: dict[str, Blob] = {}
    for index, task in enumerate(compiled.manifest.tasks, 1):
        say(f"computing self-test vectors: task {index} of {len(compiled.manifest.tasks)}")
        if task.task_id not in vectors:
            data = compute_vectors(task, blobs).to_bytes()
            vectors[task.task_id] = make_blob(get_blob_key(compute_digest(data)), data)

    def describe(_: int, task: Task) -> dict[str, Any]:
        blob = vectors[task.task_id]
        return {"reference_digest": blob.digest, "reference_bytes": blob.length}

    return change_tasks(compiled, describe, tuple(vectors.values()))


def compute_vectors(task: Task, blobs: Mapping[str, Blob]) -> SelfTestVectors:
    """Return the self-test vectors of one task, computed on this process's device."""
    from splitup.backend.runtime import TaskProgram, describe_device  # opens the device

    with tempfile.TemporaryDirectory() as directory:
        weights = None
        if task.weights_digest:
            weights = Path(directory) / "weights.safetensors"
            with weights.open("wb") as file:
                for chunk in blobs[get_weights_key(task.weights_digest)].open():
                    file.write(chunk)
        graph = b"".join(blobs[get_task_key(task.task_id)].open())
        program = TaskProgram(graph, weights, is_foreign=False)
    state = program.new_state()
    outputs = [
        program.run(state, make_inputs(program.inputs, SEED, step, limits.VECTOR_ROWS))
        for step in range(limits.VECTOR_STEPS)
    ]
    name = describe_device().determinism_class[: limits.MAX_DETERMINISM_CHARS]
    return make_vectors(task.task_id, SEED, name, outputs, program.outputs, limits.VECTOR_ROWS)
