"""The events that go into a committee member's machine.

Events are facts: from the chain, from peers whose signature the shell has checked, from the clock.
``commands`` holds what comes out.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitup.crypto.dkg import GroupKey
from splitup.graph.manifest import Manifest
from splitup.messages.completions import Completion, ExecutorCommitment, Takeovers
from splitup.messages.plans import Request, SignedRequest
from splitup.messages.snapshots import Heartbeat, Snapshot
from splitup.messages.verification import (
    Ruling,
    ValidatorCommitment,
    VerificationResult,
)
from splitup.protocol.committee.certificates import MemberView
from splitup.protocol.committee.peer_messages import GossipMessage

NodeReport = ExecutorCommitment | Takeovers | Completion | ValidatorCommitment | VerificationResult

# ---- from the chain ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockSeen:
    """The current head of the chain; an earlier head may have been reverted."""

    number: int
    timestamp_s: int
    block_hash: str


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node as in the NodeRegistry."""

    node: str
    signing_key: str
    endpoint: str
    stake_micro_usdc: int
    operator: str = ""  # its operator; "" for its own account
    locked_micro_usdc: int = 0  # of its stake, by open executions


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
    configuration: int = 0  # current at its position on the chain; 0: the current one
    refusal: str = ""  # why the committee must not plan it: its model was retired before


@dataclass(frozen=True, slots=True)
class PlanAccepted:
    execution_id: str
    plan_root: str


@dataclass(frozen=True, slots=True)
class ExecutionCommitted:
    """The chain took the root that the members agreed on, over all executors' commitments."""

    execution_id: str
    root: str
    block_hash: str
    # (executor, micro-USDC) as locked, sorted; 0 for a node whose free stake was too small
    exposures: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ExecutionEnded:
    """Settled or refunded; a settlement names the root of the evidence that it rests on.

    ``fee_micro_usdc`` is what its client paid that neither it nor a node has back.
    """

    execution_id: str
    evidence_root: str = ""
    fee_micro_usdc: int = 0


RevertibleEvent = (
    RequestSeen | PlanAccepted | ExecutionCommitted | SnapshotAccepted | ExecutionEnded
)


@dataclass(frozen=True, slots=True)
class EventReverted:
    """A reorganisation removed the block of this event. The latest reverted event comes first."""

    event: RevertibleEvent


@dataclass(frozen=True, slots=True)
class ConfigurationSeen:
    """The chain announced a configuration (``is_handover``: same key), or made it current."""

    configuration: int
    members: tuple[MemberView, ...]
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
    """All configurations, dealings and complaints up to this block were given before."""

    block_number: int


# ---- from peers; the sender is proven --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GossipReceived:
    sender: str  # the member's account
    message: GossipMessage
    configuration: int = 0


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    heartbeat: Heartbeat
    signing_key: str  # that signed it


@dataclass(frozen=True, slots=True)
class SignedRequestReceived:
    """A client's signed request, which the shell checked, with the client's balance on chain."""

    signed: SignedRequest
    balance_micro_usdc: int
    frozen_until: int


@dataclass(frozen=True, slots=True)
class ReportReceived:
    """What a node tells the members about an execution, with the key that signed it.

    ``token`` is the signed message, as evidence for the other members.
    """

    report: NodeReport
    signing_key: str
    token: str = ""


# ---- from the shell itself -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyReady:
    """Key generation ended: the group key, and our share of its secret."""

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
    """The results of a RecomputeTask, one for each claim; if it failed one states why."""

    execution_id: str
    rulings: tuple[Ruling, ...]


@dataclass(frozen=True, slots=True)
class PlanPushed:
    """A PushPlan was carried out; ``unreached`` nodes did not answer."""

    execution_id: str
    unreached: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemberLost:
    """A member's process accepts no connections."""

    account: str


@dataclass(frozen=True, slots=True)
class Tick:
    pass


ChainFact = BlockSeen | NodesSeen | RevertibleEvent | EventReverted
BoardFact = ConfigurationSeen | DealingPosted | ComplaintPosted | BoardRead
PeerEvent = GossipReceived | HeartbeatReceived | SignedRequestReceived | ReportReceived
LocalEvent = (
    KeyReady
    | RttMeasured
    | ManifestFetched
    | SnapshotFetched
    | TaskRecomputed
    | PlanPushed
    | MemberLost
    | Tick
)
MemberEvent = ChainFact | PeerEvent | LocalEvent  # for the machine of one configuration
Event = MemberEvent | BoardFact
