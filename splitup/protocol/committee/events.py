"""What goes into a committee member's machine and what comes out of it.

Events are facts (from the chain, from peers that the shell has authenticated, from the clock).
Commands are to be carried out in order: a ``Persist`` stands before the sends that it guards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splitup.crypto.dkg import GroupKey
from splitup.crypto.quorum import Settlement
from splitup.graph.manifest import Manifest
from splitup.messages.base import Message
from splitup.messages.completions import Completion, ExecutorCommitment, Takeovers, TaskCommitment
from splitup.messages.plans import PlanCertificate, PlanNode, Request, SignedRequest
from splitup.messages.snapshots import Heartbeat, Snapshot
from splitup.messages.verification import (
    Ruling,
    ValidatorCommitment,
    VerificationOrder,
    VerificationResult,
)
from splitup.protocol.committee.certificates import CommitteeMember
from splitup.protocol.committee.peer_messages import Equivocation

# ---- from the chain ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockSeen:
    """The chain's head: what it is now, whatever was its head before."""

    number: int
    timestamp_s: int
    block_hash: str


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node as the NodeRegistry states it."""

    node: str
    signing_key: str
    endpoint: str
    stake_micro_usdc: int
    operator: str = ""  # who runs it; "" means its own account
    locked_micro_usdc: int = 0  # of the stake, by executions under way


@dataclass(frozen=True, slots=True)
class NodesSeen:
    """All active nodes."""

    nodes: tuple[NodeRecord, ...]


@dataclass(frozen=True, slots=True)
class SnapshotAccepted:
    configuration: int
    sequence: int
    root: str


@dataclass(frozen=True, slots=True)
class RequestSeen:
    request: Request
    configuration: int = 0  # that was current where the chain holds it; 0: the one that is now


@dataclass(frozen=True, slots=True)
class PlanAccepted:
    execution_id: str
    plan_root: str


@dataclass(frozen=True, slots=True)
class CompletionCommitted:
    execution_id: str
    node: str
    steps: int
    root: str
    block_hash: str
    exposure_micro_usdc: int = 0  # what the node locked by it


@dataclass(frozen=True, slots=True)
class ExecutionCommitted:
    """The chain took the root that the members agreed on, over all executors' pledges."""

    execution_id: str
    root: str
    block_hash: str


@dataclass(frozen=True, slots=True)
class ExecutionEnded:
    """Settled or refunded."""

    execution_id: str


@dataclass(frozen=True, slots=True)
class RequestReverted:
    """A reorganisation dropped the block of this event. Undone events come latest first."""

    event: (
        RequestSeen
        | PlanAccepted
        | CompletionCommitted
        | ExecutionCommitted
        | SnapshotAccepted
        | ExecutionEnded
    )


@dataclass(frozen=True, slots=True)
class ConfigurationSeen:
    """The chain announced members (``is_handover``: they take over the key), or changed to them."""

    configuration: int
    members: tuple[CommitteeMember, ...]
    is_handover: bool
    is_current: bool
    block_number: int


@dataclass(frozen=True, slots=True)
class DealingPosted:
    dealer: str
    dealing: bytes
    block_number: int
    configuration: int = 0


@dataclass(frozen=True, slots=True)
class ComplaintPosted:
    dealer: str
    complainer: str
    evidence: bytes
    block_number: int
    configuration: int = 0


@dataclass(frozen=True, slots=True)
class BoardRead:
    """Every configuration, dealing and complaint up to this block has been told."""

    block_number: int


# ---- from peers; the sender is proven --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GossipReceived:
    sender: str  # the member's account
    message: Message
    configuration: int = 0


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    heartbeat: Heartbeat
    signing_key: str  # that signed it


@dataclass(frozen=True, slots=True)
class SignedRequestReceived:
    """A client's signed request, and what the chain says of the client. The rest was checked."""

    signed: SignedRequest
    balance_micro_usdc: int
    frozen_until: int


@dataclass(frozen=True, slots=True)
class CompletionReceived:
    completion: Completion
    signing_key: str


@dataclass(frozen=True, slots=True)
class ExecutorCommitmentReceived:
    commitment: ExecutorCommitment
    signing_key: str


@dataclass(frozen=True, slots=True)
class TakeoversReceived:
    """A node's proof that it runs tasks of another; ``signing_key`` signed the message."""

    takeovers: Takeovers
    signing_key: str


