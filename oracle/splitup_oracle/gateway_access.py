"""Who may read and write which object: the plan is the capability list. Pure functions.

A right is granted for one exact key, and a PUT for one exact length. The certificate, order or
manifest given here must have been checked (``splitup.protocol.certificates``) by the caller.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from splitup import limits
from splitup.errors import Refused
from splitup.graph.manifest import (
    ClientTask,
    Manifest,
    Task,
    TaskInput,
    TaskSource,
    get_blob_key,
    get_manifest_key,
    get_task_key,
    get_weights_key,
)
from splitup.net.gateway import UploadObject
from splitup.protocol.keys import Segment, iter_segments, measure_record
from splitup.protocol.selection import rank_validators
from splitup.protocol.verification import is_sampled
from splitup.wire import CLIENT, Plan, VerificationOrder

_UPLOAD_KEY: Final = re.compile(
    r"(?:models/0x(?P<model>[0-9a-f]{64})/manifest\.json"
    r"|tasks/(?P<task>[0-9a-f]{64})\.json"
    r"|weights/(?P<weights>[0-9a-f]{64})\.safetensors"
    r"|blobs/(?P<blob>[0-9a-f]{64}))\Z"
)
_UPLOAD_BYTES: Final = {
    "model": limits.MAX_MANIFEST_BYTES,
    "task": limits.MAX_GRAPH_BYTES,
    "weights": limits.MAX_UPLOAD_BYTES,
    "blob": limits.MAX_TOKENIZER_BYTES,
}


@dataclass(frozen=True, slots=True)
class Right:
    """One method on one key; the store holds a PUT to exactly this length, and digest if given."""

    method: Literal["GET", "PUT"]
    key: str
    length_bytes: int
    sha256: str | None = None


def check_upload(entry: UploadObject) -> Right:
    """Return the right to store a content-addressed object; refuse every other key.

    The store itself enforces length and digest, both being part of the URL's signature.
    """
    match = _UPLOAD_KEY.match(entry.key)
    if match is None:
        raise _refuse(f"the key {entry.key!r} is not one of an object that a developer stores")
    kind = str(match.lastgroup)
    if entry.sha256 != match[kind]:
        raise _refuse(f"the key {entry.key} does not name the object's own digest {entry.sha256}")
    if entry.length_bytes > _UPLOAD_BYTES[kind]:
        raise _refuse(
            f"{entry.key} has {entry.length_bytes} bytes; the limit is {_UPLOAD_BYTES[kind]}"
        )
    return Right("PUT", entry.key, entry.length_bytes, entry.sha256)


def compute_model_rights(model_id: str, manifest: Manifest) -> list[Right]:
    """Return the rights to read a model: manifest, tasks with all they have, tokenizer."""
    rights = [Right("GET", get_manifest_key(model_id), len(manifest.to_bytes()))]
    tasks: list[Task | ClientTask] = [*manifest.tasks]
    tasks += manifest.client.tasks if manifest.client is not None else ()
    for task in tasks:
        rights += _task_rights(task)
    if manifest.text is not None:
        text = manifest.text
        rights.append(Right("GET", get_blob_key(text.tokenizer_digest), text.tokenizer_bytes))
    return _unique(rights)


def compute_execution_rights(plan: Plan, manifest: Manifest, requester: str) -> list[Right]:
    """Return everything the holder of the Ed25519 key ``requester`` may do in an execution.

    An executor writes its tasks' outputs and reads their inputs; the client writes the graph's
    inputs and reads its outputs. Refuses a key that has no part in the plan.
    """
    _check_plan_fits(plan, manifest)
    nodes = {entry.node for entry in plan.nodes if entry.signing_key == requester}
    own = {task for task, executor in enumerate(plan.executors()) if executor in nodes}
    is_client = requester == plan.request.client_key
    if not own and not is_client:
        raise _refuse(
            f"the key {requester} is neither an executor nor the client of execution "
            f"{plan.request.execution_id}"
        )
    rights: list[Right] = []
    for index in sorted(own):
        task = manifest.tasks[index]
        for port, output in enumerate(task.outputs):
            rights += _segment_rights("PUT", plan, index, port, measure_record(output.spec))
        rights += _input_rights(plan, manifest, index, plan.request.steps)
    if is_client:
        for port, graph_input in enumerate(manifest.inputs):
            rights += _segment_rights("PUT", plan, CLIENT, port, measure_record(graph_input.spec))
        for graph_output in manifest.outputs:
            rights += _segment_rights(
                "GET", plan, graph_output.task, graph_output.port, measure_record(graph_output.spec)
            )
    return _unique(rights)


def compute_verification_rights(
    order: VerificationOrder,
    manifest: Manifest,
    requester: str,
    sampling_bps: int,
    *,
    is_member: bool = False,
) -> list[Right]:
    """Return what a drawn validator may read: the task's inputs, graph and weights.

    Committee members may, too: they recompute what is disputed. Never the claimed output: a
    validator that could see it would not have to compute it.
    """
    plan = order.certificate.plan
    _check_plan_fits(plan, manifest)
    execution = plan.request.execution_id
    if order.draw.execution_id != execution:
        raise _refuse(f"the draw is of execution {order.draw.execution_id}, not of {execution}")
    if order.snapshot.root() != plan.request.snapshot_root:
        raise _refuse(f"the snapshot is not the one that execution {execution} was planned with")
    if order.task >= len(manifest.tasks) or order.steps > plan.request.steps:
        raise _refuse(f"execution {execution} has no task {order.task} with {order.steps} steps")
    if not is_sampled(order.draw.seed, order.task, sampling_bps):
        raise _refuse(f"task {order.task} of execution {execution} was not drawn")
    ranking = rank_validators(order.draw.seed, order.task, plan, order.snapshot, manifest)
    nodes = {entry.node for entry in order.snapshot.entries if entry.signing_key == requester}
    if not is_member and nodes.isdisjoint(ranking):
        raise _refuse(
            f"the key {requester} is not a validator of task {order.task} of execution {execution}"
        )
    rights = _input_rights(plan, manifest, order.task, order.steps)
    return _unique([*rights, *_task_rights(manifest.tasks[order.task])])


def _check_plan_fits(plan: Plan, manifest: Manifest) -> None:
    """Refuse a plan whose tasks are not the manifest's."""
    if manifest.model_id != plan.request.model_id or len(manifest.tasks) != len(plan.tasks):
        raise _refuse(
            f"the plan of {plan.request.execution_id} does not fit model {plan.request.model_id}"
        )


