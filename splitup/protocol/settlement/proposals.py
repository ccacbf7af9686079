"""Agreement on the settlement that follows from complete evidence: proposals and signatures.

Members propose in the order that the draw gives them. A member signs a proposal if it computes the
same settlement from its own evidence: from all that it has, or from what it had when that was
complete, with what the proposal adds.
"""

from __future__ import annotations

from typing import NamedTuple

from splitup.core import limits, tuning
from splitup.core.errors import PeerFault
from splitup.crypto import quorum
from splitup.messages.verification import Evidence
from splitup.protocol.committee.commands import Command, Gossip, Log, SubmitSettlement
from splitup.protocol.committee.context import MemberContext
from splitup.protocol.committee.peer_messages import SettlementSignature
from splitup.protocol.committee.settlement_proposals import SettlementProposal
from splitup.protocol.planning.exposure import Economics
from splitup.protocol.settlement import settlement_transitions as transitions
from splitup.protocol.settlement.evidence import (
    compute_evidence_root,
    make_evidence,
)
from splitup.protocol.settlement.proof_of_sampling import compute_settlement
from splitup.protocol.settlement.settlement_state import (
    OwnProposal,
    Proposing,
    SettlementState,
    Verifying,
)
from splitup.protocol.settlement.verification_state import Verification


class _Result(NamedTuple):
    """What follows from a verification."""

    settlement: quorum.Settlement
    settlement_hash: str
    evidence: Evidence


class Proposals:
    """One member's part in agreeing on settlements."""

    def __init__(self, context: MemberContext, economics: Economics) -> None:
        self._context = context
        self._economics = economics

    def advance(self, state: SettlementState, now: float) -> list[Command]:
        """Sign others' proposals that equal our own settlement; propose when it is our turn."""
        if isinstance(state.phase, Verifying) and state.phase.verification.is_complete():
            transitions.complete_evidence(state, now)
        phase = state.phase
        if not isinstance(phase, Proposing) or (now < phase.propose_at and not state.proposals):
            return []
        result = self._compute(state, phase.verification)
        commands: list[Command] = []
        for sender, proposal in sorted(state.proposals.items()):
            if proposal.settlement_hash == result.settlement_hash:
                commands += self._sign(state, phase, sender, proposal.round, result)
        state.proposals = {
            sender: proposal
            for sender, proposal in state.proposals.items()
            if proposal.settlement_hash != result.settlement_hash
        }
        if now < phase.propose_at:
            return commands
        phase.propose_at = now + tuning.SETTLEMENT_STAGE_S * len(self._context.accounts())
        return commands + self._propose(state, phase, result)

    def judge(
        self, state: SettlementState, phase: Proposing, sender: str, found: Verification
    ) -> list[Command]:
        """Sign a proposal that equals the settlement from ``found``: our basis and what it adds."""
        result, proposal = self._compute(state, found), state.proposals[sender]
        if proposal.settlement_hash != result.settlement_hash:
            return []
        del state.proposals[sender]
        return self._sign(state, phase, sender, proposal.round, result)

    def _propose(self, state: SettlementState, phase: Proposing, result: _Result) -> list[Command]:
        """Send our proposal to all members; in a new round when the evidence has grown."""
        commands: list[Command] = []
        verification, own = phase.verification, phase.own
        if own is None or own.settlement_hash != result.settlement_hash:
            if state.rounds >= limits.MAX_SETTLEMENT_ROUNDS:
                return []
            own = phase.own = OwnProposal(state.rounds, result.settlement, result.settlement_hash)
            phase.evidence[result.settlement.evidence_root] = result.evidence
            state.rounds += 1
            commands += self._sign(state, phase, self._context.account, own.round, result)
        completions = sorted(verification.completions.items())
        message = SettlementProposal(
            execution_id=state.request.execution_id,
            round=own.round,
            draw=verification.draw,
            completions=tuple(completion for _, completion in completions),
            results=tuple(answer.token for answer in verification.list_answers()),
            attestations=tuple(verification.attestations.get_all()),
            settlement_hash=result.settlement_hash,
        )
        commands.append(Gossip(None, message))
        if len(own.signatures) >= self._context.view.quorum:  # the chain has not taken it yet
            commands.append(_make_submission(state, own))
        return commands

    def _sign(
        self,
        state: SettlementState,
        phase: Proposing,
        proposer: str,
        round_: int,
        result: _Result,
    ) -> list[Command]:
        """Sign one settlement per proposer and round; the chain takes only the first.

        The evidence for what was signed is kept, and no more: a liar may propose without end.
        """
        execution_id, settlement_hash = state.request.execution_id, result.settlement_hash
        commands = self._context.signing_guard.claim(
            f"settlement/{execution_id}/{proposer}/{round_}",
            settlement_hash,
            self._context.get_end_s(state.request),
        )
        if commands is None:
            return [Log(f"{proposer} proposed two settlements of {execution_id} in one round")]
        phase.evidence[result.settlement.evidence_root] = result.evidence
        struct_hash = quorum.settlement_struct_hash(execution_id, settlement_hash)
        signature = self._context.sign(struct_hash)
        own = _get_own(state)
        if proposer == self._context.account and own is not None:
            own.signatures[proposer] = bytes.fromhex(signature[2:])
            return commands
        message = SettlementSignature(
            execution_id=execution_id,
            round=round_,
            settlement_hash=settlement_hash,
            signature=signature,
        )
        return [*commands, Gossip(proposer, message)]

    def _compute(self, state: SettlementState, verification: Verification) -> _Result:
        """Return the settlement that follows from a verification, and the evidence for it."""
        verdicts = verification.list_verdicts()
        executors = verification.executors
        evidence = make_evidence(verification.draw, verdicts)
        settlement = compute_settlement(
            verification.context.plan,
            verification.context.manifest,
            verification.draw.steps,
            set(executors) - verification.completions.keys(),
            verdicts,
            self._economics,
            executors,
            state.chain.get_locked(),
            evidence_root=compute_evidence_root(evidence),
        )
        return _Result(settlement, quorum.settlement_hash(settlement), evidence)

    def process_signature(
        self, state: SettlementState, sender: str, message: SettlementSignature
    ) -> list[Command]:
        """Count a signature under our proposal; the last one needed sends it to the chain."""
        own = _get_own(state)
        if own is None or message.round != own.round:
            return []
        if message.settlement_hash != own.settlement_hash:
            raise PeerFault(f"member {sender} signed another settlement than asked", peer=sender)
        struct_hash = quorum.settlement_struct_hash(message.execution_id, own.settlement_hash)
        self._context.check(sender, struct_hash, message.signature)
        if sender in own.signatures:
            return []
        own.signatures[sender] = bytes.fromhex(message.signature[2:])
        if len(own.signatures) != self._context.view.quorum:
            return []  # fewer are not enough; with more it was submitted already
        return [_make_submission(state, own)]


def _get_own(state: SettlementState) -> OwnProposal | None:
    return state.phase.own if isinstance(state.phase, Proposing) else None


def _make_submission(state: SettlementState, own: OwnProposal) -> SubmitSettlement:
    packed = quorum.pack_signatures(own.signatures.items())
    execution_id, history = state.request.execution_id, None
    if own.settlement.slashes:
        history = state.make_history()
    return SubmitSettlement(execution_id, own.settlement, history, packed)
