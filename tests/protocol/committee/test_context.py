"""The ledger, the library, the collector of shares, the order of members."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.core import tuning
from splitup.crypto import bls
from splitup.protocol.committee.certificates import RANDOMNESS_DOMAIN
from splitup.protocol.committee.commands import FetchManifest, FetchSnapshot, Forget, Persist
from splitup.protocol.committee.context import (
    ContentStore,
    FeeTotals,
    SigningGuard,
    ThresholdSignatureCollector,
    compute_member_order,
)
from tests.builders import address, make_chain_manifest, make_snapshot
from tests.protocol.committees import make_keys

ALPHA = b"what is signed"


def sign(place: int, alpha: bytes = ALPHA) -> str:
    return bls.sign_partial(make_keys()[1][place], RANDOMNESS_DOMAIN, alpha)


def test_a_slot_is_signed_once_and_the_same_again() -> None:
    signing_guard = SigningGuard({"old": {"digest": "a", "until_s": 5}})
    assert signing_guard.claim("old", "a") == []
    assert signing_guard.claim("old", "b") is None
    assert signing_guard.claim("new", "x") == [
        Persist("signed", "new", {"digest": "x", "until_s": 0})
    ]
    assert signing_guard.claim("new", "x") == []
    assert signing_guard.claim("new", "y") is None


def test_forgotten_slots_leave_the_journal_too() -> None:
    signing_guard = SigningGuard()
    for slot in ("snapshot/1/1/0", "snapshot/1/12/0"):
        signing_guard.claim(slot, "a")
    assert signing_guard.forget("snapshot/1/1/0") == [Forget("signed", "snapshot/1/1/0")]
    assert signing_guard.claim("snapshot/1/12/0", "b") is None


def test_s03_a_slot_is_kept_until_the_chains_time_has_closed_it_for_long() -> None:
    signing_guard = SigningGuard()
    signing_guard.claim("plan/1", "a", 1_000)
    signing_guard.claim("plan/2", "b", 9_000)
    signing_guard.claim("snapshot/1/1/0", "c")
    end_s = 1_000 + tuning.SIGNED_MARGIN_S
    assert signing_guard.forget_closed(end_s) == []
    assert signing_guard.forget_closed(end_s + 1) == [Forget("signed", "plan/1")]
    assert len(signing_guard) == 2
    (kept,) = signing_guard.shorten("plan/2", 1_000)
    assert kept == Persist("signed", "plan/2", {"digest": "b", "until_s": 1_000})
    assert signing_guard.shorten("plan/2", 8_000) == [], "never longer"
    assert signing_guard.claim("plan/2", "other", 9_000) is None
    assert signing_guard.forget_closed(end_s + 1) == [Forget("signed", "plan/2")]
    assert signing_guard.slots() == ["snapshot/1/1/0"]


def test_the_content_store_keeps_the_latest_snapshots() -> None:
    content_store = ContentStore()
    first = make_snapshot(1, 1)
    commands = content_store.add_snapshot(first)
    assert [type(command) for command in commands] == [Persist]
    assert content_store.add_snapshot(first) == []
    for sequence in range(2, tuning.MAX_SNAPSHOTS + 2):
        commands = content_store.add_snapshot(first.model_copy(update={"sequence": sequence}))
    assert commands[-1] == Forget("snapshot", first.root())
    assert content_store.find_snapshot(first.root()) is None


def test_the_content_store_asks_for_what_is_missing_once_a_second() -> None:
    content_store, manifest = ContentStore(), make_chain_manifest(1)
    wanted = [FetchManifest(manifest.model_id), FetchSnapshot("0x11")]
    assert content_store.ask(manifest.model_id, "0x11", 5.0) == wanted
    assert content_store.ask(manifest.model_id, "0x11", 5.9) == []
    content_store.add_manifest(manifest)
    assert content_store.ask(manifest.model_id, "0x11", 6.0) == wanted[1:]


def test_s94_strangers_models_displace_none_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MAX_MANIFESTS", 4)
    content_store = ContentStore()
    used, idle, *strangers = [make_chain_manifest(count) for count in range(1, 8)]
    for manifest in (used, idle):
        content_store.add_manifest(manifest)
    content_store.note_plan(used.model_id)
    for manifest in strangers:
        content_store.add_manifest(manifest)
    assert content_store.manifests() == [used, *strangers[-3:]]
    for manifest in strangers:  # whoever pays for executions, too, has half of the places
        content_store.note_plan(manifest.model_id)
    content_store.add_manifest(idle)
    assert content_store.manifests() == [*strangers[-3:], idle]


def test_s107_a_model_is_in_use_by_what_its_users_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MAX_MANIFESTS", 8)
    content_store = ContentStore()
    content_store.note_fee("0xa", 1_000, 0.0)
    for number in range(20):  # planned by a client that pays a node of its own
        content_store.note_plan(f"0x{number}")
        content_store.note_fee(f"0x{number}", 0, 1.0)
        content_store.note_fee(f"0x{number}", 10, 2.0)
    assert content_store.used == {"0xa"}
    content_store.note_fee("0x1", 500, 3.0)  # a quarter of all fees makes a model used
    assert content_store.used == {"0xa", "0x1"}
    content_store.note_fee("0x2", 2_000, 30 * tuning.FEES_HALVE_S)
    assert content_store.used == {"0x2"}, "what nobody pays for any more is forgotten"


def test_s107_few_fees_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MAX_OPEN_EXECUTIONS", 2)
    totals = FeeTotals()
    for model_id, fee in (("0xa", 9), ("0xb", 8), ("0xc", 7)):
        totals.add(model_id, fee, 0.0)
    assert totals.find_large(9) == {"0xa", "0xb"}


@pytest.mark.parametrize("signers", [(0, 1, 2), (1, 2, 3), (3, 0, 2), (0, 1, 2, 3)])
def test_any_quorum_of_shares_gives_the_same_seed(signers: tuple[int, ...]) -> None:
    collector = ThresholdSignatureCollector(ALPHA)
    for place in signers:
        collector.add(place, sign(place))
    assert collector.combine(make_keys()[0]) == []
    expected = ThresholdSignatureCollector(ALPHA, {place: sign(place) for place in (0, 1, 3)})
    expected.combine(make_keys()[0])
    assert collector.seed == expected.seed != ""
    bls.verify_signature(make_keys()[0].public_key, RANDOMNESS_DOMAIN, ALPHA, collector.signature)


def test_too_few_shares_give_nothing() -> None:
    collector = ThresholdSignatureCollector(ALPHA, {0: sign(0), 1: sign(1)})
    assert collector.combine(make_keys()[0]) == []
    assert collector.seed == ""


@pytest.mark.parametrize("false", [sign(1, b"other"), "0x" + "00" * 48, "0x" + "ff" * 48])
def test_a_false_share_is_named_and_stays_out(false: str) -> None:
    collector = ThresholdSignatureCollector(ALPHA, {0: sign(0), 1: false, 2: sign(2)})
    assert collector.combine(make_keys()[0]) == [1]
    assert collector.seed == ""
    collector.add(1, sign(1))
    assert 1 not in collector.partials
    collector.add(3, sign(3))
    assert collector.combine(make_keys()[0]) == []
    assert collector.seed != ""


@given(st.integers(0, 2**256 - 1))
def test_the_order_of_members_is_a_permutation_by_seed(seed: int) -> None:
    accounts = [address(n) for n in range(7)]
    order = compute_member_order(f"0x{seed:064x}", accounts)
    assert sorted(order) == accounts
    assert compute_member_order(f"0x{seed:064x}", accounts[::-1]) == order
