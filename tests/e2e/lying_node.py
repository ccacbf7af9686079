"""``splitup-node run`` of a dishonest operator: ``python lying_node.py HOW … --config NODE.toml``.

HOW is one of

    always            lies in every task and every verification
    every N AT        lies in one of N
    guess             computes its own tasks, and guesses what it should verify
    withhold          commits to what it computed and never shows it
    copy              verifies nothing: it looks for somebody's answer and repeats it
    hide              commits to what it computed and stores none of it
    mute              takes its tasks and does nothing
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path
from typing import Any

from splitup_node.config import NodeConfig
from splitup_node.daemon import run_node
from splitup_node.execution.digests import Digests
from splitup_node.execution.runs import Runs
from splitup_node.settlement.reports import Reporter
from splitup_node.settlement.verifier import RESULT_TYP, Verifier
from splitup_node.worker.supervisor import WORKER_ARGV

from splitup.core import limits, tuning
from splitup.core.errors import Refused, SplitUpError
from splitup.messages.verification import (
    VerificationCommitment,
    VerificationOrder,
    VerificationResult,
)
from splitup.protocol.execution.routes import get_sources
from splitup.storage.log_store import LogWriter, iter_tensors

NOTHING = Digests(0, 0)
_log = logging.getLogger("splitup.node.lying")

WORKER = Path(__file__).resolve().parents[1] / "node" / "lying_worker.py"


async def say_nothing(self: Any, *_: Any) -> bool:
    return False


async def guess(self: Verifier, order: Any) -> Digests:
    """Fetch and hash the inputs, which is cheap, and make up the rest."""
    found: Digests = await Verifier._recompute_honestly(self, order)  # type: ignore[attr-defined]
    found.add_outputs([b"a guess"] * len(found.outputs))
    return found


async def copy_output(self: Verifier, order: VerificationOrder) -> Digests:
    """Hash the executor's outputs instead of computing any, if the store shows them."""
    request = order.certificate.plan.request
    manifest = await self._tools.cache.fetch_manifest(request.model_id)
    entry, store = manifest.tasks[order.task], self._tools.open_store(order)
    found = Digests(len(entry.inputs), len(entry.outputs))

    async def read(source: tuple[int, int], spec: Any) -> list[bytes]:
        tensors = iter_tensors(
            store, request, source, order.executors, spec, order.steps, is_drawn=True
        )
        return [bytes(tensor) async for tensor in tensors]

    try:
        outputs = [
            await read((order.task, port), output.spec) for port, output in enumerate(entry.outputs)
        ]
    except Refused as refusal:
        _log.warning("nothing to copy: %s", refusal)
        return NOTHING
    inputs = [
        await read(source, port.spec)
        for source, port in zip(get_sources(manifest, order.task), entry.inputs, strict=True)
    ]
    for step in range(order.steps):
        found.add_inputs([tensors[step] for tensors in inputs])
        found.add_outputs([tensors[step] for tensors in outputs])
    return found


async def overhear(self: Verifier, result: VerificationResult, until_s: float) -> str | None:
    """Return what another validator of the execution has committed to, from what members tell."""
    committee_client = self._tools.committee_client
    committee = await committee_client._fetch_committee(result.execution_id)
    while time.time() < until_s:
        for member in committee.members:
            try:
                signed = await committee_client._fetch(result.execution_id, member, committee)
            except SplitUpError:
                continue
            for held in signed.attestation.held:
                if held.validator != result.validator:
                    return held.root
        await asyncio.sleep(tuning.REPORT_RETRY_S)
    return None


async def repeat(self: Verifier, order: VerificationOrder, result: VerificationResult) -> None:
    """Commit to somebody's commitment, and when it is due show what there is."""
    give_up_s = order.certificate.plan.request.deadline + limits.GRANT_GRACE_S
    patience_s = limits.VERIFICATION_SILENCE_S / 2  # then it would be passed over
    root = result.root()
    if result.outputs == NOTHING.outputs:
        overheard = await overhear(self, result, time.time() + patience_s)
        if overheard is None:
            return
        root = overheard
    validator_commitment = VerificationCommitment(
        execution_id=result.execution_id, task=result.task, validator=result.validator, root=root
    )
    committee_client = self._tools.committee_client
    if await committee_client.wait_until_due(result.execution_id, validator_commitment, give_up_s):
        await committee_client.spread("/v1/verification", RESULT_TYP, result, give_up_s)


def corrupt(how: str) -> None:
    if how == "withhold":
        Reporter._reveal = say_nothing  # type: ignore[method-assign]
    elif how == "copy":
        Verifier._recompute = copy_output  # type: ignore[method-assign]
        Verifier._report = repeat  # type: ignore[method-assign]
    elif how == "guess":
        Verifier._recompute_honestly = Verifier._recompute  # type: ignore[attr-defined]
        Verifier._recompute = guess  # type: ignore[method-assign]
    elif how == "hide":
        LogWriter.append = lambda self, task, port, entry: None  # type: ignore[method-assign]
    elif how == "mute":
        Runs.pump = lambda self: None  # type: ignore[method-assign]


if __name__ == "__main__":
    how, *numbers, _, config = sys.argv[1:]
    corrupt(how)
    lying = (sys.executable, str(WORKER), *numbers)
    argv = lying if how in ("always", "every") else WORKER_ARGV
    asyncio.run(run_node(NodeConfig.load(Path(config)), worker_argv=argv))
