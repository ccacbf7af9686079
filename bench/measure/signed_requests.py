"""Measure the time from a request to its plan, sent to the chain and signed, with 1 s blocks.

python -m bench.measure.signed_requests [executions]
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from splitup.chain.committee_reader import fetch_committee
from splitup.client.market.plan_requests import Wanted, fetch_certificate
from splitup.client.market.signed_request import fetch_signed_plan, make_request, wait_until_open
from splitup.crypto.keys import Identity
from splitup.crypto.quorum import compute_execution_id
from splitup.devnet.anvil import derive_key
from tests.oracle.committee_network import MANIFEST, MNEMONIC, STEPS, Network, run_network

_DIGEST = "0x" + "aa" * 32


async def measure(executions: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with run_network(Path(directory), mixed_mining=False) as network:
            await network.wait_until(network.is_ready, 120)
            own = [await run_own(network, number) for number in range(1, executions + 1)]
            head = await network.client.fetch_head()
            await network.client.send("market", "freeze", head.timestamp + 3_600)
            signed = [await run_signed(network, 100 + number) for number in range(executions)]
    for name, values in (("on chain first", own), ("signed", signed)):
        print(f"{name}: p50 {1000 * statistics.median(values):.0f} ms of {len(values)}")


async def make_wanted(network: Network, nonce: int) -> Wanted:
    head, deployment = await network.client.fetch_head(), network.deployment
    client = network.client.address
    return Wanted(
        execution_id=compute_execution_id(deployment.chain_id, deployment.market, client, nonce),
        chain_id=deployment.chain_id,
        market=deployment.market,
        model_id=MANIFEST.model_id,
        client=client,
        client_key="0x" + "bb" * 32,
        steps=STEPS,
        max_price_micro_usdc=10_000,
        deadline=head.timestamp + 300,
        verify_bps=800,
        task_count=len(MANIFEST.tasks),
    )


async def run_own(network: Network, nonce: int) -> float:
    wanted = await make_wanted(network, nonce)
    source = partial(fetch_committee, network.client)
    started = time.monotonic()
    listening = asyncio.create_task(fetch_certificate(network.http, source, wanted, timeout_s=60))
    await network.client.send(
        "market",
        "requestExecution",
        wanted.model_id,
        wanted.steps,
        _DIGEST,
        wanted.client_key,
        wanted.max_price_micro_usdc,
        wanted.deadline,
        nonce,
        wanted.verify_bps,
    )
    await listening
    return time.monotonic() - started


async def run_signed(network: Network, nonce: int) -> float:
    wanted = await make_wanted(network, nonce)
    source = partial(fetch_committee, network.client)
    identity = Identity.from_private_key(derive_key(MNEMONIC, 5))
    started = time.monotonic()
    signed = await make_request(network.client, identity, wanted, nonce, _DIGEST)
    await fetch_signed_plan(network.http, source, wanted, signed, timeout_s=60)
    elapsed = time.monotonic() - started
    assert await wait_until_open(network.client, wanted)
    return elapsed


if __name__ == "__main__":
    asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
