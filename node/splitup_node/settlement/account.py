"""The node's money: stake, unbonding, payments. Every verb reads the chain before it sends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from splitup.chain.client import Chain
from splitup.chain.earnings import fetch_days
from splitup.chain.market import distribute, find_dues
from splitup.client.inputs import format_usdc
from splitup.core import tuning
from splitup.core.background import Closing
from splitup.core.errors import ConfigurationError
from splitup.crypto.keys import Identity
from splitup.crypto.quorum import unpack_word
from splitup.messages.network import Deployment
from splitup.protocol.planning.exposure import compute_spare
from splitup_node.config import NodeConfig, make_command


class Account(Closing):
    """A node's account on the chain. Opened by ``open``; closed by ``async with``."""

    def __init__(self, config: NodeConfig, identity: Identity, chain: Chain) -> None:
        self._config = config
        self._identity = identity
        self._chain = chain
        self._money: tuple[float, int, dict[str, int]] | None = None  # when, at which balance

    @classmethod
    async def open(cls, config: NodeConfig) -> Self:
        """Open the key and the chain. Raises ConfigurationError, ChainUnavailable."""
        identity = config.load_identity()
        deployment = Deployment.load(config.deployment)
        chain = await Chain.connect(config.rpc_url, deployment, private_key=identity.private_key)
        return cls(config, identity, chain)

    async def close(self) -> None:
        """Close the connections to the chain."""
        await self._chain.close()

    async def fetch(self) -> dict[str, Any]:
        """Return what the chain says about the node."""
        address = self._identity.address
        entry, balance, wallet = await asyncio.gather(
            self._chain.call("nodes", "nodeOf", address),
            self._chain.call("market", "balanceOf", address),
            self._chain.call("usdc", "balanceOf", address),
        )
        vram_gb = entry["vramGb"] or self._config.vram_gb
        return {
            "address": address,
            "active": entry["active"],
            "stake_micro_usdc": entry["stake"],
            "least_stake_micro_usdc": await self._chain.call("nodes", "minStake", vram_gb),
            "locked_micro_usdc": entry["locked"],
            "vram_gb": entry["vramGb"],
            "endpoint": entry["endpoint"],
            "unbonding_at_s": entry["unbondingAt"],
            "balance_micro_usdc": balance,
            "wallet_micro_usdc": wallet,
        }

    async def fetch_money(self, balance: int) -> dict[str, int]:
        """Return what can be withdrawn: the ``balance``, and what is settled for the node.

        That is distributed when somebody withdraws. Unless the balance has changed, all events of
        the market are read once in ``tuning.MONEY_AGE_S``.
        """
        now = time.monotonic()
        if self._money is not None:
            read_at, known, found = self._money
            if known == balance and now < read_at + tuning.MONEY_AGE_S:
                return found
        address = self._identity.address
        events = await self._chain.fetch_events("market", from_block=0)
        words = [unpack_word(word) for due in find_dues(events) for word in due.payouts]
        settled = sum(amount for node, amount in words if node == address)
        found = {
            "ready_to_withdraw_micro_usdc": balance + settled,
            "undistributed_micro_usdc": settled,
            "withdrawn_micro_usdc": sum(
                event.args["amount"]
                for event in events
                if event.name == "Withdrawn" and event.args["account"] == address
            ),
        }
        self._money = now, balance, found
        return found

    async def fetch_earnings(self, days: int, now_s: float) -> dict[str, Any]:
        """Return payments and losses by day (``fetch_days``), and what is ready to withdraw."""
        address = self._identity.address
        found = await fetch_days(self._chain, address, days=days, now_s=now_s)
        return {
            "address": address,
            "days": [asdict(day) | {"date": day.date.isoformat()} for day in found],
            **await self.fetch_money((await self.fetch())["balance_micro_usdc"]),
        }

    async def stake(
        self,
        check: Callable[[], Awaitable[None]] | None = None,
        spare_percent: float = tuning.STAKE_SPARE_PERCENT,
    ) -> dict[str, Any]:
        """Register, or top up a slashed stake; do nothing when the stake is complete.

        It is complete with a spare above the least stake, so that a trifle does not end the node's
        business. ``check`` is called first; nothing is staked when it raises. A node that was
        slashed because its device is faulty finds that out here, before another difference costs
        it more.
        """
        state = await self.fetch()
        if state["unbonding_at_s"]:
            raise ConfigurationError(
                f"node {state['address']} is leaving; stay with: "
                f"{self._config.make_command('unstake --cancel')}"
            )
        registered = state["stake_micro_usdc"] > 0 or state["vram_gb"] > 0
        vram_gb = state["vram_gb"] if registered else self._config.vram_gb
        least: int = state["least_stake_micro_usdc"]
        spare = compute_spare(least, spare_percent)
        missing = max(0, least + spare - state["stake_micro_usdc"])
        if missing:
            await self._check_funds(missing, state["wallet_micro_usdc"], least, spare)
            if check is not None:
                await check()
            await self._allow(missing)
            if registered:
                await self._chain.send("nodes", "topUp", missing)
            else:
                endpoint = self._config.endpoint or f"http://{self._config.listen}"
                await self._chain.send(
                    "nodes", "register", self._identity.signing_key_hex, vram_gb, endpoint
                )
                if spare:  # registering takes exactly the least stake
                    await self._chain.send("nodes", "topUp", spare)
        return {
            "address": state["address"],
            "added_micro_usdc": missing,
            "stake_micro_usdc": state["stake_micro_usdc"] + missing,
            "least_stake_micro_usdc": least,
        }

    async def unstake(self) -> dict[str, Any]:
        """Begin to leave: the stake is free after the unbonding period."""
        await self._chain.send("nodes", "requestUnstake")
        return {"unbonding_at_s": (await self.fetch())["unbonding_at_s"]}

    async def cancel_unstake(self) -> dict[str, Any]:
        """Cancel ``unstake``."""
        await self._chain.send("nodes", "cancelUnstake")
        return {"unbonding_at_s": 0}

    async def withdraw(self, stake: bool, balance: bool) -> dict[str, Any]:
        """Take out the stake (after unbonding), the balance that is ready to withdraw, or both.

        First has settled executions credited, which also releases the stake that they locked.
        """
        await distribute(self._chain, self._identity.address)
        state = await self.fetch()
        taken = {"stake_micro_usdc": 0, "balance_micro_usdc": 0}
        if balance and state["balance_micro_usdc"]:
            await self._chain.send("market", "withdraw", state["balance_micro_usdc"])
            taken["balance_micro_usdc"] = state["balance_micro_usdc"]
        if stake:
            await self._chain.send("nodes", "withdrawStake")
            taken["stake_micro_usdc"] = state["stake_micro_usdc"]
        return taken

    async def _check_funds(self, amount: int, wallet: int, least: int, spare: int) -> None:
        address, chain_id = self._identity.address, self._chain.deployment.chain_id
        if wallet < amount:
            stake = f"{format_usdc(least)} of stake and {format_usdc(spare)} to spare"
            less = f", or put down less to spare: {self._config.make_command('stake --spare 0')}"
            raise ConfigurationError(
                f"the node needs {stake}, and {address} has {format_usdc(wallet)} to put down; "
                f"send it the missing {format_usdc(amount - wallet)} on chain {chain_id} (on a "
                f"network of your own: splitup fund {address})"
                f"{less if wallet >= amount - spare else ''}"
            )
        if not await self._chain.fetch_ether_wei(address):
            raise ConfigurationError(
                f"{address} has no ether to pay for gas; send it some on chain {chain_id}"
            )

    async def _allow(self, amount: int) -> None:
        registry = self._chain.deployment.nodes
        allowed = await self._chain.call("usdc", "allowance", self._identity.address, registry)
        if allowed < amount:
            await self._chain.send("usdc", "approve", registry, amount)


