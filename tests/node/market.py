"""Whole nodes on a real chain, object store and gateway, with a committee that only listens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp import web
from splitup_node.config import NodeConfig, format_config
from splitup_node.daemon import run_node
from splitup_node.settlement.account import Account
from splitup_node.status_file import read_status
from splitup_node.worker.supervisor import WORKER_ARGV

from splitup.chain.client import Chain
from splitup.chain.market import terms_to_abi
from splitup.chain.rpc import Rpc
from splitup.core import limits
from splitup.core.codec import compute_digest
from splitup.crypto import bls
from splitup.crypto.keys import Identity
from splitup.crypto.keystore import DEVNET_WORK_FACTOR, create_identity, create_passphrase
from splitup.crypto.quorum import (
    commitments_struct_hash,
    hash_exposures,
    pack_signatures,
    pack_words,
    sign_quorum,
    snapshot_struct_hash,
)
from splitup.devnet.anvil import derive_key
from splitup.graph.ir import Graph
from splitup.graph.manifest import Manifest, get_blob_key, get_task_key
from splitup.messages import api
from splitup.messages.completions import Completion, ExecutorCommitment
from splitup.messages.plans import PlanCertificate, Request, request_to_abi
from splitup.messages.snapshots import Heartbeat, Snapshot, SnapshotEntry
from splitup.messages.storage import UploadObject
from splitup.messages.verification import (
    Attestation,
    Held,
    ValidatorCommitment,
    VerificationResult,
)
from splitup.net.http import SignedClient
from splitup.net.http_server import add_routes, make_app, read_message, serve_app
from splitup.protocol.settlement.attestations import sign_notice
from tests.builders import HANG_S, KERNELS
from tests.node.graphs import make_reference
from tests.oracle.gateway_network import MNEMONIC, Network, confirm_group_key

HEAD = "0x" + "01" * 32
FIRST_NODE = 5  # accounts 0 to 4 are the owner and the committee


@dataclass
class Members:
    """The committee's HTTP side: checks and keeps what nodes send."""

    audience: str
    demand: list[dict[str, Any]] = field(default_factory=list)
    heartbeats: dict[str, Heartbeat] = field(default_factory=dict)
    completions: dict[tuple[str, str], Completion] = field(default_factory=dict)
    commitments: dict[tuple[str, str], ExecutorCommitment] = field(default_factory=dict)
    results: asyncio.Queue[VerificationResult] = field(default_factory=asyncio.Queue)
    verified: set[tuple[str, int]] = field(default_factory=set)
    validator_commitments: dict[tuple[str, int], ValidatorCommitment] = field(default_factory=dict)
    identities: Iterator[Identity] = field(default_factory=lambda: iter(()))
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def _read(self, request: web.Request, route: api.Route[api.M]) -> api.M:
        return (await read_message(request, route, audience=self.audience)).message

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def on_heartbeat(self, request: web.Request) -> web.Response:
        beat = await self._read(request, api.HEARTBEAT)
        if beat.block_hash != HEAD:
            return web.json_response({"block": HEAD})
        self.heartbeats[beat.node] = beat
        await self._tell()
        return web.json_response(
            {"block": HEAD, "period_ms": 1000, "rest_ms": 1000, "tasks": self.demand}
        )

    async def on_completion(self, request: web.Request) -> web.Response:
        completion = await self._read(request, api.COMPLETION)
        self.completions[completion.execution_id, completion.node] = completion
        await self._tell()
        return web.json_response({})

    async def on_commitment(self, request: web.Request) -> web.Response:
        commitment = await self._read(request, api.EXECUTOR_COMMITMENT)
        self.commitments[commitment.execution_id, commitment.node] = commitment
        return web.json_response({})

    async def on_validator_commitment(self, request: web.Request) -> web.Response:
        validator_commitment = await self._read(request, api.VALIDATOR_COMMITMENT)
        self.validator_commitments[validator_commitment.execution_id, validator_commitment.task] = (
            validator_commitment
        )
        return web.json_response({})

    async def on_due_notice(self, request: web.Request) -> web.Response:
        """Attest, as one member after the other, that it is time to reveal."""
        execution_id = request.match_info["execution_id"]
        member = next(self.identities)
        attestation = Attestation(
            execution_id=execution_id,
            member=member.address,
            steps=next(
                (c.end.end.steps for (e, _), c in self.commitments.items() if e == execution_id), 1
            ),
            due=True,
            held=tuple(
                Held(task=p.task, validator=p.validator, root=p.root)
                for p in self.validator_commitments.values()
                if p.execution_id == execution_id
            ),
            silent=(),
            rulings=(),
        )
        tasks, validator = request.query.get("tasks", ""), request.query.get("validator", "")
        named = [int(task) for task in tasks.split(",") if task]
        signed = sign_notice(member, attestation, validator, named)
        return web.json_response(signed.model_dump(mode="json"))

    async def on_verification(self, request: web.Request) -> web.Response:
        result = await self._read(request, api.VERIFICATION_RESULT)
        if (key := (result.execution_id, result.task)) not in self.verified:
            assert result.error or self.validator_commitments[key].root == result.root()
            self.verified.add(key)  # the four members listen at one endpoint
            self.results.put_nowait(result)
        return web.json_response({})

    async def wait_for(self, condition: Any, timeout_s: float = HANG_S) -> None:
        """Wait until ``condition()`` holds, checked after every message of a node."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(condition)


@dataclass
class RunningNode:
    """A daemon in a task of the test's own loop."""

    config: NodeConfig
    identity: Identity
    stop: asyncio.Event
    task: asyncio.Task[None]

    @property
    def endpoint(self) -> str:
        return str(read_status(self.config.data_dir).values["endpoint"])

    async def shut_down(self) -> None:
        self.stop.set()
        await self.task


