"""A member that says different things to different members, together with a validator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from splitup.core import limits
from splitup.messages.base import ZERO_BYTES32
from splitup.messages.verification import (
    Attestation,
    Draw,
    Held,
    SignedAttestation,
    Silence,
    ValidatorCommitment,
    VerificationOrder,
)
from splitup.protocol.committee import events as ev
from splitup.protocol.committee.certificates import CommitteeView
from splitup.protocol.committee.peer_messages import Attested
from splitup.protocol.committee.settlement_proposals import SettlementProposal
from splitup.protocol.settlement import settlement_agreement
from splitup.protocol.settlement.attestations import check_attestation, sign_attestation
from tests.protocol.simulator import VERIFY_ALL, Node, Simulation, settle, start

NOBODY = "0x" + "77" * 20


class Divided(Simulation):
    """A validator pledges something else to one member; a member helps the others to a quorum.

    It tells one of them alone that it holds the pledge, too, and then everybody more than that,
    without the pledge. It signs no settlement.
    """

    def __init__(self, seed: int = 3, **options: object) -> None:
        super().__init__(seed, nodes=4, tasks=1, economics=VERIFY_ALL, **options)  # type: ignore[arg-type]
        self.first, self.second, self.other, self.liar = list(self.members)
        self.down.add(self.liar)
        self.validator = ""
        self.helped = False

    def feed(self, account: str, event: ev.Event) -> None:
        if isinstance(event, ev.ReportReceived):
            pledge = event.report
            if isinstance(pledge, ValidatorCommitment) and pledge.validator == self.validator:
                if account == self.other:
                    update = {"root": "0x" + "ab" * 32}
                    event = ev.ReportReceived(pledge.model_copy(update=update), event.signing_key)
                elif account == self.first and not self.helped:
                    self.helped = True
                    self.help(pledge)
        super().feed(account, event)

    def help(self, pledge: ValidatorCommitment) -> None:
        held = Held(task=pledge.task, validator=pledge.validator, root=pledge.root)
        more = tuple(Silence(node=NOBODY, task=task) for task in range(3))
        self.state(pledge.execution_id, (held,), (), (self.first,))
        self.state(pledge.execution_id, (), more, (self.first, self.second, self.other))

    def state(
        self,
        execution_id: str,
        held: tuple[Held, ...],
        silent: tuple[Silence, ...],
        to: tuple[str, ...],
    ) -> None:
        attestation = Attestation(
            execution_id=execution_id,
            member=self.liar,
            steps=4,
            due=False,
            held=held,
            silent=silent,
            rulings=(),
        )
        identity = next(one for one in self.identities if one.address == self.liar)
        message = Attested(attestation=sign_attestation(identity, attestation))
        for account in to:
            super().feed(account, ev.GossipReceived(self.liar, message))

    def _verify(self, node: Node, order: VerificationOrder) -> None:
        self.validator = self.validator or node.address
        super()._verify(node, order)

    def _when_due(self, node: Node, execution_id: str, own: object, event: ev.Event) -> None:
        if node.address == self.validator:
            own = None  # it reveals without waiting until its pledge is fixed
        super()._when_due(node, execution_id, own, event)  # type: ignore[arg-type]


def test_s48_a_member_that_contradicts_itself_does_not_divide_the_others() -> None:
    simulation = Divided()
    assert simulation.run(20, lambda: simulation.chain.sequence >= 1)
    execution_id = simulation.request()
    settle(simulation, execution_id, within_s=400)
    assert simulation.helped
    verdicts = simulation.members[simulation.second].settlements.find_evidence(execution_id)
    assert verdicts is not None
    assert simulation.validator in verdicts.verdicts[0].validators, "the quorum of one counts"


def make_proposal(
    execution_id: str, attestations: Sequence[SignedAttestation], number: int = 0
) -> SettlementProposal:
    """Return a proposal of a settlement that nobody computes; ``number`` makes others of it."""
    return SettlementProposal(
        execution_id=execution_id,
        round=0,
        draw=Draw(
            execution_id=execution_id,
            block_hash=ZERO_BYTES32,
            commitments=(),
            steps=4,
            signature="0x00",
            seed=ZERO_BYTES32,
        ),
        completions=(),
        results=(),
        attestations=tuple(attestations),
        settlement_hash=f"0x{number:064x}",
    )


def test_s49_proposals_before_the_draw_cost_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of them carries attestations that are not kept, so that each look checks them again."""
    checked: list[SignedAttestation] = []

    def count(signed: SignedAttestation, view: CommitteeView) -> None:
        checked.append(signed)
        check_attestation(signed, view)

    monkeypatch.setattr(settlement_agreement, "check_attestation", count)
    simulation = start(nodes=4, tasks=1, economics=VERIFY_ALL)
    other, liar = next(iter(simulation.members)), simulation.identities[-1]
    execution_id = simulation.request()
    assert simulation.run(20, lambda: len(simulation.certificates.get(execution_id, ())) == 4)
    own = [
        Attestation(
            execution_id=execution_id,
            member=liar.address,
            steps=4,
            due=False,
            held=(),
            silent=(Silence(node=NOBODY, task=task),),
            rulings=(),
        )
        for task in range(limits.MAX_CONFLICTING)
    ]
    proposal = make_proposal(execution_id, [sign_attestation(liar, one) for one in own])
    before = len(checked)
    for _ in range(50):
        simulation.feed(other, ev.GossipReceived(liar.address, proposal))
        simulation.feed(other, ev.Tick())
    assert len(checked) == before
    settle(simulation, execution_id)
    assert sum(one.attestation in own for one in checked) <= len(own)


def test_s49_of_proposals_in_quick_succession_one_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has the whole verification looked at."""
    judged: list[str] = []
    add_evidence = settlement_agreement.SettlementAgreement._add_evidence

    def count(self: Any, state: Any, proposal: SettlementProposal) -> None:
        judged.append(proposal.settlement_hash)
        add_evidence(self, state, proposal)

    monkeypatch.setattr(settlement_agreement.SettlementAgreement, "_add_evidence", count)
    simulation = start(nodes=4, tasks=1, economics=VERIFY_ALL)
    other, liar = next(iter(simulation.members)), simulation.identities[-1]
    execution_id = simulation.request()
    member = simulation.members[other]
    assert simulation.run(60, lambda: member.settlements.find_attestation(execution_id) is not None)
    judged.clear()
    for number in range(50):
        message = make_proposal(execution_id, (), number)
        simulation.feed(other, ev.GossipReceived(liar.address, message))
    assert len(set(judged)) == 1
    settle(simulation, execution_id)