async def check_registration(
    chain: Chain, identity: Identity, config: NodeConfig
) -> dict[str, Any]:
    """Return the node's registry entry. Raises ConfigurationError when the node may not run."""
    entry: dict[str, Any] = await chain.call("nodes", "nodeOf", identity.address)
    if not entry["stake"]:
        raise ConfigurationError(
            f"node {identity.address} has no stake; "
            f"put it down with: {config.make_command('stake')}"
        )
    if entry["unbondingAt"]:
        raise ConfigurationError(
            f"node {identity.address} is leaving; stay with: "
            f"{config.make_command('unstake --cancel')}"
        )
    if problem := await find_low_stake(chain, entry, config):
        raise ConfigurationError(f"node {identity.address} gets no work: {problem}")
    if entry["signingKey"] != identity.signing_key_hex:
        raise ConfigurationError(
            f"the registry lists another signing key for {identity.address} than {config.keystore} "
            "gives; use the key file that the stake was put down with"
        )
    if entry["vramGb"] < config.vram_gb:
        raise ConfigurationError(
            f"node {identity.address} staked for {entry['vramGb']} GB and is configured for "
            f'{config.vram_gb} GB; set vram = "{entry["vramGb"]}GB", or unstake and stake again'
        )
    return entry


async def find_low_stake(chain: Chain, entry: Mapping[str, Any], config: NodeConfig) -> str:
    """Return how far a registered node's stake is below the least and what mends it, or ""."""
    if entry["active"] or entry["unbondingAt"]:
        return ""
    least: int = await chain.call("nodes", "minStake", entry["vramGb"])
    return describe_low_stake(entry["stake"], least, config.path)


def describe_low_stake(stake: int, least: int, config: Path) -> str:
    """Return why a node whose stake is below the least gets no work, and what mends it."""
    return (
        f"its stake of {format_usdc(stake)} is {format_usdc(least - stake)} below the least since "
        f"a slash; fill it up with: {make_command('stake', config)}"
    )
