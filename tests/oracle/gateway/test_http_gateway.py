from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from splitup_oracle.config import GatewayConfig
from splitup_oracle.gateway.access import compute_execution_rights
from splitup_oracle.gateway.http_gateway import start_gateway

from splitup.core import limits
from splitup.core.errors import (
    ConfigurationError,
    InvalidInput,
    Refused,
    StorageUnavailable,
)
from splitup.crypto.keys import Identity, generate_identity
from splitup.crypto.keystore import write_secret_file
from splitup.graph.manifest import Manifest
from splitup.messages import api
from splitup.messages.base import CLIENT
from splitup.messages.plans import PlanCertificate
from splitup.messages.storage import (
    ExecutionRequest,
    Grants,
    LogName,
    LogWrite,
    ModelRequest,
    UploadObject,
)
from splitup.messages.verification import VerificationOrder
from splitup.net.http import SignedClient
from splitup.net.object_transfer import get_object
from splitup.protocol.execution.takeovers import ExecutorMap
from splitup.protocol.planning.selection import rank_validators
from splitup.protocol.planning.validators import open_snapshot
from splitup.protocol.settlement.proof_of_sampling import get_sampled_tasks
from splitup.storage.gateway_client import GatewayClient, prove_account
from tests.builders import find_free_port, make_chain_manifest
from tests.oracle.gateway_network import NODE_STAKE, Network, run_network, write_config

pytestmark = pytest.mark.asyncio(loop_scope="module")
STEPS = 100
TASKS = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def network(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Network]:
    async with run_network(tmp_path_factory.mktemp("gateway")) as running:
        await running.store_manifest(make_chain_manifest(TASKS))
        yield running


@pytest.fixture
def manifest() -> Manifest:
    return make_chain_manifest(TASKS)


def certify(
    network: Network, manifest: Manifest, *, left_s: int = 60, **options: object
) -> PlanCertificate:
    """A plan in which node i of the network executes task i."""
    snapshot = network.make_snapshot(manifest)
    request = network.make_request(manifest, snapshot, steps=STEPS, left_s=left_s)
    executors = {task: network.nodes[task].address for task in range(3)}
    executors[3] = network.nodes[0].address
    return network.committee.certify(request, snapshot, manifest, restrict=executors, **options)  # type: ignore[arg-type]


async def ask(network: Network, who: Identity, certificate: PlanCertificate) -> Grants:
    async with network.open(who) as gateway:
        return await gateway.execution_grants(certificate)


def log_name(certificate: PlanCertificate, task: int, number: int = 0) -> LogName:
    plan = certificate.plan
    node = plan.request.client if task == CLIENT else plan.executors()[task]
    return LogName.of(task, 0, node, number)


def log_key(certificate: PlanCertificate, task: int, number: int = 0) -> str:
    return log_name(certificate, task, number).get_key(certificate.plan.request.execution_id)


def make_read(certificate: PlanCertificate, task: int, number: int = 0) -> LogName:
    node = log_name(certificate, task).node
    return LogName(task=task, port=0, node=node, number=number, apart=False)


def make_write(task: int, number: int = 0, length: int = 400) -> LogWrite:
    digest = hashlib.sha256(bytes(length)).hexdigest()
    return LogWrite(
        task=task, port=0, number=number, apart=False, length_bytes=length, sha256=digest
    )


async def ask_log(
    network: Network,
    who: Identity,
    certificate: PlanCertificate,
    *,
    writes: Sequence[LogWrite] = (),
    reads: Sequence[LogName] = (),
) -> Grants:
    async with network.open(who) as gateway:
        return await gateway.log_grants(certificate, writes, reads)


def split(grants: Grants) -> dict[str, set[str]]:
    return {
        method: {grant.key for grant in grants.grants if grant.method == method}
        for method in ("GET", "PUT")
    }


# ---- executions --------------------------------------------------------------------------------


async def test_executor_writes_its_log_and_reads_its_inputs(
    network: Network, manifest: Manifest
) -> None:
    certificate = certify(network, manifest)
    reads = [make_read(certificate, 0, number) for number in range(2)]
    writes = [make_write(1), make_write(1, 1)]
    executor = network.nodes[1]
    grants = split(await ask_log(network, executor, certificate, writes=writes, reads=reads))
    own = {log_key(certificate, 1, number) for number in range(2)}
    assert grants == {"PUT": own, "GET": {log_key(certificate, 0, n) for n in range(2)}}


