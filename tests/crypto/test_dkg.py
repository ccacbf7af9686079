from __future__ import annotations

import dataclasses
import json
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitup.core.codec import encode_canonical
from splitup.core.errors import InvalidInput, PeerFault
from splitup.crypto import bls, dkg
from splitup.crypto.keys import Identity

IDENTITIES = [Identity.from_private_key(bytes([i + 1]) * 32) for i in range(10)]
CEREMONY_ID = "0x" + "ab" * 32


def make_ceremony(members: int) -> dkg.Ceremony:
    keys = tuple(identity.signing_key_hex for identity in IDENTITIES[:members])
    return dkg.Ceremony(CEREMONY_ID, keys)


def deal(ceremony: dkg.Ceremony, dealer: int) -> dkg.Dealing:
    return dkg.make_dealing(ceremony, dealer, bytes([dealer + 100]) * 32)


def finish(
    ceremony: dkg.Ceremony, dealings: dict[int, dkg.Dealing]
) -> tuple[dkg.GroupKey, list[bytes]]:
    group = dkg.compute_group(ceremony, dealings)
    secrets = []
    for member in range(len(ceremony.members)):
        shares = {
            dealer: dkg.open_and_verify_share(ceremony, dealing, member, IDENTITIES[member])
            for dealer, dealing in dealings.items()
        }
        secrets.append(dkg.compute_secret_share(ceremony, group, member, shares))
    return group, secrets


CEREMONY = make_ceremony(4)
DEALING = deal(CEREMONY, 1)


def replace_share(dealing: dkg.Dealing, member: int, sealed: str) -> dkg.Dealing:
    shares = list(dealing.sealed)
    shares[member] = sealed
    return dataclasses.replace(dealing, sealed=tuple(shares))


@pytest.mark.parametrize("members", [4, 7])
def test_every_quorum_signs_with_identical_bytes(members: int) -> None:
    ceremony = make_ceremony(members)
    group, secrets = finish(ceremony, {i: deal(ceremony, i) for i in range(members)})
    assert group.threshold == ceremony.threshold == {4: 3, 7: 5}[members]
    partials = {i: bls.sign_partial(s, b"plan", b"alpha") for i, s in enumerate(secrets)}
    for member, partial in partials.items():
        bls.verify_signature(group.member_keys[member], b"plan", b"alpha", partial)
    signatures = {
        bls.combine({i: partials[i] for i in chosen}, group.threshold)
        for chosen in combinations(range(members), group.threshold)
    }
    assert len(signatures) == 1
    bls.verify_signature(group.public_key, b"plan", b"alpha", signatures.pop())


def test_a_member_that_dealt_nothing_still_gets_a_share() -> None:
    group, secrets = finish(CEREMONY, {i: deal(CEREMONY, i) for i in (0, 1, 3)})
    assert group.qualified == (0, 1, 3) and len(set(secrets)) == 4
    partials = {i: bls.sign_partial(secrets[i], b"d", b"m") for i in (1, 2, 3)}
    bls.verify_signature(group.public_key, b"d", b"m", bls.combine(partials, 3))


def test_too_few_dealers_are_refused() -> None:
    with pytest.raises(InvalidInput, match="3 qualified dealers"):
        dkg.compute_group(CEREMONY, {i: deal(CEREMONY, i) for i in (0, 1)})


def test_a_dealing_is_deterministic_and_bound_to_its_ceremony() -> None:
    assert deal(CEREMONY, 1) == DEALING != deal(CEREMONY, 2)
    other = dkg.Ceremony("0x" + "cd" * 32, CEREMONY.members)
    assert deal(other, 1).commitments != DEALING.commitments
    swapped = dkg.Ceremony(CEREMONY_ID, (*CEREMONY.members[:3], IDENTITIES[4].signing_key_hex))
    assert deal(swapped, 1).commitments != DEALING.commitments
    # a share sealed in one ceremony does not open in another
    stolen = dataclasses.replace(DEALING, ceremony_id=other.ceremony_id)
    with pytest.raises(PeerFault):
        dkg.open_and_verify_share(other, stolen, 0, IDENTITIES[0])


def test_a_share_opens_for_its_member_alone() -> None:
    shares = {dkg.open_and_verify_share(CEREMONY, DEALING, i, IDENTITIES[i]) for i in range(4)}
    assert len(shares) == 4
    moved = replace_share(DEALING, 0, DEALING.sealed[1])
    with pytest.raises(PeerFault):
        dkg.open_and_verify_share(CEREMONY, moved, 0, IDENTITIES[0])
    with pytest.raises(InvalidInput, match="another signing key"):
        dkg.open_and_verify_share(CEREMONY, DEALING, 0, IDENTITIES[1])