@dataclass(frozen=True, slots=True)
class ValidatorCommitmentReceived:
    """A validator's commitment."""

    validator_commitment: ValidatorCommitment
    signing_key: str


@dataclass(frozen=True, slots=True)
class VerificationResultReceived:
    result: VerificationResult
    signing_key: str
    token: str  # the signed bytes, as evidence for the other members


# ---- from the shell itself -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyReady:
    """Key generation ended: the group's key, and our share of its secret."""

    group: GroupKey
    share: bytes


@dataclass(frozen=True, slots=True)
class RttMeasured:
    """The answer to a probe; None when the node cannot be reached."""

    node: str
    rtt_ms: int | None


@dataclass(frozen=True, slots=True)
class ManifestFetched:
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class SnapshotFetched:
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class TaskRecomputed:
    """A RecomputeTask was carried out, or cannot be: then the ruling says why."""

    execution_id: str
    ruling: Ruling


@dataclass(frozen=True, slots=True)
class PlanPushed:
    """A PushPlan was carried out; ``unreached`` nodes did not answer."""

    execution_id: str
    unreached: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemberLost:
    """A member's process accepts no connection."""

    account: str


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    BlockSeen
    | NodesSeen
    | SnapshotAccepted
    | RequestSeen
    | PlanAccepted
    | CompletionCommitted
    | ExecutionCommitted
    | ExecutionEnded
    | RequestReverted
    | ConfigurationSeen
    | DealingPosted
    | ComplaintPosted
    | BoardRead
    | GossipReceived
    | HeartbeatReceived
    | SignedRequestReceived
    | CompletionReceived
    | ExecutorCommitmentReceived
    | ValidatorCommitmentReceived
    | TakeoversReceived
    | VerificationResultReceived
    | TaskRecomputed
    | KeyReady
    | RttMeasured
    | ManifestFetched
    | SnapshotFetched
    | PlanPushed
    | MemberLost
    | Tick
)


# ---- commands ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gossip:
    """Send to one member, or (``to`` None) to all others of the configuration."""

    to: str | None
    message: Message
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
    executors: int  # how many nodes it gives work to
    signatures: bytes
    client_signature: str = ""  # when the request is to be opened with it


@dataclass(frozen=True, slots=True)
class SubmitCommitments:
    """Bring the agreed root over all executors' pledges to the chain, and have them locked."""

    execution_id: str
    root: str
    exposures: tuple[tuple[str, int], ...]  # (executor, micro-USDC), sorted
    signatures: bytes


@dataclass(frozen=True, slots=True)
class SubmitSettlement:
    execution_id: str
    settlement: Settlement
    signatures: bytes


@dataclass(frozen=True, slots=True)
class SubmitEvidence:
    """Bring a member's two signatures to the chain."""

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
    """Post the certificate to these nodes of its plan, all at once; report with PlanPushed."""

    certificate: PlanCertificate
    nodes: tuple[PlanNode, ...]


@dataclass(frozen=True, slots=True)
class PushVerification:
    """Post the order to the validator drawn for it."""

    node: str
    endpoint: str
    order: VerificationOrder


@dataclass(frozen=True, slots=True)
class RecomputeTask:
    """Recompute a disputed task here; report TaskRecomputed.

    ``determinism`` is the executor's class; where this machine computes in another one and the task
    has a tolerance, ``claim`` is compared instead.
    """

    order: VerificationOrder
    determinism: str
    claim: TaskCommitment


@dataclass(frozen=True, slots=True)
class FetchManifest:
    model_id: str


@dataclass(frozen=True, slots=True)
class FetchSnapshot:
    root: str


@dataclass(frozen=True, slots=True)
class AnnouncePlan:
    """A plan, or the reason why there is none, is known now: answer whoever waits for it."""

    execution_id: str


@dataclass(frozen=True, slots=True)
class Log:
    message: str


@dataclass(frozen=True, slots=True)
class Fault:
    """Another party broke the protocol; what it sent was dropped."""

    peer: str
    message: str


Command = (
    Gossip
    | Persist
    | Forget
    | SubmitSnapshot
    | SubmitPlan
    | SubmitCommitments
    | SubmitSettlement
    | SubmitEvidence
    | PostDealing
    | PostComplaint
    | ConfirmGroupKey
    | PushPlan
    | PushVerification
    | RecomputeTask
    | FetchManifest
    | FetchSnapshot
    | AnnouncePlan
    | KeyReady
    | Log
    | Fault
)
