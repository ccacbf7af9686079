"""Waiting for money while the chain comes and goes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from splitup.chain.client import ChainBlock
from splitup.chain.event_stream import ChainEvent
from splitup.chain.market import Status
from splitup.client.market import receipts
from splitup.client.market.receipts import refund, wait_for_receipt
from splitup.core.errors import ChainUnavailable, Unavailable

EXECUTION, CLIENT = "0x" + "01" * 32, "0x" + "0c" * 20
PRICE, BACK, DUE = 700, 690, 1_000


class FakeChain:
    """One execution; ``down`` calls fail, and every look at the head passes ten seconds.

    ``behind`` answers lack the event of the state that the endpoint states.
    """

    def __init__(self, status: Status, *, down: int = 0, behind: int = 0) -> None:
        self.status = status
        self.down = down
        self.behind = behind
        self.now_s = DUE - 30
        self.refunds = 0
        self.clock = SimpleNamespace(now_s=lambda: self.now_s)

    def _answer(self) -> None:
        if self.down:
            self.down -= 1
            raise ChainUnavailable("the chain does not answer")

    async def call(self, contract: str, function: str, execution_id: str) -> Any:
        self._answer()
        if function == "refundableAt":
            return DUE
        self.now_s += 1
        row = {
            "client": CLIENT,
            "deadline": DUE - 5,
            "maxPrice": PRICE,
            "reservation": PRICE - BACK,
        }
        return {**row, "status": self.status}

    async def fetch_head(self) -> ChainBlock:
        self._answer()
        self.now_s += 10
        return ChainBlock(1, "0x", self.now_s)

    async def send(self, contract: str, function: str, execution_id: str) -> None:
        self._answer()
        self.refunds += 1
        self.status = Status.REFUNDED

    async def fetch_events(self, contract: str, *, from_block: int) -> tuple[ChainEvent, ...]:
        self._answer()
        if self.behind:
            self.behind -= 1
            return ()
        args = {
            "executionId": EXECUTION,
            "client": CLIENT,
            "amount": BACK,
            "reservation": PRICE - BACK,
        }
        asked = {"executionId": args["executionId"], "modelId": "0x", "verifyBps": 800}
        return (
            ChainEvent("RequestNodeSelections", asked, 1, "0x", 0, "0x", "market"),
            ChainEvent("Refunded", args, 1, "0x", 1, "0x", "market"),
        )


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "_POLL_S", 0)


@pytest.mark.parametrize("down", range(6))
async def test_f12_money_is_fetched_back_once_the_chain_answers_again(down: int) -> None:
    chain = FakeChain(Status.PLANNED, down=down)
    assert await refund(chain, EXECUTION, patience_s=30) == BACK  # type: ignore[arg-type]
    assert chain.refunds == 1 and not chain.down


async def test_f12_receipt_is_waited_for_while_the_chain_is_down() -> None:
    chain = FakeChain(Status.REFUNDED, down=3)
    receipt = await wait_for_receipt(chain, EXECUTION, from_block=0, timeout_s=30)  # type: ignore[arg-type]
    assert (receipt.status, receipt.refunded_micro_usdc) == ("refunded", BACK)


async def test_f12_receipt_is_waited_for_while_the_endpoint_has_the_state_but_no_event() -> None:
    chain: Any = FakeChain(Status.REFUNDED, behind=3)
    receipt = await wait_for_receipt(chain, EXECUTION, from_block=0, timeout_s=30)
    assert receipt.status == "refunded" and not chain.behind
    chain.behind = 10**9
    with pytest.raises(Unavailable, match="no event yet"):
        await wait_for_receipt(chain, EXECUTION, from_block=0, timeout_s=0.05)


@pytest.mark.parametrize("down", range(6))
async def test_whoever_waits_for_a_receipt_that_never_comes_gets_the_money_back(down: int) -> None:
    """All outputs came, and one executor cannot commit: nobody else would ask for the refund."""
    chain: Any = FakeChain(Status.PLANNED, down=down)
    receipt = await wait_for_receipt(chain, EXECUTION, from_block=0, timeout_s=30, account=CLIENT)
    assert (receipt.status, receipt.refunded_micro_usdc) == ("refunded", BACK)
    assert chain.refunds == 1 and chain.now_s >= DUE, "not before the chain allows it"


async def test_a_receipt_is_waited_for_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """An execution with more time is waited for longer: its price is locked for as long."""
    monkeypatch.setattr(receipts, "_GRACE_S", 0)
    chain: Any = FakeChain(Status.PLANNED)
    receipt = await wait_for_receipt(chain, EXECUTION, from_block=0, account=CLIENT)
    assert receipt.status == "refunded" and chain.now_s >= DUE


async def test_others_executions_are_only_watched() -> None:
    chain: Any = FakeChain(Status.PLANNED)
    with pytest.raises(Unavailable, match="not settled in"):
        await wait_for_receipt(
            chain, EXECUTION, from_block=0, timeout_s=0.05, account="0x" + "0d" * 20
        )
    assert not chain.refunds


async def test_f12_chain_that_stays_away_is_named() -> None:
    chain: Any = FakeChain(Status.PLANNED, down=10**9)
    with pytest.raises(ChainUnavailable, match="does not answer"):
        await refund(chain, EXECUTION, patience_s=0.05)
    with pytest.raises(ChainUnavailable, match="does not answer"):
        await wait_for_receipt(chain, EXECUTION, from_block=0, timeout_s=0.05)


async def test_execution_that_is_not_closed_in_time_is_said_so() -> None:
    chain: Any = FakeChain(Status.PLANNED)
    with pytest.raises(Unavailable, match="not settled in"):
        await wait_for_receipt(chain, EXECUTION, from_block=0, timeout_s=0.05)
    chain.status = Status.SETTLED
    assert await refund(chain, EXECUTION, patience_s=1) is None


async def test_an_id_that_the_chain_never_saw_is_said_so() -> None:
    chain: Any = FakeChain(Status.UNKNOWN)
    with pytest.raises(Unavailable, match="the chain knows no execution"):
        await wait_for_receipt(chain, EXECUTION, from_block=0, timeout_s=0.05)
