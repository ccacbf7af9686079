"""The commands that come out of a committee member's machine, for its shell to carry out in order.

A ``Persist`` stands before the sends that must not leave before it is on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splitup.crypto.quorum import ExecutionHistory, Settlement
from splitup.messages.completions import TaskCommitment
from splitup.messages.plans import PlanCertificate, PlanNode, Request
from splitup.messages.verification import VerificationOrder, VerificationResult
from splitup.protocol.committee.peer_messages import Equivocation, GossipMessage


@dataclass(frozen=True, slots=True)
class Gossip:
    """Send to one member, or to all others of the configuration if ``to`` is None."""

    to: str | None
    message: GossipMessage
    configuration: int = 0


@dataclass(frozen=True, slots=True)
class Persist:
    """Write to the journal, durably, before the next command."""

    kind: str
    key: str
    value: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Forget:
    kind: str
    key: str


@dataclass(frozen=True, slots=True)
class SubmitSnapshot:
    sequence: int
    epoch: int
    root: str
    signatures: bytes


@dataclass(frozen=True, slots=True)
class SubmitPlan:
    execution_id: str
    request: Request
    plan_root: str
    seed_signature: str
    executors: int  # the number of distinct executors
    signatures: bytes
    client_signature: str = ""  # set if this transaction opens the signed request


@dataclass(frozen=True, slots=True)
class SubmitCommitments:
    """Bring the agreed root over all executors' commitments to the chain, which locks exposures."""

    execution_id: str
    root: str
    exposures: tuple[tuple[str, int], ...]  # (executor, micro-USDC), sorted
    signatures: bytes


@dataclass(frozen=True, slots=True)
class SubmitSettlement:
    execution_id: str
    settlement: Settlement
    history: ExecutionHistory | None  # what the chain recorded of the execution; only for slashes
    signatures: bytes


@dataclass(frozen=True, slots=True)
class SubmitEvidence:
    """Bring the evidence of a member's equivocation to the chain."""

    evidence: Equivocation


@dataclass(frozen=True, slots=True)
class PostDealing:
    dealing: bytes


@dataclass(frozen=True, slots=True)
class PostComplaint:
    dealer: str
    evidence: bytes


@dataclass(frozen=True, slots=True)
class ConfirmGroupKey:
    public_key: str
    configuration: int = 0


@dataclass(frozen=True, slots=True)
class PushPlan:
    """Post the certificate to these nodes at once; the shell answers with PlanPushed."""

    certificate: PlanCertificate
    nodes: tuple[PlanNode, ...]


@dataclass(frozen=True, slots=True)
class PushVerification:
    """Post the verification order to its validator."""

    node: str
    endpoint: str
    order: VerificationOrder


@dataclass(frozen=True, slots=True)
class RecomputeTask:
    """Recompute a disputed task here; the shell answers with TaskRecomputed.

    ``determinism`` is the executor's class. If this machine computes in another class and the task
    has a tolerance, the result is compared with ``claim`` instead, and with what validators say.
    After each of ``tries`` that took too long it may take twice the time.
    """

    order: VerificationOrder
    determinism: str
    claim: TaskCommitment
    results: tuple[VerificationResult, ...] = ()
    tries: int = 0

    @property
    def claims(self) -> tuple[TaskCommitment | VerificationResult, ...]:
        """Return what is compared: the executor's claim, then the validators'."""
        return self.claim, *self.results


@dataclass(frozen=True, slots=True)
class FetchManifest:
    model_id: str


@dataclass(frozen=True, slots=True)
class FetchSnapshot:
    root: str


@dataclass(frozen=True, slots=True)
class AnnouncePlan:
    """A plan, or the reason why there is none, is known now: answer the requests that wait."""

    execution_id: str


@dataclass(frozen=True, slots=True)
class Log:
    message: str


@dataclass(frozen=True, slots=True)
class Fault:
    """Another party broke the protocol; what it sent was dropped."""

    peer: str
    message: str


JournalCommand = Persist | Forget
ChainCommand = (
    SubmitSnapshot
    | SubmitPlan
    | SubmitCommitments
    | SubmitSettlement
    | SubmitEvidence
    | PostDealing
    | PostComplaint
    | ConfirmGroupKey
)
PeerCommand = Gossip | PushPlan | PushVerification
FetchCommand = RecomputeTask | FetchManifest | FetchSnapshot
NoticeCommand = AnnouncePlan | Log | Fault
Command = JournalCommand | ChainCommand | PeerCommand | FetchCommand | NoticeCommand
