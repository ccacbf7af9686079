"""A member's own recomputation of a disputed task, which decides its verification."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from splitup.core import limits, tuning
from splitup.core.errors import SplitUpError, Unavailable
from splitup.core.tensors import StepsDigest, TensorSpec
from splitup.graph.manifest import Manifest, get_task_key, get_weights_key
from splitup.messages.base import CLIENT
from splitup.messages.completions import EMPTY_DIGEST
from splitup.messages.storage import Grants
from splitup.messages.verification import Ruling
from splitup.net.http import SignedClient
from splitup.net.object_transfer import get_object
from splitup.protocol.committee.commands import RecomputeTask
from splitup.protocol.execution.routes import get_sources
from splitup.protocol.execution.task_queue import PortId
from splitup.storage.gateway_client import GatewayClient
from splitup.storage.log_store import LogIncomplete, iter_tensors, open_verification_logs
from splitup_oracle.member import recomputation
from splitup_oracle.member.recompute_process import write_tensor

_LOGITS: Final = "logits"  # the name of the output whose argmax counts

_log = logging.getLogger("splitup.oracle.rulings")


class Rulings:
    """Recomputes disputed tasks, one at a time."""

    def __init__(self, http: SignedClient, gateway: GatewayClient, directory: Path) -> None:
        self._http = http
        self._gateway = gateway
        self._directory = directory
        self._turn = asyncio.Lock()
        self._classes: dict[str, str] = {}
        shutil.rmtree(directory, ignore_errors=True)  # left by a member that was killed

    async def recompute(self, command: RecomputeTask, manifest: Manifest) -> Ruling:
        """Return this machine's result for the task, or a ruling that states why there is none."""
        order = command.order
        try:
            async with self._turn:
                return await self._recompute(command, manifest)
        except (SplitUpError, OSError) as error:
            _log.warning("task %d cannot be recomputed here: %s", order.task, error)
            return Ruling(
                task=order.task, inputs=(), outputs=(), state=EMPTY_DIGEST, error=str(error)[:200]
            )

    async def _recompute(self, command: RecomputeTask, manifest: Manifest) -> Ruling:
        order = command.order
        task = manifest.tasks[order.task]
        grants = await self._gateway.verification_grants(order, ())
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._directory) as name:
            directory = Path(name)
            graph, weights = directory / "task.json", None
            await self._store(graph, get_task_key(task.task_id), task.graph_bytes, grants)
            if task.weights_digest:
                weights = directory / "weights.safetensors"
                key = get_weights_key(task.weights_digest)
                await self._store(weights, key, task.weights_bytes, grants, task.weights_digest)
            sources = get_sources(manifest, order.task)
            specs = [port.spec for port in task.inputs]
            logs, missing = await self._store_logs(command, sources, specs, directory, "input")
            if missing:
                return _miss(order.task, missing)
            job = recomputation.Replay(
                directory=directory,
                task=graph,
                weights=weights,
                inputs=[path for path, _ in logs],
                steps=order.steps,
                gate=task.gate,
                determinism=command.determinism,
                memory_bytes=task.vram_bytes,
            )
            if task.crosses_classes and not await self._computes_as(command.determinism):
                return await self._compare(command, manifest, job)
            stored = None
            if task.crosses_classes:
                stored = await self._store_claimed(command, manifest, job)
            found = await recomputation.replay(stored or job)
            close = found.pop("accepted", False)
        return Ruling.from_value({"task": order.task, "error": "", "close": close, **found})

    async def _compare(
        self, command: RecomputeTask, manifest: Manifest, job: recomputation.Replay
    ) -> Ruling:
        """Compare the outputs that the executor stored with this machine's, of another class."""
        order, claim = command.order, command.claim
        stored = await self._store_claimed(command, manifest, job)
        if stored is None:
            return _miss(order.task, (order.task,))
        found = await recomputation.replay(replace(stored, determinism=await self._find_class("")))
        return Ruling.from_value(
            {
                "task": order.task,
                "inputs": found["inputs"],
                "outputs": claim.outputs if found["accepted"] else (),
                "state": claim.state,
                "error": "",
                "compared": True,
            }
        )

    async def _store_claimed(
        self, command: RecomputeTask, manifest: Manifest, job: recomputation.Replay
    ) -> recomputation.Replay | None:
        """Return the job with the executor's stored outputs, to be compared with the result.

        None when the stored outputs are not the committed ones.
        """
        order, claim = command.order, command.claim
        task = manifest.tasks[order.task]
        outputs = [(order.task, port) for port in range(len(task.outputs))]
        specs = [port.spec for port in task.outputs]
        logs, missing = await self._store_logs(command, outputs, specs, job.directory, "output")
        if missing or tuple(digest for _, digest in logs) != claim.outputs:
            return None
        logits = [
            port.port
            for port in manifest.outputs
            if port.task == order.task and port.name == _LOGITS
        ]
        return replace(
            job,
            claimed=[path for path, _ in logs],
            tolerances=task.tolerances,
            logits=logits[0] if logits else None,
        )

    async def _computes_as(self, determinism: str) -> bool:
        try:
            return await self._find_class(determinism) == determinism
        except Unavailable:
            return False

    async def _find_class(self, determinism: str) -> str:
        """Return the class in which this machine computes if asked for this one ("": its own)."""
        if determinism not in self._classes:
            if len(self._classes) >= tuning.MAX_CLASSES:
                self._classes.clear()
            self._classes[determinism] = await recomputation.find_class(determinism)
        return self._classes[determinism]

    async def _store(
        self, path: Path, key: str, length: int, grants: Grants, digest: str | None = None
    ) -> None:
        """Fetch an object into a file; without ``digest`` it must match the digest in its key."""
        expected = digest or key.rpartition("/")[2].partition(".")[0]
        data = await get_object(
            self._http.session,
            grants.find("GET", key),
            max_bytes=length,
            expected_digest=expected,
            deadline_s=limits.RULING_S,
        )
        await asyncio.to_thread(path.write_bytes, data)

    async def _store_logs(
        self,
        command: RecomputeTask,
        sources: Sequence[PortId],
        specs: Sequence[TensorSpec],
        directory: Path,
        prefix: str,
    ) -> tuple[list[tuple[Path, str]], tuple[int, ...]]:
        """Read the logs of ports into files; return (file, digest) of each.

        Also returns the tasks whose logs are broken. Raises LogIncomplete for a broken log of the
        client, which no ruling accuses.
        """
        order = command.order
        store = open_verification_logs(self._gateway, lambda: self._http.session, order)
        files: list[tuple[Path, str]] = []
        missing: set[int] = set()
        for number, (source, spec) in enumerate(zip(sources, specs, strict=True)):
            path = directory / f"{prefix}-{number}"
            tensors = iter_tensors(
                store,
                order.certificate.plan.request,
                source,
                order.executors,
                spec,
                order.steps,
                is_drawn=True,
            )
            digest = StepsDigest()
            try:
                with path.open("wb") as file:
                    async for tensor in tensors:
                        write_tensor(file, tensor)
                        digest.add_tensor(tensor)
            except LogIncomplete as error:
                if source[0] == CLIENT:
                    raise
                _log.warning("task %d lacks an input: %s", order.task, error)
                missing.add(source[0])
            files.append((path, digest.hexdigest()))
        return files, tuple(sorted(missing))


def _miss(task: int, missing: tuple[int, ...]) -> Ruling:
    return Ruling(task=task, inputs=(), outputs=(), state=EMPTY_DIGEST, error="", missing=missing)
