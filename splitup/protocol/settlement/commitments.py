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

from splitup.core import tuning
from splitup.core.errors import BadSignature, PeerFault, Unavailable
from splitup.crypto import quorum
from splitup.messages.completions import ExecutorCommitment
from splitup.protocol.committee.context import MemberContext
from splitup.protocol.committee.events import Command, Gossip, Log, SubmitCommitments
from splitup.protocol.committee.peer_messages import (
    CommitmentsTold,
    CommitmentsVote,
    CommitmentsWanted,
)
from splitup.protocol.settlement.settlement_state import (
    AgreedCommitments,
    SettlementState,
    compute_commitments_root,
)


class CommitmentAgreement:
    """One member's part in bringing the executors' commitments to the chain."""

    def __init__(self, context: MemberContext) -> None:
        self._context = context

    def process_commitment(
        self, state: SettlementState, commitment: ExecutorCommitment, signing_key: str
    ) -> None:
        """Keep a node's pledge, the first; raise PeerFault for anybody else's."""
        if state.certificate is None:
            raise Unavailable(
                f"execution {commitment.execution_id} is not planned here yet; try again"
            )
        if state.certificate.plan.node_of(commitment.node).signing_key != signing_key:
            raise BadSignature(
                f"a commitment of {commitment.node} is signed by another key", peer=commitment.node
            )
        if commitment.steps > state.request.steps:
            raise PeerFault(
                f"{commitment.node} commits to {commitment.steps} steps, but "
                f"{state.request.steps} are paid for",
                peer=commitment.node,
            )
        state.add_takeovers(commitment.takeovers)
        state.commitments.setdefault(commitment.node, commitment)

    def process_vote(self, state: SettlementState, sender: str, vote: CommitmentsVote) -> None:
        """Keep a member's latest vote; raise BadSignature for what the chain would refuse."""
        known = state.votes.get(sender)
        if state.certificate is None or state.agreed is not None or known == vote:
            return  # it is said again
        struct_hash = quorum.commitments_struct_hash(
            state.request.execution_id, vote.root, vote.exposures_hash
        )
        self._context.check(sender, struct_hash, vote.signature)
        state.votes[sender] = vote

    def process_wanted(self, state: SettlementState, sender: str) -> list[Command]:
        """Answer a member that does not hold what the agreed root is over."""
        if state.agreement is None:
            return []
        told = CommitmentsTold(execution_id=state.request.execution_id, **state.agreement._asdict())
        return [Gossip(sender, told)]

    def process_told(self, state: SettlementState, told: CommitmentsTold) -> None:
        """Take what the agreed root is over; 2f+1 members signed it, so that the root is enough."""
        state.bind(AgreedCommitments(told.commitments, told.executors))

    def advance(self, state: SettlementState, now: float) -> list[Command]:
        """Vote when every executor has pledged; bring an agreed root to the chain; catch up."""
        if state.draw is not None:
            return []
        agreement = state.find_agreement()
        if state.agreed is not None:
            return self._catch_up(state, agreement, now)
        if agreement is None or state.get_basis() is not None:
            return []
        execution_id = state.request.execution_id
        root = compute_commitments_root(execution_id, agreement)
        own = state.votes.get(self._context.account)
        commands: list[Command] = []
        if own is None or own.root != root or now >= state.vote_at:
            if own is None or own.root != root:
                exposures_hash = quorum.hash_exposures(state.get_exposures(agreement.executors))
                struct_hash = quorum.commitments_struct_hash(execution_id, root, exposures_hash)
                own = CommitmentsVote(
                    execution_id=execution_id,
                    root=root,
                    exposures_hash=exposures_hash,
                    signature=self._context.sign(struct_hash),
                )
                state.votes[self._context.account] = own
            state.vote_at = now + tuning.GOSSIP_RETRY_S
            commands.append(Gossip(None, own))
        return commands + self._submit(state, agreement, own, now)

    def _submit(
        self, state: SettlementState, agreement: AgreedCommitments, own: CommitmentsVote, now: float
    ) -> list[Command]:
        """Send what 2f+1 members voted for, again while the chain lacks it.

        It does when somebody's free stake does not cover the exposure: other executions end.
        """
        equal = [
            (member, bytes.fromhex(vote.signature[2:]))
            for member, vote in state.votes.items()
            if (vote.root, vote.exposures_hash) == (own.root, own.exposures_hash)
        ]
        if (
            state.certificate is None
            or len(equal) < self._context.view.quorum
            or not state.is_planned
        ):
            return []
        if state.commit_at == math.inf:
            place = self._context.get_place(state.certificate.plan.seed, now)
            state.commit_at = now + place * tuning.COMMITMENTS_STAGE_S
        if now < state.commit_at:
            return []
        state.commit_at = now + tuning.COMMITMENTS_STAGE_S * len(self._context.accounts())
        return [
            SubmitCommitments(
                execution_id=state.request.execution_id,
                root=own.root,
                exposures=state.get_exposures(agreement.executors),
                signatures=quorum.pack_signatures(sorted(equal)[: self._context.view.quorum]),
            )
        ]

    def _catch_up(
        self, state: SettlementState, ours: AgreedCommitments | None, now: float
    ) -> list[Command]:
        """Find what the agreed root is over: what we hold, or what others tell us."""
        if state.bind(ours) or now < state.vote_at:
            return []
        state.vote_at = now + tuning.GOSSIP_RETRY_S
        execution_id = state.request.execution_id
        return [
            Log(f"the members agreed on commitments of {execution_id} that we do not hold"),
            Gossip(None, CommitmentsWanted(execution_id=execution_id)),
        ]
