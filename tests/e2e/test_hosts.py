"""A real network, built by the commands of docs/operations.md on hosts of their own.

Each host is a network namespace; they share nothing but the chain and the store. All URLs are
https, all addresses public, and nodes listen on their loopback only, as behind NAT.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from splitup.chain.client import Chain
from splitup.chain.deployment import Deployment
from splitup.chain.rpc import Rpc
from splitup.devnet.anvil import build_command, create_mnemonic, find_anvil
from splitup.devnet.processes import die_with_parent
from splitup.devnet.s3_server import start_object_server
from tests.builders import HANG_S
from tests.e2e.conftest import ROOT
from tests.e2e.hosts import Host, Internet, find_obstacle

PAGE: Final = ROOT / "docs" / "operations.md"
MEMBERS: Final = 4
NODES: Final = 3  # a task's executor, and two who can be its judges
ETHER: Final = 10**18
USDC: Final = 10**6
CHAIN_PORT: Final = 8545
# what the page's hosts listen on, behind TLS
PORTS: Final = {"rpc": CHAIN_PORT, "storage": 8800, **{f"member_{i}": 8700 for i in range(MEMBERS)}}
BLOCK: Final = re.compile(r"^```(\w+) title=\"([^\"]+)\"\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle() or "it can run")


class Page:
    """The page's blocks with a title, which says on which host; each is to be used."""

    def __init__(self) -> None:
        self.blocks = [found.groups() for found in BLOCK.finditer(PAGE.read_text("utf-8"))]

    def take(self, title: str) -> str:
        """Return the next block of this title."""
        place = next(i for i, (_, name, _) in enumerate(self.blocks) if name == title)
        return str(self.blocks.pop(place)[2])

    def take_commands(self, title: str) -> list[str]:
        """Return the commands of the next block of this title."""
        return [line[2:] for line in self.take(title).splitlines() if line.startswith("$ ")]


