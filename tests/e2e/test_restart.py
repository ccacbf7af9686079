"""What damages the network, and the restart that brings everything back: after all other tests."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from splitup.client.connection import SplitUp
from splitup.client.outcome import Result
from splitup.core import limits
from tests.e2e.conftest import MODEL, Network
from tests.e2e.test_network import execute, make_inputs

LYING_NODE = Path(__file__).with_name("lying_node.py")
SPARE_MICRO_USDC = 100_000_000  # more than a node loses in a test
FEWER_NODES = 3  # each loads every model again, and nothing here needs five


def test_a_lying_node_loses_its_stake_and_honest_ones_are_paid(network: Network) -> None:
    name = (*network.down, "node-1")[0]  # one that is down starts anyway
    network.replace(name, sys.executable, LYING_NODE, "always")
    # slashed as a validator it would fall below the least stake: it would be given no task,
    # and an execution whose snapshot still offers it could not be settled
    asyncio.run(network.top_up(name, SPARE_MICRO_USDC))
    network.wait_for(lambda: network.is_replaced(name))
    network.wait_for_all()
    address = next(
        node.address
        for node in network.fetch_health().nodes
        if network.name_of(node.address) == name
    )
    try:
        asyncio.run(_execute_until_slashed(network, address))
    finally:
        network.kill(name)
        network.wait_until_gone(name)


async def _execute_until_slashed(network: Network, liar: str) -> None:
    async with SplitUp.connect(network.config) as net:
        before = (await net.chain.call("nodes", "nodeOf", liar))["stake"]
        earlier: list[Result] = []  # it may have verified them
        for _ in range(10):  # chance that a node of five gets none of seven tasks ten times: 10^-7
            result = await net.execute(MODEL, make_inputs(2))
            if liar in result.nodes:
                break
            earlier.append(result)
        assert liar in result.nodes
        receipt = await net.receipt(result.execution_id)
        slashed = [*receipt.slashes]
        for other in earlier:
            slashed += (await net.receipt(other.execution_id)).slashes
        after = await net.chain.call("nodes", "nodeOf", liar)
        evidence = await net.evidence(receipt)
    own = {task for task, node in enumerate(result.nodes) if node == liar}
    # drawn as a validator it lies too, about honest nodes' tasks, and is found out as well
    assert {entry.task for entry in evidence.verdicts if liar in entry.liars} >= own
    assert [node for node, _ in receipt.slashes] == [liar]
    assert {node for node, _ in slashed} == {liar}
    assert before - after["stake"] == sum(amount for _, amount in slashed)
    assert (
        dict(receipt.slashes)[liar] > limits.EXPOSURE_FLOOR_MICRO_USDC
    )  # its tasks are far cheaper
    paid = {payment.account for payment in receipt.payments if not payment.from_slash}
    assert paid >= set(result.nodes) - {liar}
    assert liar not in {p.account for p in receipt.payments if p.from_slash}
    # the client has the price of the whole execution back, out of the liar's stake
    back = [p for p in receipt.payments if p.from_slash and p.account == net.address]
    assert [p.amount_micro_usdc for p in back] == [
        sum(task.pay_micro_usdc(2) for task in result.manifest.tasks)
    ]


async def test_one_committee_member_may_die(network: Network) -> None:
    network.kill("member-0")
    result = await execute(network, 4)
    assert result.outputs["logits"].shape == (4, 1, 2048)
    async with SplitUp.connect(network.config) as net:
        assert (await net.receipt(result.execution_id)).status == "settled"


@pytest.mark.long  # in small: chain/test_anvil.py, storage/test_s3_server.py, devnet/test_state.py
async def test_same_chain_objects_and_keys_after_a_restart(network: Network) -> None:
    async with SplitUp.connect(network.config) as net:
        head = await net.chain.fetch_head()
        deployment, address = net.chain.deployment, net.address
        model = await net.fetch_model(MODEL)
    assert await asyncio.to_thread(network.stop) == 0
    network.nodes = FEWER_NODES
    await asyncio.to_thread(network.start)
    async with SplitUp.connect(network.config) as net:
        assert (net.chain.deployment, net.address) == (deployment, address)
        assert (await net.chain.fetch_head()).number > head.number
        assert (await net.fetch_model(MODEL)).manifest == model.manifest
    await asyncio.to_thread(network.wait_for_holders, 1)
    result = await execute(network, 2)
    assert result.outputs["logits"].shape == (2, 1, 2048)
