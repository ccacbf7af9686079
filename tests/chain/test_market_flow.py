"""One execution from request to money, on a real chain."""

from __future__ import annotations

import pytest
import pytest_asyncio
from eth_hash.auto import keccak

from splitup.chain.market import Distribution, distribute
from splitup.core import limits
from splitup.core.errors import ChainRejected
from splitup.crypto.keys import Identity
from splitup.crypto.quorum import (
    Domain,
    ExecutionHistory,
    Payment,
    Settlement,
    Slash,
    commitments_struct_hash,
    compute_execution_id,
    hash_exposures,
    pack_words,
    request_struct_hash,
    sign_quorum,
    snapshot_struct_hash,
)
from splitup.devnet.anvil import derive_key
from splitup.messages.plans import Request, request_to_abi
from tests.chain.conftest import MNEMONIC, MODEL, PRICE_MICRO_USDC, ROOT, Network

OUTPUTS = "0x" + "cc" * 32
EXPOSURE = 100_000_000


async def fetch_reservation(network: Network, execution_id: str) -> int:
    row = await network.owner.call("market", "executionOf", execution_id)
    return int(row["reservation"])


@pytest_asyncio.fixture
async def network(network: Network) -> Network:
    await network.confirm_key()
    return network


async def test_execution_is_planned_committed_settled_and_a_liar_is_slashed(
    network: Network,
) -> None:
    honest, validator, liar = network.nodes
    request = await network.request()
    execution_id, market = request.execution_id, network.deployment.market
    assert execution_id == compute_execution_id(31_337, market, network.client.address, 1)
    execution = await network.client.call("market", "executionOf", execution_id)
    asked = request_struct_hash(*request_to_abi(request))
    assert execution["record"] == "0x" + asked.hex()

    await network.submit_plan(request, executors=3)
    assert (await network.owner.call("nodes", "nodeOf", honest.address))["locked"] == 0
    committed = tuple(sorted((node.address, EXPOSURE) for node in (honest, liar)))
    digest = commitments_struct_hash(execution_id, OUTPUTS, hash_exposures(committed))
    receipt = await network.owner.send(
        "market",
        "commitExecution",
        execution_id,
        OUTPUTS,
        pack_words(committed),
        network.certify(digest, 3),
    )
    assert [event.name for event in receipt.events] == ["ExecutionCommitted"]
    for node in (honest, liar):
        assert (await node.call("nodes", "nodeOf", node.address))["locked"] == EXPOSURE

    settlement = Settlement(
        steps=1,
        evidence_root="0x" + "ee" * 32,
        payments=(
            Payment(honest.address, 900_000),
            Payment(validator.address, 120_000),
            Payment(validator.address, 30_000_000, from_slash=True),
        ),
        slashes=(Slash(liar.address, 100_000_000),),
    )
    history = ExecutionHistory(
        execution_id=execution_id,
        request_hash="0x" + asked.hex(),
        plan_root=ROOT,
        seed="0x" + keccak(network.make_terms(request, 3)[0][1]).hex(),
        commitments=OUTPUTS,
        exposures=pack_words(committed),
    )
    with pytest.raises(ChainRejected, match="differs from that on chain") as caught:
        await network.settle(execution_id, settlement)
    assert caught.value.error_name == "RecordMismatch"
    receipt = await network.settle(execution_id, settlement, history)
    settled = next(event for event in receipt.events if event.name == "Settled")
    assert (settled.args["paid"], settled.args["fee"]) == (1_020_000, 10_200)
    assert settled.args["refunded"] == PRICE_MICRO_USDC - 1_030_200
    assert settled.args["slashed"] == 100_000_000
    assert settled.args["evidenceRoot"] == settlement.evidence_root
    assert await network.balance(honest.address) == 0  # decided, and credited when somebody calls
    assert await distribute(honest, honest.address) == Distribution(1, receipt.block_number)
    assert (await distribute(honest, honest.address)).executions == 0
    assert (await network.owner.call("nodes", "nodeOf", honest.address))["locked"] == 0
    assert await network.balance(honest.address) == 900_000
    assert await network.balance(validator.address) == 30_120_000
    assert await network.balance(network.client.address) == 10_000_000 - 1_030_200
    assert await network.balance(network.owner.address) == 70_000_000  # the treasury
    node = await liar.call("nodes", "nodeOf", liar.address)
    assert (node["stake"], node["active"]) == (2_100_000_000, False)
    assert await network.owner.call("market", "conserved")

    await validator.send("market", "withdraw", 30_120_000)
    assert await validator.call("usdc", "balanceOf", validator.address) == 30_120_000


