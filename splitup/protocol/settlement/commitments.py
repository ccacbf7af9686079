"""One transaction binds all executors: members agree on a root over the nodes' signed pledges.

At the end of an execution every executor tells the members the salted root of its completion. A
member that holds one of every executor votes for the root over all of them, to all; with 2f+1 equal
votes the root goes to the chain, and only then can there be a draw. Where the members do not get
there in time the executors commit on chain themselves, and nothing else changes.

A member votes for whatever it holds, without noting it: a node that pledges different things splits
the votes and gains nothing, the chain takes one root, and members draw once.
"""

from __future__ import annotations

import math

from splitup.core import limits
from splitup.core.errors import BadSignature, PeerFault, Unavailable
from splitup.crypto import quorum
from splitup.messages.completions import Pledge
from splitup.protocol.committee.context import Seat
from splitup.protocol.committee.events import Command, Gossip, Log, SubmitCommitments
from splitup.protocol.committee.peer_messages import CommitmentsVote, PledgesTold, PledgesWanted
from splitup.protocol.settlement.settlement_state import Agreement, Case, compute_pledges_root


class Pledges:
    """One member's part in bringing the executors' commitments to the chain."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def process_pledge(self, case: Case, pledge: Pledge, signing_key: str) -> None:
        """Keep a node's pledge, the first; raise PeerFault for anybody else's."""
        if case.certificate is None:
            raise Unavailable(f"execution {pledge.execution_id} is not planned here yet; try again")
        if case.certificate.plan.node_of(pledge.node).signing_key != signing_key:
            raise BadSignature(
                f"a pledge of {pledge.node} is signed by another key", peer=pledge.node
            )
        if pledge.steps > case.request.steps:
            raise PeerFault(
                f"{pledge.node} pledges {pledge.steps} steps, {case.request.steps} are paid for",
                peer=pledge.node,
            )
        case.add_takeovers(pledge.takeovers)
        case.pledges.setdefault(pledge.node, pledge)

    def process_vote(self, case: Case, sender: str, vote: CommitmentsVote) -> None:
        """Keep a member's latest vote; raise BadSignature for what the chain would refuse."""
        known = case.votes.get(sender)
        if case.certificate is None or case.agreed is not None or known == vote:
            return  # it is said again
        struct_hash = quorum.commitments_struct_hash(
            case.request.execution_id, vote.root, vote.exposures_hash
        )
        self._seat.check(sender, struct_hash, vote.signature)
        case.votes[sender] = vote

    def process_wanted(self, case: Case, sender: str) -> list[Command]:
        """Answer a member that does not hold what the agreed root is over."""
        if case.agreement is None:
            return []
        told = PledgesTold(execution_id=case.request.execution_id, **case.agreement._asdict())
        return [Gossip(sender, told)]

    def process_told(self, case: Case, told: PledgesTold) -> None:
        """Take what the agreed root is over; 2f+1 members signed it, so that the root is enough."""
        case.bind(Agreement(told.pledges, told.executors))

    def advance(self, case: Case, now: float) -> list[Command]:
        """Vote when every executor has pledged; bring an agreed root to the chain; catch up."""
        if case.draw is not None:
            return []
        agreement = case.find_agreement()
        if case.agreed is not None:
            return self._catch_up(case, agreement, now)
        if agreement is None or case.get_basis() is not None:
            return []
        execution_id = case.request.execution_id
        root = compute_pledges_root(execution_id, agreement)
        own = case.votes.get(self._seat.account)
        commands: list[Command] = []
        if own is None or own.root != root or now >= case.vote_at:
            if own is None or own.root != root:
                exposures_hash = quorum.hash_exposures(case.get_exposures(agreement.executors))
                struct_hash = quorum.commitments_struct_hash(execution_id, root, exposures_hash)
                own = CommitmentsVote(
                    execution_id=execution_id,
                    root=root,
                    exposures_hash=exposures_hash,
                    signature=self._seat.sign(struct_hash),
                )
                case.votes[self._seat.account] = own
            case.vote_at = now + limits.GOSSIP_RETRY_S
            commands.append(Gossip(None, own))
        return commands + self._submit(case, agreement, own, now)

    def _submit(
        self, case: Case, agreement: Agreement, own: CommitmentsVote, now: float
    ) -> list[Command]:
        """Send what 2f+1 members voted for, again while the chain lacks it.

        It does when somebody's free stake does not cover the exposure: other executions end.
        """
        equal = [
            (member, bytes.fromhex(vote.signature[2:]))
            for member, vote in case.votes.items()
            if (vote.root, vote.exposures_hash) == (own.root, own.exposures_hash)
        ]
        if case.certificate is None or len(equal) < self._seat.view.quorum or not case.is_planned:
            return []
        if case.commit_at == math.inf:
            place = self._seat.get_place(case.certificate.plan.seed, now)
            case.commit_at = now + place * limits.COMMITMENTS_STAGE_S
        if now < case.commit_at:
            return []
        case.commit_at = now + limits.COMMITMENTS_STAGE_S * len(self._seat.accounts())
        return [
            SubmitCommitments(
                execution_id=case.request.execution_id,
                root=own.root,
                exposures=case.get_exposures(agreement.executors),
                signatures=quorum.pack_signatures(sorted(equal)[: self._seat.view.quorum]),
            )
        ]

    def _catch_up(self, case: Case, ours: Agreement | None, now: float) -> list[Command]:
        """Find what the agreed root is over: what we hold, or what others tell us."""
        if case.bind(ours) or now < case.vote_at:
            return []
        case.vote_at = now + limits.GOSSIP_RETRY_S
        execution_id = case.request.execution_id
        return [
            Log(f"the members agreed on commitments of {execution_id} that we do not hold"),
            Gossip(None, PledgesWanted(execution_id=execution_id)),
        ]
