"""Committee members as processes, on a real chain (``committee_network``)."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest
from splitup_oracle.config import OracleConfig

from splitup.chain.committee_reader import fetch_committee
from splitup.client.market.plan_requests import Wanted
from splitup.client.market.signed_request import make_request
from splitup.core.errors import ConfigurationError, Refused
from splitup.crypto.keys import Identity, generate_identity
from splitup.crypto.quorum import compute_execution_id
from splitup.devnet.anvil import derive_key
from splitup.messages import api
from splitup.messages.base import ZERO_BYTES32
from splitup.messages.snapshots import ReachRequest
from splitup.net.http import SignedClient
from splitup.net.links import LinkAcceptor
from splitup.net.tunnel import Tunnel
from splitup.protocol.committee.certificates import check_certificate
from tests.builders import HANG_S, anybody
from tests.oracle.committee_network import MANIFEST, MNEMONIC, STEPS, Network, Node, run_network


async def run_execution(network: Network) -> str:
    execution_id, _ = await network.request()
    certificate = await network.fetch_plan(execution_id)
    check_certificate(certificate, await fetch_committee(network.client))
    assert certificate.plan.request.execution_id == execution_id
    assert await network.wait_until(lambda: network.find_settlement(execution_id), 3 * HANG_S)
    return execution_id


async def test_f06_members_start_plan_settle_and_survive_a_kill(tmp_path: Path) -> None:
    async with run_network(tmp_path, verify_bps=10_000) as network:
        try:
            await network.wait_until(network.is_ready, 3 * HANG_S)
            await check_interface(network)
            first = await run_execution(network)
            await check_payments(network, first)
            await check_share(network)

            await network.stop_member(0, signal.SIGKILL)
            await run_execution(network)
            await network.start_member(0)
            await network.wait_until(network.is_ready, 3 * HANG_S)
            await network.stop_member(1)  # now the one that came back is needed
            await run_execution(network)
            await check_retirement(network)

            assert await network.stop_member(2) == 0
            assert await network.stop_member(0) == 0
            logs = network.read_logs()
            assert "Traceback" not in logs
            assert "ERROR" not in logs
        except BaseException:
            print(network.read_logs())
            raise


async def check_payments(network: Network, execution_id: str) -> None:
    """Every task was verified (the draw takes all here), every party paid by its share."""
    events = await network.find_settlement(execution_id)
    names = [event.name for event in events]
    assert names.count("PlanAccepted") == names.count("Settled") == 1
    assert names.count("ExecutionCommitted") == 1 and "CompletionCommitted" not in names
    paid = next(event.args["paid"] for event in events if event.name == "Settled")
    assert paid == 2 * MANIFEST.price_micro_usdc(STEPS), "executors and one validator per task"
    assert sum(len({o.task for o in node.orders}) for node in network.nodes) == len(MANIFEST.tasks)


async def check_retirement(network: Network) -> None:
    """What was requested before its model is retired goes on; what comes later gets no plan."""
    gate = asyncio.Event()
    running, _ = await network.request(gate)
    await network.fetch_plan(running)
    await network.owner.send("models", "retire", MANIFEST.model_id)
    late, _ = await network.request()
    with pytest.raises(Refused, match="was retired by its developer"):
        await network.http.get_json(f"{network.endpoints[2]}/v1/plan/{late}?wait_s=20")
    gate.set()
    assert await network.wait_until(lambda: network.find_settlement(running), 3 * HANG_S)


async def check_share(network: Network) -> None:
    """A signed request below the network's share is refused, by the contract's rule."""
    identity = Identity.from_private_key(derive_key(MNEMONIC, 5))
    deployment, nonce = network.deployment, 2**40
    wanted = Wanted(
        execution_id=compute_execution_id(
            deployment.chain_id, deployment.market, identity.address, nonce
        ),
        chain_id=deployment.chain_id,
        market=deployment.market,
        model_id=MANIFEST.model_id,
        client=identity.address,
        client_key=identity.signing_key_hex,
        steps=STEPS,
        max_price_micro_usdc=10_000,
        deadline=(await network.client.fetch_head()).timestamp + 300,
        verify_bps=799,
        task_count=len(MANIFEST.tasks),
    )
    signed = await make_request(network.client, identity, wanted, nonce, ZERO_BYTES32)
    with pytest.raises(Refused, match="least share is 800"):
        await network.http.post_json(api.SIGNED_REQUEST.url(network.endpoints[0]), signed)


async def check_interface(network: Network) -> None:
    """What strangers get from a member's routes."""
    url, unknown = network.endpoints[0], "0x" + "77" * 32
    assert await network.http.get_json(f"{url}/v1/ping") == {}
    status = await network.get_status(0)
    assert status["nodes_registered"] == status["nodes_live"] == 4
    rows = await network.wait_until(
        lambda: [row for row in network.nodes[0].reply.get("tasks", ()) if row["holders"] == 4]
    )
    assert {row["task"] for row in rows} == set(range(len(MANIFEST.tasks)))
    assert {row["model_id"] for row in rows} == {MANIFEST.model_id}

    async def names_all() -> bool:  # the first may have been made before the last node was seen
        latest = await network.client.call("committee", "latestSnapshot")
        try:
            snapshot = await network.http.get_json(f"{url}/v1/snapshot/{latest['root']}")
        except Refused:  # it has not heard of it yet
            return False
        return len(snapshot["entries"]) == 4

    await network.wait_until(names_all)
    for path, code in [
        (f"snapshot/{unknown}", 404),
        (f"plan/{unknown}", 404),
        (f"plan/{unknown}?wait_s=0.05", 404),
        (f"plan/{unknown}?wait_s=9999", 400),
        ("nothing", 404),
    ]:
        with pytest.raises(Refused) as refused:
            await network.http.get_json(f"{url}/v1/{path}")
        assert refused.value.status == code, path

    await check_reach(network, url)
    member = (await fetch_committee(network.client)).members[0]
    async with SignedClient(generate_identity()) as stranger:
        with pytest.raises(Refused, match="no committee member's key"):
            await stranger.post_signed(api.GOSSIP, url, member.account, {})
        with pytest.raises(Refused, match="another audience"):
            await stranger.post_signed(api.GOSSIP, url, "0x0", {})


