"""Commitments of one execution on the chain: the nodes' own transactions, or one agreed root.

A reorganisation of the chain can remove any of them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from splitup.core import limits
from splitup.core.codec import compute_digest, encode_canonical
from splitup.core.errors import PeerFault
from splitup.graph.manifest import Manifest
from splitup.messages.completions import Completion
from splitup.messages.plans import PlanCertificate
from splitup.messages.verification import Draw
from splitup.protocol.committee.events import CompletionCommitted, ExecutionCommitted
from splitup.protocol.settlement.proof_of_sampling import check_completion


class DrawBasis(NamedTuple):
    """What a draw is computed over.

    ``executors`` is empty when they are the plan's and all committed; ``steps`` is the client's
    number of steps.
    """

    block_hash: str
    commitments: tuple[tuple[str, str], ...]
    executors: tuple[str, ...]
    steps: int


class AgreedCommitments(NamedTuple):
    """The content of one agreed root.

    ``executors`` is empty when they are the plan's and all committed; ``steps`` is the client's
    number of steps.
    """

    commitments: tuple[tuple[str, str], ...]  # (node, root), sorted by node
    executors: tuple[str, ...]
    steps: int


@dataclass(slots=True)
class ChainCommitments:
    """The chain's record of one execution's plan and commitments."""

    is_planned: bool = False  # the chain holds the plan
    own: dict[str, CompletionCommitted] = field(default_factory=dict)  # by node, in chain order
    agreed: ExecutionCommitted | None = None  # the root that the members agreed on
    agreement: AgreedCommitments | None = None  # the content of that root, once known
    bound: dict[str, CompletionCommitted] = field(default_factory=dict)  # by the agreed root

    def add_own(self, event: CompletionCommitted) -> bool:
        """Record a node's own transaction; one that comes after the agreed root has no effect."""
        if self.agreed is not None or event.node in self.own or len(self.own) >= limits.MAX_TASKS:
            return False
        self.own[event.node] = event
        return True

    def get_locked(self) -> dict[str, int]:
        """Return what the chain locked of every node's stake, in micro-USDC.

        Who committed by itself before the agreed root is locked twice; the larger lock counts.
        """
        locked = {node: event.exposure_micro_usdc for node, event in self.own.items()}
        for node, amount in self.agreed.exposures if self.agreed is not None else ():
            locked[node] = max(amount, locked.get(node, 0))
        return locked

    def bind(self, agreement: AgreedCommitments | None) -> bool:
        """Take the content of the agreed root if it matches; return whether it is known now."""
        agreed = self.agreed
        if agreed is None or agreement is None or self.agreement is not None:
            return self.agreement is not None
        if compute_commitments_root(agreed.execution_id, agreement) != agreed.root:
            return False
        self.agreement = agreement
        self.bound = {
            node: CompletionCommitted(
                agreed.execution_id, node, agreement.steps, root, agreed.block_hash
            )
            for node, root in agreement.commitments
        }
        return True

    def unbind(self) -> None:
        """Remove the agreed root, whose block is gone."""
        self.agreed = self.agreement = None
        self.bound.clear()


def make_basis(
    planned: tuple[str, ...],
    executors: tuple[str, ...],
    commitments: Mapping[str, CompletionCommitted],
    steps: int,
) -> DrawBasis:
    """Return what a draw over these executors' commitments is computed over.

    ``planned`` are the plan's executors; ``steps`` is the client's number of steps. The block hash
    is that of the last commitment on chain.
    """
    found = list_events(executors, commitments)
    is_plain = executors == planned and len(found) == len(set(planned))
    return DrawBasis(
        found[-1].block_hash,
        tuple(sorted((event.node, event.root) for event in found)),
        () if is_plain else executors,
        steps,
    )


def rests_on(
    draw: Draw, certificate: PlanCertificate, commitments: Mapping[str, CompletionCommitted]
) -> bool:
    """Return whether a draw is over exactly these commitments, by candidates of the plan."""
    if not certificate.plan.has_candidates(draw.executors):
        return False
    events = list_events(draw.executors or certificate.plan.executors(), commitments)
    if tuple(sorted((event.node, event.root) for event in events)) != draw.commitments:
        return False
    return bool(events) and events[-1].block_hash == draw.block_hash


def list_events(
    executors: Sequence[str], commitments: Mapping[str, CompletionCommitted]
) -> list[CompletionCommitted]:
    """Return the commitments of these executors, in the mapping's order."""
    named = set(executors)
    return [event for node, event in commitments.items() if node in named]


def compute_commitments_root(execution_id: str, agreement: AgreedCommitments) -> str:
    """Return the root over all executors' commitments, who they are, and the number of steps."""
    value = {
        "commitments": [list(entry) for entry in agreement.commitments],
        "execution_id": execution_id,
        "executors": list(agreement.executors),
        "steps": agreement.steps,
    }
    return "0x" + compute_digest(b"splitup/commitments/v2\0" + encode_canonical(value))


def check_revealed(
    completion: Completion,
    certificate: PlanCertificate,
    manifest: Manifest,
    committed: CompletionCommitted,
    executors: Sequence[str],
) -> None:
    """Raise PeerFault unless a completion is what its node committed to, steps included.

    It has to cover the tasks that its node answers for, with the takeovers that assigned them.
    """
    check_committed(completion, committed)
    check_completion(completion, certificate.plan, manifest, committed.root, executors)


def check_committed(completion: Completion, committed: CompletionCommitted) -> None:
    """Raise PeerFault unless root and steps are those on chain; the plan is not checked."""
    node = completion.node
    if completion.root() != committed.root:
        raise PeerFault(f"completion of {node} does not match the root it committed", peer=node)
    if completion.steps != committed.steps:
        raise PeerFault(
            f"completion of {node} has {completion.steps} steps, {committed.steps} were committed",
            peer=node,
        )
