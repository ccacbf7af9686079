"""What counts once 2f+1 members say it, and from whom."""

from __future__ import annotations

import pytest

from splitup.core import limits
from splitup.core.errors import BadSignature, PeerFault
from splitup.messages.completions import EMPTY_DIGEST
from splitup.messages.verification import Attestation, Held, Ruling, SignedAttestation, Silence
from splitup.protocol.settlement.attestations import (
    Attestations,
    DueNotices,
    check_attestation,
    check_notice,
    sign_attestation,
    sign_notice,
)
from tests.builders import address
from tests.protocol.committees import make_committee, make_identity

MEMBERS, VIEW = make_committee()
VALIDATOR = address(11)
ROOTS = tuple("0x" + digit * 64 for digit in "123")


def make_ruling(task: int = 0, output: str = "2" * 64, error: str = "") -> Ruling:
    return Ruling(task=task, inputs=("1" * 64,), outputs=(output,), state=EMPTY_DIGEST, error=error)


def attest(
    place: int,
    *,
    due: bool = False,
    root: str = "",
    silent: tuple[Silence, ...] = (),
    rulings: tuple[Ruling, ...] = (),
) -> SignedAttestation:
    attestation = Attestation(
        execution_id="0x" + "ee" * 32,
        member=MEMBERS[place].address,
        steps=1,
        due=due,
        held=(Held(task=0, validator=VALIDATOR, root=root),) if root else (),
        silent=silent,
        rulings=rulings,
    )
    return sign_attestation(MEMBERS[place], attestation)


def test_three_of_four_make_it_so_whatever_the_fourth_says() -> None:
    attestations = Attestations(VIEW.quorum)
    silence = Silence(node=VALIDATOR, task=None)
    for place in range(3):
        assert not attestations.is_due()
        assert attestations.find_fixed(0, VALIDATOR) is None
        assert attestations.find_ruling(0) is None
        assert not attestations.is_silent(VALIDATOR, None)
        signed = attest(place, due=True, root=ROOTS[0], silent=(silence,), rulings=(make_ruling(),))
        assert attestations.add(signed) and not attestations.add(signed)
        other = attest(3, root=ROOTS[1 + place % 2], rulings=(make_ruling(0, "9" * 64),))
        assert attestations.add(other) == (place < 2)
    assert attestations.is_due()
    assert attestations.find_fixed(0, VALIDATOR) == ROOTS[0]
    assert attestations.find_ruling(0) == make_ruling()
    assert attestations.is_silent(VALIDATOR, None) and not attestations.is_silent(VALIDATOR, 0)
    assert len(attestations.get_all()) == 5


def test_s14_members_that_could_not_compare_do_not_stop_a_ruling() -> None:
    """A liar that shows its stored outputs to some members only must not escape the ruling."""
    close = make_ruling().model_copy(update={"close": True})
    attestations = Attestations(VIEW.quorum)
    for place, ruling in enumerate((close, make_ruling(), close)):
        assert attestations.find_ruling(0) is None
        attestations.add(attest(place, rulings=(ruling,)))
    assert attestations.find_ruling(0) == make_ruling()
    attestations.add(attest(3, rulings=(close,)))
    assert attestations.find_ruling(0) == close


def test_a_member_counts_once_however_often_it_says_it() -> None:
    attestations = Attestations(VIEW.quorum)
    for root in ROOTS:
        attestations.add(attest(0, due=True, root=root))
        attestations.add(attest(1, due=True, root=root))
    assert not attestations.is_due()
    assert attestations.find_fixed(0, VALIDATOR) is None


def test_a_restarted_member_that_says_less_does_not_make_us_forget() -> None:
    attestations = Attestations(VIEW.quorum)
    full = attest(0, due=True, root=ROOTS[0])
    attestations.add(full)
    attestations.add(attest(0))
    assert attestations.get_all() == [full]


def test_members_that_cannot_recompute_are_counted() -> None:
    attestations = Attestations(VIEW.quorum)
    for place, error in enumerate(("another class", "no memory")):
        attestations.add(attest(place, rulings=(make_ruling(error=error),)))
    assert attestations.count_unable(0) == 2
    assert attestations.find_ruling(0) is None


def test_members_that_try_again_are_waited_for_while_they_may_complete_a_quorum() -> None:
    slow = make_ruling().model_copy(update={"slow": True})
    attestations = Attestations(VIEW.quorum)
    for place, is_delayed in enumerate((False, False, True)):
        attestations.add(attest(place, rulings=(slow,)))
        assert attestations.is_delayed(0) == is_delayed
    assert not attestations.count_unable(0) and attestations.find_ruling(0) is None
    attestations.add(attest(0, rulings=(make_ruling(),)))
    assert attestations.is_delayed(0), "one has ruled"
    attestations.add(attest(1, rulings=(make_ruling(error="too slow"),)))
    assert not attestations.is_delayed(0), "one has given up"
    for place in (2, 3):
        attestations.add(attest(place, rulings=(make_ruling(),)))
    assert attestations.find_ruling(0) == make_ruling() and not attestations.is_delayed(0)


