"""Answers that come after their time, one by one, and the members' agreement on a settlement."""

from __future__ import annotations

from functools import partial

import pytest

from splitup.core import limits
from splitup.messages.base import Message
from splitup.protocol.committee import events as ev
from splitup.protocol.committee.settlement_proposals import SettlementProposal
from tests.protocol.simulator import VERIFY_ALL, Node, Simulation, settle, start

ROUNDS, TASKS = 2, 60


class Trickle:
    """A validator commits to answers and keeps them; it spoils a proposal with each.

    It tells two members one when another proposes, the moment of which is known before.
    """

    def __init__(self, simulation: Simulation, node: Node) -> None:
        self.simulation = simulation
        self.kept: list[ev.ReportReceived] = []
        self.spoiled = 0
        usual = simulation._when_due

        def keep(of: Node, execution_id: str, own: object, event: ev.Event) -> None:
            if of is node and own is not None and isinstance(event, ev.ReportReceived):
                self.kept.append(event)
            else:
                usual(of, execution_id, own, event)  # type: ignore[arg-type]

        simulation._when_due = keep  # type: ignore[method-assign]
        for account in simulation.members:
            simulation.tamper[account] = partial(self.spoil, account)

    def spoil(self, proposer: str, message: Message) -> Message:
        if isinstance(message, SettlementProposal) and self.kept:
            event = self.kept.pop()
            self.spoiled += 1
            for account in [one for one in self.simulation.members if one != proposer][:2]:
                self.simulation.feed(account, event)
        return message


def test_s43_answers_that_trickle_in_do_not_use_up_the_rounds_of_all_proposers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_SETTLEMENT_ROUNDS", ROUNDS)
    simulation = start(nodes=3, tasks=TASKS, economics=VERIFY_ALL)
    trickle = Trickle(simulation, simulation.nodes[0])
    execution_id = simulation.request()
    settle(simulation, execution_id, within_s=90)
    assert trickle.spoiled and trickle.kept, "the first proposals were spoiled, not all"


class TrickleByMember(Trickle):
    """The same with a member, which tells only one other by proposals of its own, and never signs.

    All others' signatures are needed, as it is one of as many as may lie.
    """

    def __init__(self, simulation: Simulation, node: Node) -> None:
        super().__init__(simulation, node)
        self.liar = list(simulation.members)[-1]
        simulation.down.add(self.liar)

    def spoil(self, proposer: str, message: Message) -> Message:
        if isinstance(message, SettlementProposal) and self.kept:
            event = self.kept.pop()
            self.spoiled += 1
            told = {"completions": (), "attestations": (), "results": (event.token,)}
            others = [one for one in self.simulation.members if one not in (proposer, self.liar)]
            gossip = ev.GossipReceived(self.liar, message.model_copy(update=told))
            self.simulation.feed(others[self.spoiled % 2], gossip)
        return message


def test_s44_a_member_that_proposes_with_an_answer_each_time_does_not_use_up_the_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_SETTLEMENT_ROUNDS", ROUNDS)
    simulation = start(nodes=3, tasks=TASKS, economics=VERIFY_ALL)
    trickle = TrickleByMember(simulation, simulation.nodes[0])
    execution_id = simulation.request()
    settle(simulation, execution_id, within_s=90)
    assert trickle.spoiled and trickle.kept, "the first proposals were spoiled, not all"
