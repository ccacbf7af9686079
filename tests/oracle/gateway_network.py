"""A real chain and a real object store with a gateway in front, for the gateway's tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eth_utils.crypto import keccak
from splitup_oracle.config import GatewayConfig
from splitup_oracle.gateway.http_gateway import RunningGateway, start_gateway

from splitup.chain.client import Chain
from splitup.chain.deployment import deploy
from splitup.chain.rpc import Rpc
from splitup.crypto import bls
from splitup.crypto.keys import Identity, generate_identity
from splitup.crypto.quorum import Domain, sign_quorum
from splitup.devnet.anvil import derive_key
from splitup.devnet.s3_server import ObjectServer, start_object_server
from splitup.graph.manifest import Manifest, get_manifest_key
from splitup.messages.network import Deployment
from splitup.messages.plans import MemberSignature, Plan, PlanCertificate, Request
from splitup.messages.snapshots import Snapshot, SnapshotEntry
from splitup.messages.storage import UploadObject
from splitup.messages.verification import Draw
from splitup.protocol.committee.certificates import (
    RANDOMNESS_DOMAIN,
    compute_plan_hash,
    draw_alpha,
    plan_alpha,
)
from splitup.protocol.planning.selection import compute_plan
from splitup.storage.gateway_client import GatewayClient
from tests.builders import COMMON_CLASS, find_free_port
from tests.local_chain import start_anvil

MNEMONIC = "test test test test test test test test test test test junk"
MEMBERS = 4
NODE_STAKE = 1_100_000_000


@dataclass(frozen=True)
class Committee:
    """Four members; one test key replaces the group key of a key generation."""

    members: tuple[Identity, ...]
    group_secret: bytes
    domain: Domain
    configuration: int = 1

    def sign_randomness(self, alpha: bytes) -> tuple[str, str]:
        signature = bls.sign_partial(self.group_secret, RANDOMNESS_DOMAIN, alpha)
        return signature, bls.compute_seed(signature)

    def certify(
        self,
        request: Request,
        snapshot: Snapshot,
        manifest: Manifest,
        *,
        signers: int = 3,
        restrict: dict[int, str] | None = None,
    ) -> PlanCertificate:
        """Certify the plan; ``restrict`` puts single tasks on chosen executors."""
        signature, seed = self.sign_randomness(plan_alpha(request))
        plan = compute_plan(request, seed, snapshot, manifest)
        if restrict:
            tasks = list(plan.tasks)
            for task, node in restrict.items():
                others = [other for other in tasks[task] if other != node]
                tasks[task] = (node, *others)
            plan = plan.model_copy(update={"tasks": tuple(tasks)})
        return self.sign_plan(plan, signature, signers=signers)

    def sign_plan(self, plan: Plan, seed_signature: str, *, signers: int = 3) -> PlanCertificate:
        struct_hash = compute_plan_hash(plan, self.configuration)
        return PlanCertificate(
            plan=plan,
            seed_signature=seed_signature,
            signatures=tuple(
                MemberSignature(
                    member=member.address,
                    signature="0x"
                    + sign_quorum(member.private_key, self.domain, struct_hash).hex(),
                )
                for member in self.members[:signers]
            ),
        )

    def draw(self, plan: Plan, nonce: int = 0, steps: int = 0) -> Draw:
        """Return a draw over ``steps``, by default all that were requested."""
        steps = steps or plan.request.steps
        commitments = tuple((node, "0x" + "12" * 32) for node in sorted(set(plan.executors())))
        block_hash = f"0x{nonce:064x}"
        alpha = draw_alpha(plan.request.execution_id, block_hash, commitments, (), steps)
        signature, seed = self.sign_randomness(alpha)
        return Draw(
            execution_id=plan.request.execution_id,
            block_hash=block_hash,
            commitments=commitments,
            steps=steps,
            signature=signature,
            seed=seed,
        )


@dataclass(frozen=True)
class Network:
    """A network for tests of the gateway, which makes the messages that the gateway checks."""

    rpc_url: str
    deployment: Deployment
    deployment_path: Path
    server: ObjectServer
    gateway: RunningGateway
    audit_path: Path
    committee: Committee
    owner: Chain
    nodes: tuple[Identity, ...]
    client: Identity

    @property
    def url(self) -> str:
        return self.gateway.server.url

    def open(self, identity: Identity) -> GatewayClient:
        return GatewayClient((self.url,), identity)

    def make_snapshot(self, manifest: Manifest, determinism: str = COMMON_CLASS) -> Snapshot:
        resident = tuple(sorted({task.task_id for task in manifest.tasks}))
        return Snapshot(
            configuration=1,
            sequence=1,
            epoch=1,
            entries=tuple(
                SnapshotEntry(
                    node=node.address,
                    signing_key=node.signing_key_hex,
                    endpoint="http://127.0.0.1:9",
                    stake_micro_usdc=10**9,
                    rtt_ms=10,
                    queue_ms=0,
                    resident=resident,
                    determinism=determinism,
                )
                for node in sorted(self.nodes, key=lambda node: node.address)
            ),
        )

    def make_request(
        self, manifest: Manifest, snapshot: Snapshot, *, steps: int = 100, left_s: int = 600
    ) -> Request:
        return Request(
            chain_id=self.deployment.chain_id,
            market=self.deployment.market,
            execution_id="0x" + secrets.token_hex(32),
            model_id=manifest.model_id,
            client=self.client.address,
            client_key=self.client.signing_key_hex,
            steps=steps,
            max_price_micro_usdc=10**6,
            deadline=int(time.time()) + left_s,
            snapshot_sequence=1,
            snapshot_root=snapshot.root(),
            block_hash="0x" + "aa" * 32,
            verify_bps=800,
        )

    async def store_manifest(self, manifest: Manifest) -> None:
        data = manifest.to_bytes()
        entry = UploadObject(
            key=get_manifest_key(manifest.model_id),
            length_bytes=len(data),
            sha256=manifest.model_id[2:],
        )
        async with self.open(self.client) as gateway:
            answer = await gateway.upload_grants([entry])
            for grant in answer.grants:
                await gateway.upload_object(grant, lambda: iter([data]), lambda _: None)


@contextlib.asynccontextmanager
async def run_network(
    root: Path, *, open_models: bool = False, open_uploads: bool = True
) -> AsyncIterator[Network]:
    """Start Anvil, contracts, SeaweedFS and a gateway; stop them all at the end."""
    server = await asyncio.to_thread(start_object_server, root / "s3")
    try:
        async with start_anvil(
            find_free_port(), mnemonic=MNEMONIC, block_time_s=1, mixed_mining=True
        ) as anvil:
            owner_key = derive_key(MNEMONIC, 0)
            deployment = await deploy(anvil.url, owner_key)
            deployment.save(root / "deployment.json")
            owner = await Chain.connect(anvil.url, deployment, private_key=owner_key)
            committee = await _form_committee(anvil.url, deployment, owner)
            config = GatewayConfig(
                rpc_url=anvil.url,
                deployment=root / "deployment.json",
                s3_endpoint=server.endpoint_url,
                bucket=server.bucket,
                credentials=server.credentials_path,
                listen_port=0,
                data_dir=root / "gateway",
                open_models=open_models,
                open_uploads=open_uploads,
            )
            nodes = tuple(generate_identity() for _ in range(4))
            for node in nodes:
                await register_node(anvil.url, deployment, owner, node)
            gateway = await start_gateway(config)
            try:
                yield Network(
                    rpc_url=anvil.url,
                    deployment=deployment,
                    deployment_path=root / "deployment.json",
                    server=server,
                    gateway=gateway,
                    audit_path=root / "gateway" / "audit.jsonl",
                    committee=committee,
                    owner=owner,
                    nodes=nodes,
                    client=generate_identity(),
                )
            finally:
                await gateway.close()
                await owner.close()
    finally:
        await asyncio.to_thread(server.stop, 1.0)


async def register_node(rpc_url: str, deployment: Deployment, owner: Chain, node: Identity) -> None:
    """Give a node what it needs, and stake for 1 GB."""
    async with Rpc(rpc_url) as rpc:
        await rpc.request("anvil_setBalance", node.address, hex(10**18))
    await owner.send("usdc", "mint", node.address, NODE_STAKE)
    async with await Chain.connect(rpc_url, deployment, private_key=node.private_key) as chain:
        await chain.send("usdc", "approve", deployment.nodes, NODE_STAKE)
        await chain.send("nodes", "register", node.signing_key_hex, 1, "http://127.0.0.1:9")


async def _form_committee(rpc_url: str, deployment: Deployment, owner: Chain) -> Committee:
    members = tuple(
        sorted(
            (Identity.from_private_key(derive_key(MNEMONIC, i)) for i in range(1, MEMBERS + 1)),
            key=lambda member: member.address,
        )
    )
    await owner.send(
        "committee",
        "setMembers",
        [
            {
                "account": member.address,
                "signingKey": member.signing_key_hex,
                "endpoint": "http://127.0.0.1:9",
            }
            for member in members
        ],
    )
    secret = secrets.token_bytes(31).rjust(32, b"\0")
    await confirm_group_key(rpc_url, deployment, members, bls.compute_public_key(secret))
    domain = Domain(deployment.chain_id, deployment.committee)
    return Committee(members, secret, domain)


async def confirm_group_key(
    rpc_url: str, deployment: Deployment, members: tuple[Identity, ...], key: str
) -> None:
    data = bls.encode_public_key_eip2537(key)
    for member in members[:3]:
        async with await Chain.connect(
            rpc_url, deployment, private_key=member.private_key
        ) as chain:
            await chain.send("committee", "confirmGroupKey", keccak(data), data)


def write_config(network: Network, folder: Path, **changes: Any) -> Path:
    """Write the file of another gateway of the network's bucket."""
    values = {
        "rpc_url": network.rpc_url,
        "deployment": str(network.deployment_path),
        "s3_endpoint": network.server.endpoint_url,
        "bucket": network.server.bucket,
        "credentials": str(network.server.credentials_path),
        "listen_port": 0,
        "data_dir": "gateway",
        **changes,
    }
    path = folder / "gateway.toml"
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    return path