async def check_reach(network: Network, url: str) -> None:
    """A member says whether it reaches a node, and relays for one that it does not."""
    node, other = network.nodes[0], network.nodes[1]
    assert node.server is not None and other.server is not None

    async def ask(sender: Node, endpoint: str) -> str:
        request = ReachRequest(node=node.identity.address, endpoint=endpoint)
        committee = network.deployment.committee
        reply = await sender.http.post_signed(api.REACH_REQUEST, url, committee, request)
        return str(reply["problem"])

    assert await ask(node, node.server.url) == ""
    assert "another host" in await ask(node, other.server.url)
    assert "cannot be reached" in await ask(node, "http://127.0.0.1:1")
    assert "never connected to" in await ask(node, "http://169.254.169.254")  # A13
    with pytest.raises(Refused, match="is not the key of an active node"):
        await ask(other, node.server.url)

    acceptor = LinkAcceptor(node.identity.address, lambda link, data: None, may_open=anybody)
    tunnel = Tunnel(node.identity, acceptor, node.server.url)
    up = asyncio.Event()

    async def on_up() -> None:
        up.set()

    serving = asyncio.create_task(tunnel.serve(url, on_up))
    async with asyncio.timeout(HANG_S):
        await up.wait()
    ping = await network.http.get_json(f"{tunnel.make_endpoint(url)}/v1/ping")
    assert ping == {"node": node.identity.address}
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await tunnel.close()


async def start_alone(config: Path) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).parent / "splitup-oracle"),
        "run",
        "--config",
        str(config),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), HANG_S)
    assert process.returncode is not None
    return process.returncode, output.decode()


SETTINGS = {
    "rpc_url": '"http://127.0.0.1:9"',
    "deployment": '"deployment.json"',
    "keystore": '"keystore"',
    "passphrase_file": '"passphrase"',
    "data_dir": '"data"',
    "listen_port": "0",
    "gateway_urls": '"http://127.0.0.1:9"',
}


def write(path: Path, **changes: str | None) -> Path:
    settings = {**SETTINGS, **changes}
    path.write_text("".join(f"{k} = {v}\n" for k, v in settings.items() if v is not None))
    return path


async def test_a_missing_keystore_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    code, output = await start_alone(write(tmp_path / "oracle.toml"))
    assert code == 2
    assert output.startswith("error: ") and output.count("\n") == 1, output
    assert "keystore" in output


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"listen_port": "70000"}, "listen_port"),
        ({"gateway_urls": None}, "gateway_urls"),
        ({"more": "1"}, "more"),
        ({"confirmations": "2"}, "confirmations"),  # the deployment states them, for all members
        ({"rpc_url": '"ftp://x"'}, "rpc_url"),
    ],
)
def test_a_wrong_setting_is_named(
    tmp_path: Path, changes: dict[str, str | None], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        OracleConfig.load(write(tmp_path / "oracle.toml", **changes))


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    config = OracleConfig.load(write(tmp_path / "oracle.toml", keystore='"/etc/key"'))
    assert config.deployment == tmp_path / "deployment.json"
    assert config.keystore == Path("/etc/key")
    with pytest.raises(ConfigurationError, match="--config"):
        OracleConfig.load(tmp_path / "absent.toml")
