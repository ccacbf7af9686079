"""An agreed snapshot of the network, led by one member per epoch.

Each member observes the nodes by itself. The leader gathers 2f+1 signed observations and proposes
the snapshot that follows from them (``snapshot_rules``). The others recompute it and send their
votes to all members, so any member can bring the certificate to the chain, which accepts one
snapshot per sequence number. A leader that is silent, slow or lying costs one timeout: then 2f+1
members vote for the next epoch (``pacemaker``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from splitup.core import limits, tuning
from splitup.core.errors import PeerFault
from splitup.crypto.quorum import pack_signatures
from splitup.messages.snapshots import NodeView, Snapshot
from splitup.protocol.committee.commands import Command, FetchSnapshot, Gossip, Log, SubmitSnapshot
from splitup.protocol.committee.context import MemberContext
from splitup.protocol.committee.equivocation import EquivocationDetector, compute_vote_hash
from splitup.protocol.committee.observations import (
    ObservationShare,
    SnapshotProposal,
    choose_fitting,
)
from splitup.protocol.committee.peer_messages import (
    EpochTimeoutVote,
    ObservationRequest,
    SnapshotMessage,
    SnapshotVote,
)
from splitup.protocol.snapshots.liveness import NodeLiveness
from splitup.protocol.snapshots.observation_shares import check_proposal, check_share, make_share
from splitup.protocol.snapshots.pacemaker import Pacemaker, compute_leader
from splitup.protocol.snapshots.snapshot_rules import (
    StableFields,
    compute_snapshot,
    get_load,
    get_stable_fields,
    list_stable_fields,
)


@dataclass(slots=True)
class _Collection:
    """The observations that the leader of ``epoch`` has for the next snapshot."""

    epoch: int
    shares: dict[str, ObservationShare] = field(default_factory=dict)
    quorum_at: float = math.inf
    proposal: SnapshotProposal | None = None


@dataclass(slots=True)
class _Certified:
    """2f+1 votes for the next sequence number, on their way to the chain."""

    command: SubmitSnapshot
    submit_at: float


def find_epoch(slots: Sequence[str], configuration: int) -> int:
    """Return the epoch of the latest snapshot slot that was signed before a restart."""
    prefix = f"snapshot/{configuration}/"
    epochs = [int(slot.rsplit("/", 1)[1]) for slot in slots if slot.startswith(prefix)]
    return max(epochs, default=0)


class SnapshotAgreement:
    """One member's part in the snapshot layer."""

    def __init__(self, context: MemberContext, detector: EquivocationDetector) -> None:
        self._context = context
        self._detector = detector
        self._pacemaker = Pacemaker(
            context, find_epoch(context.signing_guard.slots(), context.view.configuration)
        )
        self.nodes = NodeLiveness(context.can_recompute, context.activity)
        self._accepted: list[tuple[int, int, str]] = []  # (configuration, sequence, root)
        self._accepted_at = 0.0
        self._started_at = math.inf
        self._observe_at = 0.0
        self._answered_at = -math.inf
        self._due_since: float | None = None
        self._change_timeout_votes = 0  # without a new snapshot since
        self._led = 0  # snapshots accepted since the epoch began
        self._collection: _Collection | None = None
        self._own: SnapshotVote | None = None
        self._votes: dict[str, SnapshotVote] = {}  # the latest of each member, next sequence
        self._certified: _Certified | None = None
        self._resend_at = 0.0
        self._seen_epoch = self.epoch

    # ---- questions --------------------------------------------------------------------------

    @property
    def is_started(self) -> bool:
        """Return whether there is a first snapshot."""
        return self._sequence > 0

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

    def get_next_s(self, now: float) -> float:
        """Return when the next tick has something to do, unless an event comes before."""
        if not self._context.is_active:
            return math.inf
        if self._collection is not None or self._certified is not None or self._own is not None:
            return now  # several stages of an agreement may be due
        return min(self._pacemaker.get_next_s(now), self._observe_at)

    @property
    def _sequence(self) -> int:
        return self._accepted[-1][1] if self._accepted else 0

    # ---- the chain --------------------------------------------------------------------------

    def process_accepted(
        self, configuration: int, sequence: int, root: str, now: float
    ) -> list[Command]:
        """Record the chain's latest snapshot; fetch its content if we lack it."""
        if self._accepted and sequence <= self._sequence:
            return []
        self._accepted.append((configuration, sequence, root))
        del self._accepted[: -tuning.MAX_SNAPSHOTS]
        self._accepted_at = now
        self.nodes.process_snapshot()
        self._pacemaker.note_progress()
        self._reset()
        self._change_timeout_votes = 0
        self._led += 1
        commands = self._forget_passed(sequence)
        if self._led >= limits.EPOCH_SNAPSHOTS:
            commands += self._follow(self._pacemaker.timeout_vote(now, planned=True))
        if sequence and self._context.contents.find_snapshot(root) is None:
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
        """Repeat our timeout vote, observe the nodes, propose, resend and submit what is due."""
        self._started_at = min(self._started_at, now)
        if not self._context.is_active:
            return []
        commands = self._pacemaker.process_tick(now)
        if not self._accepted:
            return commands
        if now >= self._observe_at:
            # an observation of many nodes takes long to send: of 10,000 nodes up to 10 s
            periods = max(1, len(self.nodes) // limits.CHUNKED_MESSAGE_NODES)
            self._observe_at = now + limits.OBSERVE_PERIOD_S * periods
            commands += self._check_due(now)
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

    def _check_due(self, now: float) -> list[Command]:
        """Send the leader our observation when a new snapshot is due; vote it out when it fails."""
        views = self._observe(now)
        if views is None:
            self._due_since = None
            return []
        activity = self._context.activity
        refresh_s = limits.SNAPSHOT_REFRESH_S
        if activity.is_resting(now) and self._is_current(views):
            refresh_s = limits.REST_SNAPSHOT_S
        stable = [get_stable_fields(view, self.nodes.records[view.node]) for view in views]
        reason = self._get_reason(stable, now, refresh_s)
        if not reason:
            self._due_since = None
            return []
        if reason == "change":
            activity.note(now)
        if self._due_since is None:
            self._due_since = now
        commands: list[Command] = []
        patience_s = self._pacemaker.timeout_s
        if self._certified is None and now - self._due_since >= patience_s:
            # no snapshot may ever agree with a view that only we have, so these votes are limited
            if reason == "refresh" or self._change_timeout_votes <= self._context.tolerated:
                self._change_timeout_votes += reason == "change"
                self._due_since = now
                commands += self._follow(self._pacemaker.timeout_vote(now))
        share = self._observation(views)
        if not self._pacemaker.leads:
            return [*commands, Gossip(self._pacemaker.leader, share)]
        return commands + self._collect(self._context.account, share, now)

    def _is_current(self, views: Sequence[NodeView]) -> bool:
        """Return whether a refresh would change nothing but round trips.

        There is one more after the last change: its consequences may have come later.
        """
        current = self.find_current()
        since_s = self._accepted_at - self._context.activity.busy_at
        return (
            current is not None
            and since_s >= limits.SNAPSHOT_REFRESH_S / 2
            and [get_load(view) for view in views] == [get_load(entry) for entry in current.entries]
        )

    def _get_reason(self, fields: Sequence[StableFields], now: float, refresh_s: float) -> str:
        """Return why a snapshot is due: "refresh" for its age, "change" of the nodes, or ""."""
        current = self.find_current()
        if self._sequence == 0:
            return "refresh" if fields else ""
        if now - self._accepted_at >= refresh_s:
            return "refresh"
        if current is not None and current.once(list_stable_fields) != fields:
            return "change"
        return ""

    def _observe(self, now: float) -> tuple[NodeView, ...] | None:
        """Return our view of the nodes, or None before we listened for a heartbeat timeout."""
        current = self.find_current()
        settled = now - self._started_at >= self.nodes.timeout_s
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
            case ObservationRequest():
                return self._process_observation_request(sender, message, now)
            case ObservationShare():
                return self._process_observation(sender, message, now)
            case SnapshotProposal():
                return self._process_proposal(sender, message, now)
            case SnapshotVote():
                return self._process_vote(message, now)
            case _ as never:
                assert_never(never)

    def _process_observation_request(
        self, sender: str, message: ObservationRequest, now: float
    ) -> list[Command]:
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
        return [Gossip(sender, self._observation(views))]

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
        check_share(self._context, share)
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
            return []  # late, or made with a newer view of the chain than ours
        own = self._own
        if own is not None and (own.epoch, own.root) == (proposal.epoch, proposal.root):
            return []  # a repetition; our vote is repeated, too
        check_proposal(self._context, sender, proposal)
        self._pacemaker.adopt(proposal.epoch)  # 2f+1 observations show that it has begun
        self._follow([])
        previous = self.find_current()
        if previous is None and self._needs_previous():
            return self._ask_current(now)
        snapshot = self._compute(proposal.observations, previous)
        fields, refresh_s = snapshot.once(list_stable_fields), limits.SNAPSHOT_REFRESH_S
        if not self._get_reason(fields, self._grant_age(now), refresh_s):
            return [Log(f"snapshot {snapshot.sequence} by {sender} is not due; not signed")]
        if snapshot.root() != proposal.root:
            # no fault: the two members may have read the registry at different blocks
            return [Log(f"snapshot {snapshot.sequence} by {sender} differs from ours; not signed")]
        return self._vote(snapshot, now) or [
            Log(f"already signed another snapshot {snapshot.sequence} of this epoch")
        ]

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
            wanted = ObservationRequest(epoch=self.epoch, sequence=self._sequence + 1)
            commands.append(Gossip(None, wanted))
            views = self._observe(now)
            if views is not None:
                mine.shares[self._context.account] = self._observation(views)
        if mine.proposal is not None:
            return commands
        mine.shares[sender] = share
        if len(mine.shares) >= self._context.view.quorum:
            mine.quorum_at = min(mine.quorum_at, now)
        return commands + self._propose(now)

    def _propose(self, now: float) -> list[Command]:
        """Propose once there are enough observations, if a snapshot is due by them."""
        mine = self._collection
        if mine is None or mine.proposal is not None or mine.epoch != self.epoch:
            return []
        everybody = len(mine.shares) == len(self._context.view.members)
        if not (everybody or now - mine.quorum_at >= limits.OBSERVATION_GRACE_S):
            return []
        previous = self.find_current()
        if previous is None and self._needs_previous():
            return self._ask_current(now)
        shares = choose_fitting(self._context.account, tuple(mine.shares.values()))
        if len(shares) < self._context.view.quorum:  # some are too large: wait for others
            mine.shares = {share.observation.member: share for share in shares}
            mine.quorum_at = math.inf
            return []
        snapshot = self._compute(shares, previous)
        fields, refresh_s = snapshot.once(list_stable_fields), limits.SNAPSHOT_REFRESH_S
        if not self._get_reason(fields, now, refresh_s):  # also when others do not rest, and we do
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
        """Persist, sign and send our vote; nothing when another root was signed for this slot."""
        root = snapshot.root()
        place = (snapshot.configuration, snapshot.sequence, snapshot.epoch)
        commands = self._context.signing_guard.claim("snapshot/{}/{}/{}".format(*place), root)
        if commands is None:
            return []
        commands += self._context.contents.add_snapshot(snapshot)
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

    # ---- state of the epoch and the sequence number -----------------------------------------

    def _follow(self, commands: list[Command]) -> list[Command]:
        """Reset what belongs to one epoch when the pacemaker has changed it."""
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
        """Drop our signing slots of sequence numbers that no reorganisation can bring back."""
        commands: list[Command] = []
        for slot in self._context.signing_guard.slots():
            parts = slot.split("/")
            if parts[0] == "snapshot" and int(parts[2]) <= sequence - tuning.REORG_BLOCKS:
                commands += self._context.signing_guard.forget(slot)
        return commands

    def find_current(self) -> Snapshot | None:
        """Return the content of the chain's latest snapshot, when we have it."""
        return (
            self._context.contents.find_snapshot(self._accepted[-1][2]) if self._accepted else None
        )

    def _needs_previous(self) -> bool:
        """Return whether the next snapshot builds on the latest one: not across committees."""
        configuration, sequence, _ = self._accepted[-1]
        return sequence > 0 and configuration == self._context.view.configuration

    def _ask_current(self, now: float) -> list[Command]:
        return self._context.contents.ask_snapshot(self._accepted[-1][2], now)

    def _grant_age(self, now: float) -> float:
        """Return the time at which to judge whether a leader's snapshot is due for its age.

        Members saw the latest one accepted at different times, so half a period early is accepted.
        A member that restarted since does not know the time and accepts the leader's word.
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

    def _observation(self, views: tuple[NodeView, ...]) -> ObservationShare:
        return make_share(self._context, self.epoch, self._sequence + 1, views)
