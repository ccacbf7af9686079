"""A real network, built by the commands of docs/operations.md on hosts of their own.

Each host is a network namespace; they share nothing but the chain and the store. All URLs are
https, all addresses public, and nodes listen on their loopback only, as behind NAT.
"""

from __future__ import annotations

import json
import re
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from splitup.chain.client import Chain
from splitup.chain.rpc import Rpc
from splitup.config import find_cache_directory
from splitup.crypto.keys import Identity
from splitup.devnet.anvil import build_command, create_mnemonic, find_anvil
from splitup.devnet.s3_server import start_object_server
from splitup.messages.network import Deployment
from tests.e2e.conftest import PATIENCE_S, ROOT
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
        self.objects = self.s3.call(lambda: start_object_server(folder / "objects"))
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

    def run(self, host: Host, *commands: str) -> str:
        return [host.begin(command).result(PATIENCE_S) for command in commands][-1]

    def run_all(self, hosts: list[Host], commands: list[str]) -> None:
        """Run the commands of the first of these hosts on all of them, each with its own name."""
        for command in commands:
            running = [host.begin(command.replace(hosts[0].name, host.name)) for host in hosts]
            wait_for_all(running)

    def give(self, usdc: int, *accounts: str) -> None:
        """Send ether for gas, and USDC, as a bank would."""

        url = f"http://127.0.0.1:{CHAIN_PORT}"
        key = (1).to_bytes(32)

        async def send() -> None:
            async with Rpc(url) as rpc:
                for account in (*accounts, Identity.from_private_key(key).address):
                    await rpc.request("anvil_setBalance", account, hex(ETHER))
            if not usdc:
                return
            deployment = Deployment.load(self.owner.folder / "network" / "deployment.json")
            async with await Chain.connect(url, deployment, private_key=key) as chain:
                for account in accounts:
                    await chain.send("usdc", "mint", account, usdc * USDC)

        self.rpc.do(send()).result(PATIENCE_S)

    def describe(self) -> str:
        return "\n".join(f"{h.name}: {h.read_log()[-1500:]}" for h in self.net.hosts.values())


def wait_for_all(running: list[Future[str]]) -> list[str]:
    return [future.result(PATIENCE_S) for future in running]


def read_address(host: Host, folder: str) -> str:
    keystore = json.loads((host.folder / folder / "keystore.json").read_text())
    return "0x" + keystore["address"].removeprefix("0x").lower()


def wait_until(network: RealNetwork, what: str, condition: Callable[[], Any]) -> None:
    """Poll other hosts' programs, which no event of ours can announce."""
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        for host in network.net.hosts.values():
            host.check_running()
        assert time.monotonic() < ends, f"{what}: not so in time\n{network.describe()}"
        time.sleep(0.1)


def fetch_json(host: Host, url: str) -> dict[str, Any]:
    """Ask a program on its own host's loopback; {} while it does not answer."""

    def fetch() -> dict[str, Any]:
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                return dict(json.load(reply))
        except (OSError, ValueError):
            return {}

    return host.call(fetch)


def count_tasks(node: Host) -> int:
    """Return how many tasks a node holds, from the file that it keeps about itself."""
    try:
        status = json.loads((node.folder / "splitup-node" / "data" / "status.json").read_text())
    except (OSError, ValueError):
        return 0
    return len(status["resident"])


@pytest.fixture
def network(tmp_path: Path) -> Iterator[RealNetwork]:
    with ExitStack() as stack:
        yield RealNetwork(tmp_path / "hosts", stack)


@pytest.mark.long  # tests/docs looks whether each command of the page exists
def test_the_pages_commands_make_a_network_on_hosts_of_their_own(network: RealNetwork) -> None:
    page, owner = network.page, network.owner
    network.run(owner, *page.take_commands("owner"))
    network.give(0, read_address(owner, "network"))
    network.run(owner, *page.take_commands("owner"))
    start_gateway(network)
    generate = populate(network)

    answer = json.loads(network.run(network.user, generate))
    assert answer["text"]
    show = f"splitup receipt {answer['execution_id']} --json"
    receipt = json.loads(network.run(network.user, show))
    assert receipt["status"] == "settled" and not receipt["slashes"], receipt

    restore_member(network, network.members[-1])
    assert page.blocks == []


def start_gateway(network: RealNetwork) -> None:
    storage = network.storage
    shutil.copy(network.owner.folder / "network" / "deployment.json", storage.folder)
    shutil.copy(network.objects.credentials_path, storage.folder / "s3-credentials.json")
    (storage.folder / "gateway.toml").write_text(network.page.take("storage: gateway.toml"))
    for command in network.page.take_commands("storage"):
        storage.serve(command)
    wait_until(network, "gateway", lambda: fetch_json(storage, "http://127.0.0.1:8800/v1/network"))


def populate(network: RealNetwork) -> str:
    """Appoint members, start nodes, register a model; return the command that uses it.

    What the page does one after the other, and does not depend on each other, is done at once.
    """
    page, owner, user = network.page, network.owner, network.user
    join, node_commands = page.take_commands("member-0"), page.take_commands("node-0")
    node_join, node_stake, node_run = node_commands
    user_join, deposit, register, generate = page.take_commands("user")
    running = [node.begin(node_join) for node in network.nodes] + [user.begin(user_join)]
    network.run_all(network.members, join)
    wait_for_all(running)
    network.give(1_000, *(read_address(m, "splitup-member") for m in network.members))
    network.give(1_111, *(read_address(n, "splitup-node") for n in network.nodes))
    network.give(100, read_address(user, ".splitup"))

    staking = [node.begin(node_stake) for node in network.nodes]
    (user.folder / "examples").symlink_to(ROOT / "examples")
    registering = user.begin(f"{deposit} > deposit.log && {register} --json")
    bond, run = page.take_commands("member-0")
    bonding = [member.begin(bond) for member in network.members]
    for member in network.members:
        shutil.copy(member.folder / f"{member.name}.toml", owner.folder)
    network.run(owner, *page.take_commands("owner"))
    wait_for_all(bonding)
    for member in network.members:
        member.serve(run)
    wait_for_all(staking)
    for node in network.nodes:
        keep_kernels(node)
        node.serve(node_run)
    tasks = len(json.loads(registering.result(PATIENCE_S))["tasks"])
    wait_until(network, "group key", lambda: is_ready(network.members))
    wait_until(network, "tasks", lambda: all(count_tasks(node) >= tasks for node in network.nodes))
    return generate


def restore_member(network: RealNetwork, member: Host) -> None:
    """Stop a member, and start it from its backup."""
    member.stop_programs()
    network.run(member, *network.page.take_commands(f"{member.name}, stopped"))
    *restore, start = network.page.take_commands(f"{member.name}, restored")
    network.run(member, *restore)
    member.serve(start)
    wait_until(network, "restored member", lambda: is_ready(network.members))
    status = "splitup-oracle status --config splitup-member/oracle.toml --json"
    assert json.loads(network.run(member, status))["answering"] == MEMBERS


def keep_kernels(node: Host) -> None:
    """Put compiled kernels on the disk of a node, as if it had run before."""
    compiled = find_cache_directory() / "kernels"
    if compiled.is_dir():
        shutil.copytree(compiled, node.folder / "splitup-node" / "data" / "kernels")


def is_ready(members: list[Host]) -> bool:
    """Return whether all members see all others and agree on lists of nodes."""
    found = [fetch_json(member, "http://127.0.0.1:8700/v1/status") for member in members]
    return all(status.get("sequence", 0) > 0 and not status["peers_down"] for status in found)
