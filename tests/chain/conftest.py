"""A real chain for the tests of this folder: one Anvil, which goes back after every test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from eth_utils.crypto import keccak

from splitup.chain.client import Chain
from splitup.chain.deployment import deploy
from splitup.chain.market import terms_to_abi
from splitup.chain.rpc import Rpc
from splitup.crypto import bls
from splitup.crypto.keys import Identity
from splitup.crypto.quorum import (
    Domain,
    ExecutionHistory,
    Settlement,
    pack_signatures,
    plan_struct_hash,
    settlement_hash,
    settlement_struct_hash,
    sign_quorum,
)
from splitup.devnet.anvil import derive_key, find_anvil
from splitup.messages.network import Deployment
from splitup.messages.plans import Request, request_to_abi
from splitup.protocol.committee.certificates import RANDOMNESS_DOMAIN, plan_alpha
from tests.builders import find_free_port
from tests.local_chain import start_anvil

MNEMONIC = "test test test test test test test test test test test junk"
KEYS = [derive_key(MNEMONIC, index) for index in range(9)]
MODEL = "0x" + "4d" * 32
PRICE_MICRO_USDC = 2_020_000
ROOT = "0x" + "11" * 32
GROUP_SECRET = bytes(31) + b"\x07"  # whole; sharing it is tested elsewhere


@pytest.fixture(scope="session")
def anvil_binary() -> Any:
    return find_anvil()  # without Anvil these tests fail, and the error says how to install it


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def rpc_url(anvil_binary: Any) -> AsyncIterator[str]:
    async with start_anvil(
        find_free_port(), mnemonic=MNEMONIC, accounts=12, binary=anvil_binary
    ) as anvil:
        yield anvil.url


@dataclass
class Network:
    """Contracts, four members, three staked nodes, one client; Anvil's accounts in this order."""

    url: str
    deployment: Deployment
    owner: Chain
    members: list[Identity]
    nodes: list[Chain]
    client: Chain
    rpc: Rpc
    chains: list[Chain] = field(default_factory=list)

    @property
    def domain(self) -> Domain:
        return Domain(self.deployment.chain_id, self.deployment.committee)

    def certify(self, struct_hash: bytes, signers: int = 3) -> bytes:
        return pack_signatures(
            (m.address, sign_quorum(m.private_key, self.domain, struct_hash))
            for m in self.members[:signers]
        )

    async def confirm_key(self) -> None:
        """Let a quorum of members agree on the group key, without which no plan has a seed."""
        key = bls.encode_public_key_eip2537(bls.compute_public_key(GROUP_SECRET))
        for member in self.members[:3]:
            async with await Chain.connect(
                self.url, self.deployment, private_key=member.private_key
            ) as chain:
                await chain.send("committee", "confirmGroupKey", keccak(key), key)

    async def request(self, nonce: int = 1, deadline_s: int = 60) -> Request:
        head = await self.client.fetch_head()
        receipt = await self.client.send(
            "market",
            "requestExecution",
            MODEL,
            1,
            "0x" + "aa" * 32,
            "0x" + "bb" * 32,
            PRICE_MICRO_USDC,
            head.timestamp + deadline_s,
            nonce,
            800,
        )
        args = receipt.events[-1].args
        return Request(
            chain_id=self.deployment.chain_id,
            market=self.deployment.market,
            execution_id=args["executionId"],
            model_id=args["modelId"],
            client=args["client"],
            client_key=args["clientKey"],
            steps=args["steps"],
            max_price_micro_usdc=args["maxPrice"],
            deadline=args["deadline"],
            snapshot_sequence=args["snapshotSequence"],
            snapshot_root=args["snapshotRoot"],
            block_hash=receipt.events[-1].block_hash,
            verify_bps=args["verifyBps"],
            inputs_digest=args["inputsDigest"],
            nonce=args["nonce"],
        )

    def make_terms(self, request: Request, executors: int, signers: int = 3) -> tuple[Any, bytes]:
        """Return a plan's terms and their certificate."""
        alpha = plan_alpha(request)
        signature = bls.sign_partial(GROUP_SECRET, RANDOMNESS_DOMAIN, alpha)
        struct_hash = plan_struct_hash(
            1, request.execution_id, request.hash(), ROOT, bls.compute_seed(signature), executors
        )
        return terms_to_abi(ROOT, signature, executors), self.certify(struct_hash, signers)

    async def submit_plan(self, request: Request, executors: int) -> None:
        terms, signatures = self.make_terms(request, executors)
        await self.owner.send(
            "market", "submitCompletePlan", request_to_abi(request), terms, signatures
        )

    async def settle(
        self,
        execution_id: str,
        settlement: Settlement,
        history: ExecutionHistory | None = None,
    ) -> Any:
        digest = settlement_hash(settlement)
        signatures = self.certify(settlement_struct_hash(execution_id, digest))
        history = history or ExecutionHistory(execution_id)  # only slashes need it
        return await self.owner.send(
            "market", "settle", execution_id, settlement.to_abi(), history.to_abi(), signatures
        )

    async def balance(self, account: str) -> int:
        return int(await self.owner.call("market", "balanceOf", account))

    async def pass_time(self, seconds: int) -> None:
        await self.rpc.request("anvil_increaseTime", seconds)
        await self.rpc.request("anvil_mine", "0x1")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def deployment(rpc_url: str) -> Deployment:
    return await deploy_market(rpc_url)


@pytest_asyncio.fixture
async def network(rpc_url: str, deployment: Deployment) -> AsyncIterator[Network]:
    """The market as it was deployed: the chain forgets what a test did."""
    async with open_network(rpc_url, deployment) as network:
        before = await network.rpc.request("evm_snapshot")
        yield network
        assert await network.rpc.request("evm_revert", before)


async def deploy_market(url: str) -> Deployment:
    """Deploy the contracts, with all that ``Network`` promises: three dozen transactions."""
    deployment = await deploy(url, KEYS[0])
    async with open_network(url, deployment) as network:
        owner, client = network.owner, network.client
        await owner.send(
            "committee",
            "setMembers",
            [(m.address, m.signing_key_hex, "http://127.0.0.1:1") for m in network.members],
        )
        for index, node in enumerate(network.nodes):
            await owner.send("usdc", "mint", node.address, 2_200_000_000)
            await node.send("usdc", "approve", deployment.nodes, 2_200_000_000)
            await node.send("nodes", "register", f"0x{index + 1:064x}", 12, f"http://n{index}")
        tasks = [(f"0x{index + 1:064x}", 1 << 30, 10**9, 100_000_000) for index in range(10)]
        edges = [index << 16 | index + 1 for index in range(9)]
        await owner.send("models", "register", MODEL, "tiny", tasks, edges)
        await owner.send("usdc", "mint", client.address, 50_000_000)
        await client.send("usdc", "approve", deployment.market, 10_000_000)
        await client.send("market", "deposit", 10_000_000)
    return deployment


@contextlib.asynccontextmanager
async def open_network(url: str, deployment: Deployment) -> AsyncIterator[Network]:
    async with contextlib.AsyncExitStack() as stack:

        async def connect(key: bytes) -> Chain:
            chain = await Chain.connect(url, deployment, private_key=key)
            return await stack.enter_async_context(chain)

        owner = await connect(KEYS[0])
        members = sorted(
            (Identity.from_private_key(key) for key in KEYS[1:5]), key=lambda m: m.address
        )
        nodes = [await connect(key) for key in KEYS[5:8]]
        client = await connect(KEYS[8])
        rpc = await stack.enter_async_context(Rpc(url))
        yield Network(url, deployment, owner, members, nodes, client, rpc)