def _input_rights(plan: Plan, manifest: Manifest, task: int, steps: int) -> list[Right]:
    rights: list[Right] = []
    for entry in manifest.tasks[task].inputs:
        producer, port = _get_producer(manifest, entry)
        rights += _segment_rights("GET", plan, producer, port, measure_record(entry.spec), steps)
    return rights


def _get_producer(manifest: Manifest, entry: TaskInput) -> tuple[int, int]:
    if isinstance(entry.source, TaskSource):
        return entry.source.task, entry.source.port
    names = [port.name for port in manifest.inputs]
    return CLIENT, names.index(entry.source.input)


def _segment_rights(
    method: Literal["GET", "PUT"],
    plan: Plan,
    task: int,
    port: int,
    tensor_bytes: int,
    steps: int | None = None,
) -> Iterator[Right]:
    """Yield a right per log object; ``steps`` limits it to those that hold the first steps.

    Lengths follow from the steps that were paid for: an execution that ends early pads with zeros.
    """
    segments: Iterable[Segment] = iter_segments(
        plan.request.execution_id, task, port, tensor_bytes, plan.request.steps
    )
    for count, segment in enumerate(segments):
        if count >= limits.MAX_GRANTS:
            raise _refuse_size(plan)
        if steps is None or segment.first_step < steps:
            yield Right(method, segment.key, segment.length)


def _task_rights(task: Task | ClientTask) -> list[Right]:
    rights = [Right("GET", get_task_key(task.task_id), task.graph_bytes)]
    if task.weights_digest:
        rights.append(Right("GET", get_weights_key(task.weights_digest), task.weights_bytes))
    if isinstance(task, Task) and task.reference_digest:
        rights.append(Right("GET", get_blob_key(task.reference_digest), task.reference_bytes))
    return rights


def _unique(rights: Iterable[Right]) -> list[Right]:
    unique = list(dict.fromkeys(rights))
    if len(unique) > limits.MAX_GRANTS:
        raise _refuse(
            f"{len(unique)} log objects are more than the {limits.MAX_GRANTS} the gateway grants "
            "at once; ask for an execution of fewer steps"
        )
    return unique


def _refuse_size(plan: Plan) -> Refused:
    return _refuse(
        f"execution {plan.request.execution_id} has more than {limits.MAX_GRANTS} log objects for "
        "one port; ask for fewer steps"
    )


def _refuse(reason: str) -> Refused:
    return Refused(reason, status=403)
