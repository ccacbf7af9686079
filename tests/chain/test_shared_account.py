"""Commands that use one account at the same time, each over a connection of its own."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from splitup.chain.abi import RevertReason
from splitup.chain.client import Chain
from splitup.chain.committee_reader import Committees
from splitup.chain.rejections import explain_revert
from splitup.client.market import account as account_module
from splitup.client.market.account import MarketAccount, Order
from splitup.client.market.payments import explain_race
from splitup.core.errors import ChainRejected, ExecutionFailed, InvalidInput, Unavailable
from splitup.crypto.keys import Identity
from splitup.devnet.anvil import derive_key
from splitup.net.http import SignedClient
from tests.chain.conftest import MNEMONIC, MODEL, Network

COMMANDS = 4
PRICE = 6_000_000  # of 10 USDC in the market and 40 in the wallet: each command needs a deposit


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the committee have every plan at once."""

    async def fetch(*_: Any, **__: Any) -> str:
        return "plan"

    monkeypatch.setattr(account_module, "fetch_certificate", fetch)


async def test_commands_at_once_on_one_account_never_fail_each_other(
    network: Network, plans: None
) -> None:
    identity = Identity.from_private_key(derive_key(MNEMONIC, 8))
    order = Order(MODEL, ("0x" + "01" * 32,), 1, PRICE, 60.0, 800, None)
    async with contextlib.AsyncExitStack() as stack:
        http = SignedClient(identity)
        stack.push_async_callback(http.close)
        accounts = []
        for _ in range(COMMANDS):
            chain = await stack.enter_async_context(
                await Chain.connect(
                    network.url, network.deployment, private_key=identity.private_key
                )
            )
            accounts.append(MarketAccount(chain, identity, http, Committees(chain)))
        answers = await asyncio.gather(
            *(account.request(order) for account in accounts),
            *(account.request(order) for account in accounts[:1]),  # two tasks of one command
            accounts[1].deposit(1_000_000),
        )
    assert [answer[0] for answer in answers[:-1]] == ["plan"] * (COMMANDS + 1)
    assert await network.balance(identity.address) <= 10_000_000 + 1_000_000
    events = await network.client.fetch_events("market")
    requests = [event for event in events if event.name == "RequestNodeSelections"]
    assert len(requests) == COMMANDS + 1


async def test_withdrawing_fetches_back_what_a_killed_command_left_locked(
    network: Network, plans: None
) -> None:
    identity = Identity.from_private_key(derive_key(MNEMONIC, 8))
    order = Order(MODEL, ("0x" + "01" * 32,), 1, PRICE, 60.0, 800, None)
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(SignedClient(identity))
        chain = await stack.enter_async_context(
            await Chain.connect(network.url, network.deployment, private_key=identity.private_key)
        )
        killed = MarketAccount(chain, identity, http, Committees(chain))
        await killed.request(order)
        later = MarketAccount(chain, identity, http, Committees(chain))
        deposit = await network.balance(identity.address)
        assert await later.withdraw(1) == 1  # the execution may still be planned and settled
        await network.pass_time(3_600)
        assert await later.withdraw(None) == deposit - 1 + PRICE
        with pytest.raises(InvalidInput, match="the deposit is 0 USDC"):
            await later.withdraw(None)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ERC20InsufficientAllowance", {"spender": "m", "allowance": 0, "needed": 5}),
        ("BalanceTooSmall", {"account": "a", "balance": 1, "required": 2}),
    ],
)
def test_an_account_that_another_program_uses_is_said_to_be_used(
    name: str, arguments: dict[str, Any]
) -> None:
    refused = explain_revert("market.deposit", RevertReason(name, arguments))
    explained = explain_race(refused)
    assert isinstance(explained, Unavailable)
    assert str(explained) == "another command is using this account; try again"
    other = ChainRejected("paused", error_name="RequestsPaused")
    assert explain_race(other) is other


@pytest.mark.parametrize("is_snapshot_there", [False, True])
async def test_without_a_node_for_the_model_the_failure_says_so(
    network: Network, monkeypatch: pytest.MonkeyPatch, is_snapshot_there: bool
) -> None:
    async def fetch(*_: Any, **__: Any) -> str:
        raise Unavailable("none of the 4 committee members had a plan")

    told: list[ExecutionFailed] = []

    async def give_back(*_: Any, **__: Any) -> int:
        assert len(told) == 1  # before the refund, which may be minutes away
        return PRICE

    async def is_served(*_: Any) -> bool:
        return True

    monkeypatch.setattr(account_module, "fetch_certificate", fetch)
    monkeypatch.setattr(account_module, "refund", give_back)
    if is_snapshot_there:
        monkeypatch.setattr(MarketAccount, "_is_served", is_served)
    identity = Identity.from_private_key(derive_key(MNEMONIC, 8))
    order = Order(MODEL, ("0x" + "01" * 32,), 1, PRICE, 60.0, 800, None, told.append)
    async with SignedClient(identity) as http:
        account = MarketAccount(network.client, identity, http, Committees(network.client))
        with pytest.raises(ExecutionFailed) as caught:
            await account.request(order)
    cause = "none of the 4" if is_snapshot_there else "no reachable node serves this model"
    assert cause in str(caught.value)
    assert "6 USDC came back to your balance in the market" in str(caught.value)
    assert caught.value.refunded_micro_usdc == PRICE


@pytest.mark.parametrize("share", [1.0, 1.01])
async def test_the_longest_deadline_is_taken_and_a_longer_one_refused_before_a_deposit(
    network: Network, plans: None, share: float
) -> None:
    identity = Identity.from_private_key(derive_key(MNEMONIC, 8))
    longest_s = (await network.client.call("market", "parameters"))["maxDeadlineS"]
    order = Order(MODEL, ("0x" + "01" * 32,), 1, PRICE, longest_s * share, 800, None)
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(SignedClient(identity))
        chain = await stack.enter_async_context(
            await Chain.connect(network.url, network.deployment, private_key=identity.private_key)
        )
        chain.clock.observe(10**6, (await chain.fetch_head()).timestamp + 12)  # a slow chain's
        account = MarketAccount(chain, identity, http, Committees(chain))
        before = await network.balance(identity.address)
        if share == 1.0:
            assert (await account.request(order))[0] == "plan"
            return
        with pytest.raises(InvalidInput, match=rf"may last 5 to {longest_s} s; give a number"):
            await account.request(order)
        assert await network.balance(identity.address) == before
