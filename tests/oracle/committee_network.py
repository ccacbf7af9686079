"""Four committee processes on a real chain, with nodes and a gateway that the test plays itself."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from splitup_node.committee.committee_client import CommitteeClient

from splitup.chain.client import Chain
from splitup.chain.committee_reader import Committees
from splitup.chain.deployment import deploy
from splitup.core.errors import PeerFault, Refused, Unavailable
from splitup.crypto.keys import Identity
from splitup.crypto.keystore import DEVNET_WORK_FACTOR, create_identity, create_passphrase
from splitup.crypto.quorum import compute_execution_id
from splitup.devnet.anvil import derive_key
from splitup.devnet.ports import find_free_ports
from splitup.messages import api
from splitup.messages.base import ZERO_BYTES32
from splitup.messages.completions import (
    EMPTY_DIGEST,
    Completion,
    End,
    ExecutorCommitment,
    TaskCommitment,
)
from splitup.messages.network import Deployment
from splitup.messages.plans import PlanCertificate
from splitup.messages.snapshots import Heartbeat
from splitup.messages.verification import (
    ValidatorCommitment,
    VerificationOrder,
    VerificationResult,
)
from splitup.net.http import SignedClient
from splitup.net.http_server import Server, make_app, read_json, serve_app
from splitup.protocol.committee.certificates import check_draw
from splitup.protocol.execution.ends import sign_end
from tests.builders import COMMON_CLASS, HANG_S, make_chain_manifest
from tests.local_chain import start_anvil
from tests.oracle.exchange import Exchange

MNEMONIC = "test test test test test test test test test test test junk"
STAKE_MICRO_USDC = 2_200_000_000
TASKS = 3
STEPS = 4
QUORUM = 3  # of four members
MANIFEST = make_chain_manifest(TASKS)
CLIENT = Identity.from_private_key((999).to_bytes(32, "big"))  # signs frames; pays nothing


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclass
class Node:
    """Heartbeats, and does what a node does on chain, without computing anything."""

    identity: Identity
    chain: Chain
    http: SignedClient
    members: list[str]
    plans: dict[str, float] = field(default_factory=dict)  # execution -> when it was told
    orders: list[VerificationOrder] = field(default_factory=list)
    reply: dict[str, Any] = field(default_factory=dict)  # to the latest heartbeat
    server: Server | None = None
    heads: dict[str, str] = field(default_factory=dict)  # endpoint -> block that it named
    sequence: int = 0
    gates: dict[str, asyncio.Event] = field(default_factory=dict)  # executions that wait for these
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.committees = Committees(self.chain)

    async def start(self) -> None:
        app = make_app()
        app.add_routes(
            [
                web.get("/v1/ping", self._ping),
                web.post(api.PLAN_CERTIFICATE.path, self._plan),
                web.post(api.VERIFICATION_ORDER.path, self._verify),
            ]
        )
        self.server = await serve_app(app, "127.0.0.1", 0)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.server:
            await self.server.close()
        await self.http.close()

    async def beat(self) -> None:
        while True:
            self.sequence += 1
            heartbeat = Heartbeat(
                node=self.identity.address,
                boot_id="ab" * 32,
                sequence=self.sequence,
                sent_at_ms=int(time.time() * 1000),
                block_hash=ZERO_BYTES32,
                queue_ms=0,
                resident=tuple(sorted(task.task_id for task in MANIFEST.tasks)),
                vram_free_bytes=0,
                determinism=COMMON_CLASS,
            )
            # a member that is down must not hold up the others' heartbeats
            for endpoint in self.members:
                self.spawn(self._beat_to(endpoint, heartbeat))
            await asyncio.sleep(1)

    async def _beat_to(self, endpoint: str, heartbeat: Heartbeat) -> None:
        """Name the block that this member named last, and once more the one it names now."""
        for _ in range(2):
            head = self.heads.get(endpoint, ZERO_BYTES32)
            named = heartbeat.model_copy(update={"block_hash": head})
            token = self.http.sign(api.HEARTBEAT, self.chain.deployment.committee, named)
            try:
                reply = await self.http.post_token(api.HEARTBEAT, endpoint, token)
            except (PeerFault, Refused, Unavailable):
                return
            self.heads[endpoint] = reply["block"]
            if "tasks" in reply:
                self.reply = reply
                return

    def spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _ping(self, _: web.Request) -> web.Response:
        return web.json_response({"node": self.identity.address})

    async def _plan(self, request: web.Request) -> web.Response:
        certificate = PlanCertificate.from_value(await read_json(request))
        await self.committees.check_certificate(certificate)
        execution_id = certificate.plan.request.execution_id
        if execution_id not in self.plans:
            self.plans[execution_id] = time.monotonic()
            self.spawn(self._execute(certificate))
        return web.json_response({})

    async def _execute(self, certificate: PlanCertificate) -> None:
        execution_id = certificate.plan.request.execution_id
        entries = tuple(
            TaskCommitment(
                task=task,
                inputs=(digest("in", execution_id, task),),
                outputs=(digest("in", execution_id, task + 1),),
                state=EMPTY_DIGEST,
            )
            for task, executor in enumerate(certificate.plan.executors())
            if executor == self.identity.address
        )
        if not entries:
            return
        completion = Completion(
            execution_id=execution_id,
            node=self.identity.address,
            tasks=entries,
            salt="0x" + digest("salt"),
            end=sign_end(CLIENT, End(execution_id=execution_id, steps=STEPS, inputs=())),
        )
        if execution_id in self.gates:
            await self.gates[execution_id].wait()
        herald = self._open_herald()
        commitment = ExecutorCommitment(
            execution_id=execution_id,
            node=completion.node,
            root=completion.root(),
            end=completion.end,
        )
        self.spawn(herald.spread(api.EXECUTOR_COMMITMENT, commitment, math.inf))
        assert await herald.wait_until_due(execution_id, None, math.inf)
        await herald.spread(api.COMPLETION, completion, math.inf)

    def _open_herald(self) -> CommitteeClient:
        return CommitteeClient(self.http, self.committees.fetch_of)

    async def _verify(self, request: web.Request) -> web.Response:
        order = VerificationOrder.from_value(await read_json(request))
        check_draw(order.draw, await self.committees.fetch_of(order.draw.execution_id))
        self.orders.append(order)
        execution_id = order.draw.execution_id
        result = VerificationResult(
            execution_id=execution_id,
            task=order.task,
            validator=self.identity.address,
            inputs=(digest("in", execution_id, order.task),),
            outputs=(digest("in", execution_id, order.task + 1),),
            state=EMPTY_DIGEST,
            salt="0x" + digest("salt", self.identity.address),
            error="",
        )
        self.spawn(self._report(result))
        return web.json_response({})

    async def _report(self, result: VerificationResult) -> None:
        validator_commitment = ValidatorCommitment(
            execution_id=result.execution_id,
            task=result.task,
            validator=result.validator,
            root=result.root(),
        )
        herald = self._open_herald()
        if await herald.wait_until_due(result.execution_id, validator_commitment, math.inf):
            await herald.spread(api.VERIFICATION_RESULT, result, math.inf)


@dataclass
class Network:
    """Everything that runs, and what a client does."""

    directory: Path
    rpc_url: str
    deployment: Deployment
    owner: Chain
    client: Chain
    http: SignedClient
    nodes: list[Node]
    rows: list[tuple[str, str, str]]  # account, signing key, endpoint of every member process
    processes: dict[int, asyncio.subprocess.Process] = field(default_factory=dict)
    exchange: Exchange = field(default_factory=Exchange)
    nonce: int = 0
    verify_bps: int = 800

    @property
    def endpoints(self) -> list[str]:
        return [endpoint for _, _, endpoint in self.rows]

    def signal_member(self, place: int, number: int) -> None:
        self.processes[place].send_signal(number)

    def cut_member(self, place: int) -> None:
        """Keep a member from hearing anybody and from reaching another one; it sees the chain."""
        self.exchange.cut(place, self.processes[place].pid)

    async def start_member(self, place: int) -> None:
        log = (self.directory / f"member{place}.log").open("ab")
        self.processes[place] = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).parent / "splitup-oracle"),
            "run",
            "--config",
            str(self.directory / f"member{place}.toml"),
            stderr=log,
            stdout=log,
        )
        log.close()

    async def stop_member(self, place: int, number: int = signal.SIGTERM) -> int:
        process = self.processes.pop(place)
        process.send_signal(number)
        return await asyncio.wait_for(process.wait(), HANG_S)

    async def wait_until(self, check: Callable[[], Any], timeout_s: float = HANG_S) -> Any:
        """Poll; looking takes a fifth of the time at most, as it costs the parties, too."""
        async with asyncio.timeout(timeout_s):
            while True:
                began = time.monotonic()
                value = check()
                value = await value if asyncio.iscoroutine(value) else value
                if value:
                    return value
                await asyncio.sleep(max(0.05, 4 * (time.monotonic() - began)))

    async def get_status(self, place: int) -> dict[str, Any]:
        try:
            return await self.http.get_json(f"{self.endpoints[place]}/v1/status", timeout_s=HANG_S)
        except Unavailable:
            return {}

    async def is_ready(self) -> bool:
        statuses = await asyncio.gather(*(self.get_status(place) for place in self.processes))
        if not await self.client.call("committee", "groupKey"):
            return False
        return all(
            s.get("group_key") and s["sequence"] >= 1 and s["nodes_live"] == len(self.nodes)
            for s in statuses
        )

    async def request(
        self, gate: asyncio.Event | None = None, *, deadline_s: int = 300
    ) -> tuple[str, float]:
        """Ask for an execution; return its id and when its block was seen (monotonic).

        Its nodes compute until ``gate`` is set.
        """
        head = await self.client.fetch_head()
        self.nonce += 1
        if gate is not None:
            market, client = self.deployment.market, self.client.address
            asked = compute_execution_id(self.deployment.chain_id, market, client, self.nonce)
            for node in self.nodes:
                node.gates[asked] = gate
        receipt = await self.client.send(
            "market",
            "requestExecution",
            MANIFEST.model_id,
            STEPS,
            "0x" + "aa" * 32,
            CLIENT.signing_key_hex,
            10_000,
            head.timestamp + deadline_s,
            self.nonce,
            self.verify_bps,
        )
        seen = time.monotonic()
        return str(receipt.events[-1].args["executionId"]), seen

    async def fetch_plan(self, execution_id: str) -> PlanCertificate:
        """Ask all members, again while they have none; the first valid certificate wins.

        A refusal counts when a quorum says so: one member may be behind, and one may be dead.
        """
        refusals: list[str] = []

        async def ask(endpoint: str) -> PlanCertificate:
            url = api.PLAN.url(endpoint, execution_id=execution_id, wait_s=20)
            while True:
                try:
                    return PlanCertificate.from_value(
                        await self.http.get_json(url, timeout_s=HANG_S)
                    )
                except Unavailable:
                    await asyncio.sleep(0.3)
                except Refused as refusal:
                    if refusal.status != 404:
                        raise

        asking = {asyncio.ensure_future(ask(endpoint)) for endpoint in self.endpoints}
        try:
            async with asyncio.timeout(3 * HANG_S):
                for answer in asyncio.as_completed(asking):
                    try:
                        return await answer
                    except Refused as refusal:
                        refusals.append(str(refusal))
                        if len(refusals) == QUORUM:
                            break
            raise AssertionError(f"there is no plan for {execution_id}: {refusals}")
        except TimeoutError:
            problem = f"no plan for {execution_id} in time: {refusals}"
            raise AssertionError(f"{problem}\n{self.read_logs(lines=50)}") from None
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def find_settlement(self, execution_id: str) -> list[Any]:
        events = await self.client.fetch_events("market")
        mine = [event for event in events if event.args.get("executionId") == execution_id]
        return mine if any(event.name == "Settled" for event in mine) else []

    def read_log(self, place: int) -> str:
        return (self.directory / f"member{place}.log").read_text()

    def read_logs(self, lines: int = 10**9) -> str:
        """Return the last lines that each process wrote."""
        logs = {path.name: path.read_text() for path in sorted(self.directory.glob("*.log"))}
        return "\n".join(
            "\n".join([f"--- {name}", *text.splitlines()[-lines:]]) for name, text in logs.items()
        )


@contextlib.asynccontextmanager
async def run_network(
    directory: Path,
    *,
    nodes: int = 4,
    verify_bps: int = 800,
    cuttable: bool = False,
    mixed_mining: bool = True,
) -> AsyncIterator[Network]:
    """Start chain, contracts, nodes, a gateway for the manifest, and four member processes.

    A fifth account is ready to become a member; its process is not started. ``cuttable`` members
    are reached through an exchange. Requests ask for ``verify_bps``.
    """
    ports = find_free_ports(6)
    async with contextlib.AsyncExitStack() as stack:
        anvil = await stack.enter_async_context(
            start_anvil(
                ports[5],
                mnemonic=MNEMONIC,
                accounts=20,
                block_time_s=1,
                mixed_mining=mixed_mining,
            )
        )
        keys = [derive_key(MNEMONIC, index) for index in range(7 + nodes)]
        deployment = await deploy(anvil.url, keys[0])
        deployment.save(directory / "deployment.json")

        async def connect(key: bytes) -> Chain:
            chain = await Chain.connect(anvil.url, deployment, private_key=key)
            return await stack.enter_async_context(chain)

        owner, client = await connect(keys[0]), await connect(keys[5])
        members = sorted(
            (Identity.from_private_key(key) for key in keys[1:5]), key=lambda m: m.address
        )
        members.append(Identity.from_private_key(keys[6]))
        exchange = Exchange()
        stack.push_async_callback(exchange.close)
        fronts = ports[:5]
        if cuttable:
            fronts = [await exchange.open(place, port) for place, port in enumerate(fronts)]
        endpoints = [f"http://127.0.0.1:{port}" for port in fronts]
        rows = [(m.address, m.signing_key_hex, e) for m, e in zip(members, endpoints, strict=True)]
        await owner.send("committee", "setMembers", rows[:4])
        await _register_model(owner)
        await owner.send("usdc", "mint", client.address, 50_000_000)
        await client.send("usdc", "approve", deployment.market, 50_000_000)
        await client.send("market", "deposit", 50_000_000)
        players = [
            await _start_node(stack, await connect(key), key, owner, endpoints) for key in keys[7:]
        ]
        gateway = await _start_gateway()
        stack.push_async_callback(gateway.close)
        http = await stack.enter_async_context(SignedClient())
        network = Network(
            *(directory, anvil.url, deployment, owner, client, http, players, rows),
            exchange=exchange,
            verify_bps=verify_bps,
        )
        for place, (member, port) in enumerate(zip(members, ports[:5], strict=True)):
            _write_config(network, place, member, port, gateway.url)
        for place in range(4):
            await network.start_member(place)
        try:
            yield network
        finally:
            for place in list(network.processes):
                with contextlib.suppress(ProcessLookupError):
                    await network.stop_member(place, signal.SIGKILL)  # also a stopped process


async def _register_model(owner: Chain) -> None:
    tasks = [("0x" + t.task_id, t.vram_bytes, t.flops, t.price_nano_usdc) for t in MANIFEST.tasks]
    edges = [start << 16 | end for start, end in MANIFEST.edges()]
    await owner.send("models", "register", MANIFEST.model_id, "test-model", tasks, edges)


async def _start_node(
    stack: contextlib.AsyncExitStack, chain: Chain, key: bytes, owner: Chain, endpoints: list[str]
) -> Node:
    identity = Identity.from_private_key(key)
    node = Node(identity, chain, SignedClient(identity), endpoints)
    await node.start()
    stack.push_async_callback(node.close)
    assert node.server
    await owner.send("usdc", "mint", chain.address, STAKE_MICRO_USDC)
    await chain.send("usdc", "approve", chain.deployment.nodes, STAKE_MICRO_USDC)
    await chain.send("nodes", "register", identity.signing_key_hex, 12, node.server.url)
    node.spawn(node.beat())
    return node


async def _start_gateway() -> Server:
    async def manifest(request: web.Request) -> web.Response:
        if request.match_info["model_id"] != MANIFEST.model_id:
            raise web.HTTPNotFound
        return web.Response(body=MANIFEST.to_bytes())

    app = make_app()
    app.add_routes([web.get(api.MANIFEST.path, manifest)])
    return await serve_app(app, "127.0.0.1", 0)


def _write_config(network: Network, place: int, member: Identity, port: int, gateway: str) -> None:
    directory = network.directory
    create_passphrase(directory / f"member{place}.passphrase")
    create_identity(
        directory / f"member{place}.keystore",
        directory / f"member{place}.passphrase",
        work_factor=DEVNET_WORK_FACTOR,
        private_key=member.private_key,
    )
    (directory / f"member{place}.toml").write_text(
        f'rpc_url = "{network.rpc_url}"\n'
        'deployment = "deployment.json"\n'
        f'keystore = "member{place}.keystore"\n'
        f'passphrase_file = "member{place}.passphrase"\n'
        f'data_dir = "member{place}"\n'
        f"listen_port = {port}\n"
        "allow_loopback = true\n"
        f'gateway_urls = "{gateway}"\n'
    )
