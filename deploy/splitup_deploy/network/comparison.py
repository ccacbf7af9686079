"""What the chain holds, compared with the owner's file, and the calls that mend what differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from splitup.chain.abi import ContractName, load_abi
from splitup.chain.client import Chain
from splitup.chain.deployment import check_creation, find_creation
from splitup.chain.rpc import Rpc
from splitup.core.errors import ChainRejected
from splitup.messages.network import Deployment
from splitup_deploy.network.settings import NetworkSettings

OWNED: Final[tuple[ContractName, ...]] = ("committee", "bonds", "nodes", "market")
_ZERO: Final = "0x" + "00" * 20
_G1_PLUS_G1: Final = {"to": "0x" + "00" * 19 + "0b", "data": "0x" + "00" * 256}  # EIP-2537


@dataclass(frozen=True, slots=True)
class ContractCall:
    """A call of one contract that an owner makes."""

    contract: ContractName
    function: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not as the file says; ``call`` mends it, None if nothing we send can."""

    what: str
    found: str
    wanted: str
    call: ContractCall | None
    is_awaited: bool = False  # somebody else has been asked to do it

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        call = None if self.call is None else f"{self.call.contract}.{self.call.function}"
        return {"what": self.what, "found": self.found, "wanted": self.wanted, "call": call}


async def check_chain(rpc: Rpc, settings: NetworkSettings) -> None:
    """Raise ChainRejected unless the chain can hold a network, and its USDC is one."""
    if len(await rpc.request("eth_call", _G1_PLUS_G1, "latest")) != 2 + 256:
        raise ChainRejected(
            f"the chain at {settings.rpc_url} lacks the precompiles of EIP-2537 (BLS12-381), which "
            "check the committee's randomness; use a chain with the Prague upgrade"
        )
    if settings.token is None:
        return
    request = {"to": settings.token, "data": load_abi("usdc").encode_call("decimals", ())}
    if await rpc.request("eth_getCode", settings.token, "latest") == "0x":
        raise ChainRejected(f"usdc: there is no contract at {settings.token} on this chain")
    answer = await rpc.request("eth_call", request, "latest")
    if int(answer, 16) != 6:
        raise ChainRejected(f"usdc: the token at {settings.token} does not have 6 decimals")


async def find_code_problems(
    rpc: Rpc, settings: NetworkSettings, deployment: Deployment
) -> list[str]:
    """Compare how each contract was made with what this version compiles; name what differs."""
    record = settings.load_record()
    addresses = {name: deployment.get_address(name) for name in (*OWNED, "models", "usdc")}
    problems: list[str] = []
    for contract, address in addresses.items():
        if contract == "usdc" and settings.token is not None:
            if address != settings.token:
                problems.append(f"usdc: it is {address}, and the settings say {settings.token}")
            continue
        entry = None if record is None else record.contracts.get(contract)
        found = None if entry is None else await find_creation(rpc, entry)
        if found is None:
            problems.append(
                f"{contract}: {settings.record} names no transaction on this chain that made it"
            )
        elif found.address != address:
            problems.append(
                f"{contract}: the record's transaction made {found.address}, not {address}"
            )
        else:
            try:
                check_creation(contract, found, addresses, settings.bond_period_s)
            except ChainRejected as error:
                problems.append(str(error))
    if deployment.confirmations != settings.confirmations:
        problems.append(
            f"confirmations: {settings.deployment} says {deployment.confirmations}, the settings "
            f"{settings.confirmations}; members that disagree about it cannot make a key"
        )
    return problems


async def compare(chain: Chain, settings: NetworkSettings, account: str) -> list[Difference]:
    """Return what is not as the file says, in the order in which the calls must be made.

    ``account`` is that of the owner's key.
    """
    found: list[Difference] = []

    async def expect(
        contract: ContractName,
        view: str,
        wanted: Any,
        function: str,
        show: Callable[[Any], str] = str,
    ) -> None:
        value = await chain.call(contract, view)
        if value != wanted:
            call = ContractCall(contract, function, (wanted,))
            found.append(Difference(f"{contract}.{view}", show(value), show(wanted), call))

    market = await chain.call("nodes", "market")
    if market != chain.deployment.market:
        call = (
            ContractCall("nodes", "setMarket", (chain.deployment.market,))
            if market == _ZERO
            else None
        )
        found.append(Difference("nodes.market", market, chain.deployment.market, call))
    longer = await chain.call("nodes", "unbondingPeriod") < settings.unbonding_period_s
    if longer:  # it has to exceed the longest execution at all times
        await expect("nodes", "unbondingPeriod", settings.unbonding_period_s, "setUnbondingPeriod")
    found += await _compare_parameters(chain, settings)
    if not longer:
        await expect("nodes", "unbondingPeriod", settings.unbonding_period_s, "setUnbondingPeriod")
    owner = settings.owner or account
    treasury = settings.treasury or owner
    await expect("market", "treasury", treasury, "setTreasury")
    await expect("bonds", "treasury", treasury, "setTreasury")
    await expect("market", "paused", settings.paused, "setPaused", lambda value: str(value).lower())
    found += await _compare_members(chain, settings)
    for contract in OWNED:  # last: whoever has handed the contracts over may change nothing
        found += await _compare_owner(chain, contract, owner, account)
    return found


async def _compare_parameters(chain: Chain, settings: NetworkSettings) -> list[Difference]:
    values = tuple((await chain.call("market", "parameters")).values())
    wanted = settings.market.to_abi()
    if values == wanted:
        return []
    names = asdict(settings.market)
    changed = [place for place, name in enumerate(names) if values[place] != wanted[place]]
    keys = list(names)

    def show(all_values: tuple[int, ...]) -> str:
        return ", ".join(f"{keys[place]} = {all_values[place]}" for place in changed)

    call = ContractCall("market", "setParameters", (wanted,))
    return [Difference("market.parameters", show(values), show(wanted), call)]


async def _compare_members(chain: Chain, settings: NetworkSettings) -> list[Difference]:
    if not settings.members:
        return []
    number = await chain.call("committee", "nextConfiguration")
    number = number or await chain.call("committee", "configuration")
    members = await chain.call("committee", "membersOf", number)
    found, wanted = [tuple(member.values()) for member in members], settings.list_members()
    if found == wanted:
        return []
    call = ContractCall("committee", "setMembers", (wanted,))
    return [Difference("committee.members", _show_members(found), _show_members(wanted), call)]


def _show_members(members: list[tuple[str, str, str]]) -> str:
    return ", ".join(f"{account} at {url}" for account, _, url in members) or "none"


async def _compare_owner(
    chain: Chain, contract: ContractName, owner: str, account: str
) -> list[Difference]:
    found = await chain.call(contract, "owner")
    if found == owner:
        return []
    call: ContractCall | None = ContractCall(contract, "transferOwnership", (owner,))
    is_awaited = await chain.call(contract, "pendingOwner") == owner
    if is_awaited:
        found += ", who has handed it over,"
        call = ContractCall(contract, "acceptOwnership", ()) if account == owner else None
    return [Difference(f"{contract}.owner", found, owner, call, is_awaited)]
