"""Decides who may read and write which object, from plan and manifest. Pure functions.

A right is for one exact key, a PUT for one exact length, too. The caller must have checked the
certificate, order or manifest (``splitup.protocol.committee.certificates``).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from splitup.core import limits
from splitup.core.errors import PeerFault, Refused
from splitup.graph.manifest import (
    ClientTask,
    Manifest,
    Task,
    get_blob_key,
    get_manifest_key,
    get_task_key,
    get_weights_key,
)
from splitup.messages.base import CLIENT
from splitup.messages.plans import Plan
from splitup.messages.storage import (
    LogName,
    LogRequest,
    LogWrite,
    UploadObject,
    VerificationRequest,
)
from splitup.messages.verification import VerificationOrder
from splitup.protocol.execution.routes import get_sources
from splitup.protocol.execution.takeovers import ExecutorMap
from splitup.protocol.planning.validators import check_validators, compares_numbers
from splitup.protocol.settlement.proof_of_sampling import is_sampled

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
    """One method on one key; the store enforces a PUT's length, and its digest if given."""

    method: Literal["GET", "PUT"]
    key: str
    length_bytes: int | None  # None: a GET of something whose size is not known yet
    sha256: str | None = None


def check_upload(entry: UploadObject) -> Right:
    """Return the right to store a content-addressed object; refuse any other key.

    The store enforces length and digest, because the URL's signature covers both.
    """
    match = _UPLOAD_KEY.match(entry.key)
    if match is None:
        raise refuse(f"the key {entry.key!r} is not that of a manifest, task, weights or blob")
    kind = str(match.lastgroup)
    if entry.sha256 != match[kind]:
        raise refuse(f"the key {entry.key} does not contain the object's digest {entry.sha256}")
    if entry.length_bytes > _UPLOAD_BYTES[kind]:
        raise refuse(
            f"{entry.key} has {entry.length_bytes} bytes; the limit is {_UPLOAD_BYTES[kind]}"
        )
    return Right("PUT", entry.key, entry.length_bytes, entry.sha256)


def compute_model_rights(model_id: str, manifest: Manifest) -> list[Right]:
    """Return the rights to read a model: manifest, tasks with weights and vectors, tokenizer."""
    rights = [Right("GET", get_manifest_key(model_id), len(manifest.to_bytes()))]
    tasks: list[Task | ClientTask] = [*manifest.tasks]
    tasks += manifest.client.tasks if manifest.client is not None else ()
    for task in tasks:
        rights += _task_rights(task)
    if manifest.text is not None:
        text = manifest.text
        rights.append(Right("GET", get_blob_key(text.tokenizer_digest), text.tokenizer_bytes))
    return _unique(rights)


def compute_execution_rights(
    plan: Plan, manifest: Manifest, requester: str, executor_map: ExecutorMap
) -> list[Right]:
    """Return the rights of the Ed25519 key ``requester`` to tensors too large for a frame.

    They follow from the plan: executors and the client may write their own tensors and read their
    inputs, the first ``limits.MAX_GRANTS`` of all. Other log objects need ``compute_log_rights``.
    Refuses a key that is neither the client's nor that of a current executor.
    """
    _check_plan_fits(plan, manifest)
    nodes = _find_nodes(plan, requester)
    own = {
        task
        for task, executor in enumerate(plan.executors())
        if executor in nodes and executor_map.executors[task] == executor
    }
    is_client = requester == plan.request.client_key
    if not own and not is_client:
        raise refuse(
            f"the key {requester} is neither an executor nor the client of execution "
            f"{plan.request.execution_id}"
        )
    ports: list[tuple[Literal["GET", "PUT"], int, int, int]] = []
    for index in sorted(own):
        task = manifest.tasks[index]
        ports += [("PUT", index, port, out.nbytes) for port, out in enumerate(task.outputs)]
        sources = get_sources(manifest, index)
        pairs = zip(sources, task.inputs, strict=True)
        ports += [("GET", *source, entry.nbytes) for source, entry in pairs]
    if is_client:
        ports += [("PUT", CLIENT, i, port.nbytes) for i, port in enumerate(manifest.inputs)]
        ports += [("GET", out.task, out.port, out.nbytes) for out in manifest.outputs]
    large = [entry for entry in dict.fromkeys(ports) if entry[3] > limits.INLINE_TENSOR_BYTES]
    executors = plan.executors()
    rights = (
        Right(
            method,
            LogName.of(
                task,
                port,
                plan.request.client if task == CLIENT else executors[task],
                step,
                apart=True,
            ).get_key(plan.request.execution_id),
            nbytes,
        )
        for step in range(plan.request.steps)
        for method, task, port, nbytes in large
    )
    return list(itertools.islice(rights, limits.MAX_GRANTS))


