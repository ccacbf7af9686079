"""Between two tasks, and client and task: who did not store, or commit to, what was given.

Every executor reveals its commitments, drawn or not, so both ends of every edge are known. What is
in the store, members know where they recomputed a task. Pure functions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from splitup.graph.manifest import Manifest
from splitup.messages.base import CLIENT
from splitup.messages.completions import End, TaskCommitment
from splitup.messages.verification import Ruling
from splitup.protocol.execution.routes import get_sources
from splitup.protocol.settlement.proof_of_sampling import Outcome


def find_misled(
    manifest: Manifest,
    claims: Mapping[int, TaskCommitment | None],
    rulings: Mapping[int, Ruling | None],
    replaced: Collection[int] = (),
) -> dict[int, Outcome]:
    """Return the tasks whose executors misled others, or may have, by task.

    WITHHELD: what a task gave is not in the store (2f+1 members looked), or is not what its
    executor committed to. CONTRADICTED: the store says nothing against the producer, and still its
    reader commits to other tensors. Either the producer sent others than it stored, or the reader
    hides a lie behind inputs that nobody has; nobody can prove which, so that neither is paid and
    nobody loses stake.

    ``claims`` are the executors' revealed commitments, None where there is none; ``rulings`` what
    2f+1 members got. Tasks that were ``replaced`` stand by all steps, and their readers may have
    used steps of the node before: nothing follows from a difference. What a shut gate left unsent
    counts as zeros at the reader, so only the gate itself is compared.
    """
    found: dict[int, Outcome] = {}
    for task, claim in claims.items():
        if claim is None:
            continue
        ruling, gate = rulings.get(task), manifest.tasks[task].gate
        if ruling is not None and task in ruling.missing:  # its own outputs, to be compared
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
            if stored != said:
                found[source] = Outcome.WITHHELD
            elif said != read and not {source, task} & set(replaced):
                found.setdefault(source, Outcome.CONTRADICTED)
                found.setdefault(task, Outcome.CONTRADICTED)
    return found


def find_misread(
    manifest: Manifest,
    claims: Mapping[int, TaskCommitment | None],
    ends: Mapping[int, End | None],
) -> set[int]:
    """Return the tasks whose executors commit to other inputs than the client says it sent.

    ``ends`` are what the executors show of the client's, by task; who reads the client's inputs and
    shows none hides it, since without one nobody knows how many steps there were. Two different
    ones are the client's doing, who signed both, and one without digests vouches for nothing: then
    nobody is to blame. As in ``find_misled`` a gated task is compared at its gate only. Takeovers
    change nothing: whoever runs a task in the end has read its inputs from the first step on.
    """
    if len({end for end in ends.values() if end is not None}) > 1:
        return set()
    found = set()
    for task, claim in claims.items():
        if claim is None:
            continue
        end, gate = ends.get(task), manifest.tasks[task].gate
        for place, (source, port) in enumerate(get_sources(manifest, task)):
            if source != CLIENT or (gate is not None and place != gate):
                continue
            if end is None or (end.inputs and end.inputs[port] != claim.inputs[place]):
                found.add(task)
    return found
