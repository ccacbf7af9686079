"""One real network for all end-to-end tests: starting it takes half a minute."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from splitup.chain.client import Chain
from splitup.client.connection import SplitUp
from splitup.config import NETWORK_FILE, NetworkConfig, find_cache_directory
from splitup.crypto.keystore import load_identity
from splitup.devnet.processes import find_program, read_tail
from splitup.devnet.state import DevnetState, is_ready, read_runtime
from splitup.devnet.status import NetworkHealth, fetch_health
from splitup.messages.network import Deployment
from splitup.net.http import SignedClient
from tests.builders import HANG_S
from tests.texts import read_account

R = TypeVar("R")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "packages-4m"
MODEL = "packages-4m"
DRAFT = "packages-draft-0.7m"  # beside it, with the same vocabulary
PRIVATE = "packages-private"
PRIVATE_0 = "packages-private-0"  # without a block at its user
TARGET_VRAM = "1.7MB"
CHUNK = 8
NODES = 5
NODE_VRAM_BYTES = 100_000_000
PATIENCE_S = 3 * HANG_S  # without any progress
MOST_S = 15 * HANG_S  # with progress
SERVE = Path(__file__).with_name("serve_network.py")


def run_apart(work: Coroutine[Any, Any, R]) -> R:
    """Run it in a thread: in this one the loop of Playwright may run."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


