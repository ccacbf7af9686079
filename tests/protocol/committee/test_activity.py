"""Members rest while nothing is open: they say and do less, and wake at once."""

from __future__ import annotations

from splitup.core import limits
from splitup.messages.snapshots import Heartbeat
from splitup.protocol.committee import events as ev
from splitup.protocol.committee.context import Activity
from splitup.protocol.member import CommitteeMember
from tests.protocol.simulator import Node, Simulation, settle, start


def rest(simulation: Simulation) -> list[CommitteeMember]:
    """Run until all members rest, and the refresh after the last change is over."""
    members = list(simulation.members.values())
    assert simulation.run(120, lambda: all(m.is_resting(simulation.now) for m in members))
    simulation.run(limits.SNAPSHOT_REFRESH_S + 5)
    return members


def test_a_member_is_busy_until_nothing_has_happened_for_a_while() -> None:
    activity = Activity()
    assert not activity.is_resting(10**9), "before it has begun"
    activity.note(100.0)
    assert not activity.is_resting(100.0 + limits.REST_AFTER_S - 1)
    assert activity.is_resting(100.0 + limits.REST_AFTER_S)
    activity.note(200.0)
    assert not activity.is_resting(200.0)
    assert activity.has_rested(201.0, within_s=2.0) and not activity.has_rested(203.0, within_s=2.0)


def test_members_that_rest_make_no_snapshots_and_look_only_when_a_timer_is_due() -> None:
    simulation = start()
    members = rest(simulation)
    before = simulation.chain.sequence
    simulation.run(2 * limits.SNAPSHOT_REFRESH_S)
    assert simulation.chain.sequence == before
    for member in members:
        now = simulation.now
        assert now < member.get_next_s(now) <= now + limits.OBSERVE_PERIOD_S
        assert member.nodes.get_rest_s(now) == limits.REST_HEARTBEAT_S
    assert simulation.run(limits.REST_SNAPSHOT_S, lambda: simulation.chain.sequence > before)


def test_ticks_at_the_times_that_a_member_names_are_enough() -> None:
    """Whatever ticks every 50 ms would do, one does that comes when it is due."""
    simulation = start()
    member = rest(simulation)[0]
    now = simulation.now
    for _ in range(20):
        due = member.get_next_s(now)
        assert not member.handle(ev.Tick(), min(now, due)), "nothing is due before"
        now = max(now, due)
        commands = member.handle(ev.Tick(), now)
        assert len(commands) <= 1, "a vote, or a look at the nodes"
    assert now >= simulation.now + 19 * limits.OBSERVE_PERIOD_S / 2


def test_a_request_ends_the_rest_of_all_members() -> None:
    simulation = start()
    members = rest(simulation)
    execution_id = simulation.request()
    simulation.run(1.5)  # its block
    for member in members:
        now = simulation.now
        assert not member.is_resting(now)
        assert member.get_next_s(now) <= now, "stages of a plan are due at any time"
        assert member.nodes.get_rest_s(now) == limits.HEARTBEAT_PERIOD_S
    settle(simulation, execution_id)


def test_who_rests_is_not_silent_before_its_second_vote_is_missed() -> None:
    simulation = start()
    simulation.run(limits.REST_AFTER_S)
    rest(simulation)
    first, second, *_ = simulation.members.values()
    for _ in range(30):
        simulation.run(1.0)
        assert not first.context.is_silent(second.context.account, simulation.now)
    simulation.down.add(second.context.account)
    simulation.run(limits.REST_MEMBER_HEARTBEAT_S + limits.MEMBER_SILENCE_S + 1)
    assert first.context.is_silent(second.context.account, simulation.now)


def test_a_node_that_beats_as_seldom_as_members_that_rest_ask_for_stays_in_the_snapshot() -> None:
    simulation = start()
    rest(simulation)
    quiet, hear, before = simulation.nodes[0], simulation._hear, simulation.chain.sequence

    def ignore(account: str, node: Node, beat: Heartbeat) -> None:
        if node is not quiet:
            hear(account, node, beat)

    for _ in range(3):
        simulation._hear = ignore  # type: ignore[method-assign,assignment]
        simulation.run(limits.REST_HEARTBEAT_S)
        simulation._hear = hear  # type: ignore[method-assign]
        simulation.run(1.1)
    assert simulation.chain.sequence == before
    simulation._hear = ignore  # type: ignore[method-assign,assignment]
    timeout_s = limits.REST_HEARTBEAT_S + limits.HEARTBEAT_TIMEOUT_S
    assert simulation.run(timeout_s + 3, lambda: simulation.chain.sequence > before), "it is gone"
