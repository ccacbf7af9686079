"""A cache of tasks and weights on disk, by digest; files are whole and verified.

Nodes keep the tasks that they serve here, clients the tasks that a model leaves to the client.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import aiohttp

from splitup.core import limits, tuning
from splitup.core.errors import PeerFault, StorageUnavailable
from splitup.core.latest import Latest
from splitup.core.throughput import Rate
from splitup.graph.manifest import (
    ClientTask,
    Manifest,
    Task,
    TextInfo,
    get_blob_key,
    get_task_key,
    get_weights_key,
)
from splitup.graph.manifest_rules import check_refused, load_manifest
from splitup.messages.storage import Grant, Grants
from splitup.storage.download import download_object, write_file

if TYPE_CHECKING:  # it brings numpy, which only nodes' audits need
    from splitup.graph.self_test_vectors import SelfTestVectors

_CHUNK_BYTES: Final = 4 * limits.MIB


class ModelStore(Protocol):
    """Where the objects of a model come from: a storage gateway, or a server that has some."""

    async def fetch_manifest(self, model_id: str) -> bytes:
        """Return a manifest whose SHA-256 is the model's id."""

    async def model_grants(self, model_id: str) -> Grants:
        """Return GET grants for a model's objects."""


class TaskCache:
    """Content-addressed files under ``directory``, fetched through the gateway when missing."""

    def __init__(
        self,
        directory: Path,
        gateway: ModelStore,
        session: aiohttp.ClientSession,
        check_manifest: Callable[[Manifest], Awaitable[None]],
    ) -> None:
        """``check_manifest`` raises InvalidModel for a manifest that the chain does not record."""
        self._directory = directory
        self._check_manifest = check_manifest
        self._gateway = gateway
        self._session = session
        self._manifests: Latest[str, Manifest] = Latest(tuning.MAX_CACHED_MANIFESTS)
        self._downloads = Rate()  # bytes

    @property
    def bandwidth_kbps(self) -> int:
        """Return 10^3 bytes a second of the latest downloads, 0 before the first."""
        return self._downloads.per_ms(limits.MAX_BANDWIDTH_KBPS)

    async def fetch_manifest(self, model_id: str) -> Manifest:
        """Return a model's manifest; raise InvalidModel, StorageUnavailable, Refused, PeerFault."""
        known = self._manifests.get(model_id)
        if known is None:
            check_refused(model_id)
            path = self._directory / f"{model_id[2:]}.json"
            if path.exists() and _compute_digest(path) == model_id[2:]:
                data = path.read_bytes()
            else:
                data = await self._gateway.fetch_manifest(model_id)
                await asyncio.to_thread(write_file, path, data)
            known = await asyncio.to_thread(load_manifest, data)
            await self._check_manifest(known)
            self._manifests[model_id] = known
        return known

    async def fetch_task(self, model_id: str, index: int) -> tuple[Path, Path | None]:
        """Return the files of a task's graph and weights (None without), fetched if missing."""
        return await self.fetch_program(
            model_id, (await self.fetch_manifest(model_id)).tasks[index]
        )

    async def fetch_program(
        self, model_id: str, task: Task | ClientTask
    ) -> tuple[Path, Path | None]:
        """Do the same for a task whose manifest the caller has."""
        graph = self._directory / f"{task.task_id}.json"
        weights = self._directory / f"{task.weights_digest}.safetensors"
        wanted = [(graph, get_task_key(task.task_id), task.task_id, task.graph_bytes)]
        if task.weights_digest:
            key = get_weights_key(task.weights_digest)
            wanted.append((weights, key, task.weights_digest, task.weights_bytes))
        await self._fetch_missing(model_id, wanted)
        return graph, weights if task.weights_digest else None

    async def fetch_manifest_file(self, model_id: str) -> Path:
        """Return the file of a model's manifest, fetched if missing."""
        await self.fetch_manifest(model_id)
        return self._directory / f"{model_id[2:]}.json"

    async def fetch_tokenizer(self, model_id: str, info: TextInfo) -> Path:
        """Return the file of a model's tokenizer.json, fetched if missing."""
        digest = info.tokenizer_digest
        path = self._directory / f"{digest}.tokenizer.json"
        wanted = [(path, get_blob_key(digest), digest, info.tokenizer_bytes)]
        await self._fetch_missing(model_id, wanted)
        return path

    async def fetch_vectors(self, model_id: str, index: int) -> SelfTestVectors | None:
        """Return a task's reference vectors, None when its model has none."""
        task = (await self.fetch_manifest(model_id)).tasks[index]
        digest = task.reference_digest
        if not digest:
            return None
        path = self._directory / f"{digest}.vectors.json"
        wanted = [(path, get_blob_key(digest), digest, task.reference_bytes)]
        await self._fetch_missing(model_id, wanted)
        data = await asyncio.to_thread(path.read_bytes)
        from splitup.graph.self_test_vectors import load_vectors

        return load_vectors(data, task.task_id, task.outputs)

    async def _fetch_missing(
        self, model_id: str, wanted: Sequence[tuple[Path, str, str, int]]
    ) -> None:
        """Fetch the files that are missing or damaged: (path, key, digest, bytes)."""
        missing = [
            entry
            for entry in wanted
            if await asyncio.to_thread(_compute_digest, entry[0]) != entry[2]
        ]
        if missing:
            grants = await self._gateway.model_grants(model_id)
            for path, key, digest, size in missing:

                async def renew(key: str = key) -> Grant:
                    return _find(await self._gateway.model_grants(model_id), key)

                started_ns = time.monotonic_ns()
                await download_object(
                    self._session,
                    _find(grants, key),
                    renew,
                    path,
                    length_bytes=size,
                    digest=digest,
                    deadline_s=tuning.DOWNLOAD_TIMEOUT_S,
                )
                if size >= tuning.MEASURED_BYTES:
                    self._downloads.add(size, time.monotonic_ns() - started_ns)


def _find(grants: Grants, key: str) -> Grant:
    try:
        return grants.find("GET", key)
    except PeerFault as error:
        raise StorageUnavailable(str(error)) from None


def _compute_digest(path: Path) -> str:
    """Return the SHA-256 of a file in hex, "" when there is none."""
    try:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
            return digest.hexdigest()
    except FileNotFoundError:
        return ""
