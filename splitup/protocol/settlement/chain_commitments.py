"""Commitments of one execution on the chain, which has one agreed root over them.

A reorganisation of the chain can remove it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from splitup.core.codec import compute_digest, encode_canonical
from splitup.core.errors import PeerFault
from splitup.graph.manifest import Manifest
from splitup.messages.completions import Completion
from splitup.messages.plans import PlanCertificate
from splitup.protocol.committee.events import ExecutionCommitted
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
    agreed: ExecutionCommitted | None = None  # the root that the members agreed on
    agreement: AgreedCommitments | None = None  # the content of that root, once known
    bound: dict[str, str] = field(default_factory=dict)  # its roots by node, of those that count

    def get_locked(self) -> dict[str, int]:
        """Return what the chain locked of every node's stake, in micro-USDC."""
        return dict(self.agreed.exposures) if self.agreed is not None else {}

    def bind(self, agreement: AgreedCommitments | None) -> bool:
        """Take the content of the agreed root if it matches; return whether it is known now.

        A node of whose stake nothing is locked counts as not having committed.
        """
        agreed = self.agreed
        if agreed is None or agreement is None or self.agreement is not None:
            return self.agreement is not None
        if compute_commitments_root(agreed.execution_id, agreement) != agreed.root:
            return False
        self.agreement, locked = agreement, self.get_locked()
        self.bound = {node: root for node, root in agreement.commitments if locked.get(node)}
        return True

    def unbind(self) -> None:
        """Remove the agreed root, whose block is gone."""
        self.agreed = self.agreement = None
        self.bound.clear()

    def find_basis(self, planned: tuple[str, ...]) -> DrawBasis | None:
        """Return what the draw is over, None without the content of a root that binds somebody.

        ``planned`` are the plan's executors.
        """
        if self.agreed is None or self.agreement is None or not self.bound:
            return None
        is_plain = not self.agreement.executors and self.bound.keys() == set(planned)
        return DrawBasis(
            self.agreed.block_hash,
            tuple(sorted(self.bound.items())),
            () if is_plain else self.agreement.executors or planned,
            self.agreement.steps,
        )


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
    basis: DrawBasis,
    root: str,
) -> None:
    """Raise PeerFault unless a completion is what its node committed to, steps included.

    It has to cover the tasks that its node answers for, with the takeovers that assigned them.
    """
    node, steps = completion.node, basis.steps
    if completion.root() != root:
        raise PeerFault(f"completion of {node} does not match the root it committed", peer=node)
    if completion.steps != steps:
        raise PeerFault(
            f"completion of {node} has {completion.steps} steps, {steps} were committed", peer=node
        )
    executors = basis.executors or certificate.plan.executors()
    check_completion(completion, certificate.plan, manifest, root, executors)
