"""Which models' manifests a member fetches before an execution asks for them."""

from __future__ import annotations

import pytest
from splitup_oracle.member.service import list_latest

from splitup.core import tuning


def test_s94_of_too_many_models_the_latest_are_fetched_and_no_retired_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "MAX_MANIFESTS", 4)
    places = [("0x5", {}), *((f"0x{9 - n}", {"block": 7, "log_index": n}) for n in range(4))]
    assert list_latest(places, {"0x5"}) == ["0x9", "0x8", "0x7", "0x6"]
    assert list_latest(places, {"0x7"}) == ["0x5", "0x9", "0x8", "0x6"]
    assert list_latest(places, ()) == ["0x7", "0x6"], "the others leave room for those in use"
