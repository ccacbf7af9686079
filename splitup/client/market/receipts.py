"""How the chain closes an execution: waiting for the settlement, or asking for the refund."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from splitup.chain.client import Chain
from splitup.chain.event_stream import ChainEvent
from splitup.chain.market import Status, refund_unclosed, try_refund
from splitup.core.errors import ChainUnavailable, Unavailable
from splitup.crypto.quorum import Payment, unpack_word

_POLL_S: Final = 0.25
_UNKNOWN_S: Final = 30.0  # until a signed request is in a block, at the latest
_GRACE_S: Final = 120.0  # after an execution's deadline, until it is settled or refunded
_CLOSING: Final = ("Settled", "Refunded")
_UNCLOSED_S: Final = 7 * 86_400.0  # how far back executions are looked for that nobody closed


@dataclass(frozen=True, slots=True)
class Receipt:
    """How the chain closed an execution: ``status`` is "settled" or "refunded"."""

    execution_id: str
    status: str
    steps: int
    payments: tuple[Payment, ...]
    slashes: tuple[tuple[str, int], ...]  # (node, micro-USDC)
    paid_micro_usdc: int  # to the nodes, out of the price
    fee_micro_usdc: int  # to the committee; if refunded, the reservation, to the treasury
    refunded_micro_usdc: int
    evidence_root: str  # "" when refunded
    block_number: int
    transaction: str
    model_id: str
    verify_bps: int  # share of the tasks that the request had verified, in 1/10,000


class PendingReceipt:
    """The receipt of an execution that may not be settled yet: ``await`` it, or ``wait()`` for it.

    ``wait`` is for threads other than the event loop's; both raise Unavailable when the chain does
    not close the execution in time.
    """

    def __init__(self, execution_id: str, fetch: Callable[[], Awaitable[Receipt]]) -> None:
        self.execution_id = execution_id
        self._fetch = fetch
        self._loop = asyncio.get_running_loop()
        self._receipt: Receipt | None = None

    def __await__(self) -> Generator[Any, None, Receipt]:
        return self._get().__await__()

    def wait(self) -> Receipt:
        return asyncio.run_coroutine_threadsafe(self._get(), self._loop).result()

    async def _get(self) -> Receipt:
        if self._receipt is None:
            self._receipt = await self._fetch()
        return self._receipt


async def fetch_status(chain: Chain, execution_id: str) -> Status:
    """Return an execution's state on chain."""
    return Status((await chain.call("market", "executionOf", execution_id))["status"])


async def wait_for_receipt(
    chain: Chain,
    execution_id: str,
    *,
    from_block: int,
    timeout_s: float | None = None,
    account: str = "",
) -> Receipt:
    """Return how the execution was closed; raise Unavailable when it is not within ``timeout_s``.

    Without ``timeout_s``, it is waited for until 120 s after the execution's deadline. A chain that
    does not answer is asked until then, an id that the chain does not know for 30 s.

    ``from_block`` is a block at or before the request's. An execution of ``account`` that was not
    settled by its deadline is refunded: nobody else would call for the refund.
    """
    failure: Unavailable | None = None
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    unknown_s = _UNKNOWN_S if timeout_s is None else min(timeout_s, _UNKNOWN_S)
    is_known: bool | None = None  # while the chain has not answered
    with suppress(TimeoutError):
        async with asyncio.timeout(_GRACE_S if timeout_s is None else timeout_s) as limit:
            while True:
                try:
                    row = await chain.call("market", "executionOf", execution_id)
                    if row["status"] in (Status.SETTLED, Status.REFUNDED):
                        events = await chain.fetch_events("market", from_block=from_block)
                        return make_receipt(execution_id, events)
                    was_known = is_known
                    failure, is_known = None, row["status"] != Status.UNKNOWN
                    if not is_known and loop.time() >= begin_s + unknown_s:
                        break
                    open_s = row["deadline"] - chain.clock.now_s()
                    if timeout_s is None and is_known and not was_known:
                        limit.reschedule(loop.time() + max(open_s, 0) + _GRACE_S)
                    if row["client"] == account and open_s <= 0:
                        await try_refund(chain, execution_id)
                except Unavailable as error:  # also of an endpoint that has no event yet
                    failure = error
                await asyncio.sleep(_POLL_S)
    if failure is not None:
        raise failure
    if is_known is False:
        raise Unavailable(
            f"the chain knows no execution {execution_id}, also after {unknown_s:g} s; compare "
            "the id with the one that was printed or returned"
        )
    raise Unavailable(
        f"execution {execution_id} was not settled in {loop.time() - begin_s:.0f} s; its price "
        f"stays locked until it is; ask again with: splitup receipt {execution_id}"
    )


async def refund(chain: Chain, execution_id: str, *, patience_s: float) -> int | None:
    """Ask for the refund of an execution once the chain allows it; return micro-USDC.

    Waits at most ``patience_s``; returns None when the money is not back by then, or when the
    execution was settled instead. Raises ChainUnavailable when the chain did not answer until then.
    """
    failure: ChainUnavailable | None = None
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            while True:
                try:
                    status = await fetch_status(chain, execution_id)
                    if status in (Status.SETTLED, Status.UNKNOWN):
                        return None
                    if status is Status.REFUNDED:
                        row = await chain.call("market", "executionOf", execution_id)
                        return int(row["maxPrice"] - row["reservation"])
                    await try_refund(chain, execution_id)
                    failure = None
                except ChainUnavailable as error:
                    failure = error
                await asyncio.sleep(_POLL_S)
    if failure is not None:
        raise failure
    return None


async def refund_killed(chain: Chain, account: str) -> None:
    """Fetch back what an account paid in the last week for executions that nobody closed.

    A command that was killed leaves one. Raises ChainUnavailable, ChainRejected.
    """
    begin = await chain.find_block(int(chain.clock.now_s() - _UNCLOSED_S))
    await refund_unclosed(chain, await chain.fetch_events("market", from_block=begin), account)


def make_receipt(execution_id: str, events: Sequence[ChainEvent]) -> Receipt:
    """Return the receipt of a closed execution from the market's events; others' are ignored."""
    own = [event for event in events if event.args.get("executionId") == execution_id]
    closing = next((event for event in own if event.name in _CLOSING), None)
    asked = next((e.args for e in own if e.name == "RequestNodeSelections"), None)
    if closing is None or asked is None:
        raise Unavailable(
            f"the chain closed execution {execution_id}, but its RPC endpoint has no event yet; "
            "ask for the receipt again"
        )
    args: dict[str, Any] = dict(closing.args)
    is_settled = closing.name == "Settled"
    payouts = [unpack_word(word) for word in args["payouts"]] if is_settled else []
    rewards = [(e.args["to"], e.args["amount"]) for e in own if e.name == "Rewarded"]
    return Receipt(
        execution_id=execution_id,
        status="settled" if is_settled else "refunded",
        steps=args["steps"] if is_settled else 0,
        payments=(
            *(Payment(to, amount, False) for to, amount in payouts),
            *(Payment(to, amount, True) for to, amount in rewards),
        ),
        slashes=tuple(unpack_word(w) for e in own if e.name == "Slashed" for w in e.args["taken"]),
        paid_micro_usdc=args["paid"] if is_settled else 0,
        fee_micro_usdc=args["fee" if is_settled else "reservation"],
        refunded_micro_usdc=args["refunded"] if is_settled else args["amount"],
        evidence_root=args["evidenceRoot"] if is_settled else "",
        block_number=closing.block_number,
        transaction=closing.transaction,
        model_id=asked["modelId"],
        verify_bps=asked["verifyBps"],
    )
