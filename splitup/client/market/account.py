"""The user's account in the market: its balance, its requests, and refunds.

Executions that are started together share one balance, and so do other processes with the same key
on this machine: what checks the balance and what spends it happens under one lock.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from splitup.chain.account_lock import AccountLock
from splitup.chain.client import Chain
from splitup.chain.committee_reader import Committees
from splitup.client.inputs import format_usdc
from splitup.client.market.member_answers import fetch_latest_snapshot
from splitup.client.market.payments import check_deadline, ensure_balance, explain_race
from splitup.client.market.plan_requests import Wanted, fetch_certificate
from splitup.client.market.receipts import refund, refund_killed
from splitup.client.market.signed_request import (
    fetch_signed_plan,
    is_frozen,
    make_request,
    wait_until_open,
)
from splitup.core import tuning
from splitup.core.background import cancel
from splitup.core.errors import (
    ChainRejected,
    ExecutionFailed,
    InvalidInput,
    SplitUpError,
    Unavailable,
)
from splitup.crypto.keys import Identity
from splitup.crypto.quorum import compute_execution_id
from splitup.messages.base import ZERO_BYTES32
from splitup.messages.plans import PlanCertificate, Request
from splitup.net.http import SignedClient
from splitup.protocol.committee.certificates import CommitteeView

_log = logging.getLogger("splitup.client.account")

_REFUND_PATIENCE_S: Final = 50.0  # after the deadline: the chain waits 30 s, then some blocks


@dataclass(frozen=True, slots=True)
class Order:
    """What an execution is to be: the model, the steps, the price and the time it may take."""

    model_id: str
    task_ids: tuple[str, ...]
    steps: int
    price_micro_usdc: int  # locked until the execution is settled
    deadline_s: float  # from now
    verify_bps: int  # share of its tasks that are verified, in 1/10,000
    inputs_digest: str | None  # None when the inputs do not exist yet, or have to stay private
    on_failure: Callable[[ExecutionFailed], None] | None = None  # called before the refund


class MarketAccount:
    """One key's balance and requests, over one connection."""

    def __init__(
        self, chain: Chain, identity: Identity, http: SignedClient, committees: Committees
    ) -> None:
        self._chain = chain
        self._identity = identity
        self._http = http
        self._committees = committees
        chain_id = chain.deployment.chain_id
        self._lock = AccountLock(chain_id, identity.address, "spend")
        self._funding = asyncio.Lock()
        self._reserved = 0  # micro-USDC of requests that are not in a block yet
        self._signing = asyncio.Lock()  # one signed request at a time, until the chain holds it
        self._openings: dict[str, asyncio.Task[bool]] = {}  # executions: is it on chain?
        self._request_blocks: dict[str, int] = {}

    async def close(self) -> None:
        """Stop watching signed requests that the chain does not hold yet."""
        await cancel(*self._openings.values())

    def get_request_block(self, execution_id: str) -> int:
        """Return a block at or before the request's, 0 when it is unknown."""
        return self._request_blocks.get(execution_id, 0)

    async def deposit(self, amount_micro_usdc: int) -> None:
        """Move USDC from the wallet into the market."""
        async with self._funding, self._lock.hold():
            balance = await self._chain.call("market", "balanceOf", self._identity.address)
            await ensure_balance(self._chain, self._identity, balance + amount_micro_usdc)

    async def withdraw(self, amount_micro_usdc: int | None) -> int:
        """Move USDC from the market into the wallet, None for all; return how much.

        What was paid for executions that nobody closed is fetched back first.
        """
        async with self._funding, self._lock.hold():
            await refund_killed(self._chain, self._identity.address)
            balance: int = await self._chain.call("market", "balanceOf", self._identity.address)
            amount = balance if amount_micro_usdc is None else amount_micro_usdc
            if not 0 < amount <= balance:
                raise InvalidInput(
                    f"the deposit is {format_usdc(balance)}; what open executions have locked "
                    "comes back when they are settled"
                )
            await self._chain.send("market", "withdraw", amount)
            return amount

    async def freeze(self, seconds: float) -> int:
        """Reserve the balance for signed requests; return until when (Unix time)."""
        until = (await self._chain.fetch_head()).timestamp + int(np.ceil(seconds))
        async with self._lock.hold():
            await self._chain.send("market", "freeze", until)
        return until

    # ---- requests ------------------------------------------------------------------------------

    async def request(self, order: Order) -> tuple[PlanCertificate, float]:
        """Pay for an execution and return its plan, and its deadline on the event loop's clock.

        Raises InvalidInput when the account cannot pay or the market takes no such deadline,
        Unavailable while another command uses it, ExecutionFailed, after the refund, when the
        committee gives no plan.
        """
        longest_s = await check_deadline(self._chain, order.deadline_s, "the time to the deadline")
        await self._lock.acquire()  # released once the chain holds the request
        try:
            async with self._funding:
                needed = self._reserved + order.price_micro_usdc
                await ensure_balance(self._chain, self._identity, needed)
                head = await self._chain.fetch_head()  # the deadline is in the chain's time
                self._reserved += order.price_micro_usdc
        except BaseException:
            self._lock.release()
            raise
        try:
            wanted, ends = self._compose(order, head.timestamp + longest_s)
            account, deadline = self._identity.address, wanted.request.deadline
            signs = await is_frozen(self._chain, account, deadline, head.timestamp)
        except BaseException:
            self._release(order.price_micro_usdc)
            raise
        send = self._request_signed if signs else self._request_on_chain
        return await send(order, wanted), ends

    def _release(self, reserved_micro_usdc: int) -> None:
        """Let others use the balance: the chain holds the request, or there is none."""
        self._reserved -= reserved_micro_usdc
        self._lock.release()

    def _compose(self, order: Order, latest: int) -> tuple[Wanted, float]:
        """Return the request, and its deadline on the event loop's clock.

        ``latest``: the last deadline that the market takes, which counts from its last block.
        """
        deployment, clock = self._chain.deployment, self._chain.clock
        nonce = secrets.randbits(53)  # as many bits as canonical JSON holds
        account = self._identity.address
        request = Request(
            execution_id=compute_execution_id(
                deployment.chain_id, deployment.market, account, nonce
            ),
            chain_id=deployment.chain_id,
            market=deployment.market,
            model_id=order.model_id,
            client=account,
            client_key=self._identity.signing_key_hex,
            steps=order.steps,
            max_price_micro_usdc=order.price_micro_usdc,
            deadline=min(int(clock.now_s()) + int(np.ceil(order.deadline_s)), latest),
            snapshot_sequence=0,  # where it is signed, its own is filled in
            snapshot_root=ZERO_BYTES32,
            block_hash=ZERO_BYTES32,
            verify_bps=order.verify_bps,
            inputs_digest=order.inputs_digest or ZERO_BYTES32,
            nonce=nonce,
        )
        ends = asyncio.get_running_loop().time() + request.deadline - clock.now_s()
        return Wanted(request, len(order.task_ids)), ends

    async def _request_on_chain(self, order: Order, wanted: Wanted) -> PlanCertificate:
        """Send the request and return its certificate, asking for it before the block is mined."""
        source, request = self._committee_source(wanted), wanted.request
        listening = asyncio.create_task(
            fetch_certificate(self._http, source, wanted, timeout_s=order.deadline_s)
        )
        try:
            mined = await self._chain.send(
                "market",
                "requestExecution",
                request.model_id,
                request.steps,
                request.inputs_digest,
                request.client_key,
                request.max_price_micro_usdc,
                request.deadline,
                request.nonce,
                request.verify_bps,
            )
        except BaseException as error:
            await cancel(listening)
            if isinstance(error, ChainRejected):
                raise explain_race(error) from None
            raise
        finally:
            self._release(wanted.request.max_price_micro_usdc)
        self._request_blocks[wanted.execution_id] = mined.block_number or 0
        return await self._await_plan(order, wanted, listening)

    async def _request_signed(self, order: Order, wanted: Wanted) -> PlanCertificate:
        """Sign the request and return its certificate; no block is waited for."""
        try:
            await self._signing.acquire()
        except BaseException:
            self._release(wanted.request.max_price_micro_usdc)
            raise
        try:
            head, signed = await asyncio.gather(
                self._chain.fetch_head(),
                make_request(self._chain, self._identity, wanted.request),
            )
        except BaseException:
            self._signing.release()
            self._release(wanted.request.max_price_micro_usdc)
            raise
        self._request_blocks[wanted.execution_id] = head.number
        opening = asyncio.create_task(self._follow_opening(wanted))
        self._openings[wanted.execution_id] = opening
        source = self._committee_source(wanted)
        try:
            plan = fetch_signed_plan(self._http, source, wanted, signed, timeout_s=order.deadline_s)
            return await self._await_plan(order, wanted, plan, passes=InvalidInput)
        except InvalidInput:
            opening.cancel()  # members that refuse a request do not open it
            raise

    async def _follow_opening(self, wanted: Wanted) -> bool:
        try:
            return await wait_until_open(self._chain, wanted)
        finally:
            self._signing.release()
            self._release(wanted.request.max_price_micro_usdc)
            self._openings.pop(wanted.execution_id, None)

    def _committee_source(self, wanted: Wanted) -> Callable[[], Awaitable[CommitteeView]]:
        return partial(
            self._committees.fetch_of, wanted.execution_id, max_age_s=tuning.COMMITTEE_REFRESH_S
        )

    # ---- failures ------------------------------------------------------------------------------

    async def _await_plan(
        self,
        order: Order,
        wanted: Wanted,
        plan: Awaitable[PlanCertificate],
        passes: type[SplitUpError] | tuple[()] = (),
    ) -> PlanCertificate:
        """Return the plan; raise ExecutionFailed, after the refund, when there is none."""
        try:
            return await plan
        except passes:
            raise
        except SplitUpError as error:
            cause = str(error)
            if isinstance(error, Unavailable) and not await self._is_served(order):
                cause = (
                    "no reachable node serves this model; see which nodes are live: splitup status"
                )
            failed = ExecutionFailed(
                f"execution {wanted.execution_id} was not planned: {cause}",
                execution_id=wanted.execution_id,
            )
            if order.on_failure is not None:
                order.on_failure(failed)
            raise await self.recover(wanted.request, failed) from None

    async def _is_served(self, order: Order) -> bool:
        """Return False when the latest snapshot shows a task that no live node holds."""
        try:
            committee = await self._committees.fetch_current()
            snapshot = await fetch_latest_snapshot(self._chain, self._http, committee.members)
        except SplitUpError:
            return True  # unknown
        if snapshot is None:
            return False
        held = {task for entry in snapshot.entries for task in entry.resident}
        return held.issuperset(order.task_ids)

    async def recover(self, wanted: Request, error: ExecutionFailed) -> ExecutionFailed:
        """Fetch the money of a failed execution back; return the error that says so."""
        opening = self._openings.get(wanted.execution_id)
        if opening is not None and not await opening:
            return _add(error, "the chain never recorded it, so nothing was paid", 0)
        locked = format_usdc(wanted.max_price_micro_usdc)
        clock = self._chain.clock
        wait_s = max(0.0, wanted.deadline - clock.now_s()) + _REFUND_PATIENCE_S
        skew = clock.describe_skew()
        if wait_s > _REFUND_PATIENCE_S:
            _log.warning(
                "%s; waiting at most %.0f s for the %s paid for it to come back; Ctrl-C: do not "
                "wait, and fetch it back later with: splitup withdraw",
                *(error, wait_s, locked),
            )
        back: int | None = None
        try:
            back = await refund(self._chain, wanted.execution_id, patience_s=wait_s)
            kept = wanted.max_price_micro_usdc - (back or 0)
            rest = f", without {format_usdc(kept)} for the stake that was reserved" if kept else ""
            money = (
                f"{format_usdc(back)} came back to your balance in the market{rest}"
                if back is not None
                else f"the {locked} paid for it are not back yet; see: "
                f"splitup receipt {wanted.execution_id}"
            )
        except SplitUpError as problem:
            money = f"the {locked} paid for it could not be fetched back yet ({problem})"
        return _add(error, money + (f"; {skew}" if skew else ""), back)


def _add(error: ExecutionFailed, money: str, refunded: int | None) -> ExecutionFailed:
    return ExecutionFailed(
        f"{error}; {money}",
        execution_id=error.execution_id,
        task=error.task,
        node=error.node,
        refunded_micro_usdc=refunded,
    )
