"""What the chain says about registered models, and taking one off the market."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from splitup.core import limits
from splitup.core.errors import ChainRejected, InvalidInput

if TYPE_CHECKING:
    from splitup.chain.client import Chain  # half a second, of which names need nothing
    from splitup.chain.event_stream import ChainEvent

_MODEL_ID: Final = re.compile(r"0x[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A model as the ModelRegistry states it.

    ``is_current``: clients that name the model by its name get this version, the newest.
    ``is_retired``: its developer took it off the market, so no new executions of it start.
    """

    model_id: str
    name: str
    developer: str
    task_count: int
    price_per_step_nano_usdc: int
    is_current: bool
    is_retired: bool


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
        price_per_step_nano_usdc=model["pricePerStep"],
        is_current=await chain.call("models", "modelByName", model["name"]) == model_id,
        is_retired=await chain.call("models", "isRetired", model_id),
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


async def find_model(chain: Chain, name_or_id: str) -> RegisteredModel:
    """Return the model of an id, or the version that a name stands for. Raises InvalidInput."""
    fetch = fetch_model if _MODEL_ID.fullmatch(name_or_id) else fetch_model_by_name
    found = await fetch(chain, name_or_id)
    if found is None:
        raise InvalidInput(
            f"there is no registered model {name_or_id!r:.80}; see what there is: "
            "splitup-deploy list"
        )
    return found


async def fetch_models(chain: Chain) -> tuple[RegisteredModel, ...]:
    """Return every registered model, the oldest first."""
    return collect_models(await chain.fetch_events("models"))


def collect_models(events: Iterable[ChainEvent]) -> tuple[RegisteredModel, ...]:
    """Return the models of the registry's events, the oldest first."""
    found: dict[str, RegisteredModel] = {}
    current: dict[str, str] = {}  # name -> id of the newest version
    for event in events:
        model_id = event.args["modelId"]
        if event.name == "ModelRetired":
            found[model_id] = replace(found[model_id], is_retired=True)
        elif event.name == "ModelRegistered":
            current[event.args["name"]] = model_id
            found[model_id] = RegisteredModel(
                model_id=model_id,
                name=event.args["name"],
                developer=event.args["developer"],
                task_count=len(event.args["tasks"]),
                price_per_step_nano_usdc=sum(t["priceNanoUsdc"] for t in event.args["tasks"]),
                is_current=False,
                is_retired=False,
            )
    return tuple(
        replace(model, is_current=current[model.name] == model.model_id) for model in found.values()
    )


async def retire_model(chain: Chain, name_or_id: str) -> RegisteredModel:
    """Take a model off the market for good; return it as it is then.

    Raises InvalidInput when there is no such model, it is another developer's, or is retired.
    """
    model = await find_model(chain, name_or_id)
    if model.developer != chain.address:
        raise InvalidInput(
            f"the model {model.model_id} belongs to {model.developer}, and your key is that of "
            f"{chain.address}; only its developer can retire it (--keystore)"
        )
    if model.is_retired:
        raise InvalidInput(f"the model {model.model_id} is retired already")
    await chain.send("models", "retire", model.model_id)
    return replace(model, is_retired=True)
