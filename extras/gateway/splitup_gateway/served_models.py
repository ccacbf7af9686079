"""Models that a server answers by: their leases, and the towers of their images."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from functools import partial

from splitup.client.images.image_reader import ImageReader
from splitup.client.leases import LeaseOptions, LeasePool
from splitup.client.network import Network
from splitup.client.text.encoding import EncoderModel
from splitup.client.text.generation import TextModel
from splitup.core.errors import InvalidInput
from splitup_gateway.api_keys import ApiKey
from splitup_gateway.apis.requests import ChatRequest, parse_request
from splitup_gateway.errors import ApiError
from splitup_gateway.generation import Speculate
from splitup_gateway.image_towers import TOWER_STEPS, ImageTower
from splitup_gateway.preparing import Prepared, prepare
from splitup_gateway.timelines import Timelines


@dataclass(slots=True)
class ServedModel:
    """A model that reads texts, its leases, and what its texts draft with if they are to.

    ``tower`` makes rows of images.
    """

    model: TextModel | EncoderModel
    pool: LeasePool
    speculate: Speculate | None = None
    tower: ImageTower | None = None

    def compute_price(self, prepared: Prepared) -> int:
        """Return the most that texts may cost, in micro-USDC."""
        model = self.get_text_model()
        price = model.manifest.cost_micro_usdc(prepared.count_steps(model))
        if prepared.images and self.tower is not None:
            price += self.tower.manifest.cost_micro_usdc(prepared.images)
        return price

    def get_text_model(self) -> TextModel:
        """Return the model; raise ApiError for one that writes no text."""
        if isinstance(self.model, TextModel):
            return self.model
        right = "/v1/rerank" if self.model.is_ranker else "/v1/embeddings"
        raise ApiError(
            f"the model '{self.model.name}' writes no text; ask it by POST {right}", param="model"
        )

    def get_encoder(self) -> EncoderModel:
        """Return the model; raise ApiError for one that writes text."""
        if isinstance(self.model, EncoderModel):
            return self.model
        raise ApiError(
            f"the model '{self.model.name}' writes text, and gives neither embeddings nor ranks; "
            "GET /v1/models shows each model's kind",
            param="model",
        )


class ServedModels:
    """The models of one network that a server answers by, each under its name."""

    def __init__(self, net: Network, options: LeaseOptions, timelines: Timelines) -> None:
        self._net = net
        self._timelines = timelines
        self._options = options
        self._models: dict[str, ServedModel] = {}
        self.for_devices: set[str] = set()  # served beside these, to devices that keep the text
        self._towers: dict[str, ImageTower] = {}  # by id
        self._reader = ImageReader()

    async def add(self, name: str, draft: str | None) -> None:
        """Serve a model, as ``ApiServer.add_model`` says."""
        model = await self._fetch(name)
        speculate = None
        if draft is not None:
            speculate = partial(self._net.speculate, name, draft or None)
            await speculate()  # which loads the draft model
        pool = LeasePool(self._net, name, self._options, self._timelines.keep)
        pool.open()
        tower = None
        if isinstance(model, TextModel):
            tower = await self._add_tower(model)
            await _warm_up(model)
        self._models[name] = ServedModel(model, pool, speculate, tower)

    async def _add_tower(self, model: TextModel) -> ImageTower | None:
        """Return what makes rows of a model's images, None for a model that takes none."""
        if (info := model.info.images) is None:
            return None
        if info.tower not in self._towers:
            manifest, port = await self._net.fetch_tower(model.name)
            options = replace(self._options, warm=0, steps=TOWER_STEPS)
            pool = LeasePool(self._net, info.tower, options, self._timelines.keep)
            pool.open()
            self._towers[info.tower] = ImageTower(manifest, port, pool, self._reader)
        return self._towers[info.tower]

    async def _fetch(self, name: str) -> TextModel | EncoderModel:
        found = await self._net.fetch_model(name)
        if found.manifest.is_encoder:
            return await self._net.fetch_encoder_model(name)
        return await self._net.fetch_text_model(name)

    async def close(self) -> None:
        """End all leases; they are paid for what they ran."""
        pools = [each.pool for each in self._models.values()]
        pools += [each.pool for each in self._towers.values()]
        await asyncio.gather(*(pool.close() for pool in pools))
        self._reader.close()

    @property
    def pools(self) -> dict[str, LeasePool]:
        """The leases of every model and tower, by its name."""
        pools = {name: served.pool for name, served in self._models.items()}
        return pools | {name: tower.pool for name, tower in self._towers.items()}

    def list_allowed(self, key: ApiKey | None) -> list[str]:
        """Return the names of the models that a key may use."""
        return [name for name in self._models if key is None or key.allows(name)]

    def get(self, name: str) -> TextModel | EncoderModel | None:
        """Return the model of this name, None if it is not served."""
        served = self._models.get(name)
        return None if served is None else served.model

    def describe(self, name: str) -> dict[str, object]:
        """Return what a list of models says of one."""
        served = self._models[name]
        model = served.model
        return {
            "id": name,
            **{"object": "model", "created": 0, "owned_by": "splitup"},  # as OpenAI has it
            **{"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"},
            "kind": model.manifest.kind,
            "context_length": model.info.context,
            "price_nano_usdc_per_step": model.manifest.price_nano_usdc,
            "takes_images": served.tower is not None,
            "takes_turns": isinstance(model, TextModel) and model.info.takes_turns,
        }

    async def find(self, name: str, key: ApiKey | None) -> ServedModel:
        """Return a model that a key may use; raise ApiError (404) for another."""
        served = self._models.get(name)
        if served is None or (key is not None and not key.allows(name)):
            who = "here" if key is None else "to this key"
            advice = f"is not served {who}; GET /v1/models lists those that are"
            if name in self.for_devices and (key is None or key.allows(name)):
                advice = (
                    "is served at /private, to devices that keep the text, and not by this API; "
                    "'splitup serve' without --private serves it by this one"
                )
            raise ApiError(
                f"the model '{name:.100}' {advice}",
                status=404,
                param="model",
                code="model_not_found",
            )
        if not served.model.tokenizer.is_running:  # a prompt has ended its process
            served.model = await self._fetch(name)
        return served


async def _warm_up(model: TextModel) -> None:
    """Prepare a chat: its libraries are loaded and its template compiled before the first one."""
    messages = [{"role": "user", "content": "hello"}]
    asked = parse_request(ChatRequest, {"model": model.name, "messages": messages})
    with contextlib.suppress(ApiError, InvalidInput):  # whoever asks is told
        await prepare(model, asked)
