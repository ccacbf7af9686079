"""Takeovers: another candidate runs a task whose executor failed. And the map of executors.

The plan orders the candidates of every task. When an executor fails, the client names the next
candidate in a signed message; the highest candidate named is the executor. No other party has to
agree: the committee chose the candidates, price and deadline stay, and the client gains nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from splitup.core.errors import BadSignature, PeerFault
from splitup.crypto.keys import Identity, verify_raw
from splitup.messages.base import CLIENT
from splitup.messages.completions import Completion, SignedTakeover, Takeover
from splitup.messages.plans import Plan

_DOMAIN: Final = b"splitup/takeover/v1\0"


def sign_takeover(identity: Identity, takeover: Takeover) -> SignedTakeover:
    """Return a takeover with the client's signature."""
    signature = identity.sign_raw(_DOMAIN + takeover.canonical_bytes())
    return SignedTakeover(takeover=takeover, signature="0x" + signature.hex())


def check_takeover(signed: SignedTakeover, plan: Plan) -> str:
    """Return the node that a takeover names; raise PeerFault, BadSignature for an invalid one."""
    takeover, request = signed.takeover, plan.request
    if takeover.execution_id != request.execution_id:
        raise PeerFault("a takeover is for another execution")
    if takeover.task >= len(plan.tasks) or takeover.candidate >= len(plan.tasks[takeover.task]):
        raise PeerFault(
            f"a takeover in {request.execution_id} names a candidate that does not exist"
        )
    if plan.places and takeover.candidate < plan.places[takeover.task]:
        raise PeerFault(f"a takeover in {request.execution_id} names a node that was passed over")
    if takeover.first_step > request.steps:
        raise PeerFault(f"a takeover in {request.execution_id} begins after its last step")
    message = _DOMAIN + takeover.canonical_bytes()
    verify_raw(request.client_key, message, bytes.fromhex(signed.signature[2:]))
    return plan.tasks[takeover.task][takeover.candidate]


class ExecutorMap:
    """The current executors of one execution."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._executors = list(plan.executors())
        self._keys = {entry.node: entry.signing_key for entry in plan.nodes}
        self.takeovers: dict[int, SignedTakeover] = {}  # by task, the highest candidate's
        self._earlier: dict[tuple[int, str], SignedTakeover] = {}  # by task and the node it names

    @property
    def executors(self) -> tuple[str, ...]:
        """Return the executor of every task."""
        return tuple(self._executors)

    def apply(self, signed: SignedTakeover) -> bool:
        """Apply a takeover; return False when it changes nothing. Raises like check_takeover."""
        takeover = signed.takeover
        known = self.takeovers.get(takeover.task)
        if known is not None and known.takeover.candidate >= takeover.candidate:
            return False
        node = check_takeover(signed, self._plan)
        self.takeovers[takeover.task] = self._earlier[takeover.task, node] = signed
        self._executors[takeover.task] = node
        return True

    def find_takeover(self, task: int, node: str) -> SignedTakeover | None:
        """Return the takeover that gave a task to a node, which may have lost it again."""
        return self._earlier.get((task, node))

    def has_run(self, task: int, node: str) -> bool:
        """Return whether a node is or was the executor of a task."""
        if task >= len(self._executors):
            return False
        return node == self._plan.executors()[task] or (task, node) in self._earlier

    def get_author(self, task: int) -> str:
        """Return the writer of a task's log, or of the graph inputs' (CLIENT); raise PeerFault."""
        if task == CLIENT:
            return self._plan.request.client
        if task >= len(self._executors):
            raise PeerFault(f"{self._plan.request.execution_id} has no task {task}")
        return self._executors[task]

    def get_key(self, task: int) -> str:
        """Return the key that signs the frames of a task; raise PeerFault for an unknown task."""
        if task == CLIENT:
            return self._plan.request.client_key
        return self._keys[self.get_author(task)]

    def is_replaced(self, task: int, signed_bytes: bytes, signature: bytes) -> bool:
        """Return whether an earlier executor of a task signed this: it is late, not faulty."""
        if task not in self.takeovers:
            return False
        candidates = self._plan.tasks[task][: self.takeovers[task].takeover.candidate]
        for node in candidates:
            try:
                verify_raw(self._keys[node], signed_bytes, signature)
            except BadSignature:
                continue
            return True
        return False


def get_candidate(completion: Completion, plan: Plan, task: int) -> int:
    """Return which candidate for ``task`` a completion's node is.

    Raises PeerFault, BadSignature unless the completion's takeovers prove it.
    """
    if plan.executors()[task] == completion.node:
        return 0
    for signed in completion.takeovers:
        if signed.takeover.task == task and check_takeover(signed, plan) == completion.node:
            return signed.takeover.candidate
    raise PeerFault(
        f"completion of {completion.node} covers task {task}, which is not its own",
        peer=completion.node,
    )


def is_given_away(completion: Completion, plan: Plan, task: int) -> bool:
    """Return whether a completion shows that the client gave a task to another than planned.

    Raises PeerFault, BadSignature for a takeover that the client did not sign.
    """
    planned = plan.executors()[task]
    return any(
        signed.takeover.task == task and check_takeover(signed, plan) != planned
        for signed in completion.takeovers
    )


def list_taken(
    takeovers: Iterable[SignedTakeover], plan: Plan, node: str
) -> frozenset[tuple[int, int]]:
    """Return the (task, candidate) by which checked takeovers name a node."""
    names = ((signed.takeover.task, signed.takeover.candidate) for signed in takeovers)
    return frozenset((task, place) for task, place in names if plan.tasks[task][place] == node)


def find_executors(
    plan: Plan,
    named: Iterable[tuple[int, int]],
    places: Mapping[str, int],
    *,
    known: Iterable[tuple[int, int]] = (),
    partial: bool = False,
) -> tuple[str, ...] | None:
    """Return who answers for every task, None while a commitment is missing.

    All takeovers are ``known``: the last candidate of each task is waited for. With ``partial``
    commitments may be missing: then the last candidate named, or the plan's, stands for the task.

    ``named`` are the (task, candidate) by which those that committed show that they answer for a
    task (``list_taken``). ``places`` are the positions of the
    nodes' commitments on chain, all equal where the chain gives no order. The first commitments
    that cover every task count, so later ones change nothing; of several candidates for one task
    the highest counts.
    """
    executors, names = plan.executors(), sorted(named)
    last_named = dict(sorted(known))  # the highest candidate, by task
    if not names and not last_named:  # the usual case, computed many times a second
        return executors if partial or places.keys() >= set(executors) else None
    eligible = [[executor] for executor in executors]
    for task, candidate in names:
        eligible[task].append(plan.tasks[task][candidate])
    present = [[node for node in nodes if node in places] for nodes in eligible]
    if partial:
        pairs = zip(present, eligible, strict=True)
        return tuple((nodes or candidates)[-1] for nodes, candidates in pairs)
    if not all(present):
        return None
    if any(present[task][-1] != plan.tasks[task][place] for task, place in last_named.items()):
        return None
    last = max(min(places[node] for node in nodes) for nodes in present)
    return tuple([node for node in nodes if places[node] <= last][-1] for nodes in present)
