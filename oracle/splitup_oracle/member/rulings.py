"""A member's own recomputation of a disputed task, which decides its verification."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from splitup.core import limits, tuning
from splitup.core.errors import InvalidInput, SplitUpError, Unavailable
from splitup.core.tensors import StepsDigest, TensorSpec
from splitup.graph.manifest import Manifest, get_task_key, get_weights_key
from splitup.messages.base import CLIENT
from splitup.messages.completions import EMPTY_DIGEST, TaskCommitment
from splitup.messages.storage import Grant, Grants
from splitup.messages.verification import Ruling, VerificationOrder, VerificationResult
from splitup.net.http import SignedClient
from splitup.protocol.committee.commands import RecomputeTask
from splitup.protocol.execution.routes import get_sources
from splitup.protocol.execution.task_queue import PortId
from splitup.storage.download import check_space, download_object
from splitup.storage.gateway_client import GatewayClient
from splitup.storage.log_store import (
    LogIncomplete,
    LogPatience,
    iter_tensors,
    open_verification_logs,
)
from splitup_oracle.member import recomputation
from splitup_oracle.member.recompute_process import write_tensor

_LOGITS: Final = "logits"  # the name of the output whose argmax counts

_log = logging.getLogger("splitup.oracle.rulings")


class Rulings:
    """Recomputes disputed tasks, one at a time."""

    def __init__(
        self,
        http: SignedClient,
        gateway: GatewayClient,
        recomputer: recomputation.Recomputer,
        directory: Path,
        *,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._http = http
        self._gateway = gateway
        self._recomputer = recomputer
        self._directory = directory
        self._patience = LogPatience(is_drawn=True, now_s=now_s)
        self._turn = asyncio.Lock()
        self._defined: dict[str, tuple[int, tuple[str, ...]]] = {}  # by seed: steps, inputs
        shutil.rmtree(directory, ignore_errors=True)  # left by a member that was killed

    async def recompute(self, command: RecomputeTask, manifest: Manifest) -> tuple[Ruling, ...]:
        """Return what this machine finds about the executor's claim, and about validators'.

        One ruling says so where there is no result, or none yet: where this machine took too long,
        or something that it needs did not answer.
        """
        order = command.order
        try:
            async with self._turn:
                return await self._recompute(command, manifest)
        except (Unavailable, OSError) as error:
            _log.warning("task %d is not recomputed yet: %s", order.task, error)
            return (_fail(order.task).model_copy(update={"slow": True}),)
        except SplitUpError as error:
            _log.warning("task %d cannot be recomputed here: %s", order.task, error)
            return (_fail(order.task, error=str(error)[:200]),)

    async def _recompute(self, command: RecomputeTask, manifest: Manifest) -> tuple[Ruling, ...]:
        order = command.order
        task = manifest.tasks[order.task]
        grants = await self._gateway.verification_grants(order)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._directory) as name:
            directory = Path(name)
            graph, weights = directory / "task.json", None
            key, digest = get_task_key(task.task_id), task.task_id
            await self._store(graph, key, task.graph_bytes, digest, order, grants)
            if digest := task.weights_digest:
                weights = directory / "weights.safetensors"
                key = get_weights_key(digest)
                await self._store(weights, key, task.weights_bytes, digest, order, grants)
            sources = get_sources(manifest, order.task)
            specs = [port.spec for port in task.inputs]
            prefix = directory / "input"
            logs, missing = await self._store_logs(order, sources, specs, order.executors, prefix)
            if missing:
                return (_fail(order.task, missing),)
            job = recomputation.RecomputeJob(
                directory=directory,
                task=graph,
                weights=weights,
                inputs=[path for path, _ in logs],
                steps=order.steps,
                gate=task.gate,
                determinism=command.determinism,
                memory_bytes=task.vram_bytes,
                patience=2**command.tries,
            )
            if task.crosses_classes and not await self._computes_as(command.determinism):
                return await self._compare(command, manifest, job)
            stored = None
            if task.crosses_classes:
                stored = await self._store_claim(command, manifest, command.claim, directory)
            job = _add_claims(job, manifest, order.task, [stored])
            found = await self._replay(job, {(one.outputs, one.state) for one in command.claims})
            close = any(found.pop("accepted"))
            del found["is_defined"], found["noisy_steps"]
        return (Ruling.from_value({"task": order.task, "error": "", "close": close, **found}),)

    async def _compare(
        self, command: RecomputeTask, manifest: Manifest, job: recomputation.RecomputeJob
    ) -> tuple[Ruling, ...]:
        """Compare the outputs that each party stored with this machine's, of another class."""
        order, claims = command.order, command.claims
        stored = [
            await self._store_claim(command, manifest, claim, job.directory) for claim in claims
        ]
        seed = f"{order.draw.seed}/{order.task}"
        steps, inputs = self._defined.get(seed, (0, ()))
        job = replace(
            job,
            determinism=await self._recomputer.find_class(""),
            seed=seed,
            defined_steps=steps,
            defined_inputs=inputs,
        )
        found = await self._recomputer.replay(_add_claims(job, manifest, order.task, stored))
        if not found["is_defined"]:
            raise InvalidInput("rounding alone changes its results by more than a lie might")
        if found["noisy_steps"] > steps:  # a further validator's claim needs no noise again
            if len(self._defined) >= tuning.MAX_DEFINED:
                self._defined.clear()
            self._defined[seed] = found["noisy_steps"], tuple(found["inputs"])
        accepted = iter(found["accepted"])
        return tuple(
            Ruling.from_value(
                {
                    "task": order.task,
                    "inputs": found["inputs"],
                    "outputs": claim.outputs if files is not None and next(accepted) else (),
                    "state": claim.state,
                    "error": "",
                    "missing": (order.task,) if files is None else (),
                    "compared": True,
                    "validator": _get_validator(claim),
                }
            )
            for claim, files in zip(claims, stored, strict=True)
        )

    async def _store_claim(
        self, command: RecomputeTask, manifest: Manifest, claim: _Claim, directory: Path
    ) -> list[Path] | None:
        """Read the outputs that a party stored; None when they are not what it committed to."""
        task = command.order.task
        outputs = manifest.tasks[task].outputs
        authors = list(command.order.executors)
        authors[task] = _get_validator(claim) or authors[task]
        ports = [(task, port) for port in range(len(outputs))]
        specs = [port.spec for port in outputs]
        prefix = directory / f"output-{authors[task]}"
        logs, missing = await self._store_logs(command.order, ports, specs, authors, prefix)
        if missing or tuple(digest for _, digest in logs) != claim.outputs:
            return None
        return [path for path, _ in logs]

    async def _computes_as(self, determinism: str) -> bool:
        try:
            return await self._recomputer.find_class(determinism) == determinism
        except InvalidInput:
            return False

    async def _replay(
        self, job: recomputation.RecomputeJob, claimed: set[tuple[tuple[str, ...], str]]
    ) -> dict[str, Any]:
        """Recompute a task; where parties, or they and this machine, disagree, step by step.

        So nobody is convicted because many steps were computed in one pass. ``claimed`` are the
        digests of outputs and state that parties claim.
        """
        if len(claimed) == 1:
            found = await self._recomputer.replay(replace(job, merges=True))
            if (tuple(found["outputs"]), found["state"]) in claimed:
                return found
        return await self._recomputer.replay(job)

    async def _store(
        self,
        path: Path,
        key: str,
        length_bytes: int,
        digest: str,
        order: VerificationOrder,
        grants: Grants,
    ) -> None:
        """Fetch an object into a file; it may be larger than this machine's memory."""

        async def renew() -> Grant:
            return (await self._gateway.verification_grants(order)).find("GET", key)

        await download_object(
            self._http.session,
            grants.find("GET", key),
            renew,
            path,
            length_bytes=length_bytes,
            digest=digest,
            deadline_s=limits.RULING_S,
        )

    async def _store_logs(
        self,
        order: VerificationOrder,
        sources: Sequence[PortId],
        specs: Sequence[TensorSpec],
        authors: Sequence[str],  # by task
        prefix: Path,
    ) -> tuple[list[tuple[Path, str]], tuple[int, ...]]:
        """Read the logs of ports into files whose names begin with ``prefix``.

        Returns (file, digest) of each.

        Also returns the tasks whose logs are broken. Raises LogIncomplete for a broken log of the
        client, which no ruling accuses.
        """
        store = open_verification_logs(self._gateway, lambda: self._http.session, order)
        files: list[tuple[Path, str]] = []
        missing: set[int] = set()
        for number, (source, spec) in enumerate(zip(sources, specs, strict=True)):
            path = prefix.with_name(f"{prefix.name}-{number}")
            tensors = iter_tensors(
                store,
                order.certificate.plan.request,
                source,
                authors,
                spec,
                order.steps,
                self._patience,
            )
            digest = StepsDigest()
            try:
                with path.open("wb") as file:
                    async for tensor in tensors:
                        check_space(path, len(tensor))
                        write_tensor(file, tensor)
                        digest.add_tensor(tensor)
            except LogIncomplete as error:
                if source[0] == CLIENT:
                    raise
                _log.warning("task %d cannot be compared: %s", order.task, error)
                missing.add(source[0])
            files.append((path, digest.hexdigest()))
        return files, tuple(sorted(missing))


_Claim = TaskCommitment | VerificationResult


def _get_validator(claim: _Claim) -> str | None:
    """Return whose claim it is, None for the executor's."""
    return claim.validator if isinstance(claim, VerificationResult) else None


def _add_claims(
    job: recomputation.RecomputeJob,
    manifest: Manifest,
    task: int,
    claims: Sequence[list[Path] | None],
) -> recomputation.RecomputeJob:
    """Return the job with what is to be compared with its result."""
    logits = [p.port for p in manifest.outputs if p.task == task and p.name == _LOGITS]
    return replace(
        job,
        claims=[files for files in claims if files is not None],
        tolerances=manifest.tasks[task].tolerances,
        logits=logits[0] if logits else None,
    )


def _fail(task: int, missing: tuple[int, ...] = (), error: str = "") -> Ruling:
    return Ruling(
        task=task, inputs=(), outputs=(), state=EMPTY_DIGEST, error=error, missing=missing
    )
