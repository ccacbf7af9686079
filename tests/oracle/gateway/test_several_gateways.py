"""Several gateways of one bucket, and what ends a right, on a real chain and store."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from splitup_oracle.config import GatewayConfig
from splitup_oracle.gateway.http_gateway import RunningGateway, start_gateway
from splitup_oracle.gateway.sources import ChainView, Lately

from splitup.chain.client import Chain
from splitup.chain.rpc import Rpc
from splitup.core import tuning
from splitup.core.errors import (
    BadSignature,
    ChainUnavailable,
    Refused,
    StorageUnavailable,
)
from splitup.crypto.keys import Identity, generate_identity
from splitup.messages import api
from splitup.messages.base import CLIENT
from splitup.messages.completions import SignedTakeover, Takeover
from splitup.messages.plans import PlanCertificate
from splitup.messages.storage import LogName, LogRequest, LogWrite, UploadObject, UploadRequest
from splitup.net.http import SignedClient
from splitup.protocol.execution.takeovers import sign_takeover
from splitup.storage.gateway_client import GatewayClient, prove_account, recover_account
from tests.builders import find_free_port, make_chain_manifest
from tests.oracle.gateway_network import Network, register_node, run_network, write_config

pytestmark = pytest.mark.asyncio(loop_scope="module")
MANIFEST = make_chain_manifest(4)
DATA = b"x" * 300


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def network(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Network]:
    async with run_network(tmp_path_factory.mktemp("gateways")) as running:
        await running.store_manifest(MANIFEST)
        yield running


@asynccontextmanager
async def open_gateway(
    network: Network, folder: Path, **changes: Any
) -> AsyncIterator[RunningGateway]:
    """Another gateway of the network's bucket."""
    path = write_config(network, folder, data_dir="more", **changes)
    gateway = await start_gateway(GatewayConfig.load(path))
    try:
        yield gateway
    finally:
        await gateway.close()


def certify(network: Network) -> PlanCertificate:
    """A plan in which node i executes task i, and node 2 is the first to take task 1 over."""
    snapshot = network.make_snapshot(MANIFEST)
    request = network.make_request(MANIFEST, snapshot, steps=10)
    nodes = [node.address for node in network.nodes]
    certificate = network.committee.certify(
        request, snapshot, MANIFEST, restrict={i: nodes[i] for i in range(4)}
    )
    tasks = list(certificate.plan.tasks)
    tasks[1] = (nodes[1], nodes[2])
    plan = certificate.plan.model_copy(update={"tasks": tuple(tasks)})
    return network.committee.sign_plan(plan, certificate.seed_signature)


def write(task: int) -> LogWrite:
    return LogWrite(
        task=task,
        port=0,
        number=0,
        apart=False,
        length_bytes=len(DATA),
        sha256=hashlib.sha256(DATA).hexdigest(),
    )


def read(certificate: PlanCertificate, task: int) -> LogName:
    plan = certificate.plan
    node = plan.request.client if task == CLIENT else plan.executors()[task]
    return LogName(task=task, port=0, node=node, number=0, apart=False)


async def ask(
    network: Network,
    who: Identity,
    certificate: PlanCertificate,
    *,
    writes: tuple[LogWrite, ...] = (),
    reads: tuple[LogName, ...] = (),
    takeovers: tuple[SignedTakeover, ...] = (),
    url: str = "",
) -> list[str]:
    """Return what is granted, as methods and keys."""
    async with GatewayClient((url or network.url,), who) as gateway:
        grants = await gateway.log_grants(certificate, writes, reads, takeovers)
    return [f"{grant.method} {grant.key}" for grant in grants.grants]


# ---- side by side ------------------------------------------------------------------------------


