"""Who is alive: heartbeats in, an agreed snapshot of the network out. Led by one member per epoch.

Each member observes on its own; the leader of an epoch gathers 2f+1 signed observations and
proposes what follows from them; the others recompute it and sign. The chain accepts one snapshot
per sequence number. A silent leader costs its epoch and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median_low

from splitup import limits
from splitup.crypto.keys import verify
from splitup.crypto.quorum import pack_signatures, snapshot_struct_hash
from splitup.errors import BadSignature, PeerFault
from splitup.protocol.events import (
    Command,
    FetchSnapshot,
    Gossip,
    Log,
    NodeRecord,
    SubmitSnapshot,
)
from splitup.protocol.messages import (
    OBSERVATION_DOMAIN,
    ObservationShare,
    SnapshotProposal,
    SnapshotSignature,
)
from splitup.protocol.shared import Ledger, Library, Seat
from splitup.wire import Heartbeat, NodeView, Observation, Snapshot, SnapshotEntry


@dataclass(slots=True)
class _Node:
    record: NodeRecord
    heartbeat: Heartbeat | None = None
    heard_at: float = 0.0
    rtt_ms: int | None = None  # None: not reachable, or not probed yet
    probed: bool = False


@dataclass(slots=True)
class _Collection:
    """What the leader holds of its epoch."""

    epoch: int
    shares: dict[str, ObservationShare] = field(default_factory=dict)
    quorum_at: float | None = None
    snapshot: Snapshot | None = None
    signatures: dict[str, bytes] = field(default_factory=dict)
    submitted: bool = False


def compute_leader(accounts: Sequence[str], epoch: int) -> str:
    """Return who leads an epoch."""
    return accounts[epoch % len(accounts)]


def compute_snapshot(
    observations: Sequence[Observation],
    records: Mapping[str, NodeRecord],
    *,
    sequence: int,
    tolerated: int,
) -> Snapshot:
    """Return the snapshot that follows from observations of one epoch and the registry.

    A node is in when more than ``tolerated`` observers list it, hence at least one honest one. Load
    and round trip are medians; a task is resident when more than ``tolerated`` observers say so.
    """
    views: dict[str, list[NodeView]] = {}
    for observation in sorted(observations, key=lambda o: o.member):
        for view in observation.views:
            views.setdefault(view.node, []).append(view)
    entries = []
    for node in sorted(views):
        seen, record = views[node], records.get(node)
        if len(seen) <= tolerated or record is None:
            continue
        held = Counter(task for view in seen for task in view.resident)
        classes = Counter(view.determinism for view in seen)
        entries.append(
            SnapshotEntry(
                node=node,
                signing_key=record.signing_key,
                endpoint=record.endpoint,
                stake_micro_usdc=record.stake_micro_usdc,
                rtt_ms=median_low(view.rtt_ms for view in seen),
                queue_ms=median_low(view.queue_ms for view in seen),
                resident=tuple(sorted(t for t, count in held.items() if count > tolerated)),
                determinism=min(classes, key=lambda name: (-classes[name], name)),
            )
        )
    first = observations[0]
    return Snapshot(
        configuration=first.configuration,
        sequence=sequence,
        epoch=first.epoch,
        entries=tuple(entries),
    )


class Snapshots:
    """One member's part in the snapshot layer."""

    def __init__(self, seat: Seat, ledger: Ledger, library: Library, epoch_blocks: int) -> None:
        self._seat = seat
        self._ledger = ledger
        self._library = library
        self._epoch_blocks = epoch_blocks
        self._nodes: dict[str, _Node] = {}
        self._epoch = -1
        self._sequence: int | None = None  # the latest on chain; None until it is known
        self._root = ""
        self._accepted_at = 0.0
        self._collection: _Collection | None = None
        self._early: dict[str, ObservationShare] = {}  # the latest one per member, for our epoch

    # ---- what the rest of the member asks ---------------------------------------------------

    def find_record(self, node: str) -> NodeRecord | None:
        known = self._nodes.get(node)
        return known.record if known else None

    def is_unprobed(self, node: str) -> bool:
        """Return whether a registered node was heard, but never probed."""
        known = self._nodes.get(node)
        return known is not None and not known.probed

    def list_heard(self, now: float) -> list[tuple[str, str]]:
        """Return (node, endpoint) of the nodes that beat, reachable or not."""
        return [
            (node.record.node, node.record.endpoint)
            for node in self._nodes.values()
            if node.heartbeat and now - node.heard_at < limits.HEARTBEAT_TIMEOUT_S
        ]

    def get_live(self, now: float) -> list[Heartbeat]:
        """Return the latest heartbeats of the nodes that this member sees alive."""
        return [node.heartbeat for node in self._get_live_nodes(now) if node.heartbeat]

    def get_status(self, now: float) -> dict[str, int]:
        return {
            "epoch": self._epoch,
            "sequence": self._sequence or 0,
            "nodes_registered": len(self._nodes),
            "nodes_live": len(self._get_live_nodes(now)),
        }

    # ---- facts ------------------------------------------------------------------------------

    def process_nodes(self, records: Sequence[NodeRecord]) -> list[Command]:
        """Take over the registry's active nodes; the others are forgotten."""
        old = self._nodes
        self._nodes = {}
        for record in records[: limits.MAX_NODES]:
            known = old.get(record.node)
            if known and known.record.endpoint == record.endpoint:
                known.record = record
                self._nodes[record.node] = known
            else:
                self._nodes[record.node] = _Node(record, known.heartbeat if known else None)
        return []

    def process_heartbeat(
        self, heartbeat: Heartbeat, signing_key: str, now: float
    ) -> list[Command]:
        """Note a sign of life; raise PeerFault from strangers, ignore what is older than known."""
        node = self._nodes.get(heartbeat.node)
        if node is None:
            raise PeerFault(
                f"node {heartbeat.node} is not active in the registry; stake it, or wait for the "
                "block that holds its registration",
                peer=heartbeat.node,
            )
        if node.record.signing_key != signing_key:
            raise BadSignature(
                f"a heartbeat of {heartbeat.node} is signed by another key", peer=heartbeat.node
            )
        if any(a >= b for a, b in pairwise(heartbeat.resident)):
            raise PeerFault(
                "a heartbeat lists its resident tasks out of order", peer=node.record.node
            )
        last = node.heartbeat
        if last and (heartbeat.sent_at_ms, heartbeat.sequence) <= (last.sent_at_ms, last.sequence):
            return []
        node.heartbeat, node.heard_at = heartbeat, now
        return []

    def process_rtt(self, node: str, rtt_ms: int | None) -> list[Command]:
        if node in self._nodes:
            self._nodes[node].rtt_ms, self._nodes[node].probed = rtt_ms, True
        return []

    def process_accepted(self, sequence: int, root: str, now: float) -> list[Command]:
        """Note the chain's latest snapshot; fetch its content when we lack it."""
        if self._sequence is not None and sequence <= self._sequence:
            return []
        self._sequence, self._root, self._accepted_at = sequence, root, now
        if self._collection and self._collection.snapshot:
            self._collection = None
        if sequence and self._library.find_snapshot(root) is None:
            return [FetchSnapshot(root)]
        return []

    def process_block(self, number: int, now: float) -> list[Command]:
        """At the first block of an epoch, tell its leader what we see."""
        epoch = number // self._epoch_blocks
        if epoch <= self._epoch or self._sequence is None:
            return []
        self._epoch = epoch
        self._collection = None
        share = self._observe(now)
        leader = compute_leader(self._seat.accounts(), epoch)
        if leader != self._seat.account:
            return [Gossip(leader, share)]
        self._collection = _Collection(epoch)
        for early in (share, *self._early.values()):
            if early.observation.epoch == epoch:
                self._collection.shares[early.observation.member] = early
        self._early.clear()
        return self.process_tick(now)

    # ---- the leader -------------------------------------------------------------------------

    def process_observation(
        self, sender: str, share: ObservationShare, now: float
    ) -> list[Command]:
        """Keep a member's observation of the epoch that we lead, or are about to."""
        self._check_share(share)
        observation = share.observation
        if observation.member != sender:
            raise PeerFault(f"member {sender} sent another member's observation", peer=sender)
        if self._collection is None or observation.epoch != self._collection.epoch:
            if observation.epoch > self._epoch:
                self._early[sender] = share  # it saw the block before us
            return []
        self._collection.shares.setdefault(sender, share)
        return self.process_tick(now)

    def process_tick(self, now: float) -> list[Command]:
        """Propose once there are observations enough and something to say."""
        mine = self._collection
        if mine is None or mine.snapshot is not None or self._sequence is None:
            return []
        if len(mine.shares) < self._seat.view.quorum:
            return []
        if mine.quorum_at is None:
            mine.quorum_at = now
        everybody = len(mine.shares) == len(self._seat.view.members)
        if not everybody and now - mine.quorum_at < limits.OBSERVATION_GRACE_S:
            return []
        shares = tuple(share for _, share in sorted(mine.shares.items()))
        snapshot = self._compute(shares, self._sequence + 1)
        if not self._is_due(snapshot, now):
            self._collection = None
            return []
        mine.snapshot = snapshot
        commands = self._sign(snapshot)
        if commands is None:
            return []
        return [*commands, Gossip(None, SnapshotProposal(snapshot=snapshot, observations=shares))]

    def process_signature(self, sender: str, message: SnapshotSignature) -> list[Command]:
        """Count a member's signature under our proposal; submit with 2f+1."""
        mine = self._collection
        if mine is None or mine.snapshot is None or message.epoch != mine.epoch:
            return []
        snapshot = mine.snapshot
        if (message.sequence, message.root) != (snapshot.sequence, snapshot.root()):
            raise PeerFault(f"member {sender} signed another snapshot than proposed", peer=sender)
        self._seat.check(sender, self._struct_hash(snapshot), message.signature)
        mine.signatures[sender] = bytes.fromhex(message.signature[2:])
        if len(mine.signatures) < self._seat.view.quorum or mine.submitted:
            return []
        mine.submitted = True
        packed = pack_signatures(mine.signatures.items())
        return [SubmitSnapshot(snapshot.sequence, snapshot.epoch, snapshot.root(), packed)]

    # ---- the others -------------------------------------------------------------------------

    def process_proposal(self, sender: str, proposal: SnapshotProposal) -> list[Command]:
        """Recompute the leader's snapshot and sign it; raise PeerFault when it does not follow."""
        snapshot = proposal.snapshot
        if compute_leader(self._seat.accounts(), snapshot.epoch) != sender:
            raise PeerFault(f"member {sender} does not lead epoch {snapshot.epoch}", peer=sender)
        if not self._epoch - 1 <= snapshot.epoch <= self._epoch + 1:
            return []  # late, or from a chain view that we do not share yet
        if self._sequence is None or snapshot.sequence != self._sequence + 1:
            return []
        observers = [share.observation.member for share in proposal.observations]
        if len(observers) < self._seat.view.quorum or any(a >= b for a, b in pairwise(observers)):
            raise PeerFault(f"member {sender} proposed a snapshot without a quorum", peer=sender)
        for share in proposal.observations:
            self._check_share(share)
            if share.observation.epoch != snapshot.epoch:
                raise PeerFault(f"member {sender} mixed observations of epochs", peer=sender)
        if self._compute(proposal.observations, snapshot.sequence) != snapshot:
            # honest when the registry changed between two views of the chain
            return [Log(f"snapshot {snapshot.sequence} by {sender} differs from ours; not signed")]
        commands = self._sign(snapshot)
        if commands is None:
            return [Log(f"already signed another snapshot {snapshot.sequence} of this epoch")]
        return commands

    # ---- pieces -----------------------------------------------------------------------------

    def _sign(self, snapshot: Snapshot) -> list[Command] | None:
        """Persist and sign; the signature goes to the leader, which may be us."""
        slot = f"snapshot/{snapshot.configuration}/{snapshot.sequence}/{snapshot.epoch}"
        commands = self._ledger.claim(slot, snapshot.root())
        if commands is None:
            return None
        # a slot of a sequence that the chain has passed can never count again
        commands += self._ledger.forget(
            f"snapshot/{snapshot.configuration}/{snapshot.sequence - 2}/"
        )
        commands += self._library.add_snapshot(snapshot)
        signature = self._seat.sign(self._struct_hash(snapshot))
        leader = compute_leader(self._seat.accounts(), snapshot.epoch)
        message = SnapshotSignature(
            sequence=snapshot.sequence,
            epoch=snapshot.epoch,
            root=snapshot.root(),
            signature=signature,
        )
        if leader == self._seat.account:
            return commands + self.process_signature(leader, message)
        return [*commands, Gossip(leader, message)]

    def _struct_hash(self, snapshot: Snapshot) -> bytes:
        return snapshot_struct_hash(
            snapshot.configuration, snapshot.sequence, snapshot.epoch, snapshot.root()
        )

    def _compute(self, shares: Sequence[ObservationShare], sequence: int) -> Snapshot:
        return compute_snapshot(
            [share.observation for share in shares],
            {name: node.record for name, node in self._nodes.items()},
            sequence=sequence,
            tolerated=self._seat.tolerated,
        )

    def _is_due(self, snapshot: Snapshot, now: float) -> bool:
        """Return whether the chain should hear of it: other members, or old load figures."""
        current = self._library.find_snapshot(self._root)
        if current is None:
            return bool(snapshot.entries) or bool(self._sequence)
        if now - self._accepted_at >= limits.SNAPSHOT_REFRESH_S:
            return True
        return [_lasting(e) for e in snapshot.entries] != [_lasting(e) for e in current.entries]

    def _observe(self, now: float) -> ObservationShare:
        views = tuple(
            NodeView(
                node=node.record.node,
                rtt_ms=node.rtt_ms or 0,
                queue_ms=node.heartbeat.queue_ms,
                resident=node.heartbeat.resident,
                determinism=node.heartbeat.determinism,
            )
            for node in self._get_live_nodes(now)
            if node.heartbeat
        )
        observation = Observation(
            configuration=self._seat.view.configuration,
            epoch=self._epoch,
            member=self._seat.account,
            views=views,
        )
        signature = self._seat.identity.sign(OBSERVATION_DOMAIN, observation.canonical_bytes())
        return ObservationShare(observation=observation, signature="0x" + signature.hex())

    def _check_share(self, share: ObservationShare) -> None:
        observation = share.observation
        member = self._seat.view.member_of(observation.member)
        if observation.configuration != self._seat.view.configuration:
            raise PeerFault("an observation is of another configuration", peer=member.account)
        nodes = [view.node for view in observation.views]
        if any(a >= b for a, b in pairwise(nodes)):
            raise PeerFault("an observation lists its nodes out of order", peer=member.account)
        verify(
            member.signing_key,
            OBSERVATION_DOMAIN,
            observation.canonical_bytes(),
            bytes.fromhex(share.signature[2:]),
        )

    def _get_live_nodes(self, now: float) -> list[_Node]:
        return [
            node
            for _, node in sorted(self._nodes.items())
            if node.heartbeat
            and node.rtt_ms is not None
            and now - node.heard_at < limits.HEARTBEAT_TIMEOUT_S
        ]


def _lasting(entry: SnapshotEntry) -> SnapshotEntry:
    return entry.model_copy(update={"rtt_ms": 0, "queue_ms": 0})