def bad_dealings() -> list[dkg.Dealing]:
    """What a cheating dealer can send to member 2: noise, or a well sealed but wrong share."""
    noise = replace_share(DEALING, 2, "0x" + "5a" * 48)
    # commitments of another polynomial: every share opens, none fits
    wrong = dataclasses.replace(DEALING, commitments=deal(CEREMONY, 0).commitments)
    return [noise, wrong]


@pytest.mark.parametrize("dealing", bad_dealings())
def test_a_bad_share_is_found_and_proved_to_all(dealing: dkg.Dealing) -> None:
    with pytest.raises(PeerFault):
        dkg.open_and_verify_share(CEREMONY, dealing, 2, IDENTITIES[2])
    complaint = dkg.make_complaint(CEREMONY, dealing, 2, IDENTITIES[2])
    posted = dkg.Complaint.from_bytes(complaint.to_bytes(), CEREMONY)
    assert posted == complaint
    assert dkg.is_complaint_valid(CEREMONY, dealing, posted)


def test_a_complaint_against_an_honest_dealer_fails() -> None:
    complaint = dkg.make_complaint(CEREMONY, DEALING, 2, IDENTITIES[2])
    assert not dkg.is_complaint_valid(CEREMONY, DEALING, complaint)


def test_an_invented_opening_does_not_exclude_an_honest_dealer() -> None:
    """The attack on complaints: claim another K, so that the honest share seems not to open."""
    honest = dkg.make_complaint(CEREMONY, DEALING, 2, IDENTITIES[2])
    by_other = dkg.make_complaint(CEREMONY, DEALING, 3, IDENTITIES[3])
    invented = [
        dataclasses.replace(honest, opening=by_other.opening),
        dataclasses.replace(
            honest,
            opening=dataclasses.replace(
                honest.opening, point=bytes.fromhex(IDENTITIES[5].signing_key_hex[2:])
            ),
        ),
        dataclasses.replace(
            honest, opening=dataclasses.replace(honest.opening, challenge=bytes(32))
        ),
        dataclasses.replace(
            honest, opening=dataclasses.replace(honest.opening, response=bytes(32))
        ),
        dataclasses.replace(
            honest, opening=dataclasses.replace(honest.opening, point=b"\x01" + bytes(31))
        ),
        dataclasses.replace(honest, dealer=0),
    ]
    for complaint in invented:
        assert not dkg.is_complaint_valid(CEREMONY, DEALING, complaint)


def test_a_complaint_does_not_travel_to_another_dealing() -> None:
    bad = bad_dealings()[0]
    complaint = dkg.make_complaint(CEREMONY, bad, 2, IDENTITIES[2])
    honest = deal(CEREMONY, 0)
    assert not dkg.is_complaint_valid(CEREMONY, honest, dataclasses.replace(complaint, dealer=0))


def test_wrong_shares_do_not_make_a_secret() -> None:
    dealings = {i: deal(CEREMONY, i) for i in range(4)}
    group = dkg.compute_group(CEREMONY, dealings)
    shares = {
        i: dkg.open_and_verify_share(CEREMONY, d, 0, IDENTITIES[0]) for i, d in dealings.items()
    }
    with pytest.raises(InvalidInput, match="qualified"):
        dkg.compute_secret_share(CEREMONY, group, 0, {i: shares[i] for i in range(3)})
    with pytest.raises(InvalidInput, match="add up"):
        dkg.compute_secret_share(CEREMONY, group, 1, shares)


def test_a_dealing_survives_its_bytes() -> None:
    assert dkg.Dealing.from_bytes(DEALING.to_bytes(), CEREMONY) == DEALING


IDENTITY_G2 = "0xc0" + "00" * 95


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ceremony_id", "0x" + "00" * 32),
        ("dealer", 4),
        ("dealer", -1),
        ("dealer", True),
        ("dealer", "1"),
        ("commitments", []),
        ("commitments", [*DEALING.commitments, DEALING.commitments[0]]),
        ("commitments", [IDENTITY_G2, *DEALING.commitments[1:]]),
        ("commitments", [1, 2, 3]),
        ("commitments", {"0": 1}),
        ("ephemeral", "0x" + "00" * 32),
        ("ephemeral", None),
        ("sealed", list(DEALING.sealed[:3])),
        ("sealed", [*DEALING.sealed[:3], "0x00"]),
        ("sealed", [*DEALING.sealed[:3], DEALING.sealed[3].upper()]),
        ("extra", 1),
    ],
)
def test_hostile_dealings_are_a_peers_fault(name: str, value: Any) -> None:
    changed = json.loads(DEALING.to_bytes()) | {name: value}
    with pytest.raises(PeerFault):
        dkg.Dealing.from_bytes(encode_canonical(changed), CEREMONY)