@dataclass
class Network:
    """A devnet directory, and the process that serves it at the moment."""

    directory: Path
    nodes: int = NODES
    members: int = 4
    device: str = ""  # DEV of all parties, by default of the tests
    members_device: str = ""  # that of the members, if they have no other
    script: Path = SERVE
    process: subprocess.Popen[bytes] | None = None
    killed: set[str] = field(default_factory=set)
    replacements: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)  # by name

    @property
    def config(self) -> Path:
        return self.directory / NETWORK_FILE

    @property
    def log(self) -> Path:
        return self.directory / "supervisor.log"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "DEV": self.device} if self.device else {**os.environ}

    def start(self) -> None:
        self.directory.mkdir(exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, self.script, self.directory),
                    *map(str, (self.nodes, NODE_VRAM_BYTES, self.members)),
                    self.members_device,
                ],
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )
        self.wait_for(self.is_ready)

    def register(self, target_vram: str = TARGET_VRAM) -> None:
        """Register the example model, and wait until every node holds all of it."""
        self.register_model(EXAMPLE, MODEL, "--target-vram", target_vram)
        self.wait_for_holders(self.nodes)

    def register_model(self, model: Path, name: str, *options: str) -> None:
        """Register a model; one with ``--vision`` has no chunk.

        At their own prices, the few steps of a test would earn less than a micro-USDC per task.

        Only the first has self-test vectors, which take most of a registration's time: the others'
        numbers are compared with the uncut model here.
        """
        price = () if "--price" in options else ("--price", "12")
        chunk = () if "--vision" in options else ("--chunk", str(CHUNK))
        vectors = () if name == MODEL else ("--no-reference",)
        done = subprocess.run(
            [
                *(find_program("splitup-deploy"), "register", "--json", "--model", model),
                *("--name", name, "--config", self.directory, *chunk, *price, *vectors, *options),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.describe()
        return is_ready(self.directory, self.process.pid)

    def stop(self) -> int:
        """Ask it to stop; return its exit code."""
        assert self.process is not None
        for replacement in self.replacements.values():
            replacement.terminate()
        try:
            for replacement in self.replacements.values():
                replacement.wait(2 * HANG_S)
        finally:  # one that does not stop must not leave the others behind
            for replacement in self.replacements.values():
                replacement.kill()
                replacement.wait()
            self.replacements.clear()
            self.killed.clear()
            self.process.send_signal(signal.SIGTERM)
            ended = self.process.wait(HANG_S)
        return ended

    def replace(self, name: str, *command: str | Path) -> None:
        """Run another program with a party's key and directory, in place of what runs there."""
        [config] = (self.directory / name).glob("*.toml")
        if name in self.replacements:
            self.replacements[name].terminate()
            self.replacements[name].wait(HANG_S)
        elif name not in self.killed:
            self.kill(name)
        with (self.directory / "logs" / f"{name}.log").open("ab") as log:
            self.replacements[name] = subprocess.Popen(
                [*command, "--config", config], stdout=log, stderr=log
            )

    def is_replaced(self, name: str) -> bool:
        """Return whether the new program has written its first status."""
        values = json.loads((self.directory / name / "status.json").read_text())
        return bool(values["pid"] == self.replacements[name].pid)

    @property
    def down(self) -> list[str]:
        """The nodes that were killed and run nowhere."""
        running = {name for name, party in self.replacements.items() if party.poll() is None}
        return sorted(name for name in self.killed - running if name.startswith("node-"))

    def wait_for_all(self) -> None:
        """Wait until every node that is up is live and holds every task of the model."""
        up = self.nodes - len(self.down)
        self.wait_for(lambda: self.fetch_health().live_nodes == up)
        self.wait_for_holders(up)

    def wait_until_gone(self, *names: str) -> None:
        """Wait until no plan can name these nodes, which were killed."""

        def are_gone() -> bool:
            listed = {node.address for node in self.fetch_health().nodes if node.in_snapshot}
            return not any(self.name_of(address) in names for address in listed)

        self.wait_for(are_gone)

    def pid_of(self, name: str) -> int:
        if name in self.replacements:
            return self.replacements[name].pid
        return next(p.pid for p in read_runtime(self.directory).processes if p.name == name)

    def find_store(self) -> int:
        """Return the process id of the object store, a child of the network's own process."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        names = {int(pid): Path(f"/proc/{pid}/comm").read_text() for pid in children.split()}
        return next(pid for pid, name in names.items() if name.strip() == "weed")

    def kill(self, name: str) -> None:
        """Kill a party, whichever process it lives in by now."""
        self.killed.add(name)
        os.kill(self.pid_of(name), signal.SIGKILL)
        if name in self.replacements:
            self.replacements[name].wait(HANG_S)

    def revive(self, *names: str) -> None:
        """Start nodes that were killed, where nobody has yet."""
        for name in names:
            replacement = self.replacements.get(name)
            if replacement is None or replacement.poll() is not None:
                self.replace(name, find_program("splitup-node"), "run")

    def restart(self, *names: str) -> None:
        """Start nodes with what their files say now, and wait as for those that were killed."""
        for name in names:
            self.replace(name, find_program("splitup-node"), "run")
        self.start_again(*names)

    def start_again(self, *names: str) -> None:
        """Start nodes that were killed, and wait until they hold everything again."""
        self.revive(*names)
        for name in names:
            self.wait_for(partial(self.is_replaced, name))
        self.wait_for_all()

    def name_of(self, address: str) -> str:
        """Return the party's name for an account: the keystore in its directory says it."""
        for folder in self.directory.iterdir():
            if read_account(folder) == address:
                return folder.name
        raise AssertionError(f"nobody has {address}")

    async def top_up(self, name: str, spare_micro_usdc: int = 0) -> None:
        """Make a node's stake whole, without which it may not serve, and add to it."""
        folder, config = self.directory / name, NetworkConfig.load(self.config)
        key = load_identity(folder / "keystore.json", folder / "passphrase").private_key
        deployment = Deployment.load(config.deployment)
        async with await Chain.connect(config.rpc_url, deployment, private_key=key) as chain:
            node = await chain.call("nodes", "nodeOf", chain.address)
            least = await chain.call("nodes", "minStake", node["vramGb"])
            amount = max(0, least - node["stake"]) + spare_micro_usdc
            if amount:
                await chain.send("usdc", "mint", chain.address, amount, wait=False)
                await chain.send("usdc", "approve", deployment.nodes, amount, wait=False)
                await chain.send("nodes", "topUp", amount)

    def fetch_health(self) -> NetworkHealth:
        async def fetch() -> NetworkHealth:
            state = DevnetState.load(self.directory)
            assert state is not None
            async with SplitUp.connect(self.config) as net, SignedClient() as http:
                return await fetch_health(net.chain, http, state, self.directory)

        return run_apart(fetch())

    def wait_for_holders(self, count: int, name: str = MODEL) -> None:
        """Wait until ``count`` live nodes hold every task of a model."""

        async def fetch_tasks() -> list[str]:
            async with SplitUp.connect(self.config) as net:
                model = await net.fetch_model(name)
                return [task.task_id for task in model.manifest.tasks]

        tasks = run_apart(fetch_tasks())

        def is_held() -> bool:
            holders = self.fetch_health().count_holders()
            return all(holders[task] >= count for task in tasks)

        self.wait_for(is_held)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait as long as the parties make progress."""
        wait_for(condition, self.describe, self.measure_progress)

    def measure_progress(self) -> tuple[int, int, int]:
        """Return what grows while parties start, compile and load."""
        logs = sum(log.stat().st_size for log in (self.directory / "logs").glob("*.log"))
        resident = 0
        for status in self.directory.glob("node-*/status.json"):
            with contextlib.suppress(OSError, ValueError):  # it is being replaced
                resident += len(json.loads(status.read_text())["resident"])
        kernels = sum(1 for _ in (find_cache_directory() / "kernels").rglob("*"))
        return logs, resident, kernels

    def describe(self) -> str:
        return read_tail(self.log, 30)


def wait_for(
    condition: Callable[[], bool],
    describe: Callable[[], str] = lambda: "",
    measure: Callable[[], object] = lambda: None,
) -> None:
    """Poll processes of other programs, which no event of ours can announce.

    What ``measure`` returns changes as long as there is progress; a slow machine gets more time.
    Looking takes a fifth of it at most: to ask a whole network costs its parties, too.
    """
    now = time.monotonic()
    ends, stalls, seen = now + MOST_S, now + PATIENCE_S, measure()
    while not condition():
        before, now = now, time.monotonic()
        if (found := measure()) != seen:
            seen, stalls = found, now + PATIENCE_S
        assert now < min(ends, stalls), f"not so, and nothing changes any more: {describe()}"
        time.sleep(max(0.2, 4 * (time.monotonic() - before)))
        now = time.monotonic()


@pytest.fixture(scope="package")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    network = Network(tmp_path_factory.mktemp("e2e") / "net")
    try:
        network.start()
        network.register()
        yield network
        assert network.stop() == 0
    finally:
        if network.process is not None and network.process.poll() is None:
            network.stop()


@pytest.fixture(scope="package")
def private(network: Network) -> Network:
    """The network, with the model registered a second time: its ends stay with its users."""
    network.register_model(EXAMPLE, PRIVATE, "--target-vram", TARGET_VRAM, "--private", "1")
    network.wait_for_holders(3, PRIVATE)
    return network


@pytest.fixture(scope="package")
def private_0(network: Network) -> Network:
    """The network, with the model registered so that nodes return the final hidden state."""
    network.register_model(EXAMPLE, PRIVATE_0, "--target-vram", TARGET_VRAM, "--private", "0")
    network.wait_for_holders(3, PRIVATE_0)
    return network