async def test_a15_a_token_for_one_gateway_is_worth_nothing_at_another(
    network: Network, tmp_path: Path
) -> None:
    certificate = certify(network)
    body = LogRequest(certificate=certificate, writes=(write(1),), reads=())
    async with (
        open_gateway(network, tmp_path) as other,
        SignedClient(network.nodes[1]) as http,
    ):
        token = http.sign(api.LOG_REQUEST, network.url, body)
        with pytest.raises(Refused, match="another audience"):
            await http.post_token(api.LOG_REQUEST, other.server.url, token)
        await http.post_token(api.LOG_REQUEST, network.url, token)
        with pytest.raises(Refused, match="used before"):
            await http.post_token(api.LOG_REQUEST, network.url, token)


async def test_a_gateway_answers_to_its_public_url_alone(network: Network, tmp_path: Path) -> None:
    certificate = certify(network)
    body = LogRequest(certificate=certificate, writes=(write(1),), reads=())
    async with (
        open_gateway(network, tmp_path, public_url="http://gateway.example:7") as other,
        SignedClient(network.nodes[1]) as http,
    ):
        await http.post_signed(api.LOG_REQUEST, other.server.url, "http://gateway.example:7", body)
        with pytest.raises(Refused, match="another audience"):
            await http.post_signed(api.LOG_REQUEST, other.server.url, other.server.url, body)


async def test_the_next_gateway_serves_when_one_is_gone(network: Network, tmp_path: Path) -> None:
    dead = f"http://127.0.0.1:{find_free_port()}"
    certificate = certify(network)
    async with open_gateway(network, tmp_path) as other:
        for urls in ((dead, network.url), (network.url, dead), (dead, other.server.url, dead)):
            async with GatewayClient(urls, network.nodes[1]) as gateway:
                for _ in range(2):
                    assert await gateway.fetch_manifest(MANIFEST.model_id) == MANIFEST.to_bytes()
                    assert (await gateway.log_grants(certificate, [write(1)], [])).grants
    async with GatewayClient((dead, dead), network.nodes[1]) as gateway:
        with pytest.raises(
            StorageUnavailable, match=rf"{dead} and {dead}/\S* cannot be.*check that it runs"
        ):
            await gateway.ping()


async def test_a_refusal_is_final_and_not_carried_to_the_next_gateway(
    network: Network, tmp_path: Path
) -> None:
    certificate = certify(network)
    stranger = generate_identity()
    async with open_gateway(network, tmp_path) as other:
        async with GatewayClient((network.url, other.server.url), stranger) as gateway:
            with pytest.raises(Refused, match="has no part"):
                await gateway.log_grants(certificate, [write(1)], [])
        audits = (network.audit_path, tmp_path / "more" / "audit.jsonl")
        lines = [line for path in audits for line in path.read_text().splitlines()]
        assert sum(stranger.signing_key_hex in line for line in lines) == 1


# ---- clear refusals ----------------------------------------------------------------------------


async def test_a_committee_member_is_refused(network: Network) -> None:
    certificate = certify(network)
    for member in network.committee.members:
        with pytest.raises(Refused, match="has no part in execution"):
            await ask(network, member, certificate, writes=(write(1),))
        with pytest.raises(Refused, match="has no part in execution"):
            await ask(network, member, certificate, reads=(read(certificate, 0),))


async def test_a_node_outside_the_plan_is_refused(network: Network) -> None:
    certificate = certify(network)
    outside = generate_identity()
    await register_node(network.rpc_url, network.deployment, network.owner, outside)
    with pytest.raises(Refused, match="has no part in execution"):
        await ask(network, outside, certificate, reads=(read(certificate, 0),))


async def test_a_consumer_that_wants_to_write_what_it_reads_is_refused(network: Network) -> None:
    certificate = certify(network)
    consumer = network.nodes[1]
    assert await ask(network, consumer, certificate, reads=(read(certificate, 0),))
    with pytest.raises(Refused, match="does not run task 0"):
        await ask(network, consumer, certificate, writes=(write(0),))
    with pytest.raises(Refused, match="does not run"):
        await ask(network, consumer, certificate, writes=(write(CLIENT),))
    # nor does the store take a write with a URL for reading
    async with network.open(consumer) as gateway, SignedClient() as http:
        [grant] = (await gateway.log_grants(certificate, [], [read(certificate, 0)])).grants
        async with http.session.put(grant.url, data=DATA) as response:
            assert response.status == 403