async def test_client_writes_inputs_and_reads_outputs(network: Network, manifest: Manifest) -> None:
    certificate = certify(network, manifest)
    grants = await ask_log(
        network,
        network.client,
        certificate,
        writes=[make_write(CLIENT)],
        reads=[make_read(certificate, TASKS - 1)],
    )
    key = log_key(certificate, CLIENT)
    assert split(grants) == {"PUT": {key}, "GET": {log_key(certificate, TASKS - 1)}}
    with pytest.raises(Refused, match="does not run task 0"):
        await ask_log(network, network.client, certificate, writes=[make_write(0)])
    with pytest.raises(Refused, match="does not read port 0 of task 0"):
        await ask_log(network, network.client, certificate, reads=[make_read(certificate, 0)])


async def test_fallback_and_stranger_get_nothing(network: Network, manifest: Manifest) -> None:
    certificate = certify(network, manifest)
    assert any(network.nodes[3].address in task for task in certificate.plan.tasks)
    with pytest.raises(Refused, match="neither an executor nor the client") as refusal:
        await ask(network, network.nodes[3], certificate)
    assert refusal.value.status == 403
    with pytest.raises(Refused, match="has no part in execution") as refusal:
        await ask(network, generate_identity(), certificate)
    assert refusal.value.status == 403


async def test_tampered_certificates_are_refused(network: Network, manifest: Manifest) -> None:
    good = certify(network, manifest)
    stranger = generate_identity()
    request = good.plan.request
    greedy = (*good.plan.tasks[:1], good.plan.tasks[1][::-1])
    plans = [
        good.plan.model_copy(
            update={"request": request.model_copy(update={"client_key": stranger.signing_key_hex})}
        ),
        good.plan.model_copy(update={"tasks": (*greedy, *good.plan.tasks[2:])}),
        good.plan.model_copy(update={"request": request.model_copy(update={"steps": STEPS + 1})}),
    ]
    for plan, who in zip(plans, (stranger, network.nodes[1], network.nodes[1]), strict=True):
        forged = good.model_copy(update={"plan": plan})
        with pytest.raises(Refused, match="certificate is not valid") as refusal:
            await ask(network, who, forged)
        assert refusal.value.status == 403
    # even with a quorum, the seed must be the committee's
    plan = good.plan.model_copy(update={"seed": "0x" + "77" * 32})
    with pytest.raises(Refused, match="seed is not the hash"):
        await ask(
            network,
            network.nodes[1],
            network.committee.sign_plan(plan, good.seed_signature),
        )
    await ask(network, network.nodes[1], good)


async def test_two_of_four_signatures_are_no_quorum(network: Network, manifest: Manifest) -> None:
    with pytest.raises(Refused, match="2 signatures; 3 are needed"):
        await ask(network, network.nodes[0], certify(network, manifest, signers=2))
    good = certify(network, manifest)
    doubled = good.model_copy(update={"signatures": (*good.signatures[:2], good.signatures[1])})
    with pytest.raises(Refused, match="ascend strictly"):
        await ask(network, network.nodes[0], doubled)
    renamed = good.signatures[0].model_copy(update={"member": network.client.address})
    with pytest.raises(Refused, match="certificate is not valid"):
        await ask(
            network,
            network.nodes[0],
            good.model_copy(update={"signatures": (renamed, *good.signatures[1:])}),
        )


async def test_passed_deadline_is_refused(network: Network, manifest: Manifest) -> None:
    snapshot = network.make_snapshot(manifest)
    request = network.make_request(manifest, snapshot, left_s=0)
    certificate = network.committee.certify(request, snapshot, manifest)
    with pytest.raises(Refused, match="deadline of execution"):
        await ask(network, network.client, certificate)


async def test_urls_end_with_the_deadline_and_its_grace(
    network: Network, manifest: Manifest
) -> None:
    certificate = certify(network, manifest)
    deadline = certificate.plan.request.deadline
    for grant in (await ask(network, network.client, certificate)).grants:
        assert 0 <= deadline + limits.GRANT_GRACE_S - grant.expires_at_s <= 2


