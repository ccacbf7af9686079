"""Which nodes are shown as live."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from splitup_gateway.explorer import views
from splitup_gateway.explorer.descriptions import count_holders
from splitup_gateway.explorer.views import Explorer

from splitup.core.errors import Unavailable
from splitup.messages.snapshots import Snapshot


async def test_nodes_of_a_network_that_does_not_answer_are_not_shown_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, answers = SimpleNamespace(now=1_000.0), [SimpleNamespace(entries=[])]

    async def fetch_snapshot() -> Any:
        if not answers:
            raise Unavailable("the chain does not answer")
        return answers[0]

    monkeypatch.setattr(views, "time", SimpleNamespace(monotonic=lambda: clock.now))
    net: Any = SimpleNamespace(fetch_snapshot=fetch_snapshot)
    explorer = Explorer(net, SimpleNamespace())  # type: ignore[arg-type]
    assert await explorer._fetch_snapshot_or_none() is not None
    answers.clear()
    clock.now += views.SNAPSHOT_S
    assert await explorer._fetch_snapshot_or_none() is not None, "one answer was missed"
    clock.now += views.SHOWN_S
    with pytest.raises(Unavailable, match="which nodes are live is not known"):
        await explorer.list_nodes()


def test_s131_holders_are_counted_once_for_each_list_of_nodes() -> None:
    nodes = [SimpleNamespace(resident=("a", "b")), SimpleNamespace(resident=("b",))]
    snapshot: Any = Snapshot.model_construct(entries=tuple(nodes))
    first = count_holders(snapshot)
    assert first == {"a": 1, "b": 2} and count_holders(snapshot) is first
    assert count_holders(None) == {}