async def test_a_producer_that_wants_to_read_others_tensors_is_refused(network: Network) -> None:
    certificate = certify(network)
    producer = network.nodes[0]
    assert await ask(network, producer, certificate, writes=(write(0),))
    for task in (1, 2, 3):
        with pytest.raises(Refused, match=f"does not read port 0 of task {task}"):
            await ask(network, producer, certificate, reads=(read(certificate, task),))


# ---- what ends a right -------------------------------------------------------------------------


async def test_f04_a_takeover_moves_the_rights(network: Network) -> None:
    certificate = certify(network)
    old, new, reads = network.nodes[1], network.nodes[2], (read(certificate, 0),)
    execution_id = certificate.plan.request.execution_id
    takeover = Takeover(execution_id=execution_id, task=1, candidate=1, first_step=0)
    signed = sign_takeover(network.client, takeover)
    forged = sign_takeover(new, takeover)
    with pytest.raises(Refused, match="does not run task 1"):
        await ask(network, new, certificate, writes=(write(1),))
    with pytest.raises(Refused, match="takeover is not valid"):
        await ask(network, new, certificate, writes=(write(1),), takeovers=(forged,))
    assert await ask(network, old, certificate, writes=(write(1),), reads=reads)
    assert await ask(
        network, new, certificate, writes=(write(1),), reads=reads, takeovers=(signed,)
    )
    assert await ask(network, old, certificate, writes=(write(1),)), "what it had computed is owed"
    with pytest.raises(Refused, match="does not read"):
        await ask(network, old, certificate, reads=reads)


async def test_a_node_without_stake_is_granted_nothing(network: Network) -> None:
    gone = generate_identity()
    other = dataclasses.replace(network, nodes=(gone, *network.nodes[1:]))
    certificate = certify(other)
    with pytest.raises(Refused, match="has left or lost stake"):
        await ask(other, gone, certificate, writes=(write(0),))
    assert await ask(other, network.nodes[1], certificate, writes=(write(1),))


async def test_a_leaving_node_stands_until_it_has_left(network: Network) -> None:
    node = generate_identity()
    await register_node(network.rpc_url, network.deployment, network.owner, node)

    async def stands() -> bool:  # with a fresh view: a gateway's is a few seconds old
        return await ChainView(network.owner, network.deployment).has_standing(node.address)

    assert await stands()
    async with await Chain.connect(
        network.rpc_url, network.deployment, private_key=node.private_key
    ) as chain:
        await chain.send("nodes", "requestUnstake")
        assert await stands()  # its work is begun, its stake is here
        async with Rpc(network.rpc_url) as rpc:
            await rpc.request("evm_increaseTime", 8 * 86_400)
            await rpc.request("evm_mine")
        await chain.send("nodes", "withdrawStake")
    assert not await stands()


async def test_f12_without_the_chain_its_last_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "COMMITTEE_CACHE_S", -1.0)  # ask every time
    word: list[str | None] = ["settled"]

    async def look(name: str) -> str | None:
        if not word:
            raise ChainUnavailable("gone")
        return word[0]

    lately = Lately(look, None)
    assert await lately.fetch("a") == "settled"
    word.clear()
    assert await lately.fetch("a") == "settled" and await lately.fetch("b") is None


async def test_urls_of_what_is_moved_at_once_are_short_lived(network: Network) -> None:
    certificate = certify(network)
    async with network.open(network.nodes[1]) as gateway:
        grants = await gateway.log_grants(certificate, [write(1)], [read(certificate, 0)])
    for grant in grants.grants:
        assert f"X-Amz-Expires={tuning.LOG_URL_S}&" in grant.url + "&"


# ---- uploads -----------------------------------------------------------------------------------