async def test_other_deployments_and_models_are_refused(
    network: Network, manifest: Manifest
) -> None:
    snapshot = network.make_snapshot(manifest)
    request = network.make_request(manifest, snapshot)
    for change, reason in (
        ({"market": "0x" + "11" * 20}, "another deployment"),
        ({"chain_id": 1}, "for chain 1"),
        ({"model_id": "0x" + "22" * 32}, "no model 0x2222"),
    ):
        other = request.model_copy(update=change)
        certificate = network.committee.certify(other, snapshot, manifest)
        with pytest.raises(Refused, match=reason):
            await ask(network, network.client, certificate)


async def test_large_tensors_are_granted_upfront_as_far_as_they_fit(network: Network) -> None:
    wide = make_chain_manifest(1)
    port = {"shape": (2**20,), "dtype": "float32"}  # 4 MB: one object per step
    task = wide.tasks[0]
    wide = wide.model_copy(
        update={
            "inputs": (wide.inputs[0].model_copy(update=port),),
            "outputs": (wide.outputs[0].model_copy(update=port),),
            "tasks": (
                task.model_copy(
                    update={
                        "inputs": (task.inputs[0].model_copy(update=port),),
                        "outputs": (task.outputs[0].model_copy(update=port),),
                    }
                ),
            ),
        }
    )
    await network.store_manifest(wide)
    snapshot = network.make_snapshot(wide)
    request = network.make_request(wide, snapshot, steps=10)
    certificate = network.committee.certify(request, snapshot, wide)
    grants = (await ask(network, network.client, certificate)).grants
    assert len(grants) == 20 and {g.length_bytes for g in grants} == {2**22}
    first = LogName.of(CLIENT, 0, request.client, 0, apart=True)
    assert grants[0].key == first.get_key(request.execution_id)
    request = network.make_request(wide, snapshot, steps=limits.MAX_STEPS)
    plan = network.committee.certify(request, snapshot, wide).plan
    key = network.client.signing_key_hex
    rights = compute_execution_rights(plan, wide, key, ExecutorMap(plan))
    assert len(rights) == limits.MAX_GRANTS


async def test_a_token_works_once_and_for_one_purpose(network: Network, manifest: Manifest) -> None:
    certificate = certify(network, manifest)
    body = ExecutionRequest(certificate=certificate)
    async with SignedClient(network.nodes[0]) as http:
        token = http.sign(api.EXECUTION_REQUEST, network.url, body)
        await http.post_token(api.EXECUTION_REQUEST, network.url, token)
        with pytest.raises(Refused, match="was used before"):
            await http.post_token(api.EXECUTION_REQUEST, network.url, token)
        with pytest.raises(Refused, match="another audience"):
            await http.post_signed(api.EXECUTION_REQUEST, network.url, "somebody-else", body)
        with pytest.raises(Refused, match="'splitup-execution-request' token"):
            wrong = replace(api.EXECUTION_REQUEST, typ=api.MODEL_REQUEST.typ)
            await http.post_signed(wrong, network.url, network.url, body)


# ---- the grants at the store -------------------------------------------------------------------


async def test_the_store_enforces_length_and_writes_once(
    network: Network, manifest: Manifest
) -> None:
    certificate = certify(network, manifest)
    write = make_write(CLIENT)
    grants = await ask_log(network, network.client, certificate, writes=[write])
    put = grants.find("PUT", log_key(certificate, CLIENT))
    assert put.length_bytes == write.length_bytes
    data = bytes(write.length_bytes)
    async with SignedClient() as http:

        async def send(body: bytes, **headers: str) -> int:
            async with http.session.put(
                put.url, data=body, headers={**put.headers, **headers}
            ) as response:
                return response.status

        assert await send(data[:-1], **{"Content-Length": str(len(data) - 1)}) == 403
        assert await send(b"x" + data[1:]) == 400
        assert await send(data) == 200
        assert await send(data) == 412
        read = make_read(certificate, CLIENT)
        readers = await ask_log(network, network.nodes[0], certificate, reads=[read])
        get = readers.find("GET", put.key)
        assert (
            await get_object(
                http.session,
                get,
                max_bytes=len(data),
                expected_digest=hashlib.sha256(data).hexdigest(),
            )
            == data
        )


