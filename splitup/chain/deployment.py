"""The contracts of a network: their terms, and their creation, which can be repeated.

A contract's address follows from its creator and a nonce. The nonce is written to a record before
anything is sent, and only that transaction is ever sent under it: so no contract is made twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Final, Self

from pydantic import Field

from splitup.chain.abi import CONTRACTS, ContractName, load_abi
from splitup.chain.rpc import Rpc
from splitup.chain.sender import ReservedNonce, Sender, Submitted
from splitup.core import tuning
from splitup.core.errors import ChainRejected, ChainUnavailable
from splitup.crypto.keys import Identity
from splitup.messages.base import AddressField, Bytes32Field, Message
from splitup.messages.network import Deployment

# What a constructor fixes for ever; owner, period of unbonding and parameters can be changed later.
_FIXED: Final[Mapping[str, ContractName]] = {
    "usdc_": "usdc",
    "committee_": "committee",
    "nodes_": "nodes",
    "models_": "models",
}


@dataclass(frozen=True, slots=True)
class MarketParameters:
    """The market's economics; see ``Parameters`` in IMarket.sol. Unsafe ones are refused."""

    reservation_bps: int = 2_000
    min_deadline_s: int = 5
    max_deadline_s: int = 86_400
    settlement_grace_s: int = 3_600
    fee_bps: int = 100
    treasury_bps: int = 2_000
    reward_milli: int = 1_200
    slash_milli: int = 100_000
    sampling_bps: int = 800
    validation_bonus_milli: int = 0
    outside_gain_micro_usdc: int = 300_000
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


@dataclass(frozen=True, slots=True)
class Creation:
    """A contract's address, and the data of the transaction that made it ("0x…")."""

    address: str
    data: str


class CreationEntry(Message):
    """One contract's nonce, and the hashes of all transactions that were sent under it."""

    nonce: Annotated[int, Field(ge=0)]
    hashes: Annotated[tuple[Bytes32Field, ...], Field(max_length=256)] = ()


class CreationRecord(Message):
    """Which transactions of which account make a network's contracts."""

    chain_id: Annotated[int, Field(ge=1)]
    genesis_hash: Bytes32Field
    creator: AddressField
    first_block: Annotated[int, Field(ge=0)] = 0  # the head when the first one was to be made
    contracts: dict[ContractName, CreationEntry] = Field(default_factory=dict)

    @classmethod
    async def start(cls, rpc: Rpc, creator: str) -> Self:
        """Return the record of an account that has made nothing yet."""
        chain_id, genesis, head = await asyncio.gather(
            rpc.request("eth_chainId"),
            rpc.request("eth_getBlockByNumber", "0x0", False),
            rpc.request("eth_blockNumber"),
        )
        return cls(
            chain_id=int(chain_id, 16),
            genesis_hash=genesis["hash"],
            creator=creator,
            first_block=int(head, 16),
        )

    def make_deployment(
        self, addresses: dict[ContractName, str], confirmations: int = 0
    ) -> Deployment:
        """Return the deployment of contracts that were made at these addresses."""
        return Deployment(
            chain_id=self.chain_id,
            genesis_hash=self.genesis_hash,
            **addresses,
            confirmations=confirmations,
            first_block=self.first_block,
        )

    def with_entry(self, contract: ContractName, entry: CreationEntry | None) -> Self:
        """Return the record with another entry of one contract, or without it."""
        contracts = {name: old for name, old in self.contracts.items() if name != contract}
        if entry is not None:
            contracts[contract] = entry
        return self.model_copy(update={"contracts": contracts})


async def deploy(rpc_url: str, private_key: bytes, terms: Terms | None = None) -> Deployment:
    """Deploy the contracts on a chain for development, owned by the key's account; two blocks.

    A worthless test token is deployed, too. Needs an endpoint that simulates on pending
    transactions; ``splitup_deploy.network`` needs none, and can be repeated. Raises ChainRejected,
    for instance for unsafe parameters, and ChainUnavailable.
    """
    async with Rpc(rpc_url) as rpc:
        record = await CreationRecord.start(rpc, Identity.from_private_key(private_key).address)
        ceiling = tuning.FEE_CEILING_WEI
        sender = Sender(rpc, record.chain_id, private_key, fee_ceiling_wei=ceiling)
        addresses = await create_contracts(
            rpc, sender, record, terms or Terms(), usdc=None, at_once=True
        )
        data = load_abi("nodes").encode_call("setMarket", (addresses["market"],))
        await sender.wait(await sender.submit("nodes.setMarket", addresses["nodes"], data))
        return record.make_deployment(addresses)