class RealNetwork:
    """The hosts, and what the page's commands have made on them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.page = Page()
        self.net = Internet(folder)
        stack.callback(self.net.stop)
        self.owner, self.rpc, self.s3 = (self.net.add(name) for name in ("owner", "rpc", "s3"))
        self.storage, self.user = self.net.add("storage"), self.net.add("user")
        self.members = [self.net.add(f"member-{i}") for i in range(MEMBERS)]
        self.nodes = [self.net.add(f"node-{i}") for i in range(NODES)]
        self.objects = self.s3.call(
            lambda: start_object_server(folder / "objects", preexec_fn=die_with_parent)
        )
        stack.callback(self.objects.stop)
        s3_port = int(self.objects.endpoint_url.rpartition(":")[2])
        self.net.publish(**PORTS, s3=s3_port)
        command = build_command(
            find_anvil(),
            CHAIN_PORT,
            mnemonic=create_mnemonic(),
            accounts=1,
            state_file=None,
            block_time_s=1,
            mixed_mining=True,
        )
        self.rpc.serve(" ".join(f"'{word}'" for word in command))

    @property
    def path(self) -> str:
        return f"{Path(sys.executable).parent}"

    def run(self, host: Host, *commands: str) -> str:
        return [host.begin(command).result(HANG_S) for command in commands][-1]

    def run_all(self, hosts: list[Host], commands: list[str]) -> None:
        """Run the commands of the first of these hosts on all of them, each with its own name."""
        for command in commands:
            running = [host.begin(command.replace(hosts[0].name, host.name)) for host in hosts]
            wait_for_all(running)

    def give(self, usdc: int, *accounts: str) -> None:
        """Send ether for gas, and USDC, as a bank would."""

        async def send() -> None:
            async with Rpc(f"http://127.0.0.1:{CHAIN_PORT}") as rpc:
                for account in accounts:
                    await rpc.request("anvil_setBalance", account, hex(ETHER))
            if usdc:
                deployment = Deployment.load(self.owner.folder / "network" / "deployment.json")
                key = (1).to_bytes(32)
                async with await Chain.connect(rpc.url, deployment, private_key=key) as chain:
                    async with Rpc(rpc.url) as again:
                        await again.request("anvil_setBalance", chain.address, hex(ETHER))
                    for account in accounts:
                        await chain.send("usdc", "mint", account, usdc * USDC, wait=False)
                    await chain.send("usdc", "mint", chain.address, 1)

        self.rpc.do(send()).result(HANG_S)

    def describe(self) -> str:
        return "\n".join(f"{h.name}: {h.read_log()[-1500:]}" for h in self.net.hosts.values())


def wait_for_all(running: list[Future[str]]) -> list[str]:
    return [future.result(HANG_S) for future in running]


def read_address(host: Host, folder: str) -> str:
    keystore = json.loads((host.folder / folder / "keystore.json").read_text())
    return "0x" + keystore["address"].removeprefix("0x").lower()


def wait_until(network: RealNetwork, host: Host, command: str, condition: Any) -> Any:
    """Repeat a command with --json until its result is as it should be."""
    ends = time.monotonic() + HANG_S
    while True:
        for other in network.net.hosts.values():
            other.check_running()
        try:
            value = json.loads(network.run(host, f"{command} --json"))
            if condition(value):
                return value
            problem = str(value)
        except AssertionError as error:
            problem = str(error)
        assert time.monotonic() < ends, f"{problem}\n{network.describe()}"


@pytest.fixture
def network(tmp_path: Path) -> Iterator[RealNetwork]:
    with ExitStack() as stack:
        yield RealNetwork(tmp_path / "hosts", stack)


def test_the_pages_commands_make_a_network_on_hosts_of_their_own(network: RealNetwork) -> None:
    page, owner = network.page, network.owner
    began = time.monotonic()

    def note(what: str) -> None:
        print(f"{time.monotonic() - began:5.1f} s  {what}")

    # 1. contracts
    network.run(owner, *page.take_commands("owner"))
    network.give(0, read_address(owner, "network"))
    network.run(owner, *page.take_commands("owner"))
    note("contracts")

    # 2. gateway
    storage = network.storage
    shutil.copy(owner.folder / "network" / "deployment.json", storage.folder)
    shutil.copy(network.objects.credentials_path, storage.folder / "s3-credentials.json")
    (storage.folder / "gateway.toml").write_text(page.take("storage: gateway.toml"))
    for command in page.take_commands("storage"):
        storage.serve(command)
    ping = "import urllib.request as u; u.urlopen('https://storage.example.org/v1/network')"
    wait_for_command(network, storage, f'{sys.executable} -c "{ping}"')
    note("gateway")

    # 3. members, and at the same time the keys of nodes and the user
    join, [node_join, node_stake, node_run] = (
        page.take_commands("member-0"),
        page.take_commands("node-0"),
    )
    user_join, *use = page.take_commands("user")
    running = [node.begin(node_join) for node in network.nodes] + [network.user.begin(user_join)]
    network.run_all(network.members, join)
    wait_for_all(running)
    for member in network.members:
        shutil.copy(member.folder / f"{member.name}.toml", owner.folder)
    network.give(1_000, *(read_address(m, "splitup-member") for m in network.members))
    network.give(1_100, *(read_address(n, "splitup-node") for n in network.nodes))
    network.give(100, read_address(network.user, ".splitup"))
    note("keys")
    staking = [node.begin(node_stake) for node in network.nodes]
    network.run(owner, *page.take_commands("owner"))
    bond, run = page.take_commands("member-0")
    network.run_all(network.members, [bond])
    for member in network.members:
        member.serve(run)
    note("members")

    # 4. nodes and a user
    wait_for_all(staking)
    for node in network.nodes:
        node.serve(node_run)
    (network.user.folder / "examples").symlink_to(ROOT / "examples")
    deposit, register, generate = use
    network.run(network.user, deposit, register)
    note("model registered")
    member = network.members[0]
    status = "splitup-oracle status --config splitup-member/oracle.toml"
    wait_until(network, member, status, lambda found: found["works"])
    for node in network.nodes:
        wait_until(
            network,
            node,
            "splitup-node status --config splitup-node/node.toml",
            lambda found: found["chain"]["active"] and len(found["node"]["tasks"]) > 0,
        )
    note("nodes hold tasks")
    answer = wait_until(network, network.user, generate.removesuffix(" --json"), bool)
    note("text")
    assert answer["text"]
    receipt = wait_until(
        network,
        network.user,
        f"splitup receipt {answer['execution_id']}",
        lambda found: found["status"] == "settled",
    )
    note("receipt")
    assert receipt["payouts"] and not receipt["slashes"]

    # backup and restore
    last = network.members[-1]
    network.run(last, "true")
    last.stop_programs()
    network.run(last, *page.take_commands(f"{last.name}, stopped"))
    *restore, start = page.take_commands(f"{last.name}, restored")
    network.run(last, *restore)
    last.serve(start)
    wait_until(network, member, status, lambda found: found["answering"] == MEMBERS)
    note("restored")
    assert page.blocks == []


def wait_for_command(network: RealNetwork, host: Host, command: str) -> None:
    """Repeat a command until it succeeds."""
    ends = time.monotonic() + HANG_S
    while True:
        try:
            network.run(host, command)
            return
        except AssertionError as error:
            assert time.monotonic() < ends, f"{error}\n{network.describe()}"
            host.check_running()
