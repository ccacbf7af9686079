"""One execution from request to money, on a real chain."""

from __future__ import annotations

import pytest

from splitup.crypto.quorum import (
    Payment,
    Settlement,
    Slash,
    compute_commitment,
    compute_execution_id,
    plan_struct_hash,
)
from splitup.errors import ChainRejected
from tests.chain.conftest import MODEL, PRICE_MICRO_USDC, Network

OUTPUTS = "0x" + "cc" * 32


async def test_execution_is_planned_committed_settled_and_a_liar_is_slashed(
    network: Network,
) -> None:
    honest, validator, liar = network.nodes
    execution_id = await network.request()
    market = network.deployment.market
    assert execution_id == compute_execution_id(31_337, market, network.client.address, 1)

    await network.submit_plan(execution_id, executors=2)
    for node in (honest, liar):
        receipt = await node.send("market", "commitCompletions", [(execution_id, 1, OUTPUTS)])
        assert [event.name for event in receipt.events] == ["CompletionCommitted"]
        commitment = await node.call("market", "commitmentOf", execution_id, node.address)
        assert commitment == compute_commitment(1, OUTPUTS)

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
    receipt = await network.settle(execution_id, settlement)
    settled = next(event for event in receipt.events if event.name == "Settled")
    assert settled.args["paid"] == 1_020_000
    assert settled.args["refunded"] == PRICE_MICRO_USDC - 1_020_000
    assert settled.args["slashed"] == 100_000_000
    assert settled.args["evidenceRoot"] == settlement.evidence_root
    assert await network.balance(honest.address) == 900_000
    assert await network.balance(validator.address) == 30_120_000
    assert await network.balance(network.client.address) == 10_000_000 - 1_020_000
    assert await network.balance(network.owner.address) == 70_000_000  # the treasury
    node = await liar.call("nodes", "nodeOf", liar.address)
    assert (node["stake"], node["active"]) == (2_100_000_000, False)
    assert await network.owner.call("market", "conserved")

    await validator.send("market", "withdraw", 30_120_000)
    assert await validator.call("usdc", "balanceOf", validator.address) == 30_120_000


async def test_undelivered_execution_is_refunded_by_anybody_after_the_deadline(
    network: Network,
) -> None:
    execution_id = await network.request(deadline_s=60)
    with pytest.raises(ChainRejected, match="is refundable from") as caught:
        await network.nodes[0].send("market", "refund", execution_id)
    assert caught.value.error_name == "NotRefundable"
    await network.pass_time(61)
    await network.nodes[0].send("market", "refund", execution_id)
    assert await network.balance(network.client.address) == 10_000_000
    execution = await network.client.call("market", "executionOf", execution_id)
    assert execution["status"] == 4
    assert execution["modelId"] == MODEL
    assert await network.owner.call("market", "totalLocked") == 0


async def test_two_signatures_are_no_quorum(network: Network) -> None:
    execution_id = await network.request()
    root = "0x" + "11" * 32
    few = network.certify(plan_struct_hash(execution_id, root, root, 1), signers=2)
    with pytest.raises(ChainRejected, match="2 signatures are no quorum; 3 members") as caught:
        await network.owner.send("market", "submitCompletePlan", execution_id, root, root, 1, few)
    assert caught.value.error_name == "QuorumTooSmall"


async def test_too_little_usdc_allowance_or_balance_is_said_in_usdc(network: Network) -> None:
    client = network.client
    with pytest.raises(ChainRejected, match=r"may take 0 USDC, 5 are needed; approve more"):
        await client.send("market", "deposit", 5_000_000)
    await client.send("usdc", "approve", network.deployment.market, 10**12)
    with pytest.raises(ChainRejected, match=r"has 40 USDC, 1,000 are needed"):
        await client.send("market", "deposit", 10**9)
    with pytest.raises(ChainRejected, match=r"has 10 USDC in the market, 10\.5 are needed") as e:
        await client.send("market", "withdraw", 10_500_000)
    assert e.value.error_name == "BalanceTooSmall"


async def test_unsafe_parameters_are_refused(network: Network) -> None:
    parameters = await network.owner.call("market", "parameters")
    with pytest.raises(ChainRejected, match="cheating would pay: the expected loss is 725760"):
        await network.owner.send("market", "setParameters", {**parameters, "slashMilli": 10_000})
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
