"""Key generation over a bulletin board: all members decide the same from the same blocks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from splitup.core import limits
from splitup.crypto import bls, dkg
from splitup.crypto.keys import Identity
from splitup.protocol.committee.certificates import CommitteeView
from splitup.protocol.committee.commands import (
    Command,
    ConfirmGroupKey,
    Fault,
    PostComplaint,
    PostDealing,
)
from splitup.protocol.committee.events import ComplaintPosted, DealingPosted, KeyReady
from splitup.protocol.committee.key_generation import KeyGeneration, Predecessor, make_ceremony
from tests.protocol.committees import make_committee, make_identity, make_view


class Board:
    """Parties and the chain between them; every block tells everybody the same."""

    def __init__(
        self,
        view: CommitteeView | None = None,
        parties: Sequence[Identity] = (),
        predecessors: Sequence[Predecessor | None] = (),
        confirmations: int = 0,
    ) -> None:
        self.confirmations = confirmations
        members, four = make_committee()
        self.members = list(parties) or list(members)
        self.view = view or four
        self.keygens = [
            KeyGeneration(
                member,
                self.view,
                bytes([place + 1]) * 32,
                predecessors[place] if predecessors else None,
                confirmations,
            )
            for place, member in enumerate(self.members)
        ]
        self.block = 1
        self.log: list[DealingPosted | ComplaintPosted] = []
        self.pending: list[DealingPosted | ComplaintPosted] = []
        self.outcome: dict[int, list[Command]] = {place: [] for place in range(len(self.members))}

    def post(self, place: int, commands: list[Command]) -> None:
        account = self.members[place].address
        for command in commands:
            if isinstance(command, PostDealing):
                self.pending.append(DealingPosted(account, command.dealing, 0))
            elif isinstance(command, PostComplaint):
                evidence = command.evidence
                self.pending.append(ComplaintPosted(command.dealer, account, evidence, 0))
            else:
                self.outcome[place].append(command)

    def mine(self, blocks: int = 1) -> None:
        """Add blocks; all members read them ``confirmations`` blocks later."""
        for _ in range(blocks):
            self.block += 1
            pending, self.pending = self.pending, []
            for event in pending:
                fields = {name: getattr(event, name) for name in event.__slots__}
                self.log.append(type(event)(**{**fields, "block_number": self.block}))
            read = self.block - self.confirmations
            for posted in [event for event in self.log if event.block_number == read]:
                for place, keygen in enumerate(self.keygens):
                    self.post(place, deliver(keygen, posted))
            for place, keygen in enumerate(self.keygens):
                self.post(place, keygen.process_block(read))

    def get_ready(self) -> list[KeyReady]:
        return [
            c for commands in self.outcome.values() for c in commands if isinstance(c, KeyReady)
        ]

    def list_faults(self) -> list[Fault]:
        return [c for commands in self.outcome.values() for c in commands if isinstance(c, Fault)]


def deliver(keygen: KeyGeneration, event: DealingPosted | ComplaintPosted) -> list[Command]:
    if isinstance(event, DealingPosted):
        return keygen.process_dealing(event)
    return keygen.process_complaint(event)


def spoil(dealing: bytes, ceremony: dkg.Ceremony, victim: int) -> bytes:
    """Swap one member's sealed share for another's."""
    parsed = dkg.Dealing.from_bytes(dealing, ceremony)
    sealed = list(parsed.sealed)
    sealed[victim] = sealed[(victim + 1) % len(sealed)]
    return dkg.Dealing(
        parsed.ceremony_id, parsed.dealer, parsed.commitments, parsed.ephemeral, tuple(sealed)
    ).to_bytes()


def test_all_dealings_give_one_key_to_all() -> None:
    board = Board()
    for place, keygen in enumerate(board.keygens):
        board.post(place, keygen.process_start())
    board.mine()
    assert board.get_ready() == [], "complaints still count"
    board.mine(limits.DKG_COMPLAINT_BLOCKS)
    ready = board.get_ready()
    assert len(ready) == 4
    assert len({command.group.public_key for command in ready}) == 1
    assert len({command.share for command in ready}) == 4
    votes = [
        c for commands in board.outcome.values() for c in commands if isinstance(c, ConfirmGroupKey)
    ]
    assert {vote.public_key for vote in votes} == {ready[0].group.public_key}
    assert all(keygen.is_done for keygen in board.keygens)


def test_one_silent_dealer_is_not_waited_for_for_ever() -> None:
    board = Board()
    for place, keygen in enumerate(board.keygens[:3]):
        board.post(place, keygen.process_start())
    board.mine(limits.DKG_TIMEOUT_BLOCKS)
    assert board.get_ready() == []
    board.mine(limits.DKG_COMPLAINT_BLOCKS + 2)
    ready = board.get_ready()
    assert len(ready) == 4, "the silent one still gets its share of the key"
    assert ready[0].group.qualified == (0, 1, 2)


def test_a_dealing_after_the_time_does_not_count() -> None:
    board = Board()
    for place, keygen in enumerate(board.keygens[:3]):
        board.post(place, keygen.process_start())
    board.mine(limits.DKG_TIMEOUT_BLOCKS + 2)
    board.post(3, board.keygens[3].process_start())
    board.mine(limits.DKG_COMPLAINT_BLOCKS + 2)
    assert {command.group.qualified for command in board.get_ready()} == {(0, 1, 2)}


def test_dealings_and_complaints_are_final_exactly_at_their_blocks() -> None:
    board, first = Board(), 5
    machine = board.keygens[0]
    for place, keygen in enumerate(board.keygens[:3]):
        (command,) = keygen.process_start()
        assert isinstance(command, PostDealing)
        dealer = board.members[place].address
        machine.process_dealing(DealingPosted(dealer, command.dealing, first))
    final = first + limits.DKG_TIMEOUT_BLOCKS + limits.DKG_COMPLAINT_BLOCKS
    assert machine.process_block(first + limits.DKG_TIMEOUT_BLOCKS) == []
    assert machine.process_block(final - 1) == [] and not machine.is_done
    kinds = [type(command) for command in machine.process_block(final)]
    assert kinds == [KeyReady, ConfirmGroupKey] and machine.is_done
    assert machine.process_block(final + 1) == [], "it ends once"


def test_when_too_few_are_in_time_the_next_ones_close_it() -> None:
    board = Board()
    for place in (0, 1):
        board.post(place, board.keygens[place].process_start())
    board.mine(limits.DKG_TIMEOUT_BLOCKS + 5)
    assert board.get_ready() == []
    board.post(3, board.keygens[3].process_start())
    board.mine(limits.DKG_COMPLAINT_BLOCKS + 1)
    assert {command.group.qualified for command in board.get_ready()} == {(0, 1, 3)}


@pytest.mark.parametrize("victim", [1, 2])
def test_a_true_complaint_excludes_the_dealer(victim: int) -> None:
    board = Board()
    ceremony = make_ceremony(board.view)
    for place, keygen in enumerate(board.keygens):
        commands = keygen.process_start()
        if place == 0:
            (post,) = commands
            assert isinstance(post, PostDealing)
            commands = [PostDealing(spoil(post.dealing, ceremony, victim))]
        board.post(place, commands)
    board.mine(2 + limits.DKG_COMPLAINT_BLOCKS)
    ready = board.get_ready()
    assert {command.group.qualified for command in ready} == {(1, 2, 3)}
    assert len(ready) == 4
    assert {fault.peer for fault in board.list_faults()} == {board.members[0].address}


def test_a_false_complaint_excludes_nobody() -> None:
    board = Board()
    ceremony = make_ceremony(board.view)
    for place, keygen in enumerate(board.keygens):
        board.post(place, keygen.process_start())
    board.mine()
    first = board.log[0]
    assert isinstance(first, DealingPosted)
    dealing = dkg.Dealing.from_bytes(first.dealing, ceremony)
    complaint = dkg.make_complaint(ceremony, dealing, 3, board.members[3])
    board.post(3, [PostComplaint(first.dealer, complaint.to_bytes())])
    board.mine(limits.DKG_COMPLAINT_BLOCKS)
    assert {command.group.qualified for command in board.get_ready()} == {(0, 1, 2, 3)}
    assert {fault.peer for fault in board.list_faults()} == {board.members[3].address}


def test_malformed_and_foreign_dealings_count_as_none() -> None:
    board = Board()
    for place, keygen in enumerate(board.keygens[:3]):
        board.post(place, keygen.process_start())
    (other,) = board.keygens[0].process_start()
    assert isinstance(other, PostDealing)
    board.post(3, [PostDealing(b"{}"), PostDealing(other.dealing)])
    board.mine(limits.DKG_TIMEOUT_BLOCKS + limits.DKG_COMPLAINT_BLOCKS + 1)
    assert {command.group.qualified for command in board.get_ready()} == {(0, 1, 2)}
    assert {fault.peer for fault in board.list_faults()} == {board.members[3].address}


def test_a_member_that_lost_its_journal_finds_its_share_on_the_chain() -> None:
    board = Board()
    for place, keygen in enumerate(board.keygens):
        board.post(place, keygen.process_start())
    board.mine(1 + limits.DKG_COMPLAINT_BLOCKS)
    again = KeyGeneration(board.members[2], board.view, b"\xff" * 32)
    for event in board.log:
        assert deliver(again, event) == []
    assert again.process_start() == [], "its dealing is there already"
    ready, _ = again.process_block(board.block)
    assert ready == board.get_ready()[2]


def start_handover(newcomers: Sequence[Identity], stay: Sequence[int]) -> tuple[Board, str]:
    """Four members with a key, about to hand over to some of them and newcomers."""
    board = Board()
    for place, keygen in enumerate(board.keygens):
        board.post(place, keygen.process_start())
    board.mine(1 + limits.DKG_COMPLAINT_BLOCKS)
    ready = board.get_ready()
    predecessors = [Predecessor(board.view, r.group, r.share) for r in ready]
    watching = Predecessor(board.view, ready[0].group)
    view = make_view([*(board.members[place] for place in stay), *newcomers], configuration=2)
    parties = [*board.members, *newcomers]
    second = Board(view, parties, [*predecessors, *[watching] * len(newcomers)])
    return second, ready[0].group.public_key


def sign_with(ready: Sequence[KeyReady], threshold: int) -> str:
    places = {key: place for place, key in enumerate(ready[0].group.member_keys)}
    partials = {
        places[bls.compute_public_key(r.share)]: bls.sign_partial(r.share, b"d", b"m")
        for r in ready
    }
    return bls.combine(partials, threshold)


def test_members_that_join_and_leave_take_the_key_over() -> None:
    board, key = start_handover([make_identity(n) for n in range(1, 5)], stay=[0, 2, 3])
    for place, keygen in enumerate(board.keygens):
        board.post(place, keygen.process_start())
    assert len(board.pending) == 4, "only the members before deal"
    board.mine(1 + limits.DKG_COMPLAINT_BLOCKS)
    ready = board.get_ready()
    assert len(ready) == 7, "the one that leaves holds no share of the new polynomial"
    assert {command.group.public_key for command in ready} == {key}
    assert {keygen.group for keygen in board.keygens} == {ready[0].group}, "whoever watches knows"
    bls.verify_signature(key, b"d", b"m", sign_with(ready[2:], 5))


def test_a_handover_survives_a_dead_dealer_and_one_that_cheats() -> None:
    """One of four is replaced because it is down; with a cheat among the rest it has to wait."""
    board, key = start_handover([make_identity(1)], stay=[0, 1, 2])
    for place in (0, 1, 2):
        commands = board.keygens[place].process_start()
        if place == 0:
            (post,) = commands
            assert isinstance(post, PostDealing)
            ceremony = board.keygens[0]._ceremony
            commands = [PostDealing(spoil(post.dealing, ceremony, 2))]
        board.post(place, commands)
    board.mine(2 + limits.DKG_TIMEOUT_BLOCKS + limits.DKG_COMPLAINT_BLOCKS)
    assert board.get_ready() == [], "two honest dealings of four members are no quorum"
    assert {fault.peer for fault in board.list_faults()} == {board.members[0].address}

    board, key = start_handover([make_identity(1)], stay=[0, 1, 2])
    for place in (0, 1, 2):
        board.post(place, board.keygens[place].process_start())
    board.mine(2 + limits.DKG_TIMEOUT_BLOCKS + limits.DKG_COMPLAINT_BLOCKS)
    ready = board.get_ready()
    assert len(ready) == 4 and {r.group.public_key for r in ready} == {key}
    assert ready[0].group.qualified == (0, 1, 2)


@pytest.mark.parametrize("size", [7, pytest.param(31, marks=pytest.mark.long)])
def test_larger_committees_generate_a_key(size: int) -> None:
    """With a silent dealer and one that cheats."""
    members, view = make_committee(size)
    few = [members[0], members[1], members[-1]]  # the others would compute the same
    board = Board(view, few)
    ceremony = make_ceremony(view)
    for place, member in enumerate(members[:-1]):
        entropy = bytes([place + 1]) * 32
        data = dkg.make_dealing(ceremony, place, entropy).to_bytes()
        if place == 2:
            data = spoil(data, ceremony, 1)
        board.pending.append(DealingPosted(member.address, data, 0))
    board.mine(2 + limits.DKG_TIMEOUT_BLOCKS + limits.DKG_COMPLAINT_BLOCKS)
    ready = board.get_ready()
    assert len(ready) == 3
    assert len({r.group.public_key for r in ready}) == 1
    assert ready[0].group.qualified == tuple(p for p in range(size - 1) if p != 2)
    partials = [bls.sign_partial(r.share, b"d", b"m") for r in ready]
    keys = [ready[0].group.member_keys[place] for place in (0, 1, size - 1)]
    for key, partial in zip(keys, partials, strict=True):
        bls.verify_signature(key, b"d", b"m", partial)


@pytest.mark.parametrize("confirmations", [0, 1, 2, 6, limits.MAX_CONFIRMATIONS])
def test_s06_bad_shares_are_complained_about_in_time_however_deep_members_read(
    confirmations: int,
) -> None:
    """The faulty dealer deals last, so that nothing but the window for complaints is left."""
    board = Board(confirmations=confirmations)
    ceremony = make_ceremony(board.view, confirmations=confirmations)
    for place, keygen in enumerate(board.keygens[:3]):
        board.post(place, keygen.process_start())
    board.mine(3)
    (deal,) = board.keygens[3].process_start()
    assert isinstance(deal, PostDealing)
    dealing = deal.dealing
    for victim in (0, 1):
        dealing = spoil(dealing, ceremony, victim)
    board.post(3, [PostDealing(dealing)])
    board.mine(4 * confirmations + 10)
    ready = board.get_ready()
    assert [r.group.qualified for r in ready] == [(0, 1, 2)] * 4, "all agree, and can sign"


def test_s06_a_complaint_that_the_chain_does_not_hold_is_posted_again() -> None:
    board = Board(confirmations=2)
    ceremony = make_ceremony(board.view, confirmations=2)
    for place, keygen in enumerate(board.keygens):
        for command in keygen.process_start():
            assert isinstance(command, PostDealing)
            data = spoil(command.dealing, ceremony, 0) if place == 3 else command.dealing
            board.post(place, [PostDealing(data)])
    board.mine(3)
    assert [type(event) for event in board.pending] == [ComplaintPosted]
    board.pending.clear()  # lost
    assert board.keygens[0].process_start() == [], "it may only not be deep enough yet"
    board.mine(3)
    again = board.keygens[0].process_start()
    assert [type(command) for command in again] == [PostComplaint]
    assert board.keygens[0].process_start() == []
    board.post(0, again)
    board.mine(10)
    assert [r.group.qualified for r in board.get_ready()] == [(0, 1, 2)] * 4


def test_s06_members_that_read_at_other_depths_find_out() -> None:
    """Their windows differ, so they would decide differently."""
    deep = KeyGeneration(make_committee()[0][0], make_committee()[1], bytes(32), None, 6)
    (deal,) = Board().keygens[1].process_start()
    assert isinstance(deal, PostDealing)
    account = make_committee()[0][1].address
    (fault,) = deep.process_dealing(DealingPosted(account, deal.dealing, 5))
    assert isinstance(fault, Fault) and "another key generation" in fault.message
