"""The deployment of SplitUp's contracts, and what they are told when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from splitup.chain.abi import CONTRACTS, ContractName, load_abi
from splitup.chain.rpc import Rpc
from splitup.chain.sender import Sender, Submitted
from splitup.core import tuning
from splitup.core.errors import ChainUnavailable
from splitup.messages.network import Deployment


@dataclass(frozen=True, slots=True)
class MarketParameters:
    """The market's economics; see ``Parameters`` in IMarket.sol. Unsafe ones are refused."""

    min_price_micro_usdc: int = 1_000
    min_deadline_s: int = 5
    max_deadline_s: int = 86_400
    settlement_grace_s: int = 3_600
    fee_bps: int = 100
    treasury_bps: int = 2_000
    reward_milli: int = 1_200
    slash_milli: int = 100_000
    validation_bonus_milli: int = 0
    outside_gain_micro_usdc: int = 300_000
    sampling_bps: int = 800
    collusion_bps: int = 1_000
    tie_breakers: int = 2

    def to_abi(self) -> tuple[int, ...]:
        """Return the struct as the contract takes it."""
        return tuple(asdict(self).values())


@dataclass(frozen=True, slots=True)
class Terms:
    """What the contracts are told when they are made; a bond's period never changes again."""

    unbonding_period_s: int = 7 * 86_400
    bond_period_s: int = 14 * 86_400
    parameters: MarketParameters = field(default_factory=MarketParameters)


def encode_creation(
    contract: ContractName, owner: str, addresses: Mapping[ContractName, str], terms: Terms
) -> str:
    """Return the data of the transaction that makes a contract, "0x…".

    ``addresses`` has those of the contracts that come before it in ``CONTRACTS``.
    """
    args: tuple[Any, ...] = ()
    if contract == "committee":
        args = (owner,)
    elif contract == "bonds":
        args = owner, addresses["usdc"], addresses["committee"], terms.bond_period_s
    elif contract == "nodes":
        args = owner, addresses["usdc"], terms.unbonding_period_s
    elif contract == "market":
        parts: tuple[ContractName, ...] = ("usdc", "committee", "nodes", "models")
        args = (owner, *(addresses[part] for part in parts), terms.parameters.to_abi())
    return load_abi(contract).encode_constructor(args)


def compute_address(account: str, nonce: int) -> str:
    """Return the address of the contract that an account's transaction with this nonce makes."""
    from web3.utils.address import get_create_address  # at use: only a deployment needs it

    return str(get_create_address(account, nonce)).lower()  # type: ignore[arg-type]


async def deploy(
    rpc_url: str,
    private_key: bytes,
    *,
    usdc: str | None = None,
    unbonding_period_s: int = 7 * 86_400,
    bond_period_s: int = 14 * 86_400,
    parameters: MarketParameters | None = None,
    confirmations: int = 0,
) -> Deployment:
    """Deploy the contracts on a chain for development, owned by the key's account; two blocks.

    Without ``usdc`` a worthless test token is deployed, too. Needs an endpoint that simulates on
    pending transactions; ``splitup_deploy.network`` needs none, and can be repeated. Raises
    ChainRejected, for instance for unsafe parameters, and ChainUnavailable.
    """
    terms = Terms(unbonding_period_s, bond_period_s, parameters or MarketParameters())
    async with Rpc(rpc_url) as rpc:
        chain_id = int(await rpc.request("eth_chainId"), 16)
        first_block = int(await rpc.request("eth_blockNumber"), 16)
        genesis = await rpc.request("eth_getBlockByNumber", "0x0", False)
        sender = Sender(rpc, chain_id, private_key, fee_ceiling_wei=tuning.FEE_CEILING_WEI)
        addresses: dict[ContractName, str] = {} if usdc is None else {"usdc": usdc.lower()}
        pending: list[tuple[Submitted, str]] = []
        # No waiting for a block in between: the addresses follow from the nonces.
        for contract in CONTRACTS:
            if contract not in addresses:
                data = encode_creation(contract, sender.address, addresses, terms)
                submitted = await sender.submit(f"deploying {contract}", None, data)
                addresses[contract] = compute_address(sender.address, submitted.nonce)
                pending.append((submitted, addresses[contract]))
        for submitted, address in pending:
            receipt = await sender.wait(submitted)
            if receipt["contractAddress"] != address:
                raise ChainUnavailable(
                    f"{submitted.action} gave the address {receipt['contractAddress']} instead of "
                    f"{address}: another program signs with the same key; stop it and deploy again"
                )
        data = load_abi("nodes").encode_call("setMarket", (addresses["market"],))
        await sender.wait(await sender.submit("nodes.setMarket", addresses["nodes"], data))
        return Deployment(
            chain_id=chain_id,
            genesis_hash=genesis["hash"],
            **addresses,
            confirmations=confirmations,
            first_block=first_block,
        )
