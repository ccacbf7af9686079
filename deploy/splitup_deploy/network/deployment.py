"""Planning, making and checking a network's contracts. All three can be repeated at any time."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final

from splitup.chain.abi import CONTRACTS, ContractName, load_abi
from splitup.chain.account_lock import AccountLock
from splitup.chain.client import Chain
from splitup.chain.deployment import (
    CreationRecord,
    compute_address,
    create_contracts,
    encode_creation,
    find_creation,
    wait_for_pool,
)
from splitup.chain.rejections import explain_refusal
from splitup.chain.rpc import Rpc, RpcError
from splitup.chain.sender import Sender, fetch_fees
from splitup.core import tuning
from splitup.core.errors import ChainRejected, ChainUnavailable, ConfigurationError
from splitup.crypto.keys import Identity
from splitup.messages.network import Deployment
from splitup_deploy.network.comparison import (
    OWNED,
    ContractCall,
    Difference,
    check_chain,
    compare,
    find_code_problems,
)
from splitup_deploy.network.settings import NetworkSettings

_LOCK_S: Final = 1.0
_EXPOSURE_FLOOR_MICRO_USDC: Final = 5_000_000  # as in NodeRegistry.sol
_CALL_GAS: Final = 60_000  # a setter of one or two slots costs less
_MEMBER_GAS: Final = 115_000  # four slots, an endpoint of two slots, and the event


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A transaction to send. ``gas`` is None where the endpoint could not estimate it."""

    what: str
    gas: int | None


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """What ``deploy`` would do now, and what it would cost at the chain's present price of gas."""

    chain_id: int
    account: str
    balance_wei: int
    gas_price_wei: int
    gas_price_cap_wei: int
    contracts: dict[str, str]  # those that exist: address by name
    steps: tuple[PlannedStep, ...]
    blocked: tuple[Difference, ...]  # what no transaction of this account can mend

    @property
    def gas(self) -> int:
        """All gas that is known."""
        return sum(step.gas or 0 for step in self.steps)


async def make_plan(settings: NetworkSettings) -> DeploymentPlan:
    """Return what is missing on the chain; sends nothing, and opens no key.

    New contracts are simulated: what they would refuse, such as unsafe parameters, is an error now.
    Raises ChainRejected and ChainUnavailable.
    """
    account = settings.read_account()
    async with Rpc(settings.rpc_url) as rpc:
        await check_chain(rpc, settings)
        record = await _open_record(rpc, settings, account)
        addresses = await _find_contracts(rpc, settings, record)
        blocked: list[Difference] = []
        if len(addresses) < len(CONTRACTS):
            steps = await _plan_contracts(rpc, settings, account, addresses)
        else:
            deployment = record.make_deployment(addresses, settings.confirmations)
            steps = []
            async with await Chain.connect(settings.rpc_url, deployment) as chain:
                for difference in await compare(chain, settings, account):
                    if difference.call is None:
                        blocked.append(difference)
                    else:
                        steps.append(await _plan_call(rpc, chain, account, difference))
        price, balance, fees = await asyncio.gather(
            rpc.request("eth_gasPrice"),
            rpc.request("eth_getBalance", account, "latest"),
            fetch_fees(rpc, settings.fee_ceiling_wei),
        )
        return DeploymentPlan(
            record.chain_id,
            account,
            int(balance, 16),
            int(price, 16),
            max(fees.values()),
            {name: address for name, address in addresses.items()},
            tuple(steps),
            tuple(blocked),
        )


