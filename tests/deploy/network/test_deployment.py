"""A network's contracts on a real chain: planned, deployed, broken off, resumed, verified."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from splitup_deploy.cli.commands import app
from splitup_deploy.network.deployment import (
    deploy_network,
    make_plan,
    reset_members,
    verify_network,
)
from splitup_deploy.network.settings import NetworkSettings
from typer.testing import CliRunner, Result

from splitup.chain.abi import CONTRACTS
from splitup.chain.client import Chain
from splitup.chain.deployment import find_creation
from splitup.chain.rpc import Rpc
from splitup.chain.sender import Sender
from splitup.core.errors import ChainRejected, ChainUnavailable, ConfigurationError
from splitup.crypto.keys import Identity, generate_identity
from splitup.crypto.keystore import DEVNET_WORK_FACTOR, create_identity, create_passphrase
from splitup.messages.network import Deployment
from splitup.storage import private_files
from tests.builders import address, find_free_port
from tests.local_chain import start_anvil
from tests.parameters import some_of

MNEMONIC = "test test test test test test test test test test test junk"
ETHER = 10**18
MEMBERS = [generate_identity() for _ in range(4)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rpc_url() -> AsyncIterator[str]:
    async with start_anvil(find_free_port(), mnemonic=MNEMONIC) as anvil:
        yield anvil.url


class Owner:
    """An owner's directory, with a key of its own that has ether."""

    def __init__(self, folder: Path, rpc_url: str) -> None:
        self.folder, self.rpc_url = folder, rpc_url
        self.identity = self.add_key("")
        self.said: list[str] = []

    def add_key(self, prefix: str) -> Identity:
        create_passphrase(self.folder / f"{prefix}passphrase")
        return create_identity(
            self.folder / f"{prefix}keystore.json",
            self.folder / f"{prefix}passphrase",
            work_factor=DEVNET_WORK_FACTOR,
        )

    @property
    def path(self) -> Path:
        return self.folder / "network.toml"

    def write(self, *, market: str = "", members: int = 0, **changes: Any) -> NetworkSettings:
        values = {
            "rpc_url": self.rpc_url,
            "keystore": "keystore.json",
            "passphrase_file": "passphrase",
            "usdc": "test",
            "confirmations": 0,
            "deployment": "deployment.json",
            "record": "record.json",
            **changes,
        }
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        lines += ["[market]", market]
        for place, member in enumerate(MEMBERS[:members]):
            lines += ["[[members]]", f'account = "{member.address}"']
            lines += [f'signing_key = "{member.signing_key_hex}"']
            lines += [f'endpoint = "https://member-{place}.example.org"']
        self.path.write_text("\n".join(lines) + "\n")
        return NetworkSettings.load(self.path)

    async def deploy(self, settings: NetworkSettings) -> Deployment:
        return await deploy_network(settings, self.identity, self.said.append)

    async def count_transactions(self) -> int:
        async with Rpc(self.rpc_url) as rpc:
            count = await rpc.request("eth_getTransactionCount", self.identity.address, "latest")
            return int(count, 16)


async def give_ether(rpc_url: str, account: str) -> None:
    async with Rpc(rpc_url) as rpc:
        await rpc.request("anvil_setBalance", account, hex(ETHER))


@pytest_asyncio.fixture(loop_scope="module")
async def owner(tmp_path: Path, rpc_url: str) -> Owner:
    made = Owner(tmp_path, rpc_url)
    await give_ether(rpc_url, made.identity.address)
    return made


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_plan_says_what_deploying_costs(owner: Owner) -> None:
    settings = owner.write(members=4)
    plan = await make_plan(settings)
    assert [step.what for step in plan.steps] == [
        *(f"deploy {name}" for name in CONTRACTS),
        "nodes.setMarket",
        "committee.setMembers",
    ]
    assert await owner.count_transactions() == 0 and not settings.record.exists()
    deployment = await owner.deploy(settings)
    assert Deployment.load(settings.deployment) == deployment
    async with Rpc(owner.rpc_url) as rpc:
        left = int(await rpc.request("eth_getBalance", owner.identity.address, "latest"), 16)
        record = settings.load_record()
        assert record is not None
        for step in plan.steps[: len(CONTRACTS)]:
            name = step.what.removeprefix("deploy ")
            found = await find_creation(rpc, record.contracts[name])  # type: ignore[index]
            assert found is not None and step.gas is not None
            receipt = await rpc.request(
                "eth_getTransactionReceipt",
                record.contracts[name].hashes[0],  # type: ignore[index]
            )
            assert abs(step.gas - int(receipt["gasUsed"], 16)) < step.gas / 20
    spent = ETHER - left
    assert 0.5 * plan.gas * plan.gas_price_wei < spent <= plan.gas * plan.gas_price_cap_wei
    assert (await make_plan(settings)).steps == ()
    before = await owner.count_transactions()
    assert await owner.deploy(settings) == deployment
    assert await owner.count_transactions() == before
    assert await verify_network(settings) == []


