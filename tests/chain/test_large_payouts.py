"""Payouts of executions that are too large to be credited in one transaction, on a real chain."""

from __future__ import annotations

from splitup.chain.market import distribute
from splitup.crypto.quorum import Payment, Settlement
from tests.builders import address
from tests.chain.conftest import Network

EXECUTIONS, PAID = 3, 800  # each credits 384 new accounts a call, for 22 k gas each


async def test_s46_large_executions_do_not_keep_a_node_from_its_pay(network: Network) -> None:
    """Of what is due together each goes into a transaction of its own, as often as is needed."""
    await network.confirm_key()
    node = network.nodes[0]
    for number in range(1, EXECUTIONS + 1):
        request = await network.request(number)
        await network.submit_plan(request, executors=3)
        others = [address(1_000 * number + place) for place in range(PAID)]
        payments = tuple(Payment(to, 5) for to in sorted([*others, node.address]))
        assert max(others) < node.address, "it is credited by the last call"
        await network.settle(request.execution_id, Settlement(1, "0x" + "ee" * 32, payments))
    done = await distribute(node, node.address)
    assert done.executions == EXECUTIONS
    assert await network.balance(node.address) == 5 * EXECUTIONS
    assert (await distribute(node, node.address)).executions == 0
