"""The ledger, the library, the collector of shares, the order of members."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.core import limits
from splitup.crypto import bls
from splitup.protocol.committee.certificates import RANDOMNESS_DOMAIN
from splitup.protocol.committee.context import Beacon, Ledger, Library, compute_member_order
from splitup.protocol.committee.events import FetchManifest, FetchSnapshot, Forget, Persist
from tests.builders import address, make_chain_manifest, make_snapshot
from tests.protocol.committees import make_keys

ALPHA = b"what is signed"


def sign(place: int, alpha: bytes = ALPHA) -> str:
    return bls.sign_partial(make_keys()[1][place], RANDOMNESS_DOMAIN, alpha)


def test_a_slot_is_signed_once_and_the_same_again() -> None:
    ledger = Ledger({"old": "a"})
    assert ledger.claim("old", "a") == []
    assert ledger.claim("old", "b") is None
    assert ledger.claim("new", "x") == [Persist("signed", "new", {"digest": "x"})]
    assert ledger.claim("new", "x") == []
    assert ledger.claim("new", "y") is None


def test_forgotten_slots_leave_the_journal_too() -> None:
    ledger = Ledger({"plan/1/": "a", "plan/12/": "b"})
    assert ledger.forget("plan/1/") == [Forget("signed", "plan/1/")]
    assert ledger.claim("plan/12/", "c") is None


def test_the_library_keeps_the_latest_snapshots() -> None:
    library = Library()
    first = make_snapshot(1, 1)
    commands = library.add_snapshot(first)
    assert [type(command) for command in commands] == [Persist]
    assert library.add_snapshot(first) == []
    for sequence in range(2, limits.MAX_SNAPSHOTS + 2):
        commands = library.add_snapshot(first.model_copy(update={"sequence": sequence}))
    assert commands[-1] == Forget("snapshot", first.root())
    assert library.find_snapshot(first.root()) is None


def test_the_library_asks_for_what_is_missing_once_a_second() -> None:
    library, manifest = Library(), make_chain_manifest(1)
    wanted = [FetchManifest(manifest.model_id), FetchSnapshot("0x11")]
    assert library.ask(manifest.model_id, "0x11", 5.0) == wanted
    assert library.ask(manifest.model_id, "0x11", 5.9) == []
    library.add_manifest(manifest)
    assert library.ask(manifest.model_id, "0x11", 6.0) == wanted[1:]


@pytest.mark.parametrize("signers", [(0, 1, 2), (1, 2, 3), (3, 0, 2), (0, 1, 2, 3)])
def test_any_quorum_of_shares_gives_the_same_seed(signers: tuple[int, ...]) -> None:
    beacon = Beacon(ALPHA)
    for place in signers:
        beacon.add(place, sign(place))
    assert beacon.combine(make_keys()[0]) == []
    expected = Beacon(ALPHA, {place: sign(place) for place in (0, 1, 3)})
    expected.combine(make_keys()[0])
    assert beacon.seed == expected.seed != ""
    bls.verify_signature(make_keys()[0].public_key, RANDOMNESS_DOMAIN, ALPHA, beacon.signature)


def test_too_few_shares_give_nothing() -> None:
    beacon = Beacon(ALPHA, {0: sign(0), 1: sign(1)})
    assert beacon.combine(make_keys()[0]) == []
    assert beacon.seed == ""


@pytest.mark.parametrize("false", [sign(1, b"other"), "0x" + "00" * 48, "0x" + "ff" * 48])
def test_a_false_share_is_named_and_stays_out(false: str) -> None:
    beacon = Beacon(ALPHA, {0: sign(0), 1: false, 2: sign(2)})
    assert beacon.combine(make_keys()[0]) == [1]
    assert beacon.seed == ""
    beacon.add(1, sign(1))
    assert 1 not in beacon.partials
    beacon.add(3, sign(3))
    assert beacon.combine(make_keys()[0]) == []
    assert beacon.seed != ""


@given(st.integers(0, 2**256 - 1))
def test_the_order_of_members_is_a_permutation_by_seed(seed: int) -> None:
    accounts = [address(n) for n in range(7)]
    order = compute_member_order(f"0x{seed:064x}", accounts)
    assert sorted(order) == accounts
    assert compute_member_order(f"0x{seed:064x}", accounts[::-1]) == order