def test_what_one_member_can_make_us_keep_is_bounded() -> None:
    attestations = Attestations(VIEW.quorum)
    for number in range(100):
        attestations.add(attest(0, root=f"0x{number:064x}"))
    assert len(attestations._statements) == limits.MAX_CONFLICTING
    assert len(attestations.get_all()) == limits.MAX_CONFLICTING


def test_s48_what_a_quorum_rests_on_is_kept_and_shown_however_much_its_member_says() -> None:
    """Its word completes two quorums in attestations of which neither contains the other."""
    first = Attestations(VIEW.quorum)
    for place in range(2):
        first.add(attest(place, root=ROOTS[0], rulings=(make_ruling(),)))
    first.add(attest(2, root=ROOTS[0]))
    first.add(attest(2, rulings=(make_ruling(),)))
    for number in range(100):
        first.add(attest(2, root=f"0x{number:064x}", rulings=(make_ruling(1),)))
    second = Attestations(VIEW.quorum)
    for signed in first.get_all():
        second.add(signed)
    for one in (first, second):
        assert one.find_fixed(0, VALIDATOR) == ROOTS[0] and one.find_ruling(0) == make_ruling()
        assert len(one.get_all()) == 2 + limits.MAX_CONFLICTING


def test_s48_what_others_show_counts_however_much_its_member_said_before() -> None:
    attestations = Attestations(VIEW.quorum)
    for number in range(100):
        attestations.add(attest(2, root=f"0x{number:064x}"))
    for place in range(2):
        attestations.add(attest(place, root=ROOTS[0]))
    assert not attestations.add(attest(2, root=ROOTS[0]))
    assert attestations.add(attest(2, root=ROOTS[0]), may_replace=True)
    assert attestations.find_fixed(0, VALIDATOR) == ROOTS[0]
    assert len(attestations.get_all()) == 2 + limits.MAX_CONFLICTING


def test_s48_what_finds_no_place_in_a_proposal_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_CONFLICTING", 1)
    attestations = Attestations(VIEW.quorum)
    for place in range(2):
        attestations.add(attest(place, root=ROOTS[0], rulings=(make_ruling(),)))
    assert attestations.add(attest(2, root=ROOTS[0]))
    assert not attestations.add(attest(2, rulings=(make_ruling(),)), may_replace=True)
    assert attestations.find_fixed(0, VALIDATOR) == ROOTS[0]
    assert attestations.find_ruling(0) is None and len(attestations.get_all()) == 3


def test_s49_an_attestation_that_would_fill_all_proposals_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signed = attest(0, rulings=tuple(make_ruling(task) for task in range(20)))
    size_bytes = len(signed.attestation.canonical_bytes())
    monkeypatch.setattr(limits, "MAX_ATTESTATION_BYTES", size_bytes)
    check_attestation(signed, VIEW)
    monkeypatch.setattr(limits, "MAX_ATTESTATION_BYTES", size_bytes - 1)
    with pytest.raises(PeerFault, match="bytes"):
        check_attestation(signed, VIEW)


def test_a15_only_the_member_itself_and_only_these_words() -> None:
    good = attest(0, due=True)
    check_attestation(good, VIEW)
    for update in (
        {"due": False},
        {"execution_id": "0x" + "dd" * 32},
        {"member": MEMBERS[1].address},
        {"silent": (Silence(node=VALIDATOR, task=1),)},
    ):
        changed = good.attestation.model_copy(update=update)
        with pytest.raises(BadSignature):
            check_attestation(good.model_copy(update={"attestation": changed}), VIEW)
    stranger = make_identity(5)
    foreign = good.attestation.model_copy(update={"member": stranger.address})
    with pytest.raises(PeerFault, match="no committee member"):
        check_attestation(sign_attestation(stranger, foreign), VIEW)


def test_a_node_reveals_by_notices_of_a_quorum_that_its_members_signed() -> None:
    """A member that lies can name any root and any number of steps, and names itself only."""
    notices = DueNotices(VIEW.quorum)
    held = Held(task=0, validator=VALIDATOR, root=ROOTS[0])
    notices.own[0] = held
    for place, root in ((3, ROOTS[1]), (0, ROOTS[0]), (1, ROOTS[0]), (2, ROOTS[0])):
        assert not notices.find_due_steps() and not notices.is_fixed(0)
        attestation = attest(place, due=place < 3, root=root).attestation
        signed = sign_notice(MEMBERS[place], attestation, VALIDATOR, (0, 1))
        check_notice(signed, VIEW)
        other = signed.notice.model_copy(update={"member": MEMBERS[(place + 1) % 4].address})
        with pytest.raises(BadSignature):
            check_notice(signed.model_copy(update={"notice": other}), VIEW)
        notices.add(signed.notice)
        notices.add(signed.notice)
    assert notices.find_due_steps() == 1 and notices.is_fixed(0) and not notices.is_fixed(1)
    attestation = attest(0, root=ROOTS[0]).attestation
    assert sign_notice(MEMBERS[0], attestation, address(12), (0,)).notice.held == ()
    assert sign_notice(MEMBERS[0], attestation, VALIDATOR, ()).notice.held == ()
