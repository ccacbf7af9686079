"""The addresses of SplitUp's contracts on one chain, and their deployment."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError
from web3.utils.address import get_create_address

from splitup.chain.abi import ContractName, load_abi
from splitup.chain.rpc import Rpc
from splitup.chain.sender import Sender, Submitted
from splitup.core import tuning
from splitup.core.errors import ChainUnavailable, ConfigurationError
from splitup.messages.network import DeployedContracts


@dataclass(frozen=True, slots=True)
class Deployment:
    """One chain, named by id and genesis block, and the contracts on it (lower-case addresses).

    ``confirmations`` is how many blocks the members wait before they believe what they read. It is
    here because all of them derive from it how long complaints count.
    """

    chain_id: int
    genesis_hash: str
    usdc: str
    committee: str
    bonds: str
    nodes: str
    models: str
    market: str
    confirmations: int = 0

    def get_address(self, contract: ContractName) -> str:
        """Return a contract's address by its short name."""
        address: str = getattr(self, contract)
        return address

    def save(self, path: Path) -> None:
        """Write the deployment as JSON, whole or not at all."""
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", "utf-8")
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a deployment; raise ConfigurationError when it is missing or damaged."""
        try:
            contracts = DeployedContracts.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigurationError(
                f"the deployment file {path} cannot be read ({error.strerror}); "
                "start a network with: splitup up"
            ) from None
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigurationError(
                f"the deployment file {path} is damaged: {'.'.join(map(str, first['loc']))}: "
                f"{first['msg']}; get it again from the operator of the network"
            ) from None
        return cls.from_message(contracts)

    @classmethod
    def from_message(cls, contracts: DeployedContracts) -> Self:
        """Return the deployment that a message names."""
        return cls(**contracts.model_dump())

    def to_message(self) -> DeployedContracts:
        """Return the deployment as a message."""
        return DeployedContracts(**asdict(self))


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
    """Deploy the contracts, owned by the key's account, and connect them.

    Without ``usdc`` a worthless test token is deployed, too. Takes two blocks. Raises
    ChainRejected, for instance for unsafe parameters, and ChainUnavailable.
    """
    async with Rpc(rpc_url) as rpc:
        chain_id = int(await rpc.request("eth_chainId"), 16)
        genesis = await rpc.request("eth_getBlockByNumber", "0x0", False)
        sender = Sender(rpc, chain_id, private_key, fee_ceiling_wei=tuning.FEE_CEILING_WEI)
        pending: list[tuple[Submitted, str]] = []

        async def create(contract: ContractName, *args: Any) -> str:
            data = load_abi(contract).encode_constructor(args)
            submitted = await sender.submit(f"deploying {contract}", None, data)
            address = get_create_address(sender.address, submitted.nonce).lower()  # type: ignore[arg-type]
            pending.append((submitted, address))
            return address

        # No waiting for a block in between: the addresses follow from the nonces.
        owner = sender.address
        token = usdc.lower() if usdc is not None else await create("usdc")
        committee = await create("committee", owner)
        bonds = await create("bonds", owner, token, committee, bond_period_s)
        models = await create("models")
        nodes = await create("nodes", owner, token, unbonding_period_s)
        terms = (parameters or MarketParameters()).to_abi()
        market = await create("market", owner, token, committee, nodes, models, terms)
        for submitted, address in pending:
            receipt = await sender.wait(submitted)
            if receipt["contractAddress"] != address:
                raise ChainUnavailable(
                    f"{submitted.action} gave the address {receipt['contractAddress']} instead of "
                    f"{address}: another program signs with the same key; stop it and deploy again"
                )
        data = load_abi("nodes").encode_call("setMarket", (market,))
        await sender.wait(await sender.submit("nodes.setMarket", nodes, data))
        addresses = token, committee, bonds, nodes, models, market
        return Deployment(chain_id, genesis["hash"], *addresses, confirmations)
