"""A reorganisation that crosses a handover: requests move from one configuration to another.

Four accounts are members of every configuration. What they sign for a request in one of them binds
them in the next, and after every restart.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from splitup.core import tuning
from splitup.crypto.keys import Identity
from splitup.messages.plans import Request
from splitup.protocol.committee import commands as cmd
from splitup.protocol.committee import events as ev
from splitup.protocol.committee.certificates import CommitteeView
from splitup.protocol.committee.context import SIGNED, SigningGuard
from splitup.protocol.committee.equivocation import compute_vote_hash, get_slot
from splitup.protocol.committee.peer_messages import PlanVote
from splitup.protocol.member import CommitteeMember
from splitup.protocol.membership import Membership
from splitup.protocol.planning.exposure import Economics
from tests.builders import make_chain_manifest, make_request, make_snapshot
from tests.protocol.cheap_scheme import CheapScheme, make_cheap_keys
from tests.protocol.committees import make_committee, make_view
from tests.protocol.simulator import GRACE_S, read_token

SEEDS = 60
CHEAP = CheapScheme()
IDENTITIES, VIEW = make_committee()
GROUP, SHARES = make_cheap_keys(4)
MANIFEST = make_chain_manifest(2)
SNAPSHOTS = [make_snapshot(6, 2, rtts={n: n + place for n in range(1, 7)}) for place in (0, 40)]
NOW_S = 1_000_000


def make_wording(snapshot: int, block: int) -> Request:
    """The client's one request, as the chain states it with the latest snapshot."""
    return make_request().model_copy(
        update={
            "model_id": MANIFEST.model_id,
            "snapshot_root": SNAPSHOTS[snapshot].root(),
            "snapshot_sequence": snapshot + 1,
            "block_hash": f"0x{block:064x}",
            "deadline": NOW_S + 600,
            "max_price_micro_usdc": 10**6,
        }
    )


@dataclass
class Life:
    """A member's process with its journal."""

    place: int
    identity: Identity
    machine: Membership
    journal: dict[tuple[str, str], dict[str, object]] = field(default_factory=dict)


