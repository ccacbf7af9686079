"""One transaction commits all executors: members agree on a root over the nodes' commitments.

At the end of an execution every executor sends the members the salted root of its completion, and
the client's end message. A member that holds a commitment of every executor sends all members its
vote for the root over all of them and the client's number of steps. With 2f+1 equal votes the root
goes to the chain; the draw needs it there. Nodes that the client has replaced are asked before, for
how many steps it had signed: an end after fewer is none (ADR 7). Shortly before the deadline the
commitments of some executors are enough, to the client's final end, to an interim one, or to a
number of steps that they computed and the client ordered (ADR 21).

A node may show its commitment to some members only, or sign two. So a member whose vote finds no
majority shares what it holds. Who signed two for one number of steps counts as not having
committed, so all members come to the same content.

A member may vote for different roots, so it records no vote in its journal: the chain takes one
root, and members draw once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from splitup.core import limits, tuning
from splitup.core.errors import PeerFault
from splitup.crypto import quorum
from splitup.messages.completions import ExecutorCommitment
from splitup.protocol.committee.commands import Command, Gossip, Log, SubmitCommitments
from splitup.protocol.committee.context import MemberContext
from splitup.protocol.committee.peer_messages import (
    CommitmentsReply,
    CommitmentsRequest,
    CommitmentsShared,
    CommitmentsVote,
)
from splitup.protocol.settlement.chain_commitments import (
    AgreedCommitments,
    compute_commitments_root,
)
from splitup.protocol.settlement.settlement_state import SettlementState
from splitup.protocol.settlement.verification_state import PlanContext


class CommitmentAgreement:
    """One member's part in bringing the executors' commitments to the chain."""

    def __init__(self, context: MemberContext, get_answer_s: Callable[[], float]) -> None:
        self._context = context
        self._get_answer_s = get_answer_s

    def process_commitment(
        self, state: SettlementState, commitment: ExecutorCommitment, signing_key: str, token: str
    ) -> None:
        """Keep a node's commitment, and the number of steps that the client signed for it.

        ``token`` is the signed message. Raises PeerFault, BadSignature if the one is not the node's
        own, or too large to be passed on, or the other not the client's.
        """
        state.require_certificate()
        if len(token) > limits.MAX_COMMITMENT_BYTES:
            raise PeerFault(
                f"a commitment of {commitment.node} is larger than {limits.MAX_COMMITMENT_BYTES} "
                "bytes",
                peer=commitment.node,
            )
        state.check_node(commitment, signing_key)
        state.add_commitment(commitment, token)

    def process_vote(self, state: SettlementState, sender: str, vote: CommitmentsVote) -> None:
        """Keep a member's latest vote; raise BadSignature for what the chain would refuse."""
        known = state.collected.votes.get(sender)
        if state.certificate is None or state.chain.agreed is not None or known == vote:
            return
        struct_hash = quorum.commitments_struct_hash(
            state.request.execution_id, vote.root, vote.exposures_hash
        )
        self._context.check(sender, struct_hash, vote.signature)
        state.collected.votes[sender] = vote

    def process_content_request(self, state: SettlementState, sender: str) -> list[Command]:
        """Answer a member that lacks the content of the agreed root."""
        agreement = state.chain.agreement
        if agreement is None:
            return []
        reply = CommitmentsReply(execution_id=state.request.execution_id, **agreement._asdict())
        return [Gossip(sender, reply)]

    def process_reply(self, state: SettlementState, reply: CommitmentsReply) -> None:
        """Take the content of the agreed root; 2f+1 members signed it, so the root proves it."""
        agreement = AgreedCommitments(reply.commitments, reply.executors, reply.steps)
        state.chain.bind(agreement)

    def advance(self, state: SettlementState, context: PlanContext, now: float) -> list[Command]:
        """Vote once commitments cover every task; submit the agreed root, or fetch its content."""
        collected = state.collected
        if len(collected.takeovers) > collected.waited_for:
            collected.waited_for = len(collected.takeovers)
            collected.answer_until = now + self._get_answer_s()
        is_agreed = state.chain.agreed is not None
        agreement = state.find_agreement(
            self._context.timestamp_s, now if not is_agreed else math.inf
        )
        if is_agreed:
            is_drawn = state.verification is not None
            return [] if is_drawn else self._catch_up(state, agreement, now)
        if agreement is None:
            return []
        execution_id = state.request.execution_id
        root = compute_commitments_root(execution_id, agreement)
        own = collected.votes.get(self._context.account)
        commands: list[Command] = []
        if own is None or own.root != root or now >= collected.vote_at:
            if own is not None and own.root == root:
                commands += self._share(state, own)
            else:
                exposures_hash = quorum.hash_exposures(state.list_exposures(agreement))
                struct_hash = quorum.commitments_struct_hash(execution_id, root, exposures_hash)
                own = CommitmentsVote(
                    execution_id=execution_id,
                    root=root,
                    exposures_hash=exposures_hash,
                    signature=self._context.sign(struct_hash),
                )
                collected.votes[self._context.account] = own
                collected.voted[root] = agreement
                while len(collected.voted) > tuning.MAX_VOTED:
                    del collected.voted[next(iter(collected.voted))]
            collected.vote_at = now + tuning.GOSSIP_RETRY_S
            commands.append(Gossip(None, own))
        return commands + self._submit(state, context, agreement, own, now)

    def _share(self, state: SettlementState, own: CommitmentsVote) -> list[Command]:
        """Send the others what we hold, unless enough of them vote as we do.

        Once before the deadline is near, as long as it does not change; then with every vote.
        """
        collected, is_late = state.collected, state.is_late(self._context.timestamp_s)
        if len(_list_equal(state, own)) >= self._context.view.quorum:
            return []
        if collected.shared_changes == collected.changes and not is_late:
            return []
        collected.shared_changes = collected.changes
        execution_id = state.request.execution_id
        first = CommitmentsShared(
            execution_id=execution_id,
            ends=tuple(collected.finals.values()),
            takeovers=tuple(collected.takeovers.values()),
        )
        rest = (
            CommitmentsShared(execution_id=execution_id, commitments=batch)
            for batch in _split(state.collected.list_tokens())
        )
        return [Gossip(None, message) for message in (first, *rest)]

    def _submit(
        self,
        state: SettlementState,
        context: PlanContext,
        agreement: AgreedCommitments,
        own: CommitmentsVote,
        now: float,
    ) -> list[Command]:
        """Submit the root that 2f+1 members voted for, again while the chain lacks it.

        The chain refuses it while an executor's free stake does not cover what it can lose; stake
        becomes free when other executions end. Near the deadline it leaves such an executor out.
        """
        collected, equal = state.collected, _list_equal(state, own)
        if len(equal) < self._context.view.quorum or not state.chain.is_planned:
            return []
        if collected.submit_at == math.inf:
            place = self._context.get_place(context.plan.seed, now)
            collected.submit_at = now + place * tuning.COMMITMENTS_STAGE_S
        if now < collected.submit_at:
            return []
        collected.submit_at = now + tuning.COMMITMENTS_STAGE_S * len(self._context.accounts())
        return [
            SubmitCommitments(
                execution_id=state.request.execution_id,
                root=own.root,
                exposures=state.list_exposures(agreement),
                signatures=quorum.pack_signatures(sorted(equal)[: self._context.view.quorum]),
            )
        ]

    def _catch_up(
        self, state: SettlementState, ours: AgreedCommitments | None, now: float
    ) -> list[Command]:
        """Find the content of the agreed root: what we voted for or hold, or another member's.

        Commitments that came after our vote change what we hold.
        """
        agreed = state.chain.agreed
        voted = state.collected.voted.get(agreed.root) if agreed is not None else None
        if state.chain.bind(voted or ours) or now < state.collected.vote_at:
            return []
        state.collected.vote_at = now + tuning.GOSSIP_RETRY_S
        execution_id = state.request.execution_id
        return [
            Log(f"the members agreed on commitments of {execution_id} that we do not hold"),
            Gossip(None, CommitmentsRequest(execution_id=execution_id)),
        ]


def _list_equal(state: SettlementState, own: CommitmentsVote) -> list[tuple[str, bytes]]:
    """Return the members that voted for the same as we did, with their signatures."""
    return [
        (member, bytes.fromhex(vote.signature[2:]))
        for member, vote in state.collected.votes.items()
        if (vote.root, vote.exposures_hash) == (own.root, own.exposures_hash)
    ]


def _split(tokens: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Divide tokens among messages that members accept."""
    batch: list[str] = []
    for token in tokens:
        size = sum(map(len, batch)) + len(token)
        if len(batch) == limits.MAX_SHARED or size > limits.MAX_MESSAGE_BYTES // 2:
            yield tuple(batch)
            batch = []
        batch.append(token)
    if batch:
        yield tuple(batch)
