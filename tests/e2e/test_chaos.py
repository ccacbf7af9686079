"""Fifty streamed answers, while every kind of process is killed, stopped and cut off.

Each answer is the undisturbed one, whole, and paid once; nobody honest loses anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from splitup_gateway.api_keys import ApiKeys, OpenCharge

from splitup.client.connection import SplitUp
from splitup.core import tuning
from splitup.devnet.ports import find_free_ports
from splitup.devnet.processes import find_program
from splitup.devnet.state import DevnetState
from tests.builders import HANG_S
from tests.chain.proxy import Proxy
from tests.e2e.conftest import MODEL, NODE_VRAM_BYTES, Network, wait_for
from tests.e2e.server import run_keys

SCRIPT = Path(__file__).with_name("chaos_network.py")
NODES, MEMBERS = 6, 4
ANSWERS = int(os.environ.get("CHAOS_ANSWERS", "50"))
AT_ONCE = 4  # each with a key of its own
TOKENS = 100
PROMPTS = ("library for", "tool to", "python3", "a parser", "fonts")
SEED = int(os.environ.get("CHAOS_SEED", "1"))
LEASE_S = 60  # after which what a killed server had open is settled
PAUSES_S = (1.0, 4.0)  # that something is stopped or cut off

# what is done to whom; "kill" lets it be started again, a client's by itself
DISTURBANCES = (
    *((party, "kill") for party in ("node", "worker", "member", "gateway", "store", "serve")),
    *((party, "stop") for party in ("node", "worker", "member", "gateway", "store", "serve")),
    *((party, "cut") for party in ("node", "member", "gateway", "store", "chain", "serve")),
    *(("chain", "stop"), ("client", "kill"), ("client", "cut")),
)


class Server:
    """``splitup serve`` at one address, behind a proxy."""

    def __init__(self, network: Network, database: str) -> None:
        self.network = network
        [self.port] = find_free_ports(1)
        self.log = network.directory / "logs" / "serve.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.command = [
            *(find_program("splitup"), "serve", MODEL, "--port", str(self.port)),
            *("--config", network.directory, "--keys", database, "--leases", str(AT_ONCE)),
            *("--lease-seconds", str(LEASE_S)),
        ]

    def start(self) -> None:
        """Start it, and wait until it listens."""
        begin = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            process = subprocess.Popen(self.command, stdout=log, stderr=log)
        self.process = process

        def is_listening() -> bool:
            assert process.poll() is None, self.read_log()
            return b"base URL" in self.log.read_bytes()[begin:]

        wait_for(is_listening, self.read_log)

    def read_log(self) -> str:
        return self.log.read_text()[-3000:]

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def restart(self) -> None:
        """Kill it, and start it again."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.start()

    def stop(self) -> None:
        """Let it end and pay what it has open."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            assert self.process.wait(2 * HANG_S) == 0, self.read_log()


@dataclass(eq=False)
class Client:
    """Asks for one text, and comes back until it has all of it."""

    http: aiohttp.ClientSession
    url: str
    secret: str
    body: dict[str, Any]
    key: str  # Idempotency-Key
    note: Callable[[], None] = lambda: None  # called with every token
    text: str = ""
    last: str = ""  # the event that was read last
    reason: str | None = None
    usage: dict[str, Any] | None = None
    is_whole: bool = False
    is_killed: bool = False
    errors: list[dict[str, Any]] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    connections: int = 0
    reply: aiohttp.ClientResponse | None = None

    async def ask(self) -> None:
        """Read the whole text."""
        while not self.is_whole:
            self.connections += 1
            if self.is_killed:
                self.is_killed = False
                self._forget()
            try:
                await self._read()
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                self.refusals[type(error).__name__] += 1
                await asyncio.sleep(0.2)  # as clients do

    def kill(self) -> None:
        """Break the connection, and know nothing any more but the request and its key."""
        self.is_killed = True
        if self.reply is not None:
            self.reply.close()

    def _forget(self) -> None:
        self.text, self.last, self.reason = "", "", None

    async def _read(self) -> None:
        headers = {"Authorization": f"Bearer {self.secret}"}
        if self.last:
            path, _, _ = self.last.partition(":")
            headers["Last-Event-ID"] = self.last
            asking = self.http.get(f"{self.url}/v1/streams/{path}", headers=headers)
        else:
            headers["Idempotency-Key"] = self.key
            asking = self.http.post(f"{self.url}/v1/completions", headers=headers, json=self.body)
        async with asking as self.reply:
            if self.reply.status != 200:
                await self._note_refusal(self.reply)
                return
            name = ""
            async for line in self.reply.content:
                if line.startswith(b"id: "):
                    name = line[4:].decode().strip()
                elif line.startswith(b"data: "):
                    self.last = name
                    self._take(line[6:].decode().strip())

    async def _note_refusal(self, reply: aiohttp.ClientResponse) -> None:
        text = await reply.text()
        self.refusals[f"{reply.status} {text[:200]}"] += 1
        if reply.status in (404, 410):
            self._forget()
            return
        assert reply.status in (429, 503), text
        await asyncio.sleep(float(reply.headers.get("Retry-After", "0.2")))

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.is_whole = True
            return
        event = json.loads(data)
        if "error" in event:
            self.errors.append(event)
            self._forget()
            return
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            self.text += choice["text"]
            self.reason = choice["finish_reason"] or self.reason
            self.note()


class Chaos:
    """The network with its proxies, and who asks."""

    def __init__(self, network: Network, server: Server, proxies: dict[str, Proxy]) -> None:
        self.network = network
        self.server = server
        self.proxies = proxies  # by party
        self.random = random.Random(SEED)
        self.clients: set[Client] = set()  # those that ask
        self.tokens = 0
        self.done = 0  # disturbances
        self._changed = asyncio.Event()

    def note(self) -> None:
        """Count a token."""
        self.tokens += 1
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for tokens or disturbances."""
        while not condition():
            async with asyncio.timeout(3 * HANG_S):
                await self._changed.wait()

    async def disturb(self) -> None:
        """Do everything to everybody once, at moments in which texts are written."""
        order = list(DISTURBANCES)
        self.random.shuffle(order)
        for party, action in order:
            due = self.tokens + self.random.randrange(5, 40)
            await self.wait_until(lambda due=due: self.tokens >= due)  # type: ignore[misc]
            began = time.monotonic()
            names = await self._do(party, action)
            done = time.monotonic()
            await asyncio.to_thread(self.network.wait_for, self._is_ready)
            later = time.monotonic() - done
            print(f"{names} {action}: {done - began:.1f} s, ready {later:.1f} s later", flush=True)
            self.done += 1
            self._tell()

    def _is_ready(self) -> bool:
        health = self.network.fetch_health()
        return health.is_ready() and len(health.gateways) == 2 and health.live_nodes == NODES

    async def _do(self, party: str, action: str) -> str:
        """Disturb a party of a kind; return which one when it is over."""
        counts = {"node": NODES, "worker": NODES, "member": MEMBERS, "gateway": 2}
        number = self.random.randrange(counts.get(party, 1))
        name = f"{party}-{number}" if party in counts else party
        pause_s = self.random.uniform(*PAUSES_S)
        if party == "client":
            if action == "kill":
                self.random.choice(sorted(self.clients, key=lambda one: one.key)).kill()
                return name
            party = name = "serve"  # the way to it
        if action == "cut":
            self.proxies[name].cut()
            await asyncio.sleep(pause_s)
            self.proxies[name].mend()
        elif action == "stop":
            pid = self._find(party, number)
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(pause_s)
            with contextlib.suppress(ProcessLookupError):  # a worker that hangs is replaced
                os.kill(pid, signal.SIGCONT)
        elif party == "serve":
            await asyncio.to_thread(self.server.restart)
        else:
            await self._kill(party, number)
        return name

    async def _kill(self, party: str, number: int) -> None:
        """Kill it, and wait until there is another one."""
        pid = self._find(party, number)
        os.kill(pid, signal.SIGKILL)

        def is_another() -> bool:
            with contextlib.suppress(LookupError, OSError):
                return self._find(party, number) != pid
            return False

        await asyncio.to_thread(self.network.wait_for, is_another)

    def _find(self, party: str, number: int) -> int:
        if party == "serve":
            return self.server.pid
        if party == "worker":
            return find_worker(self.network.pid_of(f"node-{number}"))
        names = {"store": "objects", "chain": "chain"}
        return self.network.pid_of(names.get(party, f"{party}-{number}"))


