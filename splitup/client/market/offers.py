"""What can be run: every model on the market, what a step costs, and whether nodes hold it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from splitup.chain.client import Chain
from splitup.chain.registered_models import RegisteredModel, fetch_models
from splitup.client.market.holders import ask_all, describe_holders, is_held
from splitup.client.models import Model
from splitup.core.errors import SplitUpError
from splitup.graph.manifest import Manifest
from splitup.net.http import SignedClient
from splitup.protocol.committee.certificates import CommitteeView

_AT_ONCE = 8  # models that are asked for


@dataclass(frozen=True, slots=True)
class Offer:
    """A model on the market; ``context`` is 0 for one that reads no text."""

    name: str
    model_id: str
    kind: str
    context: int
    has_chat: bool
    is_private: bool  # leaves tasks to the client
    price_nano_usdc: int  # of a step
    is_ready: bool  # live nodes hold all its tasks
    state: str


async def fetch_offers(
    chain: Chain,
    fetch_model: Callable[[str], Awaitable[Model]],
    http: SignedClient,
    committee: CommitteeView,
) -> list[Offer]:
    """Return the newest version of every model that is not retired, the oldest name first."""
    turns = asyncio.Semaphore(_AT_ONCE)

    async def describe(listed: RegisteredModel) -> Offer:
        price = listed.price_per_step_nano_usdc
        try:
            async with turns:
                manifest = (await fetch_model(listed.model_id)).manifest
                found = await ask_all(http, committee, listed.model_id, is_held)
        except SplitUpError as error:
            return Offer(
                listed.name, listed.model_id, "", 0, False, False, price, False, str(error)
            )
        text = manifest.text
        return Offer(
            *(listed.name, listed.model_id, _name_kind(manifest), text.context if text else 0),
            *(bool(text and text.takes_turns), manifest.client is not None, price, found is None),
            "ready" if found is None else describe_holders(found),
        )

    listed = [each for each in await fetch_models(chain) if each.is_current and not each.is_retired]
    return list(await asyncio.gather(*map(describe, listed)))


def _name_kind(manifest: Manifest) -> str:
    """Return a model's kind; a function from pixels to embeddings is a vision tower."""
    ports = [[port.name for port in side] for side in (manifest.user_inputs, manifest.user_outputs)]
    return "vision-tower" if ports == [["pixels"], ["embeddings"]] else manifest.kind