async def test_unsafe_parameters_are_refused_before_anything_is_sent(owner: Owner) -> None:
    settings = owner.write(market="slash_milli = 10_000")
    with pytest.raises(ChainRejected, match="deploying market was refused: cheating would be"):
        await make_plan(settings)
    settings = owner.write(unbonding_period_s=100)
    with pytest.raises(ChainRejected, match="deploying market was refused"):
        await make_plan(settings)
    assert await owner.count_transactions() == 0


async def test_s85_bonds_outlast_the_executions_that_former_members_sign_for(owner: Owner) -> None:
    longest = 86_400 + 3_600
    owner.write(bond_period_s=longest + 1)
    with pytest.raises(ConfigurationError, match=f"a former member signs .* up to {longest} s"):
        owner.write(bond_period_s=longest)
    with pytest.raises(ConfigurationError, match="make it longer, or max_deadline_s shorter"):
        owner.write(market="max_deadline_s = 1_209_600")


def break_off(patch: pytest.MonkeyPatch, place: int) -> None:
    """End the work as a killed process does: before the n-th sending if odd, after it if even."""
    request, sent = Rpc.request, 0

    async def request_or_end(self: Rpc, method: str, *params: Any, **more: Any) -> Any:
        nonlocal sent
        if method != "eth_sendRawTransaction":
            return await request(self, method, *params, **more)
        sent += 1
        if 2 * sent - 1 == place:
            raise asyncio.CancelledError
        answer = await request(self, method, *params, **more)
        if 2 * sent == place:
            raise asyncio.CancelledError
        return answer

    patch.setattr(Rpc, "request", request_or_end)


