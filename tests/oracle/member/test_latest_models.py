"""Which models' manifests a member fetches before an execution asks for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from splitup_oracle.member.chain_events import make_event
from splitup_oracle.member.service import Retries, list_latest

from splitup.core import tuning
from splitup.protocol.committee.events import ExecutionEnded


def test_s94_of_too_many_models_the_latest_are_fetched_and_no_retired_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "MAX_MANIFESTS", 4)
    places = [("0x5", {}), *((f"0x{9 - n}", {"block": 7, "log_index": n}) for n in range(4))]
    assert list_latest(places, {"0x5"}) == ["0x9", "0x8", "0x7", "0x6"]
    assert list_latest(places, {"0x7"}) == ["0x5", "0x9", "0x8", "0x6"]
    assert list_latest(places, ()) == ["0x7", "0x6"], "the others leave room for those in use"


def test_s108_a_manifest_that_nobody_stores_is_asked_for_less_and_less() -> None:
    retries = Retries()
    asked = {now: retries.list_due(["0xa", "0xb"][: 1 + (now > 9)], now) for now in range(3_600)}
    assert [now for now, due in asked.items() if "0xa" in due][:5] == [0, 5, 15, 35, 75]
    assert [now for now, due in asked.items() if "0xb" in due][:2] == [10, 15]
    assert sum(map(len, asked.values())) < 40
    assert max(now for now, due in asked.items() if due) > 3_600 - 330, "never given up"
    assert not retries.list_due([], 3_600) and retries.list_due(["0xa"], 3_601) == ["0xa"]


def test_s107_the_fee_is_what_the_chain_says() -> None:
    args = {"executionId": "0x1", "evidenceRoot": "0x2", "fee": 7, "paid": 700}
    settled: Any = SimpleNamespace(name="Settled", args=args)
    nothing: Any = None
    assert make_event(settled, nothing, 0) == ExecutionEnded("0x1", "0x2", 7)