# ---- verification ------------------------------------------------------------------------------


async def make_order(
    network: Network, manifest: Manifest, *, left_s: int = 60
) -> tuple[VerificationOrder, list[str]]:
    """An order for a task that the draw really picks, and who may carry it out."""
    certificate = certify(network, manifest, left_s=left_s)
    snapshot = network.make_snapshot(manifest)
    for nonce in range(1000):
        draw = network.committee.draw(certificate.plan, nonce)
        sampled = [t for t in get_sampled_tasks(draw, TASKS, 800) if t in (1, 2)]
        if sampled:
            break
    ranking = rank_validators(draw.seed, sampled[0], certificate.plan, snapshot, manifest)
    shown = open_snapshot(snapshot, (certificate.plan.executors()[sampled[0]], ranking[0]))
    order = VerificationOrder(certificate=certificate, draw=draw, snapshot=shown, task=sampled[0])
    return order, ranking


async def verify(
    network: Network, who: Identity, order: VerificationOrder, *reads: LogName
) -> Grants:
    async with network.open(who) as gateway:
        return await gateway.verification_grants(order, reads)


async def test_validator_reads_inputs_and_never_the_output(
    network: Network, manifest: Manifest
) -> None:
    order, ranking = await make_order(network, manifest)
    by_address = {node.address: node for node in network.nodes}
    validator = by_address[ranking[0]]
    inputs = make_read(order.certificate, order.task - 1)
    grants = split(await verify(network, validator, order, inputs))
    task = manifest.tasks[order.task]
    assert grants["PUT"] == set()
    assert grants["GET"] == {
        log_key(order.certificate, order.task - 1),
        f"tasks/{task.task_id}.json",
    }
    with pytest.raises(Refused, match="is no input of task"):
        await verify(network, validator, order, make_read(order.certificate, order.task))


async def test_s41_drawn_tasks_are_read_as_long_as_members_may_wait_for_results(
    network: Network, manifest: Manifest
) -> None:
    wait_s = limits.VERIFICATION_GRACE_S * limits.RULING_GRACE_BPS // 10_000
    by_address = {node.address: node for node in network.nodes}
    for left_s in (-wait_s, -limits.VERIFICATION_GRACE_S):
        order, ranking = await make_order(network, manifest, left_s=left_s)
        inputs = make_read(order.certificate, order.task - 1)
        if left_s == -wait_s:
            assert split(await verify(network, by_address[ranking[0]], order, inputs))["GET"]
        else:
            with pytest.raises(Refused, match="grace period have passed"):
                await verify(network, by_address[ranking[0]], order, inputs)


async def test_wrong_validators_and_forged_draws_are_refused(
    network: Network, manifest: Manifest
) -> None:
    order, ranking = await make_order(network, manifest)
    by_address = {node.address: node for node in network.nodes}
    executor = by_address[order.certificate.plan.executors()[order.task]]
    validator = by_address[ranking[0]]
    other = next(
        task for task in range(TASKS) if task not in get_sampled_tasks(order.draw, TASKS, 800)
    )
    snapshot = network.make_snapshot(manifest)
    later = snapshot.model_copy(update={"epoch": 2})
    stolen = (await make_order(network, manifest))[0].draw
    plan = order.certificate.plan
    raised = plan.model_copy(
        update={"request": plan.request.model_copy(update={"verify_bps": 10_000})}
    )
    certificate = order.certificate.model_copy(update={"plan": raised})
    cases = [
        (  # another share than the client's, by which every task would be drawn
            validator,
            order.model_copy(update={"certificate": certificate, "task": other}),
            "certificate is not valid",
        ),
        (executor, order, "not a validator of task"),
        (network.client, order, "not that of a node that the order shows"),
        (validator, order.model_copy(update={"task": other}), "was not drawn"),
        (validator, order.model_copy(update={"draw": stolen}), "draw is of execution"),
        (
            validator,
            order.model_copy(
                update={"draw": order.draw.model_copy(update={"block_hash": "0x" + "33" * 32})}
            ),
            "draw is not valid",
        ),
        (
            validator,
            order.model_copy(
                update={"snapshot": open_snapshot(later, (executor.address, ranking[0]))}
            ),
            "header is not that of",
        ),
        (
            validator,
            order.model_copy(update={"snapshot": open_snapshot(snapshot, ranking[:1])}),
            "the executor .* is not shown",
        ),
    ]
    for who, bad, reason in cases:
        with pytest.raises(Refused, match=reason) as refusal:
            await verify(network, who, bad)
        assert refusal.value.status == 403


