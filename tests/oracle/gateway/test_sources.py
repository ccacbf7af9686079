"""What a gateway asks the chain for strangers."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from splitup_oracle.gateway.sources import ChainView

from splitup.core import tuning
from tests.builders import address


class FakeChain:
    """Counts the calls, and how many wait for an answer at once."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.waiting = self.most = 0

    async def call(self, _contract: str, function: str, *_args: Any) -> Any:
        self.asked[function] += 1
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await asyncio.sleep(0)
        self.waiting -= 1
        return {"nodeCount": 1000, "nodesPage": []}.get(function, 0)


def make_view() -> tuple[ChainView, FakeChain]:
    chain: Any = FakeChain()
    return ChainView(chain, SimpleNamespace(market="0x")), chain  # type: ignore[arg-type]


@pytest.mark.parametrize("ask", ["could_stake", "has_funds"])
async def test_s84_accounts_of_strangers_are_looked_up_a_few_at_a_time(ask: str) -> None:
    """Who makes keys and accounts, which cost nothing, had the gateway's endpoint refuse others."""
    view, chain = make_view()
    more = () if ask == "could_stake" else (1,)
    await asyncio.gather(*(getattr(view, ask)(address(n), *more) for n in range(1, 200)))
    assert chain.most <= tuning.STRANGER_LOOKUPS


async def test_s84_keys_of_nodes_are_read_once_however_many_strangers_ask() -> None:
    view, chain = make_view()
    assert not any(await asyncio.gather(*(view.is_node_key(f"0x{n}") for n in range(200))))
    assert chain.asked == {"nodeCount": 1, "nodesPage": 10}
