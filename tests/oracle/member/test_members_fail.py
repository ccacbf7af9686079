"""Members that serve, die, hang, cannot be reached, or are replaced: processes on a real chain."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from splitup.chain.abi import load_abi
from splitup.chain.committee_reader import Committees, fetch_committee
from splitup.chain.rpc import Rpc
from splitup.client.market.signed_request import make_request
from splitup.core import limits, tuning
from splitup.core.errors import Refused, Unavailable
from splitup.crypto.keys import Identity, generate_identity
from splitup.crypto.quorum import compute_execution_id, pack_words, unpack_word
from splitup.devnet.anvil import derive_key
from splitup.messages import api
from splitup.messages.base import ZERO_BYTES32
from splitup.messages.plans import Plan, Request
from splitup.messages.snapshots import ReachRequest
from splitup.net.http import SignedClient
from splitup.net.links import LinkAcceptor
from splitup.net.tunnel import Tunnel
from tests.builders import HANG_S, anybody
from tests.local_chain import mine
from tests.oracle.committee_network import MANIFEST, MNEMONIC, STEPS, Network, Node, run_network

pytestmark = pytest.mark.asyncio(loop_scope="module")
SETTLED_S = 5.0  # after which the nodes' news are in a snapshot


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def network(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Network]:
    """One network for all: starting it takes as long as a test."""
    directory: Path = tmp_path_factory.mktemp("members")
    async with run_network(directory, verify_bps=10_000, cuttable=True) as network:
        try:
            await network.wait_until(network.is_ready, 3 * HANG_S)
            yield network
        finally:
            print(network.read_logs())


async def finish(network: Network, execution_id: str) -> None:
    """Wait for plan and settlement, and check the certificate."""
    certificate = await network.fetch_plan(execution_id)
    await Committees(network.client).check_certificate(certificate)
    events = await network.wait_until(lambda: network.find_settlement(execution_id), 3 * HANG_S)
    names = [event.name for event in events]
    assert names.count("PlanAccepted") == names.count("Settled") == 1


async def run_execution(network: Network) -> str:
    execution_id, _ = await network.request()
    await finish(network, execution_id)
    return execution_id


async def has_plan(network: Network, execution_id: str) -> bool:
    events = await network.client.fetch_events("market")
    return any(e.name == "PlanAccepted" and e.args["executionId"] == execution_id for e in events)


async def has_fresh_snapshot(network: Network, seen: dict[str, float]) -> bool:
    """Return whether the next snapshot is far: a request that moves behind it is refused.

    One is due when the latest is old, or when it lacks a node, or when what it says of one has
    changed, as while nodes start: then it would come within seconds. ``seen`` keeps when each was
    seen first; blocks do not tell, as many are mined in a second while the network starts.
    """
    accepted = [
        event
        for event in await network.client.fetch_events("committee")
        if event.name == "SnapshotAccepted"
    ]
    endpoint = network.endpoints[next(iter(network.processes))]
    try:
        snapshot = await network.http.get_json(
            f"{endpoint}/v1/snapshot/{accepted[-1].args['root']}"
        )
    except (Unavailable, Refused):  # it has not fetched it yet
        return False
    if len(snapshot["entries"]) < len(network.nodes):
        return False
    head = await network.client.fetch_head()
    blocks = head.number - accepted[-1].block_number  # 1 s each from now on
    now = asyncio.get_running_loop().time()
    is_settled = now >= seen.setdefault(accepted[-1].args["root"], now) + SETTLED_S
    return is_settled and blocks < limits.SNAPSHOT_REFRESH_S * 2 / 3


async def test_members_start_plan_verify_and_pay(network: Network) -> None:
    await check_interface(network)
    execution_id = await run_execution(network)
    await check_payments(network, execution_id)
    await check_terms(network)
    logs = network.read_logs()
    assert "Traceback" not in logs and "ERROR" not in logs


async def request_of_two(network: Network, gate: asyncio.Event) -> tuple[str, Plan]:
    """Return an execution that waits for ``gate``, whose plan has several executors."""
    while True:
        execution_id, _ = await network.request(gate, deadline_s=60)
        plan = (await network.fetch_plan(execution_id)).plan
        if len(set(plan.executors())) > 1:
            return execution_id, plan


@pytest.mark.long  # in small: tests/protocol/settlement/test_commitments.py and test_unended.py
async def test_s19_an_executor_without_free_stake_keeps_nobody_elses_pay(network: Network) -> None:
    """Its stake is filled after the plan: members send again until the chain binds the others."""
    gate = asyncio.Event()
    execution_id, plan = await request_of_two(network, gate)
    filler = plan.executors()[0]
    entry = await network.client.call("nodes", "nodeOf", filler)
    free = entry["stake"] - entry["locked"] - limits.VALIDATION_RESERVE_MICRO_USDC
    words = pack_words(((filler, free),))
    await act_as_market(network, "lock", words, True)
    gate.set()
    events = await network.wait_until(lambda: network.find_settlement(execution_id), 3 * HANG_S)
    found = {event.name: event.args for event in events}
    locked = dict(map(unpack_word, found["ExecutionCommitted"]["exposures"]))
    assert locked[filler] == 0 and all(locked[n] for n in set(plan.executors()) - {filler})
    own = [task for task, node in enumerate(plan.executors()) if node == filler]
    owed = sum(t.pay_micro_usdc(STEPS) for n, t in enumerate(MANIFEST.tasks) if n not in own)
    assert found["Settled"]["paid"] == 2 * owed, "the others, and a validator of each"
    assert "Slashed" not in found
    await act_as_market(network, "release", words)


async def act_as_market(network: Network, function: str, *args: Any) -> None:
    """Do to the registry what only the Market may."""
    market = network.deployment.market
    data = load_abi("nodes").encode_call(function, args)
    call = {"from": market, "to": network.deployment.nodes, "data": data, "gas": hex(10**6)}
    async with Rpc(network.rpc_url) as rpc:
        await rpc.request("anvil_setBalance", market, hex(10**18))
        await rpc.request("anvil_impersonateAccount", market)
        sent = await rpc.request("eth_sendTransaction", call)
        await rpc.request("anvil_stopImpersonatingAccount", market)
    await network.wait_until(lambda: is_mined(network, sent))


async def is_mined(network: Network, transaction: str) -> bool:
    async with Rpc(network.rpc_url) as rpc:
        receipt = await rpc.request("eth_getTransactionReceipt", transaction)
    assert receipt is None or receipt["status"] == "0x1", receipt
    return receipt is not None


async def check_payments(network: Network, execution_id: str) -> None:
    """Every task was verified (the draw takes all here), every party paid by its share."""
    events = await network.find_settlement(execution_id)
    names = [event.name for event in events]
    assert names.count("PlanAccepted") == names.count("Settled") == 1
    assert names.count("ExecutionCommitted") == 1
    paid = next(event.args["paid"] for event in events if event.name == "Settled")
    assert paid == 2 * MANIFEST.cost_micro_usdc(STEPS), "executors and one validator per task"
    asked = {order.task for node in network.nodes for order in node.orders}
    assert asked == set(range(len(MANIFEST.tasks))), "on a slow machine another validator, too"


async def check_terms(network: Network) -> None:
    """A signed request below the network's share or price is refused, by the contract's rule."""
    identity = Identity.from_private_key(derive_key(MNEMONIC, 5))
    deployment, nonce = network.deployment, 2**40
    request = Request(
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
        snapshot_sequence=0,
        snapshot_root=ZERO_BYTES32,
        block_hash=ZERO_BYTES32,
        verify_bps=800,
        nonce=nonce,
    )
    work = 2 * MANIFEST.cost_micro_usdc(STEPS)
    for words, changes in (
        ("least share is 800", {"verify_bps": 799}),
        ("the price is", {"max_price_micro_usdc": work}),  # nothing for the stake that it reserves
    ):
        signed = await make_request(network.client, identity, request.model_copy(update=changes))
        with pytest.raises(Refused, match=words):
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


@pytest.mark.long  # in small: chain/test_event_stream.py, test_member.py
async def test_f14_an_execution_survives_a_reorganisation(network: Network) -> None:
    """The request moves to another block; whatever was said and signed for it counts there.

    First of all tests, since the snapshot is fresh now.
    """
    seen: dict[str, float] = {}
    await network.wait_until(lambda: has_fresh_snapshot(network, seen), 3 * HANG_S)
    async with Rpc(network.rpc_url) as rpc:
        await rpc.request("anvil_mine", "0x4")  # nothing older than the request is undone
        execution_id, _ = await network.request()
        await network.fetch_plan(execution_id)
        await rpc.request("anvil_reorg", 2, [])
    await finish(network, execution_id)


@pytest.mark.long  # in small: one and two that are down in tests/protocol/committee/test_member.py
async def test_f06_f07_members_killed_and_stopped_at_any_moment(network: Network) -> None:
    for place, fault in enumerate(("kill", "stop", "kill", "stop")):
        execution_id, _ = await network.request()  # under way when the member goes
        match fault:
            case "kill":
                await network.stop_member(place, signal.SIGKILL)
            case "stop":
                network.signal_member(place, signal.SIGSTOP)
        await finish(network, execution_id)
        await run_execution(network)
        match fault:
            case "kill":
                await network.start_member(place)
            case "stop":
                network.signal_member(place, signal.SIGCONT)
        await network.wait_until(network.is_ready, 3 * HANG_S)

    network.signal_member(0, signal.SIGSTOP)
    await network.stop_member(1, signal.SIGKILL)
    execution_id, _ = await network.request()
    head = await network.client.fetch_head()
    await network.wait_until(lambda: is_past(network, head.number + 2), 3 * HANG_S)
    assert not await has_plan(network, execution_id), "two of four are no quorum"
    network.signal_member(0, signal.SIGCONT)
    await finish(network, execution_id)
    await network.start_member(1)
    await network.wait_until(network.is_ready, 3 * HANG_S)
    await run_execution(network)
    assert "Traceback" not in network.read_logs()


@pytest.mark.long  # in small: protocol/committee/test_histories.py
async def test_f08_a_member_that_is_cut_off_catches_up(network: Network) -> None:
    execution_id, _ = await network.request()  # under way when the member goes
    network.cut_member(2)
    await finish(network, execution_id)
    await run_execution(network)
    await network.exchange.heal(2)
    await network.wait_until(network.is_ready, 3 * HANG_S)
    network.signal_member(0, signal.SIGSTOP)  # now it is needed for a quorum
    await run_execution(network)
    network.signal_member(0, signal.SIGCONT)
    await network.wait_until(network.is_ready, 3 * HANG_S)


async def is_past(network: Network, block: int) -> bool:
    return (await network.client.fetch_head()).number > block


@pytest.mark.long  # in small: tests/protocol/committee/test_handovers.py
async def test_a_member_is_replaced_while_executions_go_on(network: Network) -> None:
    before = await fetch_committee(network.client)
    rows = sorted([network.rows[0], network.rows[1], network.rows[2], network.rows[4]])
    await network.stop_member(3, signal.SIGKILL)  # it is to be replaced because it is gone
    settles = asyncio.Event()
    # in flight until after the handover, which waits DKG_TIMEOUT_BLOCKS for the dead dealer
    open_before, _ = await network.request(settles, deadline_s=60 * 60)
    await network.owner.send("committee", "setMembers", rows)
    await network.start_member(4)
    async with asyncio.timeout(10 * HANG_S):  # each execution has a bound of its own
        while await network.client.call("committee", "configuration") != 2:
            await run_execution(network)
    assert not await network.find_settlement(open_before)
    settles.set()
    await finish(network, open_before)  # by the members that it began with
    after = await fetch_committee(network.client)
    assert after.group_key == before.group_key
    assert {m.account for m in after.members} == {row[0] for row in rows}

    async def has_changed() -> bool:
        statuses = [await network.get_status(place) for place in network.processes]
        return all(status.get("configuration") == 2 for status in statuses)

    await network.wait_until(has_changed, 3 * HANG_S)
    await network.stop_member(0, signal.SIGKILL)  # now the new member is needed for a quorum
    await run_execution(network)
    assert "Traceback" not in network.read_logs()


async def test_what_was_requested_before_a_retirement_goes_on(network: Network) -> None:
    """What comes later gets no plan."""
    gate = asyncio.Event()
    running, _ = await network.request(gate)
    await network.fetch_plan(running)
    await network.owner.send("models", "retire", MANIFEST.model_id)
    late, _ = await network.request()
    with pytest.raises(Refused, match="was retired by its developer"):
        await network.http.get_json(f"{network.endpoints[2]}/v1/plan/{late}?wait_s=20")
    gate.set()
    assert await network.wait_until(lambda: network.find_settlement(running), 3 * HANG_S)


async def test_a_member_stops_cleanly(network: Network) -> None:
    before = len(network.read_log(2))
    assert await network.stop_member(2) == 0
    said = network.read_log(2)[before:]
    assert said and "Traceback" not in said and "ERROR" not in said


async def test_f15_members_stop_at_a_deeper_reorganisation(network: Network) -> None:
    async with Rpc(network.rpc_url) as rpc:
        await mine(rpc, tuning.REORG_BLOCKS + 40)
        head = (await network.client.fetch_head()).number

        async def have_seen() -> bool:
            statuses = [await network.get_status(place) for place in network.processes]
            return all(status.get("block", 0) >= head for status in statuses)

        await network.wait_until(have_seen, HANG_S)
        await rpc.request("anvil_reorg", tuning.REORG_BLOCKS + 48, [])
        await rpc.request("anvil_mine", "0x2")
    for place in list(network.processes):
        process = network.processes.pop(place)
        assert await asyncio.wait_for(process.wait(), HANG_S) == 1
    assert "reorganised by more than" in network.read_logs()
