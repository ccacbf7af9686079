"""Measure the gas of executions on a running network: all transactions to the market, by function.

python -m bench.measure.gas [tasks] [nodes] [executions]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eth_utils.abi import function_abi_to_4byte_selector

from splitup.chain.abi import load_abi
from splitup.chain.rpc import Rpc
from tests.builders import make_chain_manifest
from tests.oracle import committee_network


async def measure(tasks: int, nodes: int, executions: int) -> None:
    committee_network.MANIFEST = make_chain_manifest(tasks)
    with tempfile.TemporaryDirectory() as directory:
        async with committee_network.run_network(Path(directory), nodes=nodes) as network:
            await network.wait_until(network.is_ready, 120)
            rpc = Rpc(network.rpc_url)
            try:
                for _ in range(executions):
                    await run_one(network, rpc)
            finally:
                await rpc.close()


async def run_one(network: committee_network.Network, rpc: Rpc) -> None:
    before = await network.client.fetch_head()
    execution_id, _ = await network.request()
    certificate = await network.fetch_plan(execution_id)
    await network.wait_until(lambda: network.find_settlement(execution_id), 120)
    after = await network.client.fetch_head()
    gas: defaultdict[str, list[int]] = defaultdict(list)
    for number in range(before.number + 1, after.number + 1):
        block: Mapping[str, Any] = await rpc.request("eth_getBlockByNumber", hex(number), True)
        for transaction in block["transactions"]:
            if transaction["to"] == network.deployment.market.lower():
                name = find_function(transaction["input"])
                receipt = await rpc.request("eth_getTransactionReceipt", transaction["hash"])
                gas[name].append(int(receipt["gasUsed"], 16))
    distinct = len(set(certificate.plan.executors()))
    total = sum(sum(used) for used in gas.values())
    calls = ", ".join(f"{name} {'+'.join(map(str, used))}" for name, used in gas.items())
    print(f"{len(certificate.plan.tasks)} tasks, {distinct} executors: {total:,} gas ({calls})")


def find_function(data: str) -> str:
    for name, entry in load_abi("market").functions.items():
        if data.startswith("0x" + function_abi_to_4byte_selector(entry).hex()):  # type: ignore[arg-type]
            return name
    return data[:10]


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    asyncio.run(measure(*(given + [10, 10, 3][len(given) :])))
