"""What SplitUp's contracts are told when they are made, and the address that each gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from splitup.chain.abi import ContractName, load_abi


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
