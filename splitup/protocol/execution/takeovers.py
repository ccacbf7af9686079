"""Who runs a task when its executor is gone. Pure functions, and the list of who runs what now.

The plan orders the candidates of every task. The client, who alone suffers from a node that is
gone, names the next one in a message that it signs; the highest candidate named is the executor.
Nobody else's agreement is needed: the candidates are the committee's choice, price and deadline
stay, and the client gains nothing by it.
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
    """Return the node that a takeover names. Raises PeerFault, BadSignature unless it is good."""
    takeover, request = signed.takeover, plan.request
    if takeover.execution_id != request.execution_id:
        raise PeerFault("a takeover is for another execution")
    if takeover.task >= len(plan.tasks) or takeover.candidate >= len(plan.tasks[takeover.task]):
        raise PeerFault(f"a takeover in {request.execution_id} names a candidate that is none")
    if plan.places and takeover.candidate < plan.places[takeover.task]:
        raise PeerFault(f"a takeover in {request.execution_id} names a node that was passed over")
    if takeover.first_step > request.steps:
        raise PeerFault(f"a takeover in {request.execution_id} begins after its last step")
    message = _DOMAIN + takeover.canonical_bytes()
    verify_raw(request.client_key, message, bytes.fromhex(signed.signature[2:]))
    return plan.tasks[takeover.task][takeover.candidate]


class ExecutorMap:
    """The executors of one execution as they are now."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._executors = list(plan.executors())
        self._keys = {entry.node: entry.signing_key for entry in plan.nodes}
        self.takeovers: dict[int, SignedTakeover] = {}  # by task, the highest candidate's

    @property
    def executors(self) -> tuple[str, ...]:
        """Return the executor of every task."""
        return tuple(self._executors)

    def apply(self, signed: SignedTakeover) -> bool:
        """Take a takeover; return False when it says nothing new. Raises like check_takeover."""
        takeover = signed.takeover
        known = self.takeovers.get(takeover.task)
        if known is not None and known.takeover.candidate >= takeover.candidate:
            return False
        node = check_takeover(signed, self._plan)
        self.takeovers[takeover.task] = signed
        self._executors[takeover.task] = node
        return True

    def get_author(self, task: int) -> str:
        """Return who writes the log of a task, or of the graph's inputs; PeerFault for no task."""
        if task == CLIENT:
            return self._plan.request.client
        if task >= len(self._executors):
            raise PeerFault(f"{self._plan.request.execution_id} has no task {task}")
        return self._executors[task]

    def get_key(self, task: int) -> str:
        """Return the key that frames of a task are signed with; PeerFault for no task."""
        if task == CLIENT:
            return self._plan.request.client_key
        return self._keys[self.get_author(task)]

    def is_replaced(self, task: int, signed_bytes: bytes, signature: bytes) -> bool:
        """Return whether a task's earlier executor signed this: late, and no fault of its own."""
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
    """Return which candidate for ``task`` a completion's node is, as its takeovers prove.

    Raises PeerFault, BadSignature when they do not.
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


def find_executors(
    plan: Plan, named: Iterable[tuple[int, int]], places: Mapping[str, int]
) -> tuple[str, ...] | None:
    """Return who answers for every task, None while somebody's commitment lacks.

    ``named`` are the (task, candidate) of takeovers that were checked, ``places`` those of the
    nodes' commitments in the order of the chain, equal ones where there is none. The first of these
    that cover every task count, so that later ones change nothing; of several candidates for one
    task the highest.
    """
    executors, names = plan.executors(), sorted(named)
    if not names:  # the usual case, asked for many times a second
        return executors if places.keys() >= set(executors) else None
    eligible = [[executor] for executor in executors]
    for task, candidate in names:
        eligible[task].append(plan.tasks[task][candidate])
    present = [[node for node in nodes if node in places] for nodes in eligible]
    if not all(present):
        return None
    last = max(min(places[node] for node in nodes) for nodes in present)
    return tuple([node for node in nodes if places[node] <= last][-1] for nodes in present)