@dataclass
class NodeMarket:
    """The network, its listening committee, and one registered model."""

    network: Network
    members: Members
    manifest: Manifest
    root: Path
    client: Chain
    client_identity: Identity
    snapshot: Snapshot | None = None

    def make_config(self, name: str, index: int) -> NodeConfig:
        """Write a node's key and configuration."""
        folder = self.root / name
        folder.mkdir()
        create_passphrase(folder / "passphrase")
        create_identity(
            folder / "keystore.json",
            folder / "passphrase",
            work_factor=DEVNET_WORK_FACTOR,
            private_key=derive_key(MNEMONIC, FIRST_NODE + index),
        )
        path = folder / "node.toml"
        path.write_text(
            format_config(
                path,
                {
                    "rpc_url": self.network.rpc_url,
                    "deployment": str(self.network.deployment_path),
                    "gateway_urls": self.network.url,
                    "keystore": "keystore.json",
                    "passphrase_file": "passphrase",
                    "data_dir": "data",
                    "listen": "127.0.0.1:0",
                    "endpoint": "",
                    "vram": "1GB",
                    "allow_loopback": True,
                },
            )
            .replace("devices = []", 'devices = ["CPU:X86"]')
            .replace("offer_relay = false", "offer_relay = true")
            .replace('kernel_cache = ""', f'kernel_cache = "{KERNELS}"')
        )
        return NodeConfig.load(path)

    async def stake(self, config: NodeConfig) -> None:
        """Give a node what it needs and put down its stake."""
        identity = config.load_identity()
        async with Rpc(self.network.rpc_url) as rpc:
            await rpc.request("anvil_setBalance", identity.address, hex(10**18))
        await self.network.owner.send("usdc", "mint", identity.address, 1_100_000_000)
        async with await Account.open(config) as account:
            await account.stake(spare_percent=0)

    async def run(
        self, config: NodeConfig, worker_argv: Sequence[str] = WORKER_ARGV
    ) -> RunningNode:
        """Start a daemon and wait until it has loaded every task."""
        identity = config.load_identity()
        self.members.heartbeats.pop(identity.address, None)
        stop = asyncio.Event()
        task = asyncio.create_task(run_node(config, worker_argv=worker_argv, stop=stop))
        wanted = {entry.task_id for entry in self.manifest.tasks}

        def is_ready() -> bool:
            beat = self.members.heartbeats.get(identity.address)
            return beat is not None and set(beat.resident) == wanted

        waiting = asyncio.create_task(self.members.wait_for(is_ready))
        await asyncio.wait([waiting, task], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            waiting.cancel()
            task.result()
        await waiting
        return RunningNode(config, identity, stop, task)

    async def take_snapshot(self, nodes: Sequence[RunningNode]) -> Snapshot:
        """Put a snapshot of these nodes on chain."""
        sequence = 1 if self.snapshot is None else self.snapshot.sequence + 1
        snapshot = Snapshot(
            configuration=2,
            sequence=sequence,
            epoch=sequence,
            entries=tuple(
                SnapshotEntry(
                    node=node.identity.address,
                    signing_key=node.identity.signing_key_hex,
                    endpoint=node.endpoint,
                    stake_micro_usdc=1_100_000_000,
                    rtt_ms=1,
                    queue_ms=0,
                    resident=self.members.heartbeats[node.identity.address].resident,
                    determinism=self.members.heartbeats[node.identity.address].determinism,
                )
                for node in sorted(nodes, key=lambda node: node.identity.address)
            ),
        )
        digest = snapshot_struct_hash(2, sequence, snapshot.epoch, snapshot.root())
        await self.network.owner.send(
            "committee",
            "submitSnapshot",
            sequence,
            snapshot.epoch,
            snapshot.root(),
            self._sign(digest),
        )
        self.snapshot = snapshot
        return snapshot

    async def order(
        self, executors: Sequence[RunningNode], *, steps: int, nonce: int, accept: bool = True
    ) -> PlanCertificate:
        """Pay for an execution and certify a plan in which ``executors[i]`` runs task i."""
        assert self.snapshot is not None
        head = await self.client.fetch_head()
        receipt = await self.client.send(
            "market",
            "requestExecution",
            self.manifest.model_id,
            steps,
            "0x" + "aa" * 32,
            self.client_identity.signing_key_hex,
            1_000_000,
            head.timestamp + 300,
            nonce,
            800,
        )
        event = next(e for e in receipt.events if e.name == "RequestNodeSelections")
        request = Request(
            chain_id=self.network.deployment.chain_id,
            market=self.network.deployment.market,
            execution_id=event.args["executionId"],
            model_id=self.manifest.model_id,
            client=self.client.address,
            client_key=self.client_identity.signing_key_hex,
            steps=steps,
            max_price_micro_usdc=1_000_000,
            deadline=event.args["deadline"],
            snapshot_sequence=self.snapshot.sequence,
            snapshot_root=self.snapshot.root(),
            block_hash=event.block_hash,
            verify_bps=event.args["verifyBps"],
            inputs_digest=event.args["inputsDigest"],
            nonce=nonce,
        )
        certificate = self.network.committee.certify(
            request,
            self.snapshot,
            self.manifest,
            restrict={task: node.identity.address for task, node in enumerate(executors)},
        )
        if accept:
            await self.accept(certificate)
        return certificate

    async def accept(self, certificate: PlanCertificate) -> None:
        """Put a certified plan on chain."""
        plan = certificate.plan
        signatures = pack_signatures(
            (entry.member, bytes.fromhex(entry.signature[2:])) for entry in certificate.signatures
        )
        await self.network.owner.send(
            "market",
            "submitCompletePlan",
            request_to_abi(plan.request),
            terms_to_abi(plan.root(), certificate.seed_signature, len(set(plan.executors()))),
            signatures,
        )

    async def commit(self, certificate: PlanCertificate) -> None:
        """Bring a root to the chain once all executors have shown their commitments."""
        plan = certificate.plan
        execution_id, executors = plan.request.execution_id, set(plan.executors())
        known = self.members.commitments
        await self.members.wait_for(lambda: all((execution_id, n) in known for n in executors))
        execution = await self.client.call("market", "executionOf", execution_id)
        if execution["certified"]:
            return
        exposures = tuple((node, limits.EXPOSURE_FLOOR_MICRO_USDC) for node in sorted(executors))
        root = "0x" + "c0" * 32
        digest = commitments_struct_hash(execution_id, root, hash_exposures(exposures))
        words = pack_words(exposures)
        await self.network.owner.send(
            "market", "commitExecution", execution_id, root, words, self._sign(digest)
        )

    async def notify(self, certificate: PlanCertificate) -> None:
        """Send a plan to its nodes."""
        async with SignedClient() as http:
            for node in certificate.plan.nodes:
                await http.post_json(api.PLAN_CERTIFICATE.url(node.endpoint), certificate)

    def _sign(self, digest: bytes) -> bytes:
        committee = self.network.committee
        return pack_signatures(
            (member.address, sign_quorum(member.private_key, committee.domain, digest))
            for member in committee.members[:3]
        )


@contextlib.asynccontextmanager
async def open_market(
    network: Network, root: Path, manifest: Manifest, graphs: dict[str, Graph]
) -> AsyncIterator[NodeMarket]:
    """Let a listening committee speak for the network's members and register the model."""
    members = Members(
        network.deployment.committee, identities=itertools.cycle(network.committee.members)
    )
    app = make_app()
    handlers = {
        api.HEARTBEAT: members.on_heartbeat,
        api.COMPLETION: members.on_completion,
        api.EXECUTOR_COMMITMENT: members.on_commitment,
        api.VALIDATOR_COMMITMENT: members.on_validator_commitment,
        api.DUE_NOTICE: members.on_due_notice,
        api.VERIFICATION_RESULT: members.on_verification,
    }
    add_routes(app, tuple(handlers), handlers)
    server = await serve_app(app, "127.0.0.1", 0)
    key = derive_key(MNEMONIC, 9)
    client = await Chain.connect(network.rpc_url, network.deployment, private_key=key)
    try:
        await network.owner.send(
            "committee",
            "setMembers",
            [(m.address, m.signing_key_hex, server.url) for m in network.committee.members],
        )
        group_key = bls.compute_public_key(network.committee.group_secret)
        await confirm_group_key(
            network.rpc_url, network.deployment, network.committee.members, group_key
        )
        network = replace(network, committee=replace(network.committee, configuration=2))
        await _store_model(network, manifest, graphs)
        rows = [
            ("0x" + t.task_id, t.vram_bytes, t.flops, t.price_nano_usdc) for t in manifest.tasks
        ]
        edges = [source << 16 | target for source, target in manifest.edges()]
        await network.owner.send("models", "register", manifest.model_id, "tiny", rows, edges)
        await network.owner.send("usdc", "mint", client.address, 50_000_000)
        await client.send("usdc", "approve", network.deployment.market, 50_000_000)
        await client.send("market", "deposit", 50_000_000)
        members.demand = [
            {
                "model_id": manifest.model_id,
                "task": index,
                "task_id": task.task_id,
                "vram_bytes": task.vram_bytes,
                "weights_bytes": task.weights_bytes,
                "price_nano_usdc": task.price_nano_usdc,
                "holders": 0,
            }
            for index, task in enumerate(manifest.tasks)
        ]
        yield NodeMarket(network, members, manifest, root, client, network.client)
    finally:
        await client.close()
        await server.close()


async def _store_model(network: Network, manifest: Manifest, graphs: dict[str, Graph]) -> None:
    await network.store_manifest(manifest)
    async with network.open(network.client) as gateway:
        objects = {get_task_key(task_id): graph.to_bytes() for task_id, graph in graphs.items()}
        for reference in map(make_reference, graphs.values()):
            objects[get_blob_key(compute_digest(reference))] = reference
        for key, data in objects.items():
            entry = UploadObject(key=key, length_bytes=len(data), sha256=compute_digest(data))
            for grant in (await gateway.upload_grants([entry])).grants:
                await gateway.upload_object(grant, lambda data=data: iter([data]), lambda _: None)
