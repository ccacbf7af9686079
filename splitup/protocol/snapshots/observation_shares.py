"""Signing and checking the observations that members send to the leader."""

from __future__ import annotations

from itertools import pairwise

from splitup.core.errors import PeerFault
from splitup.messages.snapshots import NodeView, Observation
from splitup.protocol.committee.context import MemberContext
from splitup.protocol.committee.observations import (
    OBSERVATION_DOMAIN,
    ObservationShare,
    SnapshotProposal,
)


def make_share(
    context: MemberContext, epoch: int, sequence: int, views: tuple[NodeView, ...]
) -> ObservationShare:
    """Return our signed observation towards the snapshot of this epoch and sequence number."""
    observation = Observation(
        configuration=context.view.configuration,
        epoch=epoch,
        sequence=sequence,
        member=context.account,
        views=views,
    )
    signature = context.scheme.sign(
        context.identity, OBSERVATION_DOMAIN, observation.once(Observation.canonical_bytes)
    )
    return ObservationShare(observation=observation, signature="0x" + signature.hex())


def check_share(context: MemberContext, share: ObservationShare) -> None:
    """Raise PeerFault, BadSignature for an observation that its member cannot have made."""
    observation = share.observation
    member = context.view.member_of(observation.member)
    if observation.configuration != context.view.configuration:
        raise PeerFault("an observation is of another configuration", peer=member.account)
    nodes = [view.node for view in observation.views]
    if any(a >= b for a, b in pairwise(nodes)):
        raise PeerFault("an observation lists its nodes out of order", peer=member.account)
    context.scheme.verify(
        member.signing_key,
        OBSERVATION_DOMAIN,
        observation.once(Observation.canonical_bytes),
        bytes.fromhex(share.signature[2:]),
    )


def check_proposal(context: MemberContext, sender: str, proposal: SnapshotProposal) -> None:
    """Raise PeerFault, BadSignature unless a proposal rests on a quorum of observations."""
    observers = [share.observation.member for share in proposal.observations]
    if len(observers) < context.view.quorum or any(a >= b for a, b in pairwise(observers)):
        raise PeerFault(f"member {sender} proposed a snapshot without a quorum", peer=sender)
    expected = (proposal.epoch, proposal.sequence)
    for share in proposal.observations:
        if (share.observation.epoch, share.observation.sequence) != expected:
            raise PeerFault(f"member {sender} mixed observations of epochs", peer=sender)
    for share in proposal.observations:
        check_share(context, share)