async def deploy_network(
    settings: NetworkSettings, identity: Identity, say: Callable[[str], None]
) -> Deployment:
    """Make the chain as the file says; write the deployment's file once all of it is verified.

    Does only what is missing, so that it can be repeated after any failure. Raises ChainRejected,
    ChainUnavailable, ConfigurationError and Unavailable.
    """
    async with (
        Rpc(settings.rpc_url) as rpc,
        _hold_account(rpc, identity.address),
    ):
        await check_chain(rpc, settings)
        record = await _open_record(rpc, settings, identity.address)
        sender = Sender(
            rpc,
            record.chain_id,
            identity.private_key,
            fee_ceiling_wei=settings.fee_ceiling_wei,
        )

        def save(changed: CreationRecord) -> None:
            nonlocal record
            record = changed
            save_record(settings, changed)

        addresses = await create_contracts(
            rpc, sender, record, settings.terms, save, say, usdc=settings.token
        )
        deployment = record.make_deployment(addresses, settings.confirmations)
        await wait_for_pool(rpc, identity.address)
        async with await Chain.connect(
            settings.rpc_url,
            deployment,
            private_key=identity.private_key,
            fee_ceiling_wei=settings.fee_ceiling_wei,
        ) as chain:
            for difference in await compare(chain, settings, identity.address):
                if difference.call is None:
                    continue
                call = difference.call
                await chain.send(call.contract, call.function, *call.args)
                say(f"{difference.what}: {difference.wanted}")
            await _wait_for_depth(chain, settings.confirmations, say)
            problems = await find_code_problems(rpc, settings, deployment)
            problems += [
                f"{left.what}: it is {left.found} instead of {left.wanted}"
                for left in await compare(chain, settings, identity.address)
                if not left.is_awaited
            ]
        if problems:
            raise ChainUnavailable(
                f"the chain does not hold all of it: {problems[0]}; repeat the command, which does "
                "only what is missing"
            )
        deployment.save(settings.deployment)
        return deployment


async def verify_network(settings: NetworkSettings) -> list[str]:
    """Return what differs between the chain, this version's contracts, and the file; [] if nothing.

    Needs no key file if the settings name the owner. Raises ConfigurationError, ChainUnavailable.
    """
    deployment = Deployment.load(settings.deployment)
    owner = settings.owner or settings.read_account()
    async with (
        await Chain.connect(settings.rpc_url, deployment) as chain,
        Rpc(settings.rpc_url) as rpc,
    ):
        problems = await find_code_problems(rpc, settings, deployment)
        if problems:  # what other code answers says nothing
            return problems
        return [
            f"{left.what}: it is {left.found} instead of {left.wanted}"
            for left in await compare(chain, settings, owner)
        ]


async def reset_members(settings: NetworkSettings, identity: Identity) -> int:
    """Appoint the file's members without a handover; return the configuration's number.

    They make a new group key: for when more than f members are gone, who cannot hand theirs over.
    """
    if not settings.members:
        raise ConfigurationError(f"{settings.path} lists no members")
    deployment = Deployment.load(settings.deployment)
    key = identity.private_key
    async with await Chain.connect(settings.rpc_url, deployment, private_key=key) as chain:
        await chain.send("committee", "resetMembers", settings.list_members())
        return int(await chain.call("committee", "configuration"))


def save_record(settings: NetworkSettings, record: CreationRecord) -> None:
    """Write the record, durably, whole or not at all. Raises ConfigurationError."""
    draft = settings.record.with_name(settings.record.name + ".new")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(record.model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(settings.record)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {settings.record} ({error.strerror}); nothing is sent without it"
        ) from None


# ---- what is there -----------------------------------------------------------------------------


async def _open_record(rpc: Rpc, settings: NetworkSettings, account: str) -> CreationRecord:
    new, record = await CreationRecord.start(rpc, account), settings.load_record()
    if record is None:
        return new
    if (record.chain_id, record.genesis_hash) != (new.chain_id, new.genesis_hash):
        raise ConfigurationError(
            f"{settings.record} is of chain {record.chain_id} and the endpoint {settings.rpc_url} "
            f"serves another one ({new.chain_id}); correct rpc_url in {settings.path}"
        )
    if record.creator != account and len(record.contracts) < len(CONTRACTS) - 1:
        raise ConfigurationError(
            f"the contracts of {settings.record} are made by {record.creator}, and the key is that "
            f"of {account}; finish with the first key, then hand over with 'owner'"
        )
    return record


async def _find_contracts(
    rpc: Rpc, settings: NetworkSettings, record: CreationRecord
) -> dict[ContractName, str]:
    addresses: dict[ContractName, str] = {}
    if settings.token is not None:
        addresses["usdc"] = settings.token
    for contract, entry in record.contracts.items():
        if found := await find_creation(rpc, entry):
            addresses[contract] = found.address
    return addresses


@contextlib.asynccontextmanager
async def _hold_account(rpc: Rpc, account: str) -> AsyncIterator[None]:
    """Keep a second 'deploy' with this key away: it would overwrite the record."""
    lock = AccountLock(int(await rpc.request("eth_chainId"), 16), account, "deploy")
    await lock.acquire(_LOCK_S)
    try:
        yield
    finally:
        lock.release()


