"""The synchronous connection says when it is not open."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from splitup.client.connection import SplitUp
from splitup.client.market.payments import Quote
from splitup.client.network import Network
from splitup.client.sync import SyncSplitUp
from splitup.config import NetworkConfig
from splitup.core.errors import ChainUnavailable, InvalidInput
from splitup.crypto.keys import generate_identity


class FakeNetwork:
    """Stands for an open connection; notes what it is asked."""

    def __init__(self, fails: bool = False) -> None:
        self.asked: list[Any] = []
        self._fails = fails

    async def __aenter__(self) -> FakeNetwork:
        if self._fails:
            raise ChainUnavailable("the chain does not answer")
        self.asked.append("open")
        return self

    async def close(self) -> None:
        self.asked.append("close")

    async def quote(self, model: str, *, steps: int = 1) -> Quote:
        self.asked.append((model, steps))
        return Quote(800, 7 * steps, 4 * steps)

    async def quote_generation(self, model: str, prompt: str, *, max_tokens: int) -> Quote:
        return Quote(800, max_tokens, max_tokens)


def connect(fake: FakeNetwork) -> SyncSplitUp:
    return SyncSplitUp(cast(Network, fake))


def make_network() -> SplitUp:
    url = "http://127.0.0.1:1"
    config = NetworkConfig(rpc_url=url, deployment=Path("absent"), gateway_urls=(url,))
    return SplitUp(config, generate_identity())


@pytest.mark.parametrize(
    "use",
    [
        lambda net: net.execute("m", {}),
        lambda net: net.generate("m", "a"),
        lambda net: net.quote("m"),
        lambda net: net.quote_generation("m", "a", max_tokens=2),
        lambda net: net.deposit(1),
        lambda net: net.freeze(1),
        lambda net: net.receipt("0x"),
    ],
)
def test_a_connection_used_without_with_says_so(use: Any) -> None:
    net = SyncSplitUp(make_network())
    with pytest.raises(InvalidInput, match=r"not open; use: with SplitUp\.connect_sync\(\) as net"):
        use(net)
    net.close()  # closing what never was open does nothing


def test_it_opens_and_closes_with_and_without_with() -> None:
    fake = FakeNetwork()
    with connect(fake) as net:
        assert net.quote("m", steps=3).locked_micro_usdc == 21
        assert net.quote_generation("m", "a", max_tokens=5).average_micro_usdc == 5
    with pytest.raises(InvalidInput, match="not open"):
        net.quote("m")
    assert fake.asked == ["open", ("m", 3), "close"]
    fake = FakeNetwork()
    net = connect(fake).open()
    with pytest.raises(InvalidInput, match="open already"):
        net.open()
    net.close()
    net.close()
    assert fake.asked == ["open", "close"]


def test_a_connection_that_fails_to_open_leaves_no_thread() -> None:
    net = connect(FakeNetwork(fails=True))
    with pytest.raises(ChainUnavailable):
        net.open()
    assert net._thread is None and net._loop is None


async def test_an_asynchronous_connection_used_without_async_with_says_so() -> None:
    net = make_network()
    for use in (net.quote("m"), net.deposit(1), net.check_plan("0x" + "ab" * 32)):
        with pytest.raises(InvalidInput, match="use: async with"):
            await use
    await net.close()
