"""Messages between committee members. The transport proves only the sender.

``encode_gossip`` and ``parse_gossip`` wrap a message with its kind. A message that must convince a
third party (an observation, a quorum signature) carries its own signature.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.messages.base import AddressField, Bytes32Field, Count, Message
from splitup.messages.completions import SignedEnd, SignedTakeover
from splitup.messages.plans import PlanCertificate
from splitup.messages.verification import Draw, SignedAttestation
from splitup.protocol.committee.observations import (
    ObservationShare,
    PackedProposal,
    SnapshotProposal,
    pack_proposal,
    unpack_proposal,
)
from splitup.protocol.committee.settlement_proposals import (
    PackedSettlement,
    RoundField,
    SettlementProposal,
    pack_settlement,
    unpack_settlement,
)

QuorumSignatureField = Annotated[str, Field(pattern=r"^0x[0-9a-f]{130}$")]  # ECDSA, r ‖ s ‖ v
PartialField = Annotated[str, Field(pattern=r"^0x[0-9a-f]{96}$")]  # BLS signature by one share
CommitmentTokenField = Annotated[str, Field(max_length=limits.MAX_COMMITMENT_BYTES)]


class EpochTimeoutVote(Message):
    """A vote for an epoch. Repeated every second, so it is also the members' heartbeat."""

    configuration: Count
    epoch: Count


class ObservationRequest(Message):
    """A leader asks for observations for the snapshot of this sequence number."""

    epoch: Count
    sequence: Count


class SnapshotVote(Message):
    """A member's signature under a snapshot's root; sent to all members, proves itself."""

    configuration: Count
    sequence: Count
    epoch: Count
    root: Bytes32Field
    member: AddressField
    signature: QuorumSignatureField


class PlanPartial(Message):
    """A share of the seed of a request's plan."""

    execution_id: Bytes32Field
    request_hash: Bytes32Field
    partial: PartialField


class PlanVote(Message):
    """A member's signature under a plan; sent to all members, proves itself."""

    configuration: Count  # whose key gives the seed
    execution_id: Bytes32Field
    request_hash: Bytes32Field
    root: Bytes32Field
    seed: Bytes32Field
    executors: Annotated[int, Field(ge=1, le=limits.MAX_TASKS)]  # the number of distinct executors
    member: AddressField
    signature: QuorumSignatureField


class Equivocation(Message):
    """Two different votes of one member for one slot."""

    first: SnapshotVote | PlanVote
    second: SnapshotVote | PlanVote


class PlanCertificateMessage(Message):
    """The answer to a member that lacks the certificate; proves itself."""

    certificate: PlanCertificate


class PlanDelivered(Message):
    """The nodes of the plan have it, except those ``unreached``; others need not send it."""

    execution_id: Bytes32Field
    unreached: tuple[AddressField, ...] = Field(default=(), max_length=limits.MAX_PLAN_NODES)


class PlanRequest(Message):
    """Asks a member for the certificate of an execution."""

    execution_id: Bytes32Field


class CommitmentsVote(Message):
    """A member's signature under the root over all executors' commitments, and their exposures."""

    execution_id: Bytes32Field
    root: Bytes32Field
    exposures_hash: Bytes32Field  # of the executors' exposures
    signature: QuorumSignatureField


class CommitmentsRequest(Message):
    """Asks for the content of an execution's agreed root."""

    execution_id: Bytes32Field


class CommitmentsReply(Message):
    """The content of an agreed root, for a member that lacks it; the root on chain proves it.

    ``commitments`` are (node, root), sorted by node. ``executors`` answer for the tasks, by task;
    empty for the plan's. ``steps`` is the client's number of steps.
    """

    execution_id: Bytes32Field
    commitments: tuple[tuple[AddressField, Bytes32Field], ...] = Field(max_length=limits.MAX_TASKS)
    executors: tuple[AddressField, ...] = Field(max_length=limits.MAX_TASKS)
    steps: Annotated[int, Field(ge=1, le=limits.MAX_STEPS)]


class CommitmentsShared(Message):
    """What a member holds of an execution before the draw; every part proves itself.

    ``commitments`` are the nodes' own tokens. ``ends`` are the client's final ones: two prove that
    it signed different ones.
    """

    execution_id: Bytes32Field
    commitments: tuple[CommitmentTokenField, ...] = Field(default=(), max_length=limits.MAX_SHARED)
    ends: tuple[SignedEnd, ...] = Field(default=(), max_length=2)
    takeovers: tuple[SignedTakeover, ...] = Field(default=(), max_length=limits.MAX_PLAN_NODES)