async def test_undelivered_execution_is_refunded_by_anybody_after_the_deadline(
    network: Network,
) -> None:
    request = await network.request(deadline_s=60)
    execution_id = request.execution_id
    await network.submit_plan(request, executors=1)
    with pytest.raises(ChainRejected, match="is refundable from") as caught:
        await network.nodes[0].send("market", "refund", execution_id)
    assert caught.value.error_name == "NotRefundable"
    await network.pass_time(91)
    await network.nodes[0].send("market", "refund", execution_id)
    kept = await fetch_reservation(network, request.execution_id)
    assert 0 < kept < 100
    assert await network.balance(network.client.address) == 10_000_000 - kept
    execution = await network.client.call("market", "executionOf", execution_id)
    assert execution["status"] == 4
    assert await network.owner.call("market", "totalLocked") == 0
    executor = network.nodes[0]  # nobody committed, so that nothing was locked
    assert (await distribute(network.owner, executor.address)).executions == 0
    assert (await network.owner.call("nodes", "nodeOf", executor.address))["locked"] == 0


async def test_two_signatures_are_no_quorum(network: Network) -> None:
    request = await network.request()
    terms, few = network.make_terms(request, executors=1, signers=2)
    with pytest.raises(ChainRejected, match="2 signatures are no quorum; 3 members") as caught:
        await network.owner.send(
            "market", "submitCompletePlan", request_to_abi(request), terms, few
        )
    assert caught.value.error_name == "QuorumTooSmall"


async def test_a17_another_groups_seed_is_refused(network: Network) -> None:
    request = await network.request()
    other = request.model_copy(update={"model_id": "0x" + "66" * 32})
    terms, signatures = network.make_terms(other, executors=1)  # the seed is of another message
    with pytest.raises(ChainRejected):
        await network.owner.send(
            "market", "submitCompletePlan", request_to_abi(request), terms, signatures
        )


async def test_signed_request_is_opened_by_somebody_else(network: Network) -> None:
    client, market = network.client, network.deployment.market
    root = "0x" + "5a" * 32
    await network.owner.send(
        "committee",
        "submitSnapshot",
        1,
        1,
        root,
        network.certify(snapshot_struct_hash(1, 1, 1, root)),
    )
    head = await client.fetch_head()
    await client.send("market", "freeze", head.timestamp + 300)
    with pytest.raises(ChainRejected, match="is frozen for signed requests until"):
        await client.send("market", "withdraw", 1)
    request = make_request(network, root).model_copy(update={"deadline": head.timestamp + 60})
    struct_hash = request_struct_hash(*request_to_abi(request))
    key = Identity.from_private_key(derive_key(MNEMONIC, 8))
    own = sign_quorum(key.private_key, Domain(31_337, market), struct_hash)
    terms, signatures = network.make_terms(request, executors=3)
    receipt = await network.nodes[1].send(
        "market", "openExecution", request_to_abi(request), own, terms, signatures
    )
    assert [event.name for event in receipt.events] == ["RequestNodeSelections", "PlanAccepted"]
    assert await network.balance(client.address) == 10_000_000 - PRICE_MICRO_USDC
    with pytest.raises(ChainRejected, match="has used number 77 already"):
        await network.owner.send(
            "market", "openExecution", request_to_abi(request), own, terms, signatures
        )


def make_request(network: Network, snapshot_root: str) -> Request:
    deployment, client = network.deployment, network.client.address
    return Request(
        chain_id=deployment.chain_id,
        market=deployment.market,
        execution_id=compute_execution_id(31_337, deployment.market, client, 77),
        model_id=MODEL,
        client=client,
        client_key="0x" + "bb" * 32,
        steps=1,
        max_price_micro_usdc=PRICE_MICRO_USDC,
        deadline=1,
        snapshot_sequence=1,
        snapshot_root=snapshot_root,
        block_hash="0x" + "00" * 32,
        verify_bps=800,
        nonce=77,
    )