async def _wait_for_depth(chain: Chain, confirmations: int, say: Callable[[str], None]) -> None:
    start = (await chain.fetch_head()).number
    if confirmations:
        say(f"waiting until block {start + confirmations}")
    while True:
        if (await chain.fetch_head()).number >= start + confirmations:
            return
        await asyncio.sleep(10 * tuning.RECEIPT_POLL_S)


# ---- gas ---------------------------------------------------------------------------------------


async def _plan_contracts(
    rpc: Rpc, settings: NetworkSettings, account: str, addresses: dict[ContractName, str]
) -> list[PlannedStep]:
    """Simulate the missing contracts; their addresses are only what they would be now."""
    nonce = int(await rpc.request("eth_getTransactionCount", account, "latest"), 16)
    known, steps = dict(addresses), []
    for contract in CONTRACTS:
        if contract in known:
            continue
        data = encode_creation(contract, account, known, settings.terms)
        gas = await _simulate(rpc, contract, {"from": account, "data": data}, known, settings)
        steps.append(PlannedStep(f"deploy {contract}", gas))
        known[contract] = compute_address(account, nonce)
        nonce += 1
    for call, gas in _list_first_calls(settings, account, known["market"]):
        steps.append(PlannedStep(f"{call.contract}.{call.function}", gas))
    return steps


async def _simulate(
    rpc: Rpc,
    contract: ContractName,
    call: dict[str, str],
    addresses: dict[ContractName, str],
    settings: NetworkSettings,
) -> int | None:
    params: list[Any] = [call, "latest"]
    if contract == "market":  # its rules ask the node registry, which may not exist yet
        stand_in = _encode_registry(settings.unbonding_period_s)
        params.append({addresses["nodes"]: {"code": stand_in}})
    try:
        return int(await rpc.request("eth_estimateGas", *params), 16)
    except RpcError as error:
        if contract == "market" and not error.is_revert:
            return None  # an endpoint that takes no overrides of a contract's code
        raise explain_refusal(f"deploying {contract}", error) from None


def _encode_registry(unbonding_period_s: int) -> str:
    """Return code that answers EXPOSURE_FLOOR() with the floor, all else with the period."""
    selector = load_abi("nodes").encode_call("EXPOSURE_FLOOR", ())[2:10]
    give_period = f"67{unbonding_period_s:016x}5f5260205ff3"  # PUSH8 MSTORE RETURN
    give_floor = f"5b67{_EXPOSURE_FLOOR_MICRO_USDC:016x}5f5260205ff3"
    # PUSH0 CALLDATALOAD PUSH1 224 SHR PUSH4 selector EQ PUSH1 target JUMPI
    start = f"5f3560e01c63{selector}1460{{:02x}}57"
    target = len(start.format(0)) // 2 + len(give_period) // 2
    return "0x" + start.format(target) + give_period + give_floor


def _list_first_calls(
    settings: NetworkSettings, account: str, market: str
) -> list[tuple[ContractCall, int]]:
    owner = settings.owner or account
    calls: list[tuple[ContractCall, int]] = [
        (ContractCall("nodes", "setMarket", (market,)), _CALL_GAS)
    ]
    if (settings.treasury or owner) != account:
        calls += [
            (ContractCall(name, "setTreasury", ()), _CALL_GAS) for name in ("market", "bonds")
        ]
    if settings.paused:
        calls.append((ContractCall("market", "setPaused", (True,)), _CALL_GAS))
    if settings.members:
        gas = _CALL_GAS + _MEMBER_GAS * len(settings.members)
        calls.append((ContractCall("committee", "setMembers", ()), gas))
    if owner != account:
        calls += [(ContractCall(name, "transferOwnership", (owner,)), _CALL_GAS) for name in OWNED]
    return calls


async def _plan_call(rpc: Rpc, chain: Chain, account: str, difference: Difference) -> PlannedStep:
    call = difference.call
    assert call is not None
    data = load_abi(call.contract).encode_call(call.function, call.args)
    to = chain.deployment.get_address(call.contract)
    what = f"{call.contract}.{call.function}: {difference.found} becomes {difference.wanted}"
    try:
        found = await rpc.request("eth_estimateGas", {"from": account, "to": to, "data": data})
    except RpcError as error:
        refusal = explain_refusal(f"{call.contract}.{call.function}", error)
        if isinstance(refusal, ChainRejected):
            raise refusal from None
        return PlannedStep(what, None)
    return PlannedStep(what, int(found, 16))
