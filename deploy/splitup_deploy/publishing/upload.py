"""Storing a compiled model's objects. Each is named by its digest, so nothing is sent twice."""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

from splitup.core import limits
from splitup.core.errors import InvalidModel, StorageUnavailable
from splitup.messages.storage import Grant, UploadObject
from splitup.storage.gateway_client import GatewayClient
from splitup_deploy.cutting.build import Blob, CompiledModel

_log = logging.getLogger("splitup.deploy")
_UPLOADS: Final = 4  # uploads at once; more only help when the store is far away
_BATCH: Final = 32  # objects per request: grants live for an hour, so each batch asks for its own
_TRIES: Final = 3  # per object, before the user has to run the command again
_PAUSE_S: Final = 0.5  # before the second try; doubled before each further one


class UploadProgress(Protocol):
    """Receives the progress of an upload."""

    def start(self, total_bytes: int) -> None:
        """Take note that the model has ``total_bytes``."""

    def skip(self, present_bytes: int) -> None:
        """Take note that the store has ``present_bytes`` of it already."""

    def advance(self, sent_bytes: int) -> None:
        """Count bytes that were sent; negative when a try failed and its bytes are sent again."""


async def upload(
    compiled: CompiledModel, gateway: GatewayClient, progress: UploadProgress
) -> tuple[int, int]:
    """Store the objects that the store lacks; return how many objects and bytes were sent."""
    manifest = compiled.manifest_blob
    blobs = list({blob.key: blob for blob in compiled.blobs}.values())
    too_long = [blob for blob in blobs if blob.length > limits.MAX_UPLOAD_BYTES]
    if too_long:
        raise InvalidModel(
            f"object {too_long[0].key} has {too_long[0].length} bytes, the store takes at most "
            f"{limits.MAX_UPLOAD_BYTES} in one piece; lower the VRAM target"
        )
    batches = [blobs[start : start + _BATCH] for start in range(0, len(blobs), _BATCH)]
    progress.start(sum(blob.length for blob in [*blobs, manifest]))
    uploads = asyncio.Semaphore(_UPLOADS)
    sent: list[Blob] = []
    for batch in [*batches, [manifest]]:
        answer = await gateway.upload_grants(
            [UploadObject(key=b.key, length_bytes=b.length, sha256=b.digest) for b in batch]
        )
        grants = {grant.key: grant for grant in answer.grants}
        missing = [blob for blob in batch if blob.key in grants]
        progress.skip(sum(blob.length for blob in batch if blob.key not in grants))
        try:
            async with asyncio.TaskGroup() as group:
                for blob in missing:
                    group.create_task(_send(gateway, grants[blob.key], blob, progress, uploads))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        sent += missing
    return len(sent), sum(blob.length for blob in sent)


async def _send(
    gateway: GatewayClient,
    grant: Grant,
    blob: Blob,
    progress: UploadProgress,
    uploads: asyncio.Semaphore,
) -> None:
    async with uploads:
        for attempt in range(_TRIES):
            sent = 0

            def count(sent_bytes: int) -> None:
                nonlocal sent
                sent += sent_bytes
                progress.advance(sent_bytes)

            try:
                await gateway.upload_object(grant, blob.open, count)
                progress.advance(blob.length - sent)  # somebody else has stored it meanwhile
                return
            except StorageUnavailable as error:
                progress.advance(-sent)
                if attempt + 1 == _TRIES:
                    raise
                _log.warning("%s", error)
                await asyncio.sleep(_PAUSE_S * 2**attempt)
