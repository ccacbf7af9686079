"""What an execution costs, and deposits of what the balance lacks."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Final

from splitup.chain.client import Chain
from splitup.chain.rejections import explain_retirement
from splitup.client import defaults
from splitup.client.inputs import BPS, format_share, format_usdc, parse_share
from splitup.core.errors import ChainRejected, InvalidInput, Unavailable
from splitup.crypto.keys import Identity
from splitup.crypto.permit import Permit, sign_permit

_PERMIT_S: Final = 600  # a deposit is mined within minutes, or signed again
_CLOCK_S: Final = 30  # by which a block may come before the time that a deadline was counted from
# what the contracts say when another program spent the permit, the wallet or the balance meanwhile
_RACES: Final = (
    "ERC20InsufficientAllowance",
    "ERC20InsufficientBalance",
    "ERC2612InvalidSigner",
    "InvalidAccountNonce",
    "BalanceTooSmall",
)


@dataclass(frozen=True, slots=True)
class Quote:
    """What an execution costs, in micro-USDC, if ``verify_bps`` / 10,000 of its tasks are verified.

    ``locked`` is the most; ``average`` is paid on average if all steps run and no node lies, and
    the stake that the plan reserves is reserved until the deadline.
    """

    verify_bps: int
    locked_micro_usdc: int
    average_micro_usdc: int

    def __add__(self, other: Quote) -> Quote:
        """Return what both cost together, at one share."""
        locked = self.locked_micro_usdc + other.locked_micro_usdc
        average = self.average_micro_usdc + other.average_micro_usdc
        return Quote(self.verify_bps, locked, average)


async def fetch_quote(
    chain: Chain,
    model_id: str,
    steps: int,
    verify: float | str | None = None,
    deadline_s: float | None = None,
) -> Quote:
    """Return what a request locks and costs; ``verify`` is by default the network's share.

    ``deadline_s`` counts from the request, by default as in ``defaults.get_deadline_s``. Raises
    InvalidInput for a smaller share, and for a model that its developer has retired.
    """
    asked = None if verify is None else parse_share(verify)
    lasts_s = defaults.get_deadline_s(steps) if deadline_s is None else deadline_s
    duration_s = math.ceil(min(max(0.0, lasts_s), 2**31)) + _CLOCK_S
    parts, parameters, retired = await asyncio.gather(
        chain.call("market", "quoteParts", model_id, steps, duration_s),
        chain.call("market", "parameters"),
        chain.call("models", "isRetired", model_id),
    )
    if retired:
        raise InvalidInput(explain_retirement(model_id))
    least = int(parameters["samplingBps"])
    if asked is not None and asked < least:
        raise InvalidInput(
            f"the share of tasks to verify is {format_share(asked)}, and this network verifies at "
            f"least {format_share(least)}; give that or more, or leave it out"
        )
    share = asked or least
    nodes = parts["executors"] + parts["verification"] * share // BPS
    fee = max(nodes * int(parameters["feeBps"]) // BPS, parts["reservation"])
    return Quote(
        verify_bps=share,
        locked_micro_usdc=parts["executors"] + parts["verification"] + parts["fee"],
        average_micro_usdc=nodes + fee,
    )


async def check_deadline(chain: Chain, deadline_s: float, name: str) -> int:
    """Return the most seconds to a deadline that the market takes.

    Raises InvalidInput, which names what was given, when it is not within the market's bounds.
    """
    parameters = await chain.call("market", "parameters")
    shortest, longest = int(parameters["minDeadlineS"]), int(parameters["maxDeadlineS"])
    if not shortest <= deadline_s <= longest:
        raise InvalidInput(
            f"{name} is {deadline_s:g} s, and an execution on this network may last {shortest} to "
            f"{longest} s; give a number within these"
        )
    return longest


async def ensure_balance(chain: Chain, identity: Identity, needed: int) -> None:
    """Bring the account's balance in the market to at least ``needed`` micro-USDC.

    Deposits exactly what is missing, by an allowance when there is one, else by a permit.
    Raises InvalidInput when the wallet does not hold that much; nothing has moved then. Raises
    Unavailable when another program keeps using the account.
    """
    try:
        await _deposit_missing(chain, identity, needed)
    except ChainRejected:
        # a program that does not share our lock used the account meanwhile: look again, once
        try:
            await _deposit_missing(chain, identity, needed)
        except ChainRejected as error:
            raise explain_race(error) from None


def explain_race(error: ChainRejected) -> ChainRejected | Unavailable:
    """Return what to raise for a payment that was refused right after its balance was checked."""
    if error.error_name in _RACES:
        return Unavailable("another command is using this account; try again")
    return error


async def _deposit_missing(chain: Chain, identity: Identity, needed: int) -> None:
    account, market = identity.address, chain.deployment.market
    balance = await chain.call("market", "balanceOf", account)
    missing = needed - balance
    if missing <= 0:
        return
    wallet, allowance = await asyncio.gather(
        chain.call("usdc", "balanceOf", account),
        chain.call("usdc", "allowance", account, market),
    )
    if wallet < missing:
        raise InvalidInput(
            f"account {account} has {format_usdc(balance)} in the market and "
            f"{format_usdc(wallet)} in its wallet, and {format_usdc(needed)} are needed; "
            f"send it {format_usdc(missing - wallet)} more (token {chain.deployment.usdc}; on a "
            f"network of your own: splitup fund {account})"
        )
    if allowance >= missing:
        await chain.send("market", "deposit", missing)
        return
    nonce, separator, head = await asyncio.gather(
        chain.call("usdc", "nonces", account),
        chain.call("usdc", "DOMAIN_SEPARATOR"),
        chain.fetch_head(),
    )
    permit = Permit(account, market, missing, nonce, head.timestamp + _PERMIT_S)
    signature = sign_permit(identity.private_key, permit, bytes.fromhex(separator[2:]))
    await chain.send("market", "depositWithPermit", missing, permit.deadline, *signature)