class DrawPartial(Message):
    """A share of the draw's seed."""

    execution_id: Bytes32Field
    partial: PartialField


class DrawMessage(Message):
    """The answer to a member that lacks the draw; proves itself."""

    draw: Draw

    @property
    def execution_id(self) -> str:
        return self.draw.execution_id


class Attested(Message):
    """A member's attestation about a verification; proves itself."""

    attestation: SignedAttestation

    @property
    def execution_id(self) -> str:
        return self.attestation.attestation.execution_id


class SettlementSignature(Message):
    """A member's signature under a proposed settlement, for its proposer."""

    execution_id: Bytes32Field
    round: RoundField
    settlement_hash: Bytes32Field
    signature: QuorumSignatureField


SnapshotMessage = (
    EpochTimeoutVote | ObservationRequest | ObservationShare | SnapshotProposal | SnapshotVote
)
PlanMessage = PlanPartial | PlanVote | PlanCertificateMessage | PlanDelivered | PlanRequest
SettlementMessage = (
    CommitmentsVote
    | CommitmentsRequest
    | CommitmentsReply
    | CommitmentsShared
    | DrawPartial
    | DrawMessage
    | Attested
    | SettlementProposal
    | SettlementSignature
)
GossipMessage = SnapshotMessage | PlanMessage | Equivocation | SettlementMessage

_KINDS: Final[dict[str, type[GossipMessage | PackedProposal | PackedSettlement]]] = {
    "epoch-timeout-vote": EpochTimeoutVote,
    "observation-request": ObservationRequest,
    "observation": ObservationShare,
    "snapshot-proposal": PackedProposal,
    "snapshot-vote": SnapshotVote,
    "plan-partial": PlanPartial,
    "plan-vote": PlanVote,
    "plan-certified": PlanCertificateMessage,
    "plan-delivered": PlanDelivered,
    "plan-request": PlanRequest,
    "equivocation": Equivocation,
    "commitments-vote": CommitmentsVote,
    "commitments-request": CommitmentsRequest,
    "commitments-reply": CommitmentsReply,
    "commitments-shared": CommitmentsShared,
    "draw-partial": DrawPartial,
    "draw-made": DrawMessage,
    "attested": Attested,
    "settlement-proposal": PackedSettlement,
    "settlement-signature": SettlementSignature,
}
_NAMES: Final = {message: kind for kind, message in _KINDS.items()}


def count_nodes(message: GossipMessage) -> int:
    """Return how many nodes a message lists, each repetition counted: its size grows with that."""
    match message:
        case ObservationShare():
            return len(message.observation.views)
        case SnapshotProposal():
            return sum(len(share.observation.views) for share in message.observations)
        case _:  # does not grow with the nodes
            return 0


def encode_gossip(message: GossipMessage, configuration: int) -> dict[str, Any]:
    """Return the JSON body that carries a message between members of a configuration."""
    packed: GossipMessage | PackedProposal | PackedSettlement = message
    if isinstance(message, SnapshotProposal):
        packed = pack_proposal(message)
    elif isinstance(message, SettlementProposal):
        packed = pack_settlement(message)
    return {
        "configuration": configuration,
        "kind": _NAMES[type(packed)],
        "message": packed.model_dump(mode="json"),
    }


def parse_gossip(body: dict[str, Any]) -> tuple[GossipMessage, int]:
    """Parse the body of a gossip request into message and configuration; raise PeerFault."""
    kind, configuration = body.get("kind"), body.get("configuration")
    message_type = _KINDS.get(kind) if isinstance(kind, str) else None
    if message_type is None or body.keys() != {"configuration", "kind", "message"}:
        raise PeerFault("a gossip message is of an unknown kind; the member runs another version")
    if type(configuration) is not int or not 0 <= configuration < 2**53:
        raise PeerFault("a gossip message names no committee configuration")
    message = message_type.from_value(body["message"])
    if isinstance(message, PackedProposal):
        message = unpack_proposal(message)
    elif isinstance(message, PackedSettlement):
        message = unpack_settlement(message)
    return message, configuration
