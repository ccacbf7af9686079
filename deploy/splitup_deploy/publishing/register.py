"""Putting a compiled model on the network: objects first, the manifest after them, the chain last.

Every object is named by its digest, so an interrupted upload goes on where it stopped, and nothing
is registered unless everything it needs is stored. One transaction makes the model exist.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, Final, Protocol

from splitup.chain.client import Chain
from splitup.core import limits
from splitup.core.errors import ChainRejected, InvalidInput, InvalidModel, StorageUnavailable
from splitup.graph.manifest import Manifest
from splitup.messages.storage import Grant, UploadObject
from splitup.storage.gateway_client import GatewayClient
from splitup_deploy.cutting.build import Blob, CompiledModel

_log = logging.getLogger("splitup.deploy")
_UPLOADS: Final = 4  # streams at once; more only help when the store is far away
_BATCH: Final = 32  # objects per request: grants live for an hour, so each batch asks for its own
_TRIES: Final = 3  # per object, before the user has to run the command again
_PAUSE_S: Final = 0.5


class UploadProgress(Protocol):
    """What the upload tells whoever watches it."""

    def start(self, total_bytes: int) -> None:
        """The model has ``total_bytes``."""

    def skip(self, present_bytes: int) -> None:
        """The store has ``present_bytes`` of it already."""

    def advance(self, sent_bytes: int) -> None:
        """More bytes are on their way; negative when a try failed and begins anew."""


@dataclass(frozen=True, slots=True)
class Registration:
    """How a registration ended; ``transaction`` is "" when the model had been registered before."""

    model_id: str
    name: str
    already_registered: bool
    transaction: str
    block_number: int
    uploaded_objects: int
    uploaded_bytes: int


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A model as the ModelRegistry states it."""

    model_id: str
    name: str
    developer: str
    task_count: int
    price_per_step_micro_usdc: int


def check_name(name: str) -> str:
    """Return a name the contract and a terminal accept; raise InvalidInput otherwise."""
    if not 1 <= len(name.encode()) <= limits.MAX_MODEL_NAME_BYTES or not name.isprintable():
        raise InvalidInput(
            f"a model's name has 1 to {limits.MAX_MODEL_NAME_BYTES} bytes, all printable; "
            "choose another with --name"
        )
    if name.startswith("0x") or name != name.strip():
        raise InvalidInput(f"the name {name!r} could be taken for a model id; choose another")
    return name


async def fetch_model(chain: Chain, model_id: str) -> RegisteredModel | None:
    """Return what the chain says about a model id, None when it is not registered."""
    try:
        model = await chain.call("models", "modelOf", model_id)
    except ChainRejected as error:
        if error.error_name == "UnknownModel":
            return None
        raise
    return RegisteredModel(
        model_id=model_id,
        name=model["name"],
        developer=model["developer"],
        task_count=model["taskCount"],
        price_per_step_micro_usdc=model["pricePerStep"],
    )


async def fetch_model_by_name(chain: Chain, name: str) -> RegisteredModel | None:
    """Return the model a name points to, None when the name is free."""
    try:
        model_id = await chain.call("models", "modelByName", name)
    except ChainRejected as error:
        if error.error_name == "UnknownName":
            return None
        raise
    return await fetch_model(chain, model_id)


async def fetch_models(chain: Chain) -> tuple[RegisteredModel, ...]:
    """Return every registered model, the oldest first."""
    found: dict[str, RegisteredModel] = {}
    for event in await chain.fetch_events("models"):
        if event.name == "ModelRegistered":
            found[event.args["modelId"]] = RegisteredModel(
                model_id=event.args["modelId"],
                name=event.args["name"],
                developer=event.args["developer"],
                task_count=len(event.args["tasks"]),
                price_per_step_micro_usdc=sum(t["priceMicroUsdc"] for t in event.args["tasks"]),
            )
    return tuple(found.values())


async def check_ready(chain: Chain, name: str) -> None:
    """Refuse early what would fail at the end: a taken name, an account without ether."""
    await check_name_is_free(chain, name, chain.address)
    if not await chain.fetch_ether_wei(chain.address):
        raise InvalidInput(
            f"{chain.address} has no ether to pay for gas; send it some, or use another --keystore"
        )


async def check_name_is_free(chain: Chain, name: str, developer: str) -> None:
    """Refuse a name that another developer owns: before the compiler works, not after."""
    owner = await fetch_model_by_name(chain, name)
    if owner is not None and owner.developer != developer:
        raise InvalidInput(
            f"the name {name!r} belongs to {owner.developer}; choose another with --name"
        )


async def register(
    compiled: CompiledModel,
    name: str,
    chain: Chain,
    gateway: GatewayClient,
    progress: UploadProgress,
) -> Registration:
    """Store and register a model, or find that it is registered.

    Raises InvalidInput (name taken), StorageUnavailable, ChainUnavailable, ChainRejected (too
    little ether); after any of them the same call may be made again, and sends what is missing.
    """
    existing = await fetch_model(chain, compiled.model_id)
    if existing is not None:
        return _already(existing)
    await check_name_is_free(chain, name, chain.address)
    objects, sent_bytes = await upload(compiled, gateway, progress)
    try:
        receipt = await chain.send(
            "models",
            "register",
            compiled.model_id,
            name,
            encode_tasks(compiled.manifest),
            encode_edges(compiled.manifest),
        )
    except ChainRejected as error:
        existing = await fetch_model(chain, compiled.model_id)
        if error.error_name == "ModelExists" and existing is not None:
            return _already(existing)
        raise
    return Registration(
        model_id=compiled.model_id,
        name=name,
        already_registered=False,
        transaction=receipt.transaction,
        block_number=receipt.block_number or 0,
        uploaded_objects=objects,
        uploaded_bytes=sent_bytes,
    )


async def upload(
    compiled: CompiledModel, gateway: GatewayClient, progress: UploadProgress
) -> tuple[int, int]:
    """Store what the store lacks; return how many objects and bytes were sent."""
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
        answer = await gateway.upload_grants([_describe(blob) for blob in batch])
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


def encode_tasks(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the tasks as ``ModelRegistry.register`` takes them."""
    return [
        {
            "taskId": "0x" + task.task_id,
            "vramBytes": task.vram_bytes,
            "flops": task.flops,
            "priceMicroUsdc": task.price_micro_usdc,
        }
        for task in manifest.tasks
    ]


def encode_edges(manifest: Manifest) -> list[int]:
    """Return the task graph's edges, ``from << 16 | to``, ascending."""
    return sorted(source << 16 | target for source, target in manifest.edges())


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
                progress.advance(blob.length - sent)  # stored by somebody else meanwhile
                return
            except StorageUnavailable as error:
                progress.advance(-sent)
                if attempt + 1 == _TRIES:
                    raise
                _log.warning("%s", error)
                await asyncio.sleep(_PAUSE_S * 2**attempt)


def _describe(blob: Blob) -> UploadObject:
    return UploadObject(key=blob.key, length_bytes=blob.length, sha256=blob.digest)


def _already(model: RegisteredModel) -> Registration:
    return Registration(
        model_id=model.model_id,
        name=model.name,
        already_registered=True,
        transaction="",
        block_number=0,
        uploaded_objects=0,
        uploaded_bytes=0,
    )