def compute_log_rights(
    plan: Plan, manifest: Manifest, requester: str, request: LogRequest, executor_map: ExecutorMap
) -> list[Right]:
    """Return the rights to the log objects that ``requester`` asks for; refuse any that it lacks.

    A task's executor, according to ``executor_map``, may write below its own prefix and read that.
    It may read the logs of all candidates of the tasks whose ports it consumes. The client may
    write the graph's inputs and read its outputs. A fallback has no rights before its takeover. A
    replaced node may still write what it had computed, which may be owed to it, and reads nothing.
    """
    _check_plan_fits(plan, manifest)
    nodes = _find_nodes(plan, requester)
    is_client = requester == plan.request.client_key
    runs = {task for task, executor in enumerate(executor_map.executors) if executor in nodes}
    readable = {source for task in runs for source in get_sources(manifest, task)}
    if is_client:
        readable |= {(output.task, output.port) for output in manifest.outputs}
    execution_id = plan.request.execution_id
    rights: list[Right] = []
    for write in request.writes:
        if write.task == CLIENT and is_client:
            author = plan.request.client
        else:
            ran = (node for node in nodes if executor_map.has_run(write.task, node))
            author = next(ran, "")
        if not author:
            raise refuse(f"the key {requester} does not run task {write.task} of {execution_id}")
        check_log_size(write, plan, manifest)
        name = LogName.of(write.task, write.port, author, write.number, apart=write.apart)
        key = name.get_key(execution_id)
        rights.append(Right("PUT", key, write.length_bytes, write.sha256))
    for read in request.reads:  # one's own log is read to compare, or to continue it
        is_own = is_client if read.task == CLIENT else read.task in runs and read.node in nodes
        if not is_own and (read.task, read.port) not in readable:
            raise refuse(
                f"the key {requester} does not read port {read.port} of task {read.task} of "
                f"{execution_id}"
            )
        rights.append(_read_right(plan, read))
    return rights


def check_log_size(write: LogWrite, plan: Plan, manifest: Manifest) -> None:
    """Refuse a log object whose number or length the execution cannot produce."""
    ports = manifest.inputs if write.task == CLIENT else manifest.tasks[write.task].outputs
    where = f"port {write.port} of task {write.task} of {plan.request.execution_id}"
    if write.port >= len(ports) or write.number >= plan.request.steps:
        raise refuse(f"{where} has no log object {write.number}")
    nbytes = ports[write.port].nbytes
    if write.apart:
        limit = nbytes if nbytes > limits.INLINE_TENSOR_BYTES else 0
    else:
        inline = min(nbytes, limits.INLINE_TENSOR_BYTES)
        most = min(inline * plan.request.steps, limits.SEGMENT_BYTES + limits.INLINE_TENSOR_BYTES)
        limit = most + min(limits.LOG_STEP_BYTES * plan.request.steps, limits.SEGMENT_HEADER_BYTES)
    if write.length_bytes > limit:
        raise refuse(f"a log object of {where} has at most {limit} bytes, not {write.length_bytes}")


def _read_right(plan: Plan, read: LogName) -> Right:
    """Return the right to read a log object; refuse it if ``read.node`` cannot be its author."""
    authors = (
        (plan.request.client,)
        if read.task == CLIENT
        else plan.tasks[read.task]
        if read.task < len(plan.tasks)
        else ()
    )
    if read.node not in authors:
        raise refuse(f"{read.node} writes no log of task {read.task}")
    return _make_read(plan, read)


def _make_read(plan: Plan, read: LogName) -> Right:
    return Right("GET", read.get_key(plan.request.execution_id), None)