class Crossing:
    """Four members and a chain that may take back requests, and handovers."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.current = 1
        self.block = 1
        self.economics = Economics(800, 1_200, 100_000)
        self.said: dict[tuple[str, str], bytes] = {}
        self.held: ev.RequestSeen | None = None
        self.lives: list[Life] = []
        for place, identity in enumerate(IDENTITIES):
            self.lives.append(Life(place, identity, None))  # type: ignore[arg-type]
        for life in self.lives:
            self.restart(life)

    def restart(self, life: Life) -> None:
        """Start a process: its journal, then the chain's configurations, then its requests."""

        def make_member(view: CommitteeView, guard: SigningGuard) -> CommitteeMember:
            return CommitteeMember(
                life.identity,
                view,
                self.economics,
                read_token,
                grace_s=GRACE_S,
                signing_guard=guard,
                scheme=CHEAP,
                snapshots=SNAPSHOTS,
            )

        kept = {key: value for (kind, key), value in life.journal.items() if kind == SIGNED}
        guard = SigningGuard(kept)
        life.machine = Membership(life.identity, VIEW.domain, bytes(32), make_member, guard)
        self.feed(life, ev.BlockSeen(self.block, NOW_S, f"0x{self.block:064x}"))
        for number in range(1, self.current + 1):
            self.tell_configuration(life, number)
        if self.held is not None:
            self.feed(life, self.held)

    def tell_configuration(self, life: Life, number: int) -> None:
        members = make_view(IDENTITIES, number).members
        if number > 1:
            self.feed(life, ev.ConfigurationSeen(number, members, True, False, self.block))
        else:
            self.feed(life, ev.ConfigurationSeen(number, members, False, True, self.block))
        key = life.machine._keys[number] = ev.KeyReady(GROUP, SHARES[life.place])
        for event in (key, ev.ManifestFetched(MANIFEST)):
            machine = life.machine._machines[number]
            self.carry_out(life, life.machine._tag(number, machine.handle(event, 0.0)))
        if number > 1:
            self.feed(life, ev.ConfigurationSeen(number, members, False, True, self.block))

    def feed(self, life: Life, event: ev.Event) -> None:
        self.carry_out(life, life.machine.handle(event, float(self.block)))

    def carry_out(self, life: Life, commands: list[cmd.Command]) -> None:
        for command in commands:
            match command:
                case cmd.Persist():
                    life.journal[command.kind, command.key] = dict(command.value)
                case cmd.Forget():
                    life.journal.pop((command.kind, command.key), None)
                case cmd.Gossip(message=message):
                    if isinstance(message, PlanVote) and message.member == life.identity.address:
                        self.note(message)
                    event = ev.GossipReceived(life.identity.address, message, command.configuration)
                    for other in self.lives:
                        if other is not life and other.machine is not None:
                            self.deliver(other, event)
                case cmd.SubmitEvidence():
                    raise AssertionError(f"evidence against {command.evidence.first.member}")

    def deliver(self, life: Life, event: ev.GossipReceived) -> None:
        if event.configuration in life.machine._machines:
            self.feed(life, event)

    def note(self, vote: PlanVote) -> None:
        """What Bonds compares: two plans of one member for one slot, in any configuration."""
        what = compute_vote_hash(vote)
        before = self.said.setdefault((vote.member, get_slot(vote)), what)
        assert before == what, f"{vote.member} signed two plans for {get_slot(vote)}"

    # ---- what happens -----------------------------------------------------------------------

    def request(self) -> None:
        self.block += 1
        wording = make_wording(self.random.randrange(2), self.block)
        self.held = ev.RequestSeen(wording, self.current)
        for life in self.lives:
            self.feed(life, self.held)

    def revert(self) -> None:
        if self.held is not None:
            for life in self.lives:
                self.feed(life, ev.EventReverted(self.held))
            self.held = None

    def hand_over(self) -> None:
        self.current += 1
        for life in self.lives:
            self.tell_configuration(life, self.current)

    def revert_handover(self) -> None:
        """Members read the chain again from the start, now without the last handover."""
        if self.current > 1:
            self.held = None
            self.current -= 1
            for life in self.lives:
                self.restart(life)

    def restart_one(self) -> None:
        """The owner changed the market's parameters; who starts again computes with them."""
        self.economics = Economics(800, 1_200, self.random.choice((50_000, 100_000)))
        self.restart(self.random.choice(self.lives))

    def run(self, steps: int = 12) -> None:
        for _ in range(steps):
            happening = self.random.choice(
                (self.request, self.revert, self.hand_over, self.revert_handover, self.restart_one)
            )
            if happening != self.request or self.held is None:
                happening()
            for life in self.lives:
                self.feed(life, ev.Tick())
            self.block += int(2 * tuning.GOSSIP_RETRY_S)


def test_s03_a_reorganisation_across_a_handover_makes_nobody_sign_two_plans() -> None:
    signed = 0
    for seed in range(SEEDS):
        crossing = Crossing(seed)
        try:
            crossing.run()
        except AssertionError as error:
            pytest.fail(f"Crossing({seed}).run(): {error}")
        signed += len(crossing.said)
    assert signed > 4 * SEEDS


def test_a_request_that_moves_to_the_next_configuration_is_planned_there() -> None:
    crossing = Crossing(1)
    crossing.request()
    execution_id = make_wording(0, 0).execution_id
    assert all(life.machine.find_certificate(execution_id) for life in crossing.lives)
    crossing.revert()
    crossing.hand_over()
    crossing.request()
    for life in crossing.lives:
        machine = life.machine._machines[2]
        assert machine.plans.find_certificate(execution_id)


def test_a_restarted_member_finishes_executions_of_the_configuration_before() -> None:
    crossing = Crossing(2)
    crossing.request()
    crossing.hand_over()
    (life, *_) = crossing.lives
    crossing.restart(life)
    execution_id = make_wording(0, 0).execution_id
    assert life.machine.current == 2 and life.machine.is_open(execution_id)
    crossing.block += int(2 * tuning.GOSSIP_RETRY_S)
    crossing.feed(life, ev.Tick())
    assert life.machine.find_certificate(execution_id), "the others answer its late share"