def find_worker(daemon: int) -> int:
    """Return the process in which a node computes; raise LookupError and OSError without one."""
    for pid in Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split():
        if b"--memory" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    raise LookupError(f"process {daemon} has no worker")


@contextlib.asynccontextmanager
async def run_network(folder: Path) -> AsyncIterator[tuple[Network, dict[str, Proxy]]]:
    """Run a network whose parties are behind proxies; give these by party."""
    folder.mkdir()  # noqa: ASYNC240
    state = DevnetState.create(nodes=NODES, vram_bytes=NODE_VRAM_BYTES, members=MEMBERS)
    state.save(folder)
    [store] = find_free_ports(1)
    ports = {**dict(state.named_ports()), "store": store}
    proxies = {name: await Proxy.open(0, port) for name, port in ports.items()}
    links = {str(ports[name]): proxy.port for name, proxy in proxies.items()}
    (folder / "proxies.json").write_text(json.dumps({"store": store, "proxies": links}))
    network = Network(folder, nodes=NODES, members=MEMBERS, script=SCRIPT)
    try:
        await asyncio.to_thread(network.start)
        await asyncio.to_thread(network.register)
        yield network, proxies
    finally:
        if network.process is not None and network.process.poll() is None:
            await asyncio.to_thread(network.stop)
        for proxy in proxies.values():
            await proxy.close()