async def test_the_committee_commits_for_all_nodes_at_once(network: Network) -> None:
    request = await network.request()
    await network.submit_plan(request, executors=3)
    execution_id = request.execution_id
    exposures = [(account, EXPOSURE) for account in sorted(n.address for n in network.nodes)]
    struct_hash = commitments_struct_hash(execution_id, OUTPUTS, hash_exposures(exposures))
    receipt = await network.owner.send(
        "market",
        "commitExecution",
        execution_id,
        OUTPUTS,
        pack_words(exposures),
        network.certify(struct_hash),
    )
    node = network.nodes[0]
    assert (await node.call("nodes", "nodeOf", node.address))["locked"] == EXPOSURE
    assert [event.name for event in receipt.events] == ["ExecutionCommitted"]
    settlement = Settlement(1, "0x" + "ee" * 32, (Payment(network.nodes[0].address, 5),))
    await network.settle(execution_id, settlement)
    assert (await distribute(node, node.address)).executions == 1
    assert await network.balance(node.address) == 5
    assert (await node.call("nodes", "nodeOf", node.address))["locked"] == 0


async def test_a_node_frees_its_stake_when_nobody_closed_the_execution(network: Network) -> None:
    request = await network.request(deadline_s=60)
    await network.submit_plan(request, executors=1)
    node = network.nodes[0]
    exposures = [(node.address, EXPOSURE)]
    struct_hash = commitments_struct_hash(request.execution_id, OUTPUTS, hash_exposures(exposures))
    committed = (request.execution_id, OUTPUTS, pack_words(exposures))
    await network.owner.send("market", "commitExecution", *committed, network.certify(struct_hash))
    await network.pass_time(61)
    found = await distribute(node, node.address)  # it can still be settled
    assert found.executions == 0
    await network.pass_time(70 * 86_400)
    stranger = await distribute(network.nodes[1], network.nodes[1].address)
    assert stranger.next_block > found.next_block  # which no longer waits for it
    assert (await node.call("nodes", "nodeOf", node.address))["locked"] == EXPOSURE
    assert (await distribute(node, node.address)).executions == 1
    assert (await node.call("nodes", "nodeOf", node.address))["locked"] == 0
    kept = await fetch_reservation(network, request.execution_id)
    assert await network.balance(network.client.address) == 10_000_000 - kept


async def test_too_little_usdc_allowance_or_balance_is_said_in_usdc(network: Network) -> None:
    client = network.client
    with pytest.raises(ChainRejected, match=r"take 0 USDC, and 5 are needed; approve more"):
        await client.send("market", "deposit", 5_000_000)
    await client.send("usdc", "approve", network.deployment.market, 10**12)
    with pytest.raises(ChainRejected, match=r"has 40 USDC, 1,000 are needed"):
        await client.send("market", "deposit", 10**9)
    with pytest.raises(ChainRejected, match=r"has 10 USDC in the market, 10\.5 are needed") as e:
        await client.send("market", "withdraw", 10_500_000)
    assert e.value.error_name == "BalanceTooSmall"


async def test_python_states_the_registrys_constants(network: Network) -> None:
    floor = await network.owner.call("nodes", "EXPOSURE_FLOOR")
    reserve = await network.owner.call("nodes", "VALIDATION_RESERVE")
    assert floor == limits.EXPOSURE_FLOOR_MICRO_USDC
    assert reserve == limits.VALIDATION_RESERVE_MICRO_USDC


async def test_unsafe_parameters_are_refused(network: Network) -> None:
    parameters = await network.owner.call("market", "parameters")
    with pytest.raises(ChainRejected, match="outside would be profitable"):
        await network.owner.send("market", "setParameters", {**parameters, "outsideGain": 400_000})
    with pytest.raises(ChainRejected, match="profitable: the expected loss is 725760"):
        await network.owner.send("market", "setParameters", {**parameters, "slashMilli": 10_000})
    with pytest.raises(ChainRejected, match="an execution with the snapshot that it names may"):
        longer = {**parameters, "maxDeadlineS": 7 * 86_400}
        await network.owner.send("market", "setParameters", longer)
    await network.owner.send("market", "setParameters", {**parameters, "slashMilli": 20_000})


async def test_stake_comes_back_after_the_unbonding_period(network: Network) -> None:
    node = network.nodes[0]
    await node.send("nodes", "requestUnstake")
    with pytest.raises(ChainRejected, match="is locked until 20") as caught:
        await node.send("nodes", "withdrawStake")
    assert caught.value.error_name == "StillUnbonding"
    await network.pass_time(7 * 86_400)
    await node.send("nodes", "withdrawStake")
    assert await node.call("usdc", "balanceOf", node.address) == 2_200_000_000
    assert await node.call("nodes", "nodeCount") == 2
