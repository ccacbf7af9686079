"""The cost of payment and verification: gas, bytes of a commitment, and recomputing."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bench.modes.split import generate
from bench.report import ROOT, Bar, Report, read_tree_cpu_s, say
from bench.testbed.engines import Engines, Model, run_engines
from bench.testbed.models import CHUNK, NODES, cut_example, place_tasks, spread_tasks
from splitup.chain.rpc import Rpc
from splitup.messages.completions import (
    Completion,
    End,
    ExecutorCommitment,
    SignedEnd,
    TaskCommitment,
    pack_completion,
)
from splitup.net.http import SignedClient
from tests.builders import make_chain_manifest
from tests.oracle import committee_network

SAMPLING: Final = 0.08
STEPS: Final = 200
SESSIONS: Final = 4
BYTES_BAR: Final = 258


async def run(quick: bool) -> Report:
    """Measure all three."""
    gas = await measure_gas(1 if quick else 3)
    share, figures = await measure_recomputing(1 if quick else SESSIONS)
    snapshots = {
        f"{file.stem}: {name}": int(value)
        for file in sorted((ROOT / "contracts/snapshots").glob("*.json"))
        for name, value in json.loads(file.read_text()).items()
    }
    completion, commitment = measure_bytes()
    bars = [
        Bar("gas of an execution of 10 tasks, greatest of some", gas, "gas", at_most=600_000),
        Bar(
            "… each further task (contract tests)",
            snapshots["Execution: own request, one more task"],
            "gas",
            at_most=8_000,
        ),
        Bar(
            "plan with verified randomness (contract tests)",
            snapshots["Own 10 tasks: 1 submitCompletePlan"],
            "gas",
            at_most=250_000,
            beside={"of which verifying the randomness": snapshots["Committee: verifyRandomness"]},
        ),
        Bar(
            "snapshot (contract tests)",
            max(snapshots[f"Committee: submitSnapshot{which}"] for which in ("", ", the first")),
            "gas",
            at_most=80_000,
        ),
        Bar("what a node commits to, one task and 32 tokens", completion, "bytes",
            at_most=BYTES_BAR, beside={"its pledge for all tasks, bytes": commitment}),
        Bar("verification's share of compute at 8 %", share, "%", at_most=10.0, beside=figures),
    ]  # fmt: skip
    return Report(bars)


async def measure_gas(executions: int) -> int:
    """Return the largest gas of some executions of ten tasks on a running network."""
    say("gas")
    committee_network.MANIFEST = make_chain_manifest(10)
    found = []
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as name:
        async with committee_network.run_network(Path(name), nodes=10) as network:
            await network.wait_until(network.is_ready, 120)
            rpc = Rpc(network.rpc_url)
            try:
                for _ in range(executions):
                    found.append(await _run_one(network, rpc))
            finally:
                await rpc.close()
    return max(found)


async def _run_one(network: committee_network.Network, rpc: Rpc) -> int:
    """Return the gas of all transactions to the market while one execution runs."""
    before = await network.client.fetch_head()
    execution_id, _ = await network.request()
    await network.wait_until(lambda: network.find_settlement(execution_id), 120)
    after = await network.client.fetch_head()
    gas = 0
    for number in range(before.number + 1, after.number + 1):
        block: Mapping[str, Any] = await rpc.request("eth_getBlockByNumber", hex(number), True)
        for transaction in block["transactions"]:
            if transaction["to"] == network.deployment.market.lower():
                receipt = await rpc.request("eth_getTransactionReceipt", transaction["hash"])
                gas += int(receipt["gasUsed"], 16)
    return gas


def measure_bytes() -> tuple[int, int]:
    """Return the bytes of a node's completion of one task, and of its commitment."""
    digest, prefixed = "ab" * 32, "0x" + "ab" * 32
    node = "0x" + "cd" * 20
    end = SignedEnd(
        end=End(execution_id=prefixed, steps=32, inputs=(digest,)), signature=prefixed + "ab" * 32
    )
    commitment = ExecutorCommitment(execution_id=prefixed, node=node, root=prefixed, end=end)
    task = TaskCommitment(task=0, inputs=(digest,) * 3, outputs=(digest,), state=digest)
    completion = Completion(execution_id=prefixed, node=node, tasks=(task,), salt=prefixed, end=end)
    return len(pack_completion(completion)), len(commitment.canonical_bytes())


async def measure_recomputing(sessions: int) -> tuple[float, dict[str, Any]]:
    """Return CPU of recomputing 8 % of tasks over that of executing all, in percent.

    Every task is executed on one node and recomputed on another, so that the CPU of each is known.
    """
    say("recomputing")
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as name:
        model = await asyncio.to_thread(cut_example, Path(name) / "cut", CHUNK)
        everything = (model, range(len(model.manifest.tasks)))
        async with run_engines([*place_tasks([model]), [everything]]) as engines:
            await execute(engines, model, 1)
            before = _read_cpu(engines)
            await execute(engines, model, sessions)
            after = _read_cpu(engines)
    executed = sum(after[:NODES]) - sum(before[:NODES])
    recomputed = after[NODES] - before[NODES]
    share = round(100 * SAMPLING * recomputed / executed, 2)
    return share, {
        "recomputing everything / executing it, CPU": round(recomputed / executed, 2),
        "CPU of executing, s": round(executed, 2),
    }


async def execute(engines: Engines, model: Model, sessions: int) -> None:
    """Run sessions, and recompute every task of each on the last node."""
    url = f"{engines.nodes[NODES].entry.endpoint}/bench/recompute"
    for _ in range(sessions):
        async with engines.session(model.manifest, spread_tasks(model), STEPS) as session:
            await generate(session, STEPS - 1)
        certificate = session.certificate.model_dump(mode="json")
        async with SignedClient() as http:
            for task in range(len(model.manifest.tasks)):
                order = {"certificate": certificate, "task": task, "steps": STEPS}
                await http.post_json(url, order, timeout_s=60)


def _read_cpu(engines: Engines) -> list[float]:
    return [read_tree_cpu_s(node.child.pid) for node in engines.nodes]