@given(st.binary(max_size=300))
@settings(max_examples=60)
def test_garbage_is_a_peers_fault(data: bytes) -> None:
    for parse in (dkg.Dealing.from_bytes, dkg.Complaint.from_bytes):
        with pytest.raises(PeerFault):
            parse(data, CEREMONY)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_every_byte_of_a_dealing_is_checked_or_found(data: st.DataObject) -> None:
    whole = bytearray(DEALING.to_bytes())
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    try:
        changed = dkg.Dealing.from_bytes(bytes(whole), CEREMONY)
    except PeerFault:
        return
    faults = 0
    for member in range(4):
        try:
            dkg.open_and_verify_share(CEREMONY, changed, member, IDENTITIES[member])
        except PeerFault:
            complaint = dkg.make_complaint(CEREMONY, changed, member, IDENTITIES[member])
            assert dkg.is_complaint_valid(CEREMONY, changed, complaint)
            faults += 1
    assert faults >= 1


@pytest.mark.parametrize("members", [3, 0])
def test_a_small_committee_is_refused(members: int) -> None:
    with pytest.raises(InvalidInput):
        make_ceremony(members)


def test_a_member_listed_twice_is_refused() -> None:
    keys = CEREMONY.members
    with pytest.raises(InvalidInput, match="twice"):
        dkg.Ceremony(CEREMONY_ID, (*keys[:3], keys[0]))


def reshare(
    group: dkg.GroupKey, secrets: list[bytes], members: list[int], dealers: list[int]
) -> tuple[dkg.Ceremony, dkg.GroupKey, list[bytes]]:
    """Hand a key over to the identities ``members``; only ``dealers`` of the old ones deal."""
    keys = tuple(IDENTITIES[member].signing_key_hex for member in members)
    ceremony = dkg.Ceremony("0x" + "cd" * 32, keys, group)
    dealings = {
        dealer: dkg.make_resharing(ceremony, dealer, secrets[dealer], bytes([dealer + 50]) * 32)
        for dealer in dealers
    }
    dealings = {d: dkg.Dealing.from_bytes(x.to_bytes(), ceremony) for d, x in dealings.items()}
    new = dkg.compute_group(ceremony, dealings)
    shares = [
        dkg.compute_secret_share(
            ceremony,
            new,
            place,
            {
                dealer: dkg.open_and_verify_share(
                    ceremony, dealings[dealer], place, IDENTITIES[member]
                )
                for dealer in new.qualified
            },
        )
        for place, member in enumerate(members)
    ]
    return ceremony, new, shares


@pytest.mark.parametrize(
    ("size", "members", "dealers"),
    [
        (4, [0, 1, 2, 4], [0, 1, 3]),  # one replaced, and it is down already
        (4, [4, 5, 6, 7], [0, 1, 2, 3]),  # everybody replaced
        (4, list(range(7)), [1, 2, 3]),  # three join
        (7, list(range(10)), [0, 2, 3, 5, 6]),
        (7, [0, 1, 2, 3], list(range(7))),  # three leave
    ],
)
def test_a_handover_keeps_the_group_key(size: int, members: list[int], dealers: list[int]) -> None:
    old_ceremony = make_ceremony(size)
    old, secrets = finish(old_ceremony, {i: deal(old_ceremony, i) for i in range(size)})
    _, new, shares = reshare(old, secrets, members, dealers)
    assert new.public_key == old.public_key
    assert new.threshold == bls.compute_threshold(len(members))
    t_old, t_new = old.threshold, new.threshold
    before = bls.combine({i: bls.sign_partial(secrets[i], b"d", b"m") for i in range(t_old)}, t_old)
    after = {i: bls.sign_partial(share, b"d", b"m") for i, share in enumerate(shares)}
    assert bls.combine(after, t_new) == before, "the randomness goes on as if nothing had happened"
    mixed = {0: bls.sign_partial(secrets[0], b"d", b"m"), **{i: after[i] for i in range(1, t_new)}}
    assert bls.combine(mixed, t_new) != before, "an old share is worth nothing beside new ones"


def test_a_handover_of_another_share_is_refused() -> None:
    old, secrets = finish(CEREMONY, {i: deal(CEREMONY, i) for i in range(4)})
    ceremony = dkg.Ceremony("0x" + "cd" * 32, CEREMONY.members, old)
    with pytest.raises(InvalidInput, match="not the share"):
        dkg.make_resharing(ceremony, 0, secrets[1], bytes(32))
    dealing = dkg.make_resharing(ceremony, 0, secrets[0], bytes(32))
    posing = dataclasses.replace(dealing, dealer=1)
    with pytest.raises(PeerFault, match="does not deal its own share"):
        dkg.Dealing.from_bytes(posing.to_bytes(), ceremony)
    fresh = dkg.make_dealing(dkg.Ceremony("0x" + "cd" * 32, CEREMONY.members), 0, bytes(32))
    with pytest.raises(PeerFault, match="does not deal its own share"):
        dkg.Dealing.from_bytes(fresh.to_bytes(), ceremony)
    with pytest.raises(InvalidInput, match="3 qualified dealers"):
        dkg.compute_group(ceremony, {0: dealing})
