"""How much a model was used, from the chain's events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from splitup.chain.client import Chain
from splitup.chain.event_stream import ChainEvent
from splitup.chain.registered_models import RegisteredModel, fetch_models
from splitup.core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class ModelUsage:
    """The use of one version of a model. Steps and USDC are those of settled executions.

    ``paid_micro_usdc`` went to nodes, ``fee_micro_usdc`` to the committee. ``open`` executions are
    neither settled nor refunded yet.
    """

    model_id: str
    name: str
    executions: int = 0
    settled: int = 0
    refunded: int = 0
    open: int = 0
    clients: int = 0
    steps: int = 0
    paid_micro_usdc: int = 0
    fee_micro_usdc: int = 0


async def fetch_usage(chain: Chain, name_or_id: str) -> tuple[ModelUsage, ...]:
    """Return the usage of all versions of a name, or of one id. Raises InvalidInput."""
    models = [
        model for model in await fetch_models(chain) if name_or_id in (model.name, model.model_id)
    ]
    if not models:
        raise InvalidInput(
            f"there is no registered model {name_or_id!r:.80}; see what there is: "
            "splitup-deploy list"
        )
    return count_usage(models, await chain.fetch_events("market"))


def count_usage(
    models: Sequence[RegisteredModel], events: Sequence[ChainEvent]
) -> tuple[ModelUsage, ...]:
    """Return the usage of each model, from all events of the market in their order."""
    counts: dict[str, Counter[str]] = {model.model_id: Counter() for model in models}
    clients: dict[str, set[str]] = {model_id: set() for model_id in counts}
    model_of: dict[str, str] = {}  # by execution
    for event in events:
        args = event.args
        if event.name == "RequestNodeSelections" and args["modelId"] in counts:
            model_of[args["executionId"]] = args["modelId"]
            clients[args["modelId"]].add(args["client"])
            counts[args["modelId"]].update(executions=1, open=1)
        elif event.name == "Refunded" and args["executionId"] in model_of:
            counts[model_of[args["executionId"]]].update(refunded=1, open=-1)
        elif event.name == "Settled" and args["executionId"] in model_of:
            amounts = {"paid_micro_usdc": args["paid"], "fee_micro_usdc": args["fee"]}
            counts[model_of[args["executionId"]]].update(
                {"settled": 1, "open": -1, "steps": args["steps"], **amounts}
            )
    return tuple(
        ModelUsage(model.model_id, model.name, clients=len(clients[key]), **counts[key])
        for key, model in {model.model_id: model for model in models}.items()
    )
