"""Members' signed observations of the nodes, and the packed form of a leader's proposal.

What a node claims about itself (above all its tasks) is the same for every member that hears it,
and is by far the largest part of an observation. A packed proposal holds each such claim once, and
six numbers per node for each observer, so its size hardly grows with the number of members.
Receivers restore the observations byte for byte, because the observers signed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Final, Self

from pydantic import Field

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.messages.base import (
    AddressField,
    Bandwidth,
    Bytes32Field,
    Count,
    DigestField,
    Message,
    Speed,
)
from splitup.messages.snapshots import NodeView, Observation

Ed25519SignatureField = Annotated[str, Field(pattern=r"^0x[0-9a-f]{128}$")]
Row = tuple[Count, Count, Count, Count, Count, Count]  # claim, then ``_MEASURED``

OBSERVATION_DOMAIN: Final = b"splitup/observation/v1"
_MEASURED: Final = (
    "rtt_ms",
    "queue_ms",
    "vram_free_bytes",
    "assigned_micro_usdc",
    "locked_micro_usdc",
)
# most bytes of JSON: numbers of 16 digits; a digest in quotes; a claim's names and other values
_ROW_BYTES: Final = 6 * 17 + 2
_TASK_BYTES: Final = 67
_CLAIM_BYTES: Final = 200


class ObservationShare(Message):
    """An observation with its member's Ed25519 signature, which the leader can pass on."""

    observation: Observation
    signature: Ed25519SignatureField


class SnapshotProposal(Message):
    """The root of the leader's snapshot, and the 2f+1 observations that it follows from."""

    configuration: Count
    sequence: Count
    epoch: Count
    root: Bytes32Field
    observations: tuple[ObservationShare, ...] = Field(max_length=limits.MAX_COMMITTEE)


class Claim(Message):
    """What a node claims about itself in its heartbeat."""

    node: AddressField
    resident: tuple[DigestField, ...] = Field(max_length=limits.MAX_RESIDENT_TASKS)
    determinism: str = Field(max_length=limits.MAX_DETERMINISM_CHARS)
    speed_mflops: Speed
    bandwidth_kbps: Bandwidth

    @classmethod
    def of(cls, view: NodeView) -> Self:
        """Return the claims of a view whose fields were checked."""
        return cls.model_construct(**{name: getattr(view, name) for name in cls.model_fields})


class Observed(Message):
    """One member's observation: claims by number, sorted by node, and the measured figures."""

    member: AddressField
    signature: Ed25519SignatureField
    rows: tuple[Row, ...] = Field(max_length=limits.MAX_NODES)


class PackedProposal(Message):
    """The wire form of a ``SnapshotProposal``."""

    configuration: Count
    sequence: Count
    epoch: Count
    root: Bytes32Field
    claims: tuple[Claim, ...] = Field(max_length=limits.MAX_COMMITTEE * limits.MAX_NODES)
    observations: tuple[Observed, ...] = Field(max_length=limits.MAX_COMMITTEE)


def pack_proposal(proposal: SnapshotProposal) -> PackedProposal:
    """Return the proposal with each claim listed once."""
    claims: dict[tuple[object, ...], int] = {}
    listed: list[Claim] = []
    observations = []
    for share in proposal.observations:
        rows = []
        for view in share.observation.views:
            number = claims.setdefault(_get_claim(view), len(listed))
            if number == len(listed):
                listed.append(Claim.of(view))
            rows.append((number, *(getattr(view, name) for name in _MEASURED)))
        observations.append(
            Observed.model_construct(
                member=share.observation.member, signature=share.signature, rows=tuple(rows)
            )
        )
    return PackedProposal(
        configuration=proposal.configuration,
        sequence=proposal.sequence,
        epoch=proposal.epoch,
        root=proposal.root,
        claims=tuple(listed),
        observations=tuple(observations),
    )


def unpack_proposal(packed: PackedProposal) -> SnapshotProposal:
    """Restore the observations; raise PeerFault when a claim is missing, or nodes are unordered.

    The result has at most ``MAX_COMMITTEE`` observations of ``MAX_NODES`` nodes.
    """
    shares = []
    for observed in packed.observations:
        if any(row[0] >= len(packed.claims) for row in observed.rows):
            raise PeerFault(f"a proposal lacks claims that {observed.member} observed")
        claims = [packed.claims[row[0]] for row in observed.rows]
        if any(a.node >= b.node for a, b in pairwise(claims)):
            raise PeerFault(f"a proposal lists what {observed.member} observed out of order")
        views = tuple(map(_make_view, claims, observed.rows))
        observation = Observation.model_construct(
            configuration=packed.configuration,
            epoch=packed.epoch,
            sequence=packed.sequence,
            member=observed.member,
            views=views,
        )
        shares.append(
            ObservationShare.model_construct(observation=observation, signature=observed.signature)
        )
    return SnapshotProposal(
        configuration=packed.configuration,
        sequence=packed.sequence,
        epoch=packed.epoch,
        root=packed.root,
        observations=tuple(shares),
    )


def _make_view(claim: Claim, row: Row) -> NodeView:
    """Return a view made of checked parts."""
    values: dict[str, Any] = {name: getattr(claim, name) for name in Claim.model_fields}
    values.update(zip(_MEASURED, row[1:], strict=True))
    return NodeView.model_construct(**values)


def choose_fitting(own: str, shares: Sequence[ObservationShare]) -> list[ObservationShare]:
    """Return the shares that fit into one chunked message together, sorted by member.

    Our own share, of the member ``own``, comes first. The others follow by how many bytes they add,
    so members that invent nodes and tasks crowd out each other and nobody else.
    """
    shares = sorted(shares, key=lambda share: share.observation.member)
    if sum(len(share.observation.views) for share in shares) <= limits.CHUNKED_MESSAGE_NODES:
        return shares
    known: set[tuple[object, ...]] = set()
    for share in shares:
        if share.observation.member == own:
            known.update(map(_get_claim, share.observation.views))
    sizes = {
        share.observation.member: (share.observation.member != own, _measure(share, known))
        for share in shares
    }
    room = limits.MAX_CHUNKED_MESSAGE_BYTES
    room -= sum(_measure_claim(claim) for claim in known) + len(shares) * limits.KIB
    chosen = []
    for share in sorted(shares, key=lambda share: sizes[share.observation.member]):
        room -= sizes[share.observation.member][1]
        if room >= 0:
            chosen.append(share)
    return sorted(chosen, key=lambda share: share.observation.member)


def _measure(share: ObservationShare, known: set[tuple[object, ...]]) -> int:
    """Return the most bytes that an observation adds to a proposal that holds ``known`` claims."""
    views = share.observation.views
    new = (claim for claim in map(_get_claim, views) if claim not in known)
    return len(views) * _ROW_BYTES + sum(map(_measure_claim, new))


def _measure_claim(claim: tuple[object, ...]) -> int:
    _, resident, determinism, *_ = claim
    assert isinstance(resident, tuple) and isinstance(determinism, str)
    return _CLAIM_BYTES + len(resident) * _TASK_BYTES + 6 * len(determinism)  # \u001f at worst


def _get_claim(view: NodeView) -> tuple[object, ...]:
    return (view.node, view.resident, view.determinism, view.speed_mflops, view.bandwidth_kbps)
