"""``splitup-node run`` of a dishonest operator: ``python lying_node.py HOW … --config NODE.toml``.

HOW is one of

    always            lies in every task and every verification
    every N AT        lies in one of N
    cheap BITS BITS   computes and verifies with mantissas of so many bits, in turn
    guess             computes its own tasks, and guesses what it should verify
    withhold          commits to what it computed and never shows it
    copy              verifies nothing: it looks for somebody's answer and repeats it
    hide              commits to what it computed and stores none of it
    mute              takes its tasks and does nothing
    deceive           commits to what it computed and sends the client something else
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import sys
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from splitup_node.config import NodeConfig
from splitup_node.daemon import run_node
from splitup_node.execution.kept.digests import Digests
from splitup_node.execution.kept.executions import Execution
from splitup_node.execution.kept.routing import Outlet
from splitup_node.execution.outputs import Outputs
from splitup_node.execution.step_loop import StepLoop
from splitup_node.settlement.reports import Reporter
from splitup_node.settlement.verifier import Verifier
from splitup_node.worker.supervisor import WORKER_ARGV

from splitup.core import limits, tuning
from splitup.core.errors import Refused, SplitUpError
from splitup.core.tensors import StepsDigest
from splitup.messages import api
from splitup.messages.verification import (
    Held,
    ValidatorCommitment,
    VerificationOrder,
    VerificationResult,
)
from splitup.net.signed_frames import make_entry_frame, seal_frame
from splitup.protocol.execution.log_segments import LogEntry
from splitup.protocol.execution.routes import get_sources
from splitup.protocol.execution.task_queue import PortId
from splitup.storage.log_store import LogWriter, iter_tensors

NOTHING = Digests(0, 0)
_log = logging.getLogger("splitup.node.lying")

WORKER = Path(__file__).resolve().parents[1] / "node" / "lying_worker.py"


async def say_nothing(self: Any, *_: Any) -> bool:
    return False


async def guess(self: Verifier, order: Any) -> Digests:
    """Fetch and hash the inputs, which is cheap, and make up the rest."""
    found: Digests = await Verifier._recompute_honestly(self, order)  # type: ignore[attr-defined]
    for digest in found._outputs:
        digest.add_tensor(b"a guess")
    return found


async def copy_output(self: Verifier, order: VerificationOrder) -> Digests:
    """Hash the executor's outputs instead of computing any, if the store shows them."""
    request = order.certificate.plan.request
    manifest = await self.cache.fetch_manifest(request.model_id)
    entry, store = manifest.tasks[order.task], self.open_store(order, ())
    found = Digests(len(entry.inputs), len(entry.outputs))

    async def read(source: tuple[int, int], spec: Any) -> list[bytes]:
        patience = self.patience
        tensors = iter_tensors(store, request, source, order.executors, spec, order.steps, patience)
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
        found.add(
            *(
                [hashlib.sha256(tensors[step]).digest() for tensors in group]
                for group in (inputs, outputs)
            )
        )
    return found


async def overhear(
    self: Verifier, order: VerificationOrder, result: VerificationResult, until_s: float
) -> str | None:
    """Return what another validator of the task has committed to, from what members tell."""
    client = self.committee_client
    committee = await client._fetch_committee(result.execution_id)
    others = [entry.node for entry in order.certificate.plan.nodes]
    asked = [
        {order.task: Held(task=order.task, validator=node, root=result.root())}
        for node in others
        if node != result.validator
    ]
    while time.time() < until_s:
        for member, own in itertools.product(committee.members, asked):
            try:
                notice = await client._fetch(result.execution_id, member, committee, own)
            except SplitUpError:
                continue
            for held in notice.held:
                return held.root
        await asyncio.sleep(tuning.REPORT_RETRY_S)
    return None


async def repeat(self: Verifier, order: VerificationOrder, result: VerificationResult) -> None:
    """Commit to somebody's commitment, and when it is due show what there is."""
    give_up_s = order.certificate.plan.request.deadline + limits.VERIFICATION_GRACE_S
    patience_s = limits.VERIFICATION_SILENCE_S / 2  # then it would be passed over
    root = result.root()
    if result.outputs == NOTHING.outputs:
        overheard = await overhear(self, order, result, time.time() + patience_s)
        if overheard is None:
            return
        root = overheard
    validator_commitment = ValidatorCommitment(
        execution_id=result.execution_id, task=result.task, validator=result.validator, root=root
    )
    client = self.committee_client
    if await client.wait_until_due(result.execution_id, validator_commitment, give_up_s):
        await client.spread(api.VERIFICATION_RESULT, result, give_up_s)


class Deceiver:
    """Sends the client other outputs than it logs and commits to, signed as if they were right."""

    def __init__(self) -> None:
        self.send_honestly = Outputs.send_entry
        self.sent: dict[tuple[str, PortId], StepsDigest] = {}

    def send_entry(
        self,
        outputs: Outputs,
        execution: Execution,
        outlet: Outlet,
        entry: LogEntry,
        zeros: Collection[int],
        before: bytes,
    ) -> None:
        readers, is_result = outlet.route(entry.step, zeros)
        if not is_result or entry.data is None:
            self.send_honestly(outputs, execution, outlet, entry, zeros, before)
            return
        data = bytes(entry.data[::-1])
        false = LogEntry(entry.step, hashlib.sha256(data).digest(), len(data), data)
        sent = self.sent.setdefault((execution.id, outlet.source), StepsDigest())
        alone = replace(outlet, readers=(), gates=())
        self.send_honestly(outputs, execution, alone, false, zeros, sent.value)
        sent.add(false.digest)
        right = make_entry_frame(execution.id, outlet.source, entry)
        outputs.send(readers, seal_frame(outputs._identity, right))


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
        StepLoop.schedule = lambda self: None  # type: ignore[method-assign]
    elif how == "deceive":
        deceiver = Deceiver()
        Outputs.send_entry = lambda self, *args: deceiver.send_entry(self, *args)  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    how, *numbers, _, config = sys.argv[1:]
    corrupt(how)
    cheap = ("cheap",) if how == "cheap" else ()
    lying = (sys.executable, str(WORKER), *cheap, *numbers)
    argv = lying if how in ("always", "every", "cheap") else WORKER_ARGV
    asyncio.run(run_node(NodeConfig.load(Path(config)), worker_argv=argv))
