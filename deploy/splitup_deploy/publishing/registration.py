"""Registering a compiled model: its objects are stored first, then the manifest, the chain is last.

Nothing is registered unless everything that it needs is stored; one transaction makes the model
exist. A call that failed can be made again: it sends what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitup.chain.client import Chain
from splitup.chain.models import RecordedModels, encode_edges, encode_tasks
from splitup.chain.registered_models import RegisteredModel, fetch_model, fetch_model_by_name
from splitup.core.errors import ChainRejected, InvalidInput
from splitup.storage.gateway_client import GatewayClient
from splitup_deploy.cutting.build import CompiledModel
from splitup_deploy.publishing.upload import UploadProgress, upload


@dataclass(frozen=True, slots=True)
class Registration:
    """How a registration ended; ``transaction`` is "" if the model was registered before."""

    model_id: str
    name: str
    already_registered: bool
    transaction: str = ""
    block_number: int = 0
    uploaded_objects: int = 0
    uploaded_bytes: int = 0


async def check_ready(chain: Chain, name: str) -> None:
    """Refuse early for what would fail at the end: a taken name, an account without ether."""
    await check_name_is_free(chain, name, chain.address)
    if not await chain.fetch_ether_wei(chain.address):
        raise InvalidInput(
            f"{chain.address} has no ether to pay for gas; send it some, or use another --keystore"
        )


async def check_name_is_free(chain: Chain, name: str, developer: str) -> None:
    """Refuse a name that another developer owns."""
    owner = await fetch_model_by_name(chain, name)
    if owner is not None and owner.developer != developer:
        raise InvalidInput(
            f"the name {name!r} belongs to {owner.developer}; choose another with --name"
        )


async def publish(
    compiled: CompiledModel,
    name: str,
    chain: Chain,
    gateway: GatewayClient,
    progress: UploadProgress,
) -> Registration:
    """Store and register a model, or find that it is registered.

    Raises InvalidInput (name taken), InvalidModel (registered with other prices),
    StorageUnavailable, ChainUnavailable, ChainRejected (too little ether); after any of the last
    three the same call may be made again, and sends what is missing.
    """
    existing = await fetch_model(chain, compiled.model_id)
    if existing is not None:
        return await _check_registered(chain, compiled, existing)
    await check_name_is_free(chain, name, chain.address)
    objects, sent_bytes = await upload(compiled, gateway, progress)
    try:
        receipt = await chain.send(
            *("models", "register", compiled.model_id, name),
            *(encode_tasks(compiled.manifest), encode_edges(compiled.manifest)),
        )
    except ChainRejected as error:
        existing = await fetch_model(chain, compiled.model_id)
        if error.error_name == "ModelExists" and existing is not None:
            return await _check_registered(chain, compiled, existing)
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


async def _check_registered(
    chain: Chain, compiled: CompiledModel, model: RegisteredModel
) -> Registration:
    await RecordedModels(chain).check(compiled.manifest)  # anybody may have registered the id
    if model.is_retired:
        raise InvalidInput(
            f"the model {model.model_id} was registered as {model.name!r} and retired for good; "
            "change something to register it anew, for example --price"
        )
    return Registration(model.model_id, model.name, already_registered=True)
