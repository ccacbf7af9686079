"""From complete evidence to a settlement that 2f+1 members signed.

Members propose in the order that the draw gives them; a member signs what it computes itself from
the same evidence.
"""

from __future__ import annotations

import math

from splitup.core import limits, tuning
from splitup.core.errors import PeerFault
from splitup.crypto import quorum
from splitup.graph.manifest import Manifest
from splitup.messages.plans import PlanCertificate
from splitup.messages.verification import Draw
from splitup.protocol.committee.context import MemberContext, SigningGuard
from splitup.protocol.committee.events import Command, Gossip, Log, SubmitSettlement
from splitup.protocol.committee.peer_messages import SettlementProposal, SettlementSignature
from splitup.protocol.settlement.proof_of_sampling import Economics, compute_settlement
from splitup.protocol.settlement.settlement_state import (
    Proposed,
    SettlementState,
    compute_evidence_root,
    make_settlement,
)


class Proposals:
    """One member's part in agreeing on settlements."""

    def __init__(
        self, context: MemberContext, signing_guard: SigningGuard, economics: Economics
    ) -> None:
        self._context = context
        self._signing_guard = signing_guard
        self._economics = economics

    def advance(self, state: SettlementState, now: float) -> list[Command]:
        """Sign what others propose and we compute, too; propose when it is our turn."""
        if state.certificate is None or state.manifest is None or state.draw is None:
            return []
        if state.checks is None or not state.checks.keys() <= state.verdicts.keys():
            return []
        executors = set(state.get_executors())
        if not executors <= state.completions.keys() | state.list_withheld():
            return []
        if state.propose_at == math.inf:
            state.propose_at = now + state.place * tuning.SETTLEMENT_STAGE_S
        if now < state.propose_at and not state.proposals:
            return []
        settlement = self._compute(state, state.certificate, state.manifest, state.draw)
        settlement_hash = quorum.settlement_hash(settlement)
        commands: list[Command] = []
        for sender, proposal in sorted(state.proposals.items()):
            if proposal.settlement_hash == settlement_hash:
                commands += self._sign(state, sender, proposal.round, settlement_hash)
        state.proposals = {
            sender: proposal
            for sender, proposal in state.proposals.items()
            if proposal.settlement_hash != settlement_hash
        }
        if now < state.propose_at:
            return commands
        state.propose_at = now + tuning.SETTLEMENT_STAGE_S * len(self._context.accounts())
        return commands + self._propose(state, state.draw, settlement, settlement_hash)

    def _propose(
        self,
        state: SettlementState,
        draw: Draw,
        settlement: quorum.Settlement,
        settlement_hash: str,
    ) -> list[Command]:
        """Say it to all, again when unanswered, in a new round when the evidence has grown."""
        commands: list[Command] = []
        mine = state.proposed
        if mine is None or mine.settlement_hash != settlement_hash:
            if state.rounds >= limits.MAX_SETTLEMENT_ROUNDS:
                return []
            mine = state.proposed = Proposed(state.rounds, settlement, settlement_hash)
            state.rounds += 1
            commands += self._sign(state, self._context.account, mine.round, settlement_hash)
        message = SettlementProposal(
            execution_id=state.request.execution_id,
            round=mine.round,
            draw=draw,
            completions=tuple(completion for _, completion in sorted(state.completions.items())),
            results=tuple(answer.token for answer in state.get_answers()),
            attestations=tuple(state.attestations.get_all()),
            settlement_hash=settlement_hash,
        )
        commands.append(Gossip(None, message))
        if len(mine.signatures) >= self._context.view.quorum:  # the chain has not taken it yet
            commands.append(self._make_submission(state, mine))
        return commands

    def _sign(
        self, state: SettlementState, proposer: str, round_: int, settlement_hash: str
    ) -> list[Command]:
        """Sign one settlement per proposer and round; the chain takes only the first."""
        execution_id = state.request.execution_id
        commands = self._signing_guard.claim(
            f"settlement/{execution_id}/{proposer}/{round_}", settlement_hash
        )
        if commands is None:
            return [Log(f"{proposer} proposed two settlements of {execution_id} in one round")]
        struct_hash = quorum.settlement_struct_hash(execution_id, settlement_hash)
        signature = self._context.sign(struct_hash)
        if proposer == self._context.account and state.proposed is not None:
            state.proposed.signatures[proposer] = bytes.fromhex(signature[2:])
            return commands
        message = SettlementSignature(
            execution_id=execution_id,
            round=round_,
            settlement_hash=settlement_hash,
            signature=signature,
        )
        return [*commands, Gossip(proposer, message)]

    def _make_submission(self, state: SettlementState, mine: Proposed) -> SubmitSettlement:
        packed = quorum.pack_signatures(mine.signatures.items())
        return SubmitSettlement(state.request.execution_id, mine.settlement, packed)

    def _compute(
        self, state: SettlementState, certificate: PlanCertificate, manifest: Manifest, draw: Draw
    ) -> quorum.Settlement:
        verdicts = state.list_verdicts()
        executors, commitments = state.get_executors(), state.get_commitments()
        terms = compute_settlement(
            certificate.plan,
            manifest,
            min(commitments[node].steps for node in executors),
            set(executors) - state.completions.keys(),
            verdicts,
            self._economics,
            executors,
        )
        return make_settlement(terms, compute_evidence_root(draw, verdicts))

    def process_signature(
        self, state: SettlementState, sender: str, message: SettlementSignature
    ) -> list[Command]:
        """Count a signature under our proposal; the last one needed sends it to the chain."""
        mine = state.proposed
        if mine is None or message.round != mine.round:
            return []
        if message.settlement_hash != mine.settlement_hash:
            raise PeerFault(f"member {sender} signed another settlement than asked", peer=sender)
        struct_hash = quorum.settlement_struct_hash(message.execution_id, mine.settlement_hash)
        self._context.check(sender, struct_hash, message.signature)
        if sender in mine.signatures:
            return []
        mine.signatures[sender] = bytes.fromhex(message.signature[2:])
        if len(mine.signatures) != self._context.view.quorum:
            return []  # fewer: wait; more: it is on its way
        return [self._make_submission(state, mine)]
