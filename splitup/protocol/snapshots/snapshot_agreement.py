"""An agreed snapshot of the network, led by one member per epoch.

Each member observes on its own; the leader gathers 2f+1 signed observations and proposes what
follows from them; the others recompute it, and their votes go to all, so that anybody can bring the
certificate to the chain, which accepts one snapshot per sequence number. A leader that is silent,
slow or lying costs one timeout: then 2f+1 members wish for the next epoch (``pacemaker``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median_low
from typing import assert_never

from splitup.core import limits, tuning
from splitup.core.errors import PeerFault
from splitup.crypto.quorum import pack_signatures
from splitup.messages.snapshots import UNRULED, NodeView, Observation, Snapshot, SnapshotEntry
from splitup.protocol.committee.commands import Command, FetchSnapshot, Gossip, Log, SubmitSnapshot
from splitup.protocol.committee.context import ContentStore, MemberContext, SigningGuard
from splitup.protocol.committee.equivocation import EquivocationDetector, compute_vote_hash
from splitup.protocol.committee.events import NodeRecord
from splitup.protocol.committee.peer_messages import (
    EpochTimeoutVote,
    ObservationWanted,
    SnapshotMessage,
    SnapshotVote,
)
from splitup.protocol.snapshots.fairness import compute_credits
from splitup.protocol.snapshots.liveness import NodeLiveness
from splitup.protocol.snapshots.observations import (
    OBSERVATION_DOMAIN,
    ObservationShare,
    SnapshotProposal,
    choose_fitting,
)
from splitup.protocol.snapshots.pacemaker import Pacemaker, compute_leader

Lasting = tuple[str, tuple[str, ...], str, tuple[str, str, int]]


@dataclass(slots=True)
class _Collection:
    """What the leader of ``epoch`` holds towards the next snapshot."""

    epoch: int
    shares: dict[str, ObservationShare] = field(default_factory=dict)
    quorum_at: float = math.inf
    proposal: SnapshotProposal | None = None


@dataclass(slots=True)
class _Certified:
    """2f+1 votes for the next sequence number, on their way to the chain."""

    command: SubmitSnapshot
    submit_at: float


def compute_snapshot(
    observations: Sequence[Observation],
    records: Mapping[str, NodeRecord],
    previous: Snapshot | None,
    *,
    sequence: int,
    tolerated: int,
) -> Snapshot:
    """Return the snapshot that follows from observations of one epoch and the registry.

    A node is in when more than ``tolerated`` observers list it, hence at least one honest one. Load
    and round trip are medians, which keep their ``previous`` value while they are near it; a task
    is resident when more than ``tolerated`` observers say so, and its class is marked when as many
    cannot recompute in it: it is not sold as verified then. Credits go on from ``previous`` ones.
    """
    before = {entry.node: entry for entry in previous.entries} if previous else {}
    views: dict[str, list[NodeView]] = {}
    for observation in sorted(observations, key=lambda o: o.member):
        for view in observation.views:
            views.setdefault(view.node, []).append(view)
    live = sorted(n for n, seen in views.items() if len(seen) > tolerated and n in records)
    credits = compute_credits(
        {node: records[node].stake_micro_usdc for node in live},
        {node: entry.credit_milli for node, entry in before.items()},
        {node: median_low(view.assigned_micro_usdc for view in views[node]) for node in live},
    )
    entries = []
    for node in live:
        seen, record, old = views[node], records[node], before.get(node)
        held = Counter(task for view in seen for task in view.resident)
        classes = Counter(view.determinism.removeprefix(UNRULED) for view in seen)
        determinism = min(classes, key=lambda name: (-classes[name], name))
        if sum(view.determinism.startswith(UNRULED) for view in seen) > tolerated:
            determinism = (UNRULED + determinism)[: limits.MAX_DETERMINISM_CHARS]
        rtt_ms = median_low(view.rtt_ms for view in seen)
        queue_ms = median_low(view.queue_ms for view in seen)
        entries.append(
            SnapshotEntry(
                node=node,
                signing_key=record.signing_key,
                endpoint=record.endpoint,
                stake_micro_usdc=record.stake_micro_usdc,
                rtt_ms=_settle(old.rtt_ms, rtt_ms) if old else rtt_ms,
                queue_ms=_settle(old.queue_ms, queue_ms) if old else queue_ms,
                resident=tuple(sorted(t for t, count in held.items() if count > tolerated)),
                determinism=determinism,
                operator=record.operator,
                speed_mflops=median_low(view.speed_mflops for view in seen),
                bandwidth_kbps=median_low(view.bandwidth_kbps for view in seen),
                vram_free_bytes=median_low(view.vram_free_bytes for view in seen),
                credit_milli=credits[node],
                locked_micro_usdc=median_low(view.locked_micro_usdc for view in seen),
            )
        )
    first = observations[0]
    return Snapshot(
        configuration=first.configuration,
        sequence=sequence,
        epoch=first.epoch,
        entries=tuple(entries),
    )


def find_epoch(slots: Sequence[str], configuration: int) -> int:
    """Return the epoch of the latest snapshot slot among what an earlier life signed."""
    prefix = f"snapshot/{configuration}/"
    epochs = [int(slot.rsplit("/", 1)[1]) for slot in slots if slot.startswith(prefix)]
    return max(epochs, default=0)


class SnapshotAgreement:
    """One member's part in the snapshot layer."""

    def __init__(
        self,
        context: MemberContext,
        signing_guard: SigningGuard,
        content_store: ContentStore,
        detector: EquivocationDetector,
    ) -> None:
        self._context = context
        self._signing_guard = signing_guard
        self._content_store = content_store
        self._detector = detector
        self._pacemaker = Pacemaker(
            context, find_epoch(signing_guard.slots(), context.view.configuration)
        )
        self.nodes = NodeLiveness(context.can_recompute)
        self._accepted: list[tuple[int, int, str]] = []  # (configuration, sequence, root)
        self._accepted_at = 0.0
        self._started_at = math.inf
        self._observe_at = 0.0
        self._answered_at = -math.inf
        self._due_since: float | None = None
        self._news_timeout_votes = 0  # in vain for one sequence number
        self._led = 0  # snapshots accepted since the epoch began
        self._collection: _Collection | None = None
        self._own: SnapshotVote | None = None
        self._votes: dict[str, SnapshotVote] = {}  # the latest of each member, next sequence
        self._certified: _Certified | None = None
        self._resend_at = 0.0
        self._seen_epoch = self.epoch

    # ---- what the rest of the member asks ---------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._pacemaker.epoch

    def get_status(self, now: float) -> dict[str, int]:
        return {
            "epoch": self.epoch,
            "sequence": self._sequence,
            "nodes_registered": len(self.nodes),
            "nodes_live": self.nodes.count_live(now),
        }

    @property
    def _sequence(self) -> int:
        return self._accepted[-1][1] if self._accepted else 0

    # ---- facts ------------------------------------------------------------------------------

    def process_accepted(
        self, configuration: int, sequence: int, root: str, now: float
    ) -> list[Command]:
        """Note the chain's latest snapshot; fetch its content when we lack it."""
        if self._accepted and sequence <= self._sequence:
            return []
        self._accepted.append((configuration, sequence, root))
        del self._accepted[: -tuning.MAX_SNAPSHOTS]
        self._accepted_at = now
        self.nodes.process_snapshot()
        self._pacemaker.note_progress()
        self._reset()
        self._news_timeout_votes = 0
        self._led += 1
        commands = self._forget_passed(sequence)
        if self._led >= limits.EPOCH_SNAPSHOTS:
            commands += self._follow(self._pacemaker.timeout_vote(now, planned=True))
        if sequence and self._content_store.find_snapshot(root) is None:
            commands.append(FetchSnapshot(root))
        return commands

    def process_reverted(self, sequence: int) -> list[Command]:
        """Go back to the snapshot before one whose block a reorganisation dropped."""
        if len(self._accepted) > 1 and self._sequence == sequence:
            self._accepted.pop()
            self._reset()
        return []

    # ---- time -------------------------------------------------------------------------------

    def process_tick(self, now: float) -> list[Command]:
        """Beat, look at the nodes, propose, say again what may be lost, lose patience."""
        self._started_at = min(self._started_at, now)
        if not self._context.is_active:
            return []
        commands = self._pacemaker.process_tick(now)
        if not self._accepted:
            return commands
        if now >= self._observe_at:
            # ten thousand nodes every 10 s: so long their observation may travel
            crowds = max(1, len(self.nodes) // limits.CHUNKED_MESSAGE_NODES)
            self._observe_at = now + limits.OBSERVE_PERIOD_S * crowds
            commands += self._look(now)
        commands += self._propose(now)
        if self._certified is not None:
            if now >= self._certified.submit_at:
                stages = len(self._context.accounts())
                self._certified.submit_at = now + stages * tuning.SNAPSHOT_SUBMIT_STAGE_S
                commands.append(self._certified.command)
        elif now >= self._resend_at and self._own is not None:
            self._resend_at = now + tuning.GOSSIP_RETRY_S
            commands.append(Gossip(None, self._own))
            if self._collection and self._collection.proposal:
                commands.append(Gossip(None, self._collection.proposal))
        return commands

    def _look(self, now: float) -> list[Command]:
        """See whether the chain should hear of something, and tell the leader."""
        views = self._observe(now)
        if views is None:
            self._due_since = None
            return []
        reason = self._get_reason(self._list_lasting(views), now)
        if not reason:
            self._due_since = None
            return []
        if self._due_since is None:
            self._due_since = now
        commands: list[Command] = []
        patience_s = self._pacemaker.timeout_s
        if self._certified is None and now - self._due_since >= patience_s:
            # a view that only we have may never be satisfied: such wishes are counted
            if reason == "refresh" or self._news_timeout_votes <= self._context.tolerated:
                self._news_timeout_votes += reason == "news"
                self._due_since = now
                commands += self._follow(self._pacemaker.timeout_vote(now))
        share = self._make_share(views)
        if not self._pacemaker.leads:
            return [*commands, Gossip(self._pacemaker.leader, share)]
        return commands + self._collect(self._context.account, share, now)

    def _get_reason(self, lasting: Sequence[Lasting], now: float) -> str:
        """Return why a snapshot is due: "refresh" for its age, "news" for other nodes, or ""."""
        current = self._find_current()
        if self._sequence == 0:
            return "refresh" if lasting else ""
        if now - self._accepted_at >= limits.SNAPSHOT_REFRESH_S:
            return "refresh"
        if current is not None and current.once(_list_entries) != lasting:
            return "news"
        return ""

    def _observe(self, now: float) -> tuple[NodeView, ...] | None:
        """Return what we see, or None while we have not listened long enough to tell."""
        current = self._find_current()
        settled = now - self._started_at >= limits.HEARTBEAT_TIMEOUT_S
        if not settled and current is not None and current.entries:
            return None
        return self.nodes.observe(now)

    # ---- messages ---------------------------------------------------------------------------

    def process_gossip(self, sender: str, message: SnapshotMessage, now: float) -> list[Command]:
        """Take a member's message about snapshots; raise PeerFault when it is wrong on its face."""
        if not self._context.is_active:
            return []  # another configuration makes the snapshots
        match message:
            case EpochTimeoutVote():
                return self._follow(self._pacemaker.process_timeout_vote(sender, message, now))
            case ObservationWanted():
                return self._process_wanted(sender, message, now)
            case ObservationShare():
                return self._process_observation(sender, message, now)
            case SnapshotProposal():
                return self._process_proposal(sender, message, now)
            case SnapshotVote():
                return self._process_vote(message, now)
            case _ as never:
                assert_never(never)

    def _process_wanted(self, sender: str, message: ObservationWanted, now: float) -> list[Command]:
        if sender != compute_leader(self._context.accounts(), message.epoch):
            raise PeerFault(f"member {sender} does not lead epoch {message.epoch}", peer=sender)
        if (message.epoch, message.sequence) != (self.epoch, self._sequence + 1):
            return []
        if now - self._answered_at < limits.OBSERVE_PERIOD_S / 2:
            return []
        views = self._observe(now)
        if views is None:
            return []
        self._answered_at = now
        return [Gossip(sender, self._make_share(views))]

    def _process_observation(
        self, sender: str, share: ObservationShare, now: float
    ) -> list[Command]:
        observation = share.observation
        if observation.member != sender:
            raise PeerFault(f"member {sender} sent another member's observation", peer=sender)
        place = (observation.configuration, observation.epoch, observation.sequence)
        if place != (self._context.view.configuration, self.epoch, self._sequence + 1):
            return []
        if not self._pacemaker.leads or self._certified is not None:
            return []
        self._check_share(share)
        return self._collect(sender, share, now)

    def _process_proposal(
        self, sender: str, proposal: SnapshotProposal, now: float
    ) -> list[Command]:
        """Recompute the leader's snapshot and vote; raise PeerFault when it cannot follow."""
        if proposal.configuration != self._context.view.configuration:
            return []
        if compute_leader(self._context.accounts(), proposal.epoch) != sender:
            raise PeerFault(f"member {sender} does not lead epoch {proposal.epoch}", peer=sender)
        if proposal.epoch < self.epoch or proposal.sequence != self._sequence + 1:
            return []  # late, or from a view of the chain that we do not share yet
        own = self._own
        if own is not None and (own.epoch, own.root) == (proposal.epoch, proposal.root):
            return []  # said again; so is our vote
        self._check_proposal(sender, proposal)
        self._pacemaker.adopt(proposal.epoch)  # 2f+1 observations show that it has begun
        self._follow([])
        previous = self._find_current()
        if previous is None and self._needs_previous():
            return self._ask_current(now)
        snapshot = self._compute(proposal.observations, previous)
        if not self._get_reason(snapshot.once(_list_entries), self._grant_age(now)):
            return [Log(f"snapshot {snapshot.sequence} by {sender} is not due; not signed")]
        if snapshot.root() != proposal.root:
            # honest when the registry changed between two views of the chain
            return [Log(f"snapshot {snapshot.sequence} by {sender} differs from ours; not signed")]
        return self._vote(snapshot, now) or [
            Log(f"already signed another snapshot {snapshot.sequence} of this epoch")
        ]

    def _check_proposal(self, sender: str, proposal: SnapshotProposal) -> None:
        observers = [share.observation.member for share in proposal.observations]
        if len(observers) < self._context.view.quorum or any(
            a >= b for a, b in pairwise(observers)
        ):
            raise PeerFault(f"member {sender} proposed a snapshot without a quorum", peer=sender)
        expected = (proposal.epoch, proposal.sequence)
        for share in proposal.observations:
            if (share.observation.epoch, share.observation.sequence) != expected:
                raise PeerFault(f"member {sender} mixed observations of epochs", peer=sender)
        for share in proposal.observations:
            self._check_share(share)

    def _process_vote(self, vote: SnapshotVote, now: float) -> list[Command]:
        """Count a vote; 2f+1 for one root are a certificate."""
        if vote.configuration != self._context.view.configuration:
            return []
        known = self._votes.get(vote.member)
        if vote.sequence != self._sequence + 1 or vote == known:
            return []
        if known is not None and vote.epoch < known.epoch:
            return []
        self._context.view.member_of(vote.member)
        self._context.check(vote.member, compute_vote_hash(vote), vote.signature)
        commands = self._detector.note(vote)
        if known is not None and known.epoch == vote.epoch:
            return commands  # the first one counts, the second is evidence
        self._votes[vote.member] = vote
        return commands + self._certify(vote, now)

    # ---- the steps, in order ----------------------------------------------------------------

    def _collect(self, sender: str, share: ObservationShare, now: float) -> list[Command]:
        """Keep an observation as the leader; the first one makes us ask for the others."""
        commands: list[Command] = []
        mine = self._collection
        if mine is None or mine.epoch != self.epoch:
            mine = self._collection = _Collection(self.epoch)
            wanted = ObservationWanted(epoch=self.epoch, sequence=self._sequence + 1)
            commands.append(Gossip(None, wanted))
            views = self._observe(now)
            if views is not None:
                mine.shares[self._context.account] = self._make_share(views)
        if mine.proposal is not None:
            return commands
        mine.shares[sender] = share
        if len(mine.shares) >= self._context.view.quorum:
            mine.quorum_at = min(mine.quorum_at, now)
        return commands + self._propose(now)

    def _propose(self, now: float) -> list[Command]:
        """Propose once there are observations enough, if they amount to something."""
        mine = self._collection
        if mine is None or mine.proposal is not None or mine.epoch != self.epoch:
            return []
        everybody = len(mine.shares) == len(self._context.view.members)
        if not (everybody or now - mine.quorum_at >= limits.OBSERVATION_GRACE_S):
            return []
        previous = self._find_current()
        if previous is None and self._needs_previous():
            return self._ask_current(now)
        shares = choose_fitting(self._context.account, tuple(mine.shares.values()))
        if len(shares) < self._context.view.quorum:  # wait for others than those that are too large
            mine.shares = {share.observation.member: share for share in shares}
            mine.quorum_at = math.inf
            return []
        snapshot = self._compute(shares, previous)
        if not self._get_reason(snapshot.once(_list_entries), now):
            self._collection = None
            return []
        commands = self._vote(snapshot, now)
        if not commands:  # we signed another one before a restart
            self._collection = None
            return self._follow(self._pacemaker.timeout_vote(now))
        mine.proposal = SnapshotProposal(
            configuration=snapshot.configuration,
            sequence=snapshot.sequence,
            epoch=snapshot.epoch,
            root=snapshot.root(),
            observations=tuple(shares),
        )
        self._resend_at = now + tuning.GOSSIP_RETRY_S
        return [*commands, Gossip(None, mine.proposal)]

    def _vote(self, snapshot: Snapshot, now: float) -> list[Command]:
        """Persist, sign and tell all; nothing when another root was signed for this slot."""
        root = snapshot.root()
        place = (snapshot.configuration, snapshot.sequence, snapshot.epoch)
        commands = self._signing_guard.claim("snapshot/{}/{}/{}".format(*place), root)
        if commands is None:
            return []
        commands += self._content_store.add_snapshot(snapshot)
        unsigned = SnapshotVote(
            configuration=snapshot.configuration,
            sequence=snapshot.sequence,
            epoch=snapshot.epoch,
            root=root,
            member=self._context.account,
            signature="0x" + "00" * 65,
        )
        signature = self._context.sign(compute_vote_hash(unsigned))
        vote = self._own = unsigned.model_copy(update={"signature": signature})
        self._votes[self._context.account] = vote
        self._resend_at = now + tuning.GOSSIP_RETRY_S
        return [*commands, Gossip(None, vote), *self._certify(vote, now)]

    def _certify(self, vote: SnapshotVote, now: float) -> list[Command]:
        agreeing = [
            (member, bytes.fromhex(other.signature[2:]))
            for member, other in self._votes.items()
            if (other.epoch, other.root) == (vote.epoch, vote.root)
        ]
        if len(agreeing) < self._context.view.quorum or self._certified is not None:
            return []
        self._pacemaker.note_progress()
        command = SubmitSnapshot(vote.sequence, vote.epoch, vote.root, pack_signatures(agreeing))
        accounts = self._context.accounts()
        behind = (accounts.index(self._context.account) - vote.epoch) % len(accounts)
        delay_s = behind * tuning.SNAPSHOT_SUBMIT_STAGE_S
        self._certified = _Certified(command, now + delay_s)
        if behind:
            return []
        self._certified.submit_at += len(accounts) * tuning.SNAPSHOT_SUBMIT_STAGE_S
        return [command]

    # ---- pieces -----------------------------------------------------------------------------

    def _follow(self, commands: list[Command]) -> list[Command]:
        """Start anew when the pacemaker has changed the epoch."""
        if self._collection is not None and self._collection.epoch != self.epoch:
            self._collection = None
        if self._own is not None and self._own.epoch != self.epoch:
            self._own = None
        if self._seen_epoch != self.epoch:
            self._seen_epoch = self.epoch
            self._due_since, self._observe_at, self._led = None, 0.0, 0
        return commands

    def _reset(self) -> None:
        """Begin with the next sequence number."""
        self._collection = self._own = self._certified = self._due_since = None
        self._votes.clear()
        self._observe_at = 0.0

    def _forget_passed(self, sequence: int) -> list[Command]:
        """Drop our slots of sequence numbers that no reorganisation brings back."""
        commands: list[Command] = []
        for slot in self._signing_guard.slots():
            parts = slot.split("/")
            if parts[0] == "snapshot" and int(parts[2]) <= sequence - tuning.REORG_BLOCKS:
                commands += self._signing_guard.forget(slot)
        return commands

    def _find_current(self) -> Snapshot | None:
        """Return the content of the chain's latest snapshot, when we have it."""
        return self._content_store.find_snapshot(self._accepted[-1][2]) if self._accepted else None

    def _needs_previous(self) -> bool:
        """A committee begins without the figures of the one before it."""
        configuration, sequence, _ = self._accepted[-1]
        return sequence > 0 and configuration == self._context.view.configuration

    def _ask_current(self, now: float) -> list[Command]:
        return self._content_store.ask_snapshot(self._accepted[-1][2], now)

    def _grant_age(self, now: float) -> float:
        """Return the time by which to judge a leader that finds the snapshot old enough.

        Members saw it accepted at different times. One that restarted since does not know when.
        """
        if self._accepted_at <= self._started_at:
            return math.inf
        return now + limits.SNAPSHOT_REFRESH_S / 2

    def _compute(self, shares: Sequence[ObservationShare], previous: Snapshot | None) -> Snapshot:
        return compute_snapshot(
            [share.observation for share in shares],
            self.nodes.records,
            previous,
            sequence=self._sequence + 1,
            tolerated=self._context.tolerated,
        )

    def _list_lasting(self, views: tuple[NodeView, ...]) -> list[Lasting]:
        return [_last(view, self.nodes.records[view.node]) for view in views]

    def _make_share(self, views: tuple[NodeView, ...]) -> ObservationShare:
        observation = Observation(
            configuration=self._context.view.configuration,
            epoch=self.epoch,
            sequence=self._sequence + 1,
            member=self._context.account,
            views=views,
        )
        signature = self._context.scheme.sign(
            self._context.identity,
            OBSERVATION_DOMAIN,
            observation.once(Observation.canonical_bytes),
        )
        return ObservationShare(observation=observation, signature="0x" + signature.hex())

    def _check_share(self, share: ObservationShare) -> None:
        observation = share.observation
        member = self._context.view.member_of(observation.member)
        if observation.configuration != self._context.view.configuration:
            raise PeerFault("an observation is of another configuration", peer=member.account)
        nodes = [view.node for view in observation.views]
        if any(a >= b for a, b in pairwise(nodes)):
            raise PeerFault("an observation lists its nodes out of order", peer=member.account)
        self._context.scheme.verify(
            member.signing_key,
            OBSERVATION_DOMAIN,
            observation.once(Observation.canonical_bytes),
            bytes.fromhex(share.signature[2:]),
        )


def _settle(old: int, new: int) -> int:
    """Keep the old figure unless the new one is clearly another."""
    near = abs(new - old) * limits.MEDIAN_HYSTERESIS <= old
    return old if near else new


def _list_entries(snapshot: Snapshot) -> list[Lasting]:
    return [_last(entry, entry) for entry in snapshot.entries]


def _last(view: NodeView | SnapshotEntry, record: NodeRecord | SnapshotEntry) -> Lasting:
    """Return what of a node makes a new snapshot worth its gas: not its load."""
    registered = (record.signing_key, record.endpoint, record.stake_micro_usdc)
    return (view.node, view.resident, view.determinism, registered)