def make_bodies() -> Iterator[dict[str, Any]]:
    """Yield the requests; every third is greedy."""
    for number in range(ANSWERS):
        yield {
            **{"model": MODEL, "prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": TOKENS},
            **{"temperature": 0.8 if number % 3 else 0, "seed": number},
            **{"stream": True, "stream_options": {"include_usage": True}},
        }


async def ask_all(
    clients: list[Client], chaos: Chaos, may_begin: Callable[[int], bool] = lambda number: True
) -> None:
    """Let all ask, some at once; a client begins when it may."""
    numbers = itertools.count()

    async def ask(key: int) -> None:
        for client in clients[key::AT_ONCE]:
            number = next(numbers)
            await chaos.wait_until(lambda number=number: may_begin(number))  # type: ignore[misc]
            chaos.clients.add(client)
            await client.ask()
            chaos.clients.discard(client)

    async with asyncio.TaskGroup() as group:
        for key in range(AT_ONCE):
            group.create_task(ask(key))


async def fetch_receipts(network: Network) -> list[Any]:
    """Return the receipts of all executions of this network's user, once all are closed."""
    async with SplitUp.connect(network.config) as net:
        events = await net.chain.fetch_events("market")
        asked = [event for event in events if event.name == "RequestNodeSelections"]
        ids = [event.args["executionId"] for event in asked if event.args["client"] == net.address]
        return [await net.receipt(each) for each in ids]


@pytest.mark.long  # in small: test_failover.py, test_gateways.py, and test_streams.py of serve
async def test_fifty_streams_survive_everything(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'keys.sqlite'}"
    secrets = [
        str(run_keys(database, "new", f"key-{number}", "--budget", "1")["key"])
        for number in range(AT_ONCE)
    ]
    async with run_network(tmp_path / "net") as (network, proxies):
        server = Server(network, database)
        proxies["serve"] = await Proxy.open(0, server.port)
        url = f"http://127.0.0.1:{proxies['serve'].port}"
        patience = aiohttp.ClientTimeout(total=None, sock_read=4 * tuning.STREAM_QUIET_S)
        try:
            await asyncio.to_thread(server.start)
            async with aiohttp.ClientSession(timeout=patience) as http:
                chaos = Chaos(network, server, proxies)

                def make_clients(kind: str) -> list[Client]:
                    return [
                        Client(http, url, secrets[n % AT_ONCE], body, f"{kind} {n}", chaos.note)
                        for n, body in enumerate(make_bodies())
                    ]

                undisturbed, disturbed = make_clients("undisturbed"), make_clients("disturbed")
                began = time.monotonic()
                await ask_all(undisturbed, chaos)
                print(f"undisturbed: {time.monotonic() - began:.1f} s", flush=True)
                per_disturbance = (ANSWERS - AT_ONCE) / len(DISTURBANCES)
                async with asyncio.TaskGroup() as group:
                    disturbing = group.create_task(chaos.disturb())
                    await ask_all(
                        disturbed,
                        chaos,
                        lambda n: disturbing.done() or n < AT_ONCE + chaos.done * per_disturbance,
                    )
        finally:
            await asyncio.to_thread(server.stop)
            print(server.read_log())
        clients = [*undisturbed, *disturbed]
        for client in clients:
            if client.errors or client.refusals:
                print(client.key, client.connections, client.errors, dict(client.refusals))
        assert [one.text for one in disturbed] == [one.text for one in undisturbed]
        assert all(one.reason in ("stop", "length") for one in clients)
        told = sum(read_bill(one)["steps"] for one in clients)
        bills = Counter[str]()
        for number, client in enumerate(clients):
            bills[f"key-{number % ANSWERS % AT_ONCE}"] += read_bill(client)["cost_micro_usdc"]
        keys: Any = run_keys(database, "list")["keys"]
        spent = {key["name"]: key["spent_micro_usdc"] for key in keys}
        receipts = await fetch_receipts(network)
        settled = sum(one.steps for one in receipts if one.status == "settled")
        print(f"{len(receipts)} executions:", Counter(one.status for one in receipts))
        print(f"steps told {told}, settled {settled}; told {dict(bills)}, charged {spent}")
        assert not [one.slashes for one in receipts if one.slashes]
        assert {one.status for one in receipts} == {"settled"}
        # what a killed server had ordered, and nobody was told of, is paid as well, not by a key;
        # where a node of such an execution is killed, too, its last second was not stored: unpaid
        assert 0.99 * told <= settled <= 1.05 * told
        assert all(spent[key] >= bill for key, bill in bills.items())