# ---- models and uploads ------------------------------------------------------------------------


async def test_manifests_are_public_and_checked(network: Network, manifest: Manifest) -> None:
    async with GatewayClient((network.url,), None) as gateway:
        assert await gateway.fetch_manifest(manifest.model_id) == manifest.to_bytes()
        with pytest.raises(Refused, match="no model") as refusal:
            await gateway.fetch_manifest("0x" + "00" * 32)
        assert refusal.value.status == 404
        with pytest.raises(Refused):
            await gateway.fetch_manifest("0x..%2f")


async def test_only_staked_nodes_read_models(network: Network, manifest: Manifest) -> None:
    async with network.open(network.nodes[0]) as gateway:
        grants = await gateway.model_grants(manifest.model_id)
    async with network.open(network.client) as gateway:
        with pytest.raises(Refused, match="register and stake first"):
            await gateway.model_grants(manifest.model_id)
    rich = generate_identity()  # who could stake may try the tasks first
    await network.owner.send("usdc", "mint", rich.address, NODE_STAKE)
    async with network.open(rich) as gateway:
        assert {g.key for g in (await gateway.model_grants(manifest.model_id)).grants} == {
            g.key for g in grants.grants
        }
    stolen = ModelRequest(model_id=manifest.model_id, proof=prove_account(rich))
    async with SignedClient(network.client) as http:  # the proof is of another key
        with pytest.raises(Refused, match="does not hold the USDC"):
            await http.post_signed(
                api.MODEL_REQUEST,
                network.url,
                network.url,
                stolen.model_dump(mode="json"),
            )
    keys = {grant.key for grant in grants.grants}
    assert keys == {f"models/{manifest.model_id}/manifest.json"} | {
        f"tasks/{task.task_id}.json" for task in manifest.tasks
    }
    assert {grant.method for grant in grants.grants} == {"GET"}


async def test_uploads_are_content_addressed_and_stored_once(network: Network) -> None:
    data = b"weights " * 1000
    digest = hashlib.sha256(data).hexdigest()
    entry = UploadObject(key=f"blobs/{digest}", length_bytes=len(data), sha256=digest)
    async with network.open(network.client) as gateway:
        answer = await gateway.upload_grants([entry])
        assert answer.present == ()
        [grant] = answer.grants
        with pytest.raises(Refused, match="refused the upload"):
            await gateway.upload_object(grant, lambda: iter([b"x" * len(data)]), lambda _: None)

        def break_off() -> Iterator[bytes]:
            yield data[:100]
            raise FileNotFoundError("weights.safetensors")

        with pytest.raises(InvalidInput, match=r"weights.safetensors"):
            await gateway.upload_object(grant, break_off, lambda _: None)
        sent: list[int] = []
        await gateway.upload_object(grant, lambda: iter([data[:100], data[100:]]), sent.append)
        assert sum(sent) == len(data)
        again = await gateway.upload_grants([entry])
        assert (again.grants, again.present) == ((), (entry.key,))


@pytest.mark.parametrize(
    "key",
    [
        "executions/00/t0000.0/00000",
        "blobs/../secret",
        f"blobs/{'11' * 32}",
        f"weights/{'00' * 32}",
        f"models/{'00' * 32}/manifest.json",
        f"tasks/{'00' * 32}.json\n",
        "k" * limits.OBJECT_KEY_BYTES,
    ],
)
async def test_other_upload_keys_are_refused(network: Network, key: str) -> None:
    entry = UploadObject(key=key, length_bytes=1, sha256="00" * 32)
    async with network.open(network.client) as gateway:
        with pytest.raises(Refused) as refusal:
            await gateway.upload_grants([entry])
        assert refusal.value.status == 403