async def create_contracts(
    rpc: Rpc,
    sender: Sender,
    record: CreationRecord,
    terms: Terms,
    save: Callable[[CreationRecord], None] = lambda record: None,
    say: Callable[[str], None] = lambda text: None,
    *,
    usdc: str | None,
    at_once: bool = False,
) -> dict[ContractName, str]:
    """Make what the record does not show as made; return all addresses.

    ``save`` must put the record on disk before it returns. Without ``usdc`` a worthless test token
    is made. ``at_once``: without waiting for a block in between. Raises ChainRejected, and
    ChainUnavailable, after which it can be repeated.
    """
    addresses: dict[ContractName, str] = {} if usdc is None else {"usdc": usdc.lower()}
    sent: list[Submitted] = []
    for contract in CONTRACTS:
        if contract in addresses:
            continue
        entry = record.contracts.get(contract)
        if entry is not None:
            found = await find_creation(rpc, entry)
            if found is not None:
                check_creation(contract, found, addresses, terms.bond_period_s)
                addresses[contract] = found.address
                continue
            count = await rpc.request("eth_getTransactionCount", record.creator, "latest")
            if int(count, 16) > entry.nonce:
                say(f"another transaction took nonce {entry.nonce}, meant for {contract}")
                entry = None
        if entry is None:
            entry = CreationEntry(nonce=await sender.fetch_next_nonce())
        data = encode_creation(contract, sender.address, addresses, terms)
        record, submitted = await _send(
            sender, contract, data, record.with_entry(contract, entry), save
        )
        addresses[contract] = compute_address(record.creator, entry.nonce)
        if at_once:
            sent.append(submitted)
            continue
        gas = int((await sender.wait(submitted))["gasUsed"], 16)
        say(f"{contract} is at {addresses[contract]} ({gas:,} gas)")
    for submitted in sent:
        await sender.wait(submitted)
    return addresses


async def _send(
    sender: Sender,
    contract: ContractName,
    data: str,
    record: CreationRecord,
    save: Callable[[CreationRecord], None],
) -> tuple[CreationRecord, Submitted]:
    """Send the transaction of a contract's entry; return the new record and what was sent."""
    entry = record.contracts[contract]

    def save_hashes() -> None:
        nonlocal record
        changed = CreationEntry(nonce=entry.nonce, hashes=tuple(reserved.hashes))
        record = record.with_entry(contract, changed)
        save(record)

    reserved = ReservedNonce(entry.nonce, list(entry.hashes), save_hashes)
    submitted = await sender.submit(f"deploying {contract}", None, data, reserved)
    return record, submitted


async def find_creation(rpc: Rpc, entry: CreationEntry) -> Creation | None:
    """Return what a mined transaction made, None when none made a contract (yet)."""
    for transaction in entry.hashes:
        receipt = await rpc.request("eth_getTransactionReceipt", transaction)
        if receipt and int(receipt["status"], 16) == 1 and receipt["contractAddress"]:
            found = await rpc.request("eth_getTransactionByHash", transaction)
            if found is not None:
                return Creation(receipt["contractAddress"].lower(), found["input"])
    return None


def check_creation(
    contract: ContractName,
    creation: Creation,
    addresses: Mapping[ContractName, str],
    bond_period_s: int,
) -> None:
    """Raise ChainRejected unless a transaction made this version's contract for these others.

    The code that a chain holds follows from the data of the transaction, and so do all constants in
    it: nothing else has to be compared.
    """
    args = load_abi(contract).decode_constructor(creation.data)
    if args is None:
        raise ChainRejected(
            f"{contract}: its code is not this version's; use the version of SplitUp that deployed "
            "it, or deploy anew in another directory"
        )
    expected: dict[str, Any] = {
        name: addresses[part] for name, part in _FIXED.items() if name in args
    }
    if "releasePeriod_" in args:
        expected["releasePeriod_"] = bond_period_s
    for name, value in expected.items():
        if args[name] != value:
            raise ChainRejected(
                f"{contract}: it was made with {name.rstrip('_')} = {args[name]}, which is fixed, "
                f"and the settings say {value}; correct them, or deploy anew in another directory"
            )


async def wait_for_pool(rpc: Rpc, account: str) -> None:
    """Wait until no transaction of an account is pending; raise ChainUnavailable."""
    ends = time.monotonic() + tuning.MINE_TIMEOUT_S
    while True:
        mined, known = await asyncio.gather(
            *(rpc.request("eth_getTransactionCount", account, tag) for tag in ("latest", "pending"))
        )
        if int(known, 16) <= int(mined, 16):
            return
        if time.monotonic() > ends:
            raise ChainUnavailable(
                f"a transaction of {account} (nonce {int(mined, 16)}) is not mined within "
                f"{tuning.MINE_TIMEOUT_S:.0f} s; wait for it, then repeat the command"
            )
        await asyncio.sleep(tuning.RECEIPT_POLL_S)