@pytest.mark.parametrize("place", some_of([1, 2, 5, 6, 11, 12, 13, 14], 1, 6, 11, 14))
async def test_a_deployment_that_breaks_goes_on_and_deploys_nothing_twice(
    owner: Owner, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = owner.write()
    with monkeypatch.context() as patch:
        break_off(patch, place)
        with pytest.raises(asyncio.CancelledError):
            await owner.deploy(settings)
    assert not settings.deployment.exists()
    await owner.deploy(settings)
    assert await owner.count_transactions() == len(CONTRACTS) + 1  # and nodes.setMarket
    assert await verify_network(settings) == []


async def test_a_nonce_that_another_program_took_is_replaced(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = owner.write()
    with monkeypatch.context() as patch:
        break_off(patch, 2 * 4 - 1)  # before the fourth contract, nodes
        with pytest.raises(asyncio.CancelledError):
            await owner.deploy(settings)
    async with Rpc(owner.rpc_url) as rpc:  # the same key, in a wallet
        sender = Sender(rpc, 31_337, owner.identity.private_key, fee_ceiling_wei=10**12)
        await sender.wait(await sender.submit("a payment", address(7), "0x"))
    await owner.deploy(settings)
    assert "another transaction took nonce 3, meant for nodes" in owner.said
    assert await owner.count_transactions() == len(CONTRACTS) + 2
    assert await verify_network(settings) == []


async def test_what_a_reorganisation_took_back_is_made_again_at_the_same_address(
    owner: Owner,
) -> None:
    settings = owner.write()
    async with Rpc(owner.rpc_url) as rpc:
        before = await rpc.request("evm_snapshot")
        first = await owner.deploy(settings)
        assert await rpc.request("evm_revert", before)
    with pytest.raises(ChainUnavailable, match="it has no usdc contract"):
        await verify_network(settings)
    assert await owner.deploy(settings) == first
    assert await verify_network(settings) == []


async def test_the_chain_follows_the_file(owner: Owner, rpc_url: str) -> None:
    deployment = await owner.deploy(owner.write())
    changed = owner.write(
        market="fee_bps = 150\nreservation_bps = 3_000",
        members=4,
        unbonding_period_s=8 * 86_400,
        treasury=address(9),
        paused=True,
    )
    found = await verify_network(changed)
    names = [problem.partition(":")[0] for problem in found]
    assert names == [
        "nodes.unbondingPeriod",
        "market.parameters",
        "market.treasury",
        "bonds.treasury",
        "market.paused",
        "committee.members",
    ]
    assert "fee_bps = 100, reservation" not in found[1] and "fee_bps = 100" in found[1]
    await owner.deploy(changed)
    assert await verify_network(changed) == []
    assert await reset_members(changed, owner.identity) == 2  # the same members, without a key
    with pytest.raises(ConfigurationError, match="lists no members"):
        await reset_members(owner.write(), owner.identity)

    heir = owner.add_key("heir-")
    await give_ether(rpc_url, heir.address)
    handed = owner.write(owner=heir.address, treasury=address(9))
    await owner.deploy(handed)  # pays back to the first parameters, then hands over
    assert "who has handed it over" in (await verify_network(handed))[0]
    await deploy_network(handed, heir, owner.said.append)
    assert await verify_network(handed) == []
    with pytest.raises(ChainRejected, match="does not own the contract"):
        await owner.deploy(owner.write(owner=heir.address, treasury=address(9), paused=True))
    async with await Chain.connect(rpc_url, deployment) as chain:
        assert await chain.call("market", "owner") == heir.address


async def test_what_cannot_be_changed_is_refused_by_name(owner: Owner) -> None:
    await owner.deploy(owner.write())
    with pytest.raises(ChainRejected, match=r"bonds: it was made with releasePeriod = 1209600"):
        await owner.deploy(owner.write(bond_period_s=13 * 86_400))
    found = await verify_network(owner.write(confirmations=3))
    assert len(found) == 1 and found[0].startswith("confirmations:")
    settings = owner.write()
    deployment = Deployment.load(settings.deployment)
    record = settings.load_record()
    assert record is not None
    # a record that names another contract's transaction: other code than this version's
    swapped = record.with_entry("market", record.contracts["nodes"])
    settings.record.write_text(swapped.model_dump_json())
    assert [p.partition(":")[0] for p in await verify_network(settings)] == ["market"]
    settings.record.write_text(record.model_dump_json())
    fields = json.loads(settings.deployment.read_text())
    settings.deployment.write_text(json.dumps(fields | {"bonds": deployment.models}))
    found = await verify_network(settings)
    assert len(found) == 1 and found[0].startswith("bonds: the record's transaction made")
    settings.record.unlink()
    deployment.save(settings.deployment)
    found = await verify_network(settings)
    assert len(found) == len(CONTRACTS) and "names no transaction" in found[0]


async def test_the_token_must_be_one(owner: Owner) -> None:
    with pytest.raises(ChainRejected, match="usdc: there is no contract at"):
        await make_plan(owner.write(usdc=address(5)))
    first = await owner.deploy(owner.write())
    (owner.folder / "record.json").unlink()
    with pytest.raises((ChainRejected, ChainUnavailable)):  # a contract, but no token
        await make_plan(owner.write(usdc=first.bonds))
    settings = owner.write(usdc=first.usdc)
    again = await owner.deploy(settings)
    assert again.usdc == first.usdc and again.market != first.market
    assert await verify_network(settings) == []


async def test_one_deploy_at_a_time(owner: Owner) -> None:
    settings = owner.write()
    results = await asyncio.gather(
        *(owner.deploy(settings) for _ in range(3)), return_exceptions=True
    )
    deployment = Deployment.load(settings.deployment)
    for result in results:  # one waited for the other and found all done, or gave up
        assert result == deployment or "another command is using" in str(result), result
    assert await owner.count_transactions() == len(CONTRACTS) + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"usdc": "0x12"}, "'usdc' in"),
        ({"confirmations": 99}, "'confirmations' in"),
        ({"members": 3}, "3 members are listed"),
        ({"market": "fee_bp = 1"}, "'market' in"),
        ({"colour": 1}, "'colour' in"),
    ],
)
async def test_a_wrong_setting_is_named(owner: Owner, change: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        owner.write(**change)


async def test_the_commands(tmp_path: Path, rpc_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create = partial(create_identity, work_factor=DEVNET_WORK_FACTOR)
    monkeypatch.setattr(private_files, "create_identity", create)
    folder = tmp_path / "owner"
    config = ("--config", folder / "network.toml")

    async def run(verb: str, *options: str | Path) -> Result:
        arguments = ["network", verb, *map(str, options)]
        return await asyncio.to_thread(CliRunner().invoke, app, arguments)

    init = ("--data-dir", folder, "--rpc-url", rpc_url, "--usdc", "test", "--confirmations", "0")
    made = await run("init", *init, "--json")
    assert made.exit_code == 0, made.output
    await give_ether(rpc_url, json.loads(made.stdout)["owner"])
    again = await run("init", *init)
    assert again.exit_code == 2 and "exists already" in again.output
    plan = await run("plan", *config)
    assert plan.exit_code == 0 and "deploy market" in plan.stdout
    assert "owner: appoints members" in plan.stdout
    refused = await run("deploy", *config)
    assert refused.exit_code == 2 and "add --yes" in refused.output
    assert not (folder / "record.json").exists()
    done = await run("deploy", "--yes", "--json", *config)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads((folder / "deployment.json").read_text())
    assert (await run("verify", *config)).exit_code == 0
    text = (folder / "network.toml").read_text()
    (folder / "network.toml").write_text(text.replace("paused = false", "paused = true"))
    differs = await run("verify", *config)
    assert differs.exit_code == 1 and "market.paused: it is false instead of true" in differs.stdout
