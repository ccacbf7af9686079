"""What an owner is told of the node's money: the same wherever it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from splitup_node.owner_facts import describe_money
from splitup_node.settlement.account import Account

from splitup.chain.market import REQUEST_FIELDS
from splitup.crypto.quorum import pack_words
from splitup.messages.base import ZERO_BYTES32

NODE, OTHER = "0x" + "11" * 20, "0x" + "22" * 20


class Market:
    """A chain's market events, and how often they were read."""

    def __init__(self, *events: Any) -> None:
        self.events = list(events)
        self.reads = 0

    async def fetch_events(self, contract: str, *, from_block: int) -> list[Any]:
        assert (contract, from_block) == ("market", 0)
        self.reads += 1
        return self.events


def make_event(name: str, execution: str = ZERO_BYTES32, **args: Any) -> Any:
    return SimpleNamespace(name=name, args={"executionId": execution, **args}, block_number=1)


def settle_one(execution: str, amount: int) -> list[Any]:
    asked: dict[str, Any] = {name: ZERO_BYTES32 for name in REQUEST_FIELDS}
    counts = "steps", "maxPrice", "deadline", "nonce", "snapshotSequence", "verifyBps"
    asked |= {name: 0 for name in REQUEST_FIELDS if name in counts} | {"client": OTHER}
    payouts = pack_words([(NODE, amount), (OTHER, 2 * amount)])
    return [
        make_event("RequestNodeSelections", execution, **asked),
        make_event("PlanAccepted", execution, planRoot=ZERO_BYTES32, seed=ZERO_BYTES32),
        make_event("Settled", execution, payouts=payouts),
    ]


async def test_what_is_settled_is_ready_wherever_it_is() -> None:
    first, second = ("0x" + digit * 64 for digit in "ab")
    market = Market(*settle_one(first, 120), *settle_one(second, 30))
    account = Account(SimpleNamespace(), SimpleNamespace(address=NODE), market)  # type: ignore[arg-type]
    money = await account.fetch_money(0)
    assert describe_money(money) == ("0.00015 USDC, settled and distributed when you withdraw")
    assert await account.fetch_money(0) == money and market.reads == 1
    market.events.append(make_event("Distributed", first, remaining=0))
    assert describe_money(await account.fetch_money(120)) == (
        "0.00015 USDC, of which 0.00003 USDC are settled and distributed when you withdraw"
    )
    market.events.append(make_event("Distributed", second, remaining=0))
    market.events.append(make_event("Withdrawn", account=NODE, amount=150))
    market.events.append(make_event("Withdrawn", account=OTHER, amount=300))
    told = describe_money(await account.fetch_money(0) | await account.fetch_money(1))
    assert told == "0.000001 USDC; withdrawn so far: 0.00015 USDC"
