"""The epoch of one member: votes in, epochs and repeated votes out."""

from __future__ import annotations

from splitup.core import limits
from splitup.protocol.committee.commands import Command, Gossip
from splitup.protocol.committee.peer_messages import EpochTimeoutVote
from splitup.protocol.snapshots.pacemaker import Pacemaker, compute_leader
from tests.protocol.machines import make_context


def make_pacemaker(epoch: int = 0) -> Pacemaker:
    return Pacemaker(make_context(), epoch)


def vote(pacemaker: Pacemaker, place: int, epoch: int, configuration: int = 1) -> list[Command]:
    message = EpochTimeoutVote(configuration=configuration, epoch=epoch)
    return pacemaker.process_timeout_vote(make_context().accounts()[place], message, 0.0)


def get_epochs(commands: list[Command]) -> list[int]:
    messages = [command.message for command in commands if isinstance(command, Gossip)]
    return [message.epoch for message in messages if isinstance(message, EpochTimeoutVote)]


def test_the_leader_is_the_member_at_the_epochs_place() -> None:
    accounts = make_context().accounts()
    assert [compute_leader(accounts, epoch) for epoch in range(5)] == [*accounts, accounts[0]]
    assert make_pacemaker(0).leads and not make_pacemaker(1).leads and make_pacemaker(4).leads


def test_one_member_alone_does_not_change_the_epoch() -> None:
    pacemaker = make_pacemaker()
    assert get_epochs(pacemaker.timeout_vote(0.0)) == [1]
    assert pacemaker.timeout_vote(0.0) == [], "it has voted"
    assert pacemaker.epoch == 0
    vote(pacemaker, 1, 9)
    assert pacemaker.epoch == 0


def test_more_than_f_votes_pull_a_member_along_and_2f_1_change_the_epoch() -> None:
    pacemaker = make_pacemaker()
    assert vote(pacemaker, 1, 3) == []
    assert get_epochs(vote(pacemaker, 2, 2)) == [2], "one of two voters is honest"
    assert pacemaker.epoch == 2, "three members vote for 2 or more"


def test_an_older_vote_and_one_of_another_configuration_do_not_count() -> None:
    pacemaker = make_pacemaker()
    vote(pacemaker, 1, 3)
    vote(pacemaker, 1, 1)
    assert get_epochs(vote(pacemaker, 2, 3)) == [3]
    other = make_pacemaker()
    for place in (1, 2, 3):
        assert vote(other, place, 5, configuration=2) == []
    assert other.epoch == 0


def test_the_timeout_doubles_with_failed_epochs_up_to_a_bound_and_progress_resets_it() -> None:
    pacemaker, timeouts = make_pacemaker(), []
    for epoch in range(1, limits.EPOCH_DOUBLINGS + 3):
        timeouts.append(pacemaker.timeout_s)
        for place in (1, 2, 3):
            vote(pacemaker, place, epoch)
        assert pacemaker.epoch == epoch
    first = float(limits.EPOCH_TIMEOUT_S)
    doublings = [min(n, limits.EPOCH_DOUBLINGS) for n in range(len(timeouts))]
    assert timeouts == [first * 2**n for n in doublings]
    pacemaker.note_progress()
    assert pacemaker.timeout_s == first


def test_the_planned_end_of_an_epoch_is_no_failure() -> None:
    pacemaker = make_pacemaker()
    pacemaker.timeout_vote(0.0, planned=True)
    for place in (1, 2):
        vote(pacemaker, place, 1)
    assert pacemaker.epoch == 1 and pacemaker.timeout_s == limits.EPOCH_TIMEOUT_S


def test_a_member_adopts_a_later_epoch_and_never_an_earlier_one() -> None:
    pacemaker = make_pacemaker(2)
    pacemaker.adopt(5)
    assert pacemaker.epoch == 5
    pacemaker.adopt(4)
    assert pacemaker.epoch == 5
    assert get_epochs(pacemaker.process_tick(10.0)) == [5]


def test_the_vote_is_repeated_once_per_period() -> None:
    pacemaker, period = make_pacemaker(3), limits.MEMBER_HEARTBEAT_S
    assert get_epochs(pacemaker.process_tick(1.0)) == [3]
    assert pacemaker.process_tick(1.0 + period / 2) == []
    assert get_epochs(pacemaker.process_tick(1.0 + period)) == [3]