@pytest.mark.long  # in small: test_charges.py of serve
async def test_a_killed_server_leaves_no_charge_but_for_what_is_settled(
    network: Network, tmp_path: Path
) -> None:
    """It is killed during a stream that nobody comes back for, and an answer in one piece."""
    database = f"sqlite:///{tmp_path / 'keys.sqlite'}"
    secret = str(run_keys(database, "new", "ann", "--budget", "1")["key"])
    server = Server(network, database)
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    name = network.directory / "streams" / f"127.0.0.1:{server.port}.name"

    def list_ordered() -> dict[str, OpenCharge]:
        found = keys.list_charges(name.read_text())
        return {one.id: one for one in found if one.orders}

    async with SplitUp.connect(network.config) as net:
        manifest = (await net.fetch_model(MODEL)).manifest
        assert manifest.text is not None
        never = dict.fromkeys(map(str, manifest.text.eos_ids), -100)
        body = {"model": MODEL, "prompt": "library for", "temperature": 0, "logit_bias": never}
        with contextlib.closing(ApiKeys.open(database)) as keys:
            try:
                await asyncio.to_thread(server.start)
                headers = {"Authorization": f"Bearer {secret}"}
                async with aiohttp.ClientSession(headers=headers) as http:

                    async def ask(tokens: int) -> int:
                        async with http.post(url, json={**body, "max_tokens": tokens}) as reply:
                            return int((await reply.json())["usage"]["splitup"]["cost_micro_usdc"])

                    told = sum(await asyncio.gather(ask(9), ask(9)))  # which opens two leases
                    whole = asyncio.create_task(ask(2 * TOKENS))
                    streamed = {**body, "max_tokens": 2 * TOKENS, "stream": True}
                    async with http.post(url, json=streamed) as reply:
                        stream = reply.headers["x-splitup-stream"]
                        for _ in range(20):
                            await reply.content.readuntil(b"\n\n")
                        await asyncio.to_thread(wait_for, lambda: len(list_ordered()) == 2)
                        os.kill(server.pid, signal.SIGKILL)
                    assert isinstance(
                        (await asyncio.gather(whole, return_exceptions=True))[0],
                        aiohttp.ClientError,
                    )
                left = list_ordered()
                assert len(left) == 2 and stream in left
                await asyncio.to_thread(server.restart)
                await asyncio.to_thread(
                    wait_for, lambda: not keys.list_charges(name.read_text()), server.read_log
                )
            finally:
                await asyncio.to_thread(server.stop)
            [spent] = [key.spent_micro_usdc for key in keys.list()]
        costs = {}
        for one in left.values():
            [order] = one.orders
            receipt = await net.receipt(order.execution_id)
            costs[one.id] = manifest.cost_micro_usdc(receipt.steps - order.first)
    print(f"told {told}, settled {costs}, stream {costs[stream]}, spent {spent}")
    most, step = told + sum(costs.values()), manifest.cost_micro_usdc(1)
    assert costs[stream] > 10 * step
    # of a stream the key pays what is told, and not what was ordered besides
    assert most - 4 * step <= spent <= most


def read_bill(client: Client) -> dict[str, Any]:
    """Return what an answer says that it took."""
    assert client.usage is not None
    bill: dict[str, Any] = client.usage["splitup"]
    return bill