def make_blob(data: bytes) -> UploadObject:
    digest = hashlib.sha256(data).hexdigest()
    return UploadObject(key=f"blobs/{digest}", length_bytes=len(data), sha256=digest)


async def test_uploads_take_a_deposit_or_a_stake(network: Network, tmp_path: Path) -> None:
    poor, rich = generate_identity(), generate_identity()
    async with Rpc(network.rpc_url) as rpc:
        await rpc.request("anvil_setBalance", rich.address, hex(10**18))
    await network.owner.send("usdc", "mint", rich.address, 10**6)
    async with await Chain.connect(
        network.rpc_url, network.deployment, private_key=rich.private_key
    ) as chain:
        await chain.send("usdc", "approve", network.deployment.market, 10**6)
        await chain.send("market", "deposit", 10**6)
    blob = make_blob(b"deposit")
    async with open_gateway(network, tmp_path) as closed:
        url = closed.server.url
        for who in (rich, network.nodes[0]):
            async with GatewayClient((url,), who) as gateway:
                assert (await gateway.upload_grants([blob])).grants
        async with GatewayClient((url,), poor) as gateway:
            with pytest.raises(Refused, match="deposit first"):
                await gateway.upload_grants([blob])
        # somebody else's proof is for somebody else's key: it recovers to nobody's account
        async with SignedClient(poor) as http:
            stolen = UploadRequest(proof=prove_account(rich), objects=(blob,))
            with pytest.raises(Refused, match="deposit first"):
                await http.post_signed(api.UPLOAD_REQUEST, url, url, stolen)


async def test_a_days_quota_is_a_429_that_no_other_gateway_mends(
    network: Network, tmp_path: Path
) -> None:
    developer = generate_identity()
    async with open_gateway(
        network, tmp_path, open_uploads=True, upload_bytes_per_day=100
    ) as small:
        async with GatewayClient((small.server.url,), developer) as gateway:
            await gateway.upload_grants([make_blob(b"a" * 60)])
            with pytest.raises(StorageUnavailable, match=r"429.*40 that are left today"):
                await gateway.upload_grants([make_blob(b"b" * 60)])
        urls = (small.server.url, network.url)
        if int(developer.signing_key_hex, 16) % 2:
            urls = (network.url, small.server.url)
        async with GatewayClient(urls, developer) as gateway:  # begins with the small one
            with pytest.raises(StorageUnavailable, match="429"):
                await gateway.upload_grants([make_blob(b"b" * 60)])


async def test_an_account_proof_is_bound_to_its_key() -> None:
    identity, other = generate_identity(), generate_identity()
    proof = prove_account(identity)
    assert recover_account(identity.signing_key_hex, proof) == identity.address
    assert recover_account(other.signing_key_hex, proof) not in (identity.address, other.address)
    with pytest.raises(BadSignature):
        recover_account(identity.signing_key_hex, "0x" + "ff" * 65)


# ---- floods --------------------------------------------------------------------------------------


async def test_a25_garbage_and_strangers_are_refused_and_the_honest_served(
    network: Network,
) -> None:
    certificate = certify(network)

    async def send(http: SignedClient, body: bytes) -> int:
        url = api.LOG_REQUEST.url(network.url)
        async with http.session.post(url, data=body) as response:
            return response.status

    bodies = [b"", b"{}", b"[" * 10_000, b'{"jws": "a.b.c"}', b'{"jws": 1}', b"\xff" * 1000]
    async with SignedClient() as http:
        flood = [send(http, bodies[i % len(bodies)]) for i in range(300)]
        statuses, granted = await asyncio.gather(
            asyncio.gather(*flood), ask(network, network.nodes[1], certificate, writes=(write(1),))
        )
    assert set(statuses) == {400} and granted
    with pytest.raises(Refused):
        async with SignedClient(network.nodes[1]) as http:
            await http.post_signed(api.LOG_REQUEST, network.url, network.url, {"x": 1})
