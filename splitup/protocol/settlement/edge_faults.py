"""Faults on the edges of the graph: a tensor that one end sent and the other end read differently.

Every executor reveals its commitments, drawn or not, so both ends of every edge are known. What the
store holds is known for the tasks that members recomputed. Pure functions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from splitup.core.errors import BadSignature
from splitup.crypto.keys import verify_raw
from splitup.graph.manifest import Manifest
from splitup.messages.base import CLIENT
from splitup.messages.completions import End, TaskCommitment
from splitup.messages.frames import read_delivery
from splitup.messages.plans import Plan
from splitup.messages.verification import Ruling
from splitup.protocol.execution.routes import get_sources
from splitup.protocol.settlement.proof_of_sampling import Outcome


def find_edge_faults(
    manifest: Manifest,
    claims: Mapping[int, TaskCommitment | None],
    rulings: Mapping[int, Ruling | None],
    executors: Sequence[str],
    replaced: Collection[int],
) -> dict[int, Outcome]:
    """Return the tasks whose executors misled others, or may have, with the outcome by task.

    WITHHELD: a task's output is not in the store (2f+1 members looked), or differs from what its
    executor committed to. CONTRADICTED: the store does not contradict the producer, but its reader
    commits to different tensors. Either the producer sent other tensors than it stored, or the
    reader hides a lie behind inputs that nobody has. Nobody can prove which, so neither is paid and
    nobody loses stake. A reader of its own tensors was misled by nobody, whatever it stored.

    ``claims`` are the executors' revealed commitments, None where there is none; ``rulings`` are
    what 2f+1 members got. The last executor of a ``replaced`` task answers for all its steps, but
    its readers may have used steps of the executor before, so a difference proves nothing. A tensor
    that a shut gate left unsent counts as zeros at the reader, so only the gate is compared.
    """
    found: dict[int, Outcome] = {}
    replaced = set(replaced)
    for task, claim in claims.items():
        if claim is None:
            continue
        ruling, gate = rulings.get(task), manifest.tasks[task].gate
        if ruling is not None and task in ruling.missing:  # its own outputs
            found[task] = Outcome.WITHHELD
        for place, (source, port) in enumerate(get_sources(manifest, task)):
            if source == CLIENT:
                continue
            if ruling is not None and source in ruling.missing:
                found[source] = Outcome.WITHHELD
            producer = claims[source]
            if producer is None or (gate is not None and place != gate):
                continue
            said, read = producer.outputs[port], claim.inputs[place]
            stored = ruling.inputs[place] if ruling is not None and ruling.inputs else said
            differs = said != read and replaced.isdisjoint((source, task))
            if stored != said:
                found[source] = Outcome.WITHHELD
            elif differs:
                found.setdefault(source, Outcome.CONTRADICTED)
            if differs and (stored == said or executors[source] == executors[task]):
                found.setdefault(task, Outcome.CONTRADICTED)
    return found


def find_input_faults(
    manifest: Manifest,
    claims: Mapping[int, TaskCommitment | None],
    ends: Collection[End],
) -> set[int]:
    """Return the tasks whose executors commit to other inputs than the client says it sent.

    ``ends`` are the client's signed end messages as the executors reveal them. If two of them say
    different inputs, the client signed both, and one without digests states nothing: then no
    executor is blamed. As in ``find_edge_faults``, a gated task is compared at its gate only.
    Takeovers make no difference: the last executor of a task has read its inputs from the first
    step on.
    """
    said = {end.inputs for end in ends}
    if len(said) != 1 or not (sent := said.pop()):
        return set()
    found = set()
    for task, claim in claims.items():
        if claim is None:
            continue
        gate = manifest.tasks[task].gate
        for place, (source, port) in enumerate(get_sources(manifest, task)):
            if source != CLIENT or (gate is not None and place != gate):
                continue
            if sent[port] != claim.inputs[place]:
                found.add(task)
    return found


def find_output_faults(
    plan: Plan,
    claims: Mapping[int, TaskCommitment | None],
    executors: Sequence[str],
    ends: Iterable[End],
    steps: int,
) -> set[int]:
    """Return the tasks whose executors sent the client other outputs than they commit to.

    The proof is the executor's own signature: its delivery of all ``steps``, which the client shows
    in its end message. A client cannot make one, and blames nobody if it shows none. A successor
    signs for all steps from the first one, as it commits to them; what the client received of
    nodes that were replaced is nobody's fault.
    """
    found = set()
    for text in {delivery for end in ends for delivery in end.outputs if delivery}:
        delivery = read_delivery(text)
        if delivery is None or delivery.execution_id != plan.request.execution_id:
            continue
        claim = claims.get(delivery.task)
        if claim is None or delivery.port >= len(claim.outputs) or delivery.step != steps - 1:
            continue
        if delivery.total.hex() == claim.outputs[delivery.port]:
            continue
        signing_key = plan.node_of(executors[delivery.task]).signing_key
        try:
            verify_raw(signing_key, delivery.seal.signed, delivery.seal.signature)
        except BadSignature:
            continue
        found.add(delivery.task)
    return found