async def test_uploads_are_bounded_by_what_they_are(network: Network) -> None:
    digest = "00" * 32
    async with network.open(network.client) as gateway:
        for key, limit in (
            (f"models/0x{digest}/manifest.json", limits.MAX_MANIFEST_BYTES),
            (f"tasks/{digest}.json", limits.MAX_GRAPH_BYTES),
            (f"blobs/{digest}", limits.MAX_TOKENIZER_BYTES),
        ):
            entry = UploadObject(key=key, length_bytes=limit, sha256=digest)
            assert (await gateway.upload_grants([entry])).grants[0].length_bytes == limit
            with pytest.raises(Refused, match="the limit is"):
                longer = entry.model_copy(update={"length_bytes": limit + 1})
                await gateway.upload_grants([longer])


async def test_audit_log_names_grants_and_holds_no_url(
    network: Network, manifest: Manifest
) -> None:
    certificate = certify(network, manifest)
    await ask_log(network, network.nodes[1], certificate, writes=[make_write(1)])
    with pytest.raises(Refused):
        await ask(network, network.nodes[3], certificate)
    text = network.audit_path.read_text()
    granted, refused = (json.loads(line) for line in text.splitlines()[-2:])
    assert granted["subject"] == certificate.plan.request.execution_id
    assert (granted["GET"], granted["PUT"]) == (0, 1)
    assert granted["key"] == network.nodes[1].signing_key_hex
    assert "neither an executor" in refused["refused"]
    assert "X-Amz" not in text and network.server.endpoint_url not in text


# ---- environment -------------------------------------------------------------------------------


async def test_a_dead_store_is_unavailable_not_refused(
    network: Network, manifest: Manifest, tmp_path: Path
) -> None:
    config = write_config(network, tmp_path, s3_endpoint=f"http://127.0.0.1:{find_free_port()}")
    gateway = await start_gateway(GatewayConfig.load(config))
    try:
        async with GatewayClient((gateway.server.url,), network.client) as client:
            await client.ping()
            with pytest.raises(StorageUnavailable, match=r"object store at .* does not answer"):
                await client.fetch_manifest(manifest.model_id)
    finally:
        await gateway.close()
    with pytest.raises(StorageUnavailable, match="check that it runs"):
        async with GatewayClient((gateway.server.url,), network.client) as client:
            await client.ping()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bucket": "Not A Bucket"}, "'bucket'"),
        ({"secret_key": "x"}, "'secret_key'"),
        ({"listen_port": 70_000}, "'listen_port'"),
        ({"deployment": "missing.json"}, "missing.json cannot be read"),
        ({"credentials": "missing.json"}, "missing.json"),
    ],
)
async def test_bad_configuration_is_named(
    network: Network, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    path = write_config(network, tmp_path, **change)
    with pytest.raises(ConfigurationError, match=reason):
        await start_gateway(GatewayConfig.load(path))


async def test_a_store_that_refuses_the_secret_is_named(
    network: Network, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await network.gateway.check_store()
    assert not caplog.records
    wrong = tmp_path / "wrong.json"
    write_secret_file(wrong, b'{"access_key": "a", "secret_key": "b"}', what="S3 credentials file")
    path = write_config(network, tmp_path, credentials=str(wrong))
    gateway = await start_gateway(GatewayConfig.load(path))
    try:
        await gateway.check_store()
    finally:
        await gateway.close()
    assert "answered 403" in caplog.text and "check s3_endpoint" in caplog.text


async def test_the_command_serves_until_it_is_told_to_stop(
    network: Network, manifest: Manifest, tmp_path: Path
) -> None:
    port = find_free_port()
    config = write_config(network, tmp_path, listen_port=port)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from splitup_oracle.cli.app import main; main()"),
        *("gateway", "--config", str(config)),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    log = b""
    while b"listens on" not in log:
        line = await process.stderr.readline()
        assert line, f"the gateway ended: {log.decode()}"
        log += line
    async with GatewayClient((f"http://127.0.0.1:{port}",), None) as client:
        assert await client.fetch_manifest(manifest.model_id) == manifest.to_bytes()
    process.terminate()
    _, rest = await process.communicate()
    assert process.returncode == 0, rest.decode()
