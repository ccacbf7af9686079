"""From complete evidence to a settlement that 2f+1 members signed.

Members propose in the order that the draw gives them; a member signs what it computes itself from
the same evidence.
"""

from __future__ import annotations

import math

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.crypto import quorum
from splitup.graph.manifest import Manifest
from splitup.messages.plans import PlanCertificate
from splitup.messages.verification import Draw
from splitup.protocol.committee.context import Ledger, Seat
from splitup.protocol.committee.events import Command, Gossip, Log, SubmitSettlement
from splitup.protocol.committee.peer_messages import SettlementProposal, SettlementSignature
from splitup.protocol.settlement.proof_of_sampling import Economics, compute_settlement
from splitup.protocol.settlement.settlement_state import (
    Case,
    Proposed,
    compute_evidence_root,
    make_settlement,
)


class Proposals:
    """One member's part in agreeing on settlements."""

    def __init__(self, seat: Seat, ledger: Ledger, economics: Economics) -> None:
        self._seat = seat
        self._ledger = ledger
        self._economics = economics

    def advance(self, case: Case, now: float) -> list[Command]:
        """Sign what others propose and we compute, too; propose when it is our turn."""
        if case.certificate is None or case.manifest is None or case.draw is None:
            return []
        if case.checks is None or not case.checks.keys() <= case.verdicts.keys():
            return []
        executors = set(case.get_executors())
        if not executors <= case.completions.keys() | case.list_withheld():
            return []
        if case.propose_at == math.inf:
            case.propose_at = now + case.place * limits.SETTLEMENT_STAGE_S
        if now < case.propose_at and not case.proposals:
            return []
        settlement = self._compute(case, case.certificate, case.manifest, case.draw)
        settlement_hash = quorum.settlement_hash(settlement)
        commands: list[Command] = []
        for sender, proposal in sorted(case.proposals.items()):
            if proposal.settlement_hash == settlement_hash:
                commands += self._sign(case, sender, proposal.round, settlement_hash)
        case.proposals = {
            sender: proposal
            for sender, proposal in case.proposals.items()
            if proposal.settlement_hash != settlement_hash
        }
        if now < case.propose_at:
            return commands
        case.propose_at = now + limits.SETTLEMENT_STAGE_S * len(self._seat.accounts())
        return commands + self._propose(case, case.draw, settlement, settlement_hash)

    def _propose(
        self, case: Case, draw: Draw, settlement: quorum.Settlement, settlement_hash: str
    ) -> list[Command]:
        """Say it to all, again when unanswered, in a new round when the evidence has grown."""
        commands: list[Command] = []
        mine = case.proposed
        if mine is None or mine.settlement_hash != settlement_hash:
            if case.rounds >= limits.MAX_SETTLEMENT_ROUNDS:
                return []
            mine = case.proposed = Proposed(case.rounds, settlement, settlement_hash)
            case.rounds += 1
            commands += self._sign(case, self._seat.account, mine.round, settlement_hash)
        message = SettlementProposal(
            execution_id=case.request.execution_id,
            round=mine.round,
            draw=draw,
            completions=tuple(completion for _, completion in sorted(case.completions.items())),
            results=tuple(answer.token for answer in case.get_answers()),
            attestations=tuple(case.attestations.get_all()),
            settlement_hash=settlement_hash,
        )
        commands.append(Gossip(None, message))
        if len(mine.signatures) >= self._seat.view.quorum:  # the chain has not taken it yet
            commands.append(self._make_submission(case, mine))
        return commands

    def _sign(self, case: Case, proposer: str, round_: int, settlement_hash: str) -> list[Command]:
        """Sign one settlement per proposer and round; the chain takes only the first."""
        execution_id = case.request.execution_id
        commands = self._ledger.claim(
            f"settlement/{execution_id}/{proposer}/{round_}", settlement_hash
        )
        if commands is None:
            return [Log(f"{proposer} proposed two settlements of {execution_id} in one round")]
        struct_hash = quorum.settlement_struct_hash(execution_id, settlement_hash)
        signature = self._seat.sign(struct_hash)
        if proposer == self._seat.account and case.proposed is not None:
            case.proposed.signatures[proposer] = bytes.fromhex(signature[2:])
            return commands
        message = SettlementSignature(
            execution_id=execution_id,
            round=round_,
            settlement_hash=settlement_hash,
            signature=signature,
        )
        return [*commands, Gossip(proposer, message)]

    def _make_submission(self, case: Case, mine: Proposed) -> SubmitSettlement:
        packed = quorum.pack_signatures(mine.signatures.items())
        return SubmitSettlement(case.request.execution_id, mine.settlement, packed)

    def _compute(
        self, case: Case, certificate: PlanCertificate, manifest: Manifest, draw: Draw
    ) -> quorum.Settlement:
        verdicts = case.list_verdicts()
        executors, commitments = case.get_executors(), case.get_commitments()
        terms = compute_settlement(
            certificate.plan,
            manifest,
            min(commitments[node].steps for node in executors),
            set(executors) - case.completions.keys(),
            verdicts,
            self._economics,
            executors,
        )
        return make_settlement(terms, compute_evidence_root(draw, verdicts))

    def process_signature(
        self, case: Case, sender: str, message: SettlementSignature
    ) -> list[Command]:
        """Count a signature under our proposal; the last one needed sends it to the chain."""
        mine = case.proposed
        if mine is None or message.round != mine.round:
            return []
        if message.settlement_hash != mine.settlement_hash:
            raise PeerFault(f"member {sender} signed another settlement than asked", peer=sender)
        struct_hash = quorum.settlement_struct_hash(message.execution_id, mine.settlement_hash)
        self._seat.check(sender, struct_hash, message.signature)
        if sender in mine.signatures:
            return []
        mine.signatures[sender] = bytes.fromhex(message.signature[2:])
        if len(mine.signatures) != self._seat.view.quorum:
            return []  # fewer: wait; more: it is on its way
        return [self._make_submission(case, mine)]