def _find_nodes(plan: Plan, signing_key: str) -> set[str]:
    return {entry.node for entry in plan.nodes if entry.signing_key == signing_key}


def compute_verification_rights(
    request: VerificationRequest,
    manifest: Manifest,
    requester: str,
    *,
    is_member: bool = False,
) -> list[Right]:
    """Return the rights of a drawn validator: the task's graph and weights, and inputs on request.

    Where members may have to compare numbers (``compares_numbers``), it may write a log of its own
    outputs. Committee members have the rights to read too, since they recompute disputed tasks, and
    may also read the claimed outputs, the executor's and validators'. Validators may not: one that
    could read outputs would not have to compute them.
    """
    order = request.order
    plan = order.certificate.plan
    _check_plan_fits(plan, manifest)
    execution = plan.request.execution_id
    if order.draw.execution_id != execution:
        raise refuse(f"the draw is of execution {order.draw.execution_id}, not of {execution}")
    if order.task >= len(manifest.tasks):
        raise refuse(f"execution {execution} has no task {order.task}")
    if not is_sampled(order.draw.seed, order.task, plan.request.verify_bps):
        raise refuse(f"task {order.task} of execution {execution} was not drawn")
    if not plan.has_candidates(order.draw.executors):
        raise refuse(f"the draw does not name a candidate for every task of {execution}")
    validators = {} if is_member else _find_validators(order, manifest)
    if not is_member and requester not in validators:
        raise refuse(
            f"the key {requester} is not a validator of task {order.task} of execution {execution}"
        )
    if request.writes and (is_member or not compares_numbers(order, manifest)):
        raise refuse(f"nobody compares numbers of task {order.task} of execution {execution}")
    readable = set(get_sources(manifest, order.task))
    if is_member:
        readable |= {(order.task, port) for port in range(len(manifest.tasks[order.task].outputs))}
    for read in request.reads:
        if (read.task, read.port) not in readable:
            raise refuse(f"port {read.port} of task {read.task} is no input of task {order.task}")
    rights = _task_rights(manifest.tasks[order.task])
    for write in request.writes:
        if write.task != order.task:
            raise refuse(f"{requester} recomputes task {order.task}, not {write.task}")
        check_log_size(write, plan, manifest)
        name = LogName.of(
            write.task, write.port, validators[requester], write.number, apart=write.apart
        )
        key = name.get_key(execution)
        rights.append(Right("PUT", key, write.length_bytes, write.sha256))
    for read in request.reads:
        is_claim = is_member and read.task == order.task  # of the executor, or of any validator
        rights.append(_make_read(plan, read) if is_claim else _read_right(plan, read))
    return _unique(rights)


def _find_validators(order: VerificationOrder, manifest: Manifest) -> dict[str, str]:
    """Return the nodes that the order shows as validators, by signing key."""
    task_id, executor = manifest.tasks[order.task].task_id, order.executors[order.task]
    try:
        nodes = check_validators(order.snapshot, order.certificate.plan, executor, task_id)
    except PeerFault as error:
        raise refuse(f"the order does not prove who may verify: {error}") from None
    entries = (order.snapshot.find(node) for node in nodes)
    return {entry.signing_key: entry.node for entry in entries if entry is not None}


def _check_plan_fits(plan: Plan, manifest: Manifest) -> None:
    """Refuse a plan whose tasks are not the manifest's."""
    if manifest.model_id != plan.request.model_id or len(manifest.tasks) != len(plan.tasks):
        raise refuse(
            f"the plan of {plan.request.execution_id} does not fit model {plan.request.model_id}"
        )


def _task_rights(task: Task | ClientTask) -> list[Right]:
    rights = [Right("GET", get_task_key(task.task_id), task.graph_bytes)]
    if task.weights_digest:
        rights.append(Right("GET", get_weights_key(task.weights_digest), task.weights_bytes))
    if isinstance(task, Task) and task.reference_digest:
        rights.append(Right("GET", get_blob_key(task.reference_digest), task.reference_bytes))
    return rights


def _unique(rights: Iterable[Right]) -> list[Right]:
    return list(dict.fromkeys(rights))


def refuse(reason: str) -> Refused:
    """Return the refusal of something that the sender has no right to."""
    return Refused(reason, status=403)
