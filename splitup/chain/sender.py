"""Transactions of one account: nonces, fees, and sending again until they are mined.

Repeating is safe: a transaction is sent again under the same nonce, and gets a new nonce only once
the chain shows that another transaction took the old one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from splitup.chain.account_lock import AccountLock
from splitup.chain.rejections import explain_refusal
from splitup.chain.rpc import Rpc, RpcError
from splitup.chain.signing import sign_transaction
from splitup.core import limits, tuning
from splitup.core.errors import ChainRejected, ChainUnavailable, SplitUpError
from splitup.crypto.keys import Identity

log = logging.getLogger(__name__)

_KNOWN: Final = ("already known", "already imported", "known transaction")
_UNDERPRICED: Final = ("underpriced", "fee too low")
_NONCE_LOW: Final = ("nonce too low", "nonce is too low", "old nonce")
_NO_ETHER: Final = ("insufficient funds", "insufficient balance")
_NONCE_TRIES: Final = 5


@dataclass(slots=True)
class ReservedNonce:
    """A nonce that one transaction alone may use, however often the program is started again.

    ``save`` is called before anything is sent under it, with its hash in ``hashes``.
    """

    nonce: int
    hashes: list[str]
    save: Callable[[], None]


@dataclass(slots=True)
class Submitted:
    """One call under one nonce, with the hashes of all transactions that were sent for it."""

    action: str
    fields: dict[str, Any]
    nonce: int
    hashes: list[str] = field(default_factory=list)
    reserved: ReservedNonce | None = None
    raw: str = ""
    since: int | None = None  # block that contains it, or the head when it was first watched


@dataclass(slots=True)
class _Follow:
    """The state of a transaction that is not mined yet; times are monotonic."""

    head_due: float = 0.0
    sent_at: int | None = None  # block
    is_nonce_used: bool = False


class Sender:
    """Signs and sends for one account over one connection. Tasks of a process share one Sender."""

    def __init__(
        self, rpc: Rpc, chain_id: int, private_key: bytes, *, fee_ceiling_wei: int
    ) -> None:
        self._rpc = rpc
        self._chain_id = chain_id
        self._private_key = private_key
        self.address = Identity.from_private_key(private_key).address
        self._fee_ceiling_wei = fee_ceiling_wei
        self._nonce: int | None = None
        self._lock = asyncio.Lock()
        self._account_lock = AccountLock(chain_id, self.address, "send")
        self._sent: deque[Submitted] = deque(maxlen=tuning.SENT_KEPT)

    async def submit(
        self, action: str, to: str | None, data: str, reserved: ReservedNonce | None = None
    ) -> Submitted:
        """Simulate, sign and send; return as soon as the RPC node has accepted it.

        ``action`` names the call in messages, ``to`` is None for a deployment. Raises ChainRejected
        when the simulation reverts or the account has too little ether, ChainUnavailable, also
        when another transaction took the ``reserved`` nonce.
        """
        call = {"from": self.address, "data": data} | ({} if to is None else {"to": to})
        gas, fees = await asyncio.gather(self._estimate(action, call), self._fetch_fees())
        # One eighth more: the contract's state may change before it is mined.
        gas = min(gas + gas // 8 + 10_000, limits.MAX_TRANSACTION_GAS)
        target = b"" if to is None else bytes.fromhex(to[2:])
        fields = {"to": target, "data": data, "gas": gas, **fees}
        if reserved is not None:
            return await self._send_reserved(action, fields, reserved)
        return await self._send_under_nonce(action, fields)

    async def fetch_next_nonce(self) -> int:
        """Return the nonce that the account's next transaction has, unless another program signs.

        The pool's transactions are counted where the endpoint knows them.
        """
        count = await self._rpc.request("eth_getTransactionCount", self.address, "pending")
        return int(count, 16)

    async def wait(self, submitted: Submitted) -> dict[str, Any]:
        """Return the receipt, sending again as needed.

        Raises ChainRejected when the transaction reverted, ChainUnavailable when it is not mined in
        time; it may still be mined later.
        """
        while True:
            receipt = await self._watch(submitted)
            if receipt is not None:
                break
            if submitted.reserved is not None:
                raise _make_taken_error(submitted)
            log.warning(
                "another program used nonce %d; sending %s again", submitted.nonce, submitted.action
            )
            submitted = await self._send_under_nonce(submitted.action, submitted.fields)
        submitted.since = int(receipt["blockNumber"], 16)
        if int(receipt["status"], 16) != 1:
            raise await self._explain_failure(submitted, receipt)
        return receipt

    async def guard(self) -> None:
        """Send transactions again that a reorganisation or the pool dropped; never ends.

        Also after a receipt, until its block is ``tuning.REORG_BLOCKS`` deep. A missing transaction
        blocks every later one; equal bytes cannot be executed twice.
        """
        while True:
            await asyncio.sleep(tuning.GAP_CHECK_S)
            if not self._sent:
                continue
            try:
                await self._send_missing()
            except ChainUnavailable as error:
                log.debug("cannot look for dropped transactions: %s", error)

    async def _send_missing(self) -> None:
        head = await self._fetch_head()
        for sent in list(self._sent):
            sent.since = head if sent.since is None else sent.since
            if head >= sent.since + tuning.REORG_BLOCKS:
                self._sent.remove(sent)
        count = await self._count_mined()
        for sent in list(self._sent):
            if sent.nonce >= count:
                try:
                    await self._rpc.request("eth_sendRawTransaction", sent.raw)
                except RpcError as error:
                    log.debug("%s is not sent again: %s", sent.action, error.message)

    # ---- sending -------------------------------------------------------------------------------

    async def _send_under_nonce(self, action: str, fields: dict[str, Any]) -> Submitted:
        async with self._lock, self._account_lock.hold():
            if self._account_lock.take_note_of_use():
                self._nonce = None
            for _ in range(_NONCE_TRIES):
                if self._nonce is None:
                    self._nonce = await self.fetch_next_nonce()
                submitted = Submitted(action, dict(fields), self._nonce)
                try:
                    if await self._broadcast(submitted):
                        self._nonce += 1
                        self._sent.append(submitted)
                        return submitted
                except SplitUpError:
                    self._nonce = None  # unknown whether the node has it; ask again next time
                    raise
                self._nonce = None  # taken, by a program that does not share our lock
            raise ChainUnavailable(
                f"{action} was not sent: another program, on this or another machine, is using "
                f"the account {self.address}; try again"
            )

    async def _send_reserved(
        self, action: str, fields: dict[str, Any], reserved: ReservedNonce
    ) -> Submitted:
        async with self._lock, self._account_lock.hold():
            self._nonce = None  # the reserved one may be the next
            submitted = Submitted(action, fields, reserved.nonce, reserved.hashes, reserved)
            # what was sent before may still be in the pool, above this one's fee: ``wait`` sees it
            if not await self._broadcast(submitted) and await self._is_nonce_used(reserved.nonce):
                raise _make_taken_error(submitted)
            return submitted

    async def _broadcast(self, submitted: Submitted) -> bool:
        """Send the transaction as its fields say; False when its nonce is taken by another one."""
        submitted.raw, transaction = sign_transaction(
            self._private_key, self._chain_id, submitted.nonce, submitted.fields
        )
        if transaction not in submitted.hashes:
            submitted.hashes.append(transaction)
            if submitted.reserved is not None:
                submitted.reserved.save()
        try:
            await self._rpc.request("eth_sendRawTransaction", submitted.raw)
        except RpcError as error:
            text = error.message.lower()
            if any(word in text for word in _KNOWN):
                return True
            if any(word in text for word in _NONCE_LOW + _UNDERPRICED):
                # It may be our own: an answer was lost, and this is the second try.
                return await self._get_receipt(submitted) is not None
            if any(word in text for word in _NO_ETHER):
                raise self._make_ether_error(submitted.action) from None
            raise ChainRejected(f"{submitted.action} was not sent: {error.message}") from None
        except ChainUnavailable as error:
            # The node may have it or not; ``wait`` sends the same bytes until it is mined.
            log.warning("%s may not have arrived: %s", submitted.action, error)
        return True

    async def _estimate(self, action: str, call: dict[str, str]) -> int:
        try:
            return int(await self._rpc.request("eth_estimateGas", call, "pending"), 16)
        except RpcError as error:
            if any(word in error.message.lower() for word in _NO_ETHER):
                raise self._make_ether_error(action) from None
            raise explain_refusal(action, error) from None

    def _make_ether_error(self, action: str) -> ChainRejected:
        return ChainRejected(
            f"{action} was not sent: {self.address} has too little ether for the gas; send it some",
            error_name="InsufficientFunds",
        )

    async def _fetch_fees(self) -> dict[str, int]:
        return await fetch_fees(self._rpc, self._fee_ceiling_wei)

    # ---- waiting -------------------------------------------------------------------------------

    async def _watch(self, submitted: Submitted) -> dict[str, Any] | None:
        """Return the receipt, or None when another transaction took the nonce."""
        deadline = time.monotonic() + tuning.MINE_TIMEOUT_S
        follow = _Follow()
        while time.monotonic() < deadline:
            try:
                receipt = await self._get_receipt(submitted)
                if receipt is not None or await self._tend(submitted, follow):
                    return receipt
            except ChainUnavailable as error:  # the transaction stays sent
                log.warning("waiting for %s: %s", submitted.action, error)
            await asyncio.sleep(tuning.RECEIPT_POLL_S)
        self._nonce = None
        raise ChainUnavailable(
            f"{submitted.action} (transaction {submitted.hashes[-1]}) was not mined within "
            f"{tuning.MINE_TIMEOUT_S:.0f} s; it may still be mined: check that before you repeat it"
        )

    async def _tend(self, submitted: Submitted, follow: _Follow) -> bool:
        """Send an unmined transaction again when due; True when another one took its nonce."""
        now = time.monotonic()
        if now < follow.head_due:
            return False
        follow.head_due = now + 10 * tuning.RECEIPT_POLL_S
        head = await self._fetch_head()
        if follow.sent_at is None:
            follow.sent_at = head
        if head < follow.sent_at + tuning.RESEND_AFTER_BLOCKS:
            return False
        follow.sent_at = head
        is_used = await self._is_nonce_used(submitted.nonce)
        if is_used and follow.is_nonce_used:  # twice, blocks apart: not just a late receipt
            return True
        follow.is_nonce_used = is_used
        if not is_used:
            await self._resend(submitted)
        return False

    async def _resend(self, submitted: Submitted) -> None:
        """Send again under the same nonce, both caps raised by an eighth (geth wants a tenth)."""
        current = await self._fetch_fees()
        raised = {name: max(current[name], submitted.fields[name] * 9 // 8 + 1) for name in current}
        if max(raised.values()) <= self._fee_ceiling_wei:
            submitted.fields |= raised
        else:
            log.warning("%s: the fee ceiling is reached; sending it unchanged", submitted.action)
        log.info("%s is not mined yet; sending it again", submitted.action)
        await self._broadcast(submitted)

    async def _get_receipt(self, submitted: Submitted) -> dict[str, Any] | None:
        for transaction in reversed(submitted.hashes):  # any of them may be the one that was mined
            receipt = await self._rpc.request("eth_getTransactionReceipt", transaction)
            if receipt is not None:
                return dict(receipt)
        return None

    async def _is_nonce_used(self, nonce: int) -> bool:
        return await self._count_mined() > nonce

    async def _count_mined(self) -> int:
        return int(await self._rpc.request("eth_getTransactionCount", self.address, "latest"), 16)

    async def _fetch_head(self) -> int:
        return int(await self._rpc.request("eth_blockNumber"), 16)

    async def _explain_failure(self, submitted: Submitted, receipt: dict[str, Any]) -> SplitUpError:
        """Simulate a reverted transaction at its block, to learn the reason."""
        call = {"from": self.address, "to": receipt["to"], "data": submitted.fields["data"]}
        try:
            await self._rpc.request("eth_call", call, receipt["blockNumber"])
        except RpcError as error:
            return explain_refusal(submitted.action, error)
        return ChainRejected(
            f"{submitted.action} reverted in transaction {receipt['transactionHash']}, though its "
            "simulation passed: the contract's state changed in between"
        )


async def fetch_fees(rpc: Rpc, ceiling_wei: int) -> dict[str, int]:
    """Return a transaction's fields for its fee, in wei per gas.

    Those of EIP-1559, where twice the base fee is enough after six full blocks in a row, or
    ``gasPrice`` on a chain without base fees. Raises ChainUnavailable above the ceiling.
    """
    block, tip = await asyncio.gather(
        rpc.request("eth_getBlockByNumber", "latest", False), _fetch_tip(rpc)
    )
    has_base = block.get("baseFeePerGas") is not None
    price = 0 if has_base and tip is not None else int(await rpc.request("eth_gasPrice"), 16)
    base = int(block["baseFeePerGas"], 16) if has_base else price
    if base > ceiling_wei:
        raise ChainUnavailable(
            f"the chain asks {base / 10**9:.1f} gwei per gas, above the ceiling of "
            f"{ceiling_wei / 10**9:.1f}; wait for cheaper blocks"
        )
    if not has_base:
        return {"gasPrice": base}
    priority = min(max(0, price - base) if tip is None else tip, ceiling_wei)
    cap = min(2 * base + priority, ceiling_wei)
    return {"maxFeePerGas": max(cap, priority), "maxPriorityFeePerGas": priority}


async def _fetch_tip(rpc: Rpc) -> int | None:
    """Return what to add to the base fee, None where the endpoint does not say."""
    try:
        return int(await rpc.request("eth_maxPriorityFeePerGas"), 16)
    except RpcError:
        return None


def _make_taken_error(submitted: Submitted) -> ChainUnavailable:
    return ChainUnavailable(
        f"another program used nonce {submitted.nonce}, which was kept for {submitted.action}; "
        "stop what else signs with this key, and repeat the command: it takes another nonce"
    )
