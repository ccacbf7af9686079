"""Registered models as the client uses them: manifests, tokenizers, and the tasks it runs."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from splitup.chain.client import Chain
from splitup.chain.models import RecordedModels
from splitup.client.private.private_tasks import ClientPrograms
from splitup.client.text.generation import get_text_info
from splitup.client.text.grammar import Grammars
from splitup.client.text.tokenizer import ModelTokenizer
from splitup.core import tuning
from splitup.core.errors import ChainRejected, InvalidInput, Refused
from splitup.core.latest import Latest
from splitup.graph.manifest import ChatInfo, Manifest, get_blob_key
from splitup.graph.manifest_rules import load_manifest
from splitup.net.http import SignedClient
from splitup.net.object_transfer import get_object
from splitup.storage.gateway_client import GatewayClient
from splitup.storage.task_cache import TaskCache

_MODEL_ID: Final = re.compile(r"0x[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True)
class Model:
    """A registered model; ``name`` is what the user called it by."""

    name: str
    model_id: str
    manifest: Manifest


class Models:
    """The models that one connection has asked for lately, each fetched once.

    A name stays the model that it was at first: its developer may give it to a dearer one, at whose
    price executions would then be opened for users who were told another.
    """

    def __init__(
        self,
        chain: Chain,
        gateway: GatewayClient,
        http: SignedClient,
        cache_directory: Path,
    ) -> None:
        self._chain = chain
        self._gateway = gateway
        self._recorded = RecordedModels(chain)
        self._http = http
        self._cache_directory = cache_directory
        self._models: Latest[str, Model] = Latest(tuning.MAX_CACHED_MANIFESTS)
        self._ids: dict[str, str] = {}  # by name
        # by digest and template: a stranger's template ends no other model's process
        self._tokenizers: dict[tuple[str, ChatInfo | None], ModelTokenizer] = {}
        self._grammars: dict[str, Grammars] = {}  # by model id
        self._programs: dict[str, ClientPrograms] = {}  # by model id
        self._loading = asyncio.Lock()

    async def fetch(self, model: str) -> Model:
        """Return a registered model by name or id; raise InvalidInput when there is none.

        Raises InvalidModel when its manifest differs from what the chain records.
        """
        if model not in self._models:
            model_id = model if _MODEL_ID.match(model) else await self._resolve(model)
            try:
                data = await self._gateway.fetch_manifest(model_id)
            except Refused as error:
                raise InvalidInput(
                    f"there is no model '{model}' ({error}); list the models with: splitup models"
                ) from None
            manifest = await asyncio.to_thread(load_manifest, data)
            await self._recorded.check(manifest)
            self._models[model] = Model(model, model_id, manifest)
        self._models.move_to_end(model)
        return self._models[model]

    async def fetch_tokenizer(self, model: Model) -> ModelTokenizer:
        """Return a model's tokenizer; raise InvalidInput for a model without.

        Raises InvalidModel for a file that cannot be used.
        """
        info = model.manifest.text
        if info is None:
            raise InvalidInput(f"model {model.name} reads no text")
        async with self._loading:
            known = self._tokenizers.get((info.tokenizer_digest, info.chat))
            if known is None or not known.is_running:
                grants = await self._gateway.model_grants(model.model_id)
                data = await get_object(
                    self._http.session,
                    grants.find("GET", get_blob_key(info.tokenizer_digest)),
                    max_bytes=info.tokenizer_bytes,
                    expected_digest=info.tokenizer_digest,
                )
                known = await asyncio.to_thread(ModelTokenizer, data, f"model {model.name}")
                self._tokenizers[info.tokenizer_digest, info.chat] = known
            return known

    def get_grammars(self, model: Model, tokenizer: ModelTokenizer) -> Grammars:
        """Return what keeps a text model's answers to grammars."""
        if model.model_id not in self._grammars:
            info = get_text_info(model.manifest, model.name)
            self._grammars[model.model_id] = Grammars(
                tokenizer.data, f"model {model.name}", info.vocab, info.eos_ids
            )
        return self._grammars[model.model_id]

    async def load_programs(self, model: Model) -> ClientPrograms | None:
        """Return the tasks that the model leaves to the client, compiled; None for most models.

        Raises StorageUnavailable, PeerFault, InvalidModel.
        """
        manifest = model.manifest
        if manifest.client is None:
            return None
        async with self._loading:
            known = self._programs.get(model.model_id)
            if known is None or not known.is_running:
                cache = self._open_cache()
                files = [
                    await cache.fetch_program(model.model_id, task)
                    for task in manifest.client.tasks
                ]
                known = await ClientPrograms.load(manifest, files)
                self._programs[model.model_id] = known
            return known

    async def fetch_client_files(self, model: Model) -> dict[str, Path]:
        """Return the files that a device needs of a private text model, by digest."""
        info, part = get_text_info(model.manifest, model.name), model.manifest.client
        if part is None:
            raise InvalidInput(
                f"model {model.name} leaves no task to the client; register it with "
                "splitup-deploy register --private K"
            )
        async with self._loading:
            cache = self._open_cache()
            files = {model.model_id[2:]: await cache.fetch_manifest_file(model.model_id)}
            files[info.tokenizer_digest] = await cache.fetch_tokenizer(model.model_id, info)
            for task in part.tasks:
                graph, weights = await cache.fetch_program(model.model_id, task)
                files[task.task_id] = graph
                if weights is not None:
                    files[task.weights_digest] = weights
        return files

    def _open_cache(self) -> TaskCache:
        return TaskCache(
            self._cache_directory, self._gateway, self._http.session, self._recorded.check
        )

    def close(self) -> None:
        """End the processes of tokenizers, of grammars and of the client's tasks."""
        for grammars in self._grammars.values():
            grammars.close()
        for tokenizer in self._tokenizers.values():
            tokenizer.close()
        for programs in self._programs.values():
            programs.close()

    async def _resolve(self, name: str) -> str:
        try:
            if name not in self._ids:
                self._ids[name] = str(await self._chain.call("models", "modelByName", name))
            return self._ids[name]
        except ChainRejected as error:
            if error.error_name != "UnknownName":
                raise
        raise InvalidInput(f"there is no model '{name}'; list the models with: splitup models")
