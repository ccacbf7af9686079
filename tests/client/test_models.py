"""The manifests that one connection keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from splitup.client.models import Model, Models
from splitup.core import tuning
from splitup.graph.manifest import ChatInfo, Manifest, TextInfo
from tests.builders import make_chain_manifest


def open_models(
    manifests: Sequence[Manifest], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Models, list[str]]:
    """Return the models of a connection that keeps two, and the ids that it fetches."""
    files = {manifest.model_id: manifest.to_bytes() for manifest in manifests}
    fetched: list[str] = []

    async def fetch_manifest(model_id: str) -> bytes:
        fetched.append(model_id)
        return files[model_id]

    async def check(_: object) -> None: ...

    monkeypatch.setattr(tuning, "MAX_CACHED_MANIFESTS", 2)
    nothing: Any = None
    gateway: Any = SimpleNamespace(fetch_manifest=fetch_manifest)
    models = Models(nothing, gateway, nothing, directory)
    monkeypatch.setattr(models, "_recorded", SimpleNamespace(check=check))
    return models, fetched


async def test_s93_a_name_stays_the_model_that_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = [make_chain_manifest(count) for count in (1, 2, 3, 4)]
    models, _ = open_models(manifests, tmp_path, monkeypatch)
    cheap, dear, *others = [manifest.model_id for manifest in manifests]
    registered = [cheap]

    async def call(*_: object) -> str:
        return registered[-1]

    monkeypatch.setattr(models, "_chain", SimpleNamespace(call=call))
    assert (await models.fetch("llama")).model_id == cheap
    registered.append(dear)  # by the same developer, under the same name
    for other in others:  # as pages of an explorer ask for: the first manifest is forgotten
        await models.fetch(other)
    assert (await models.fetch("llama")).model_id == cheap


async def test_s66_a_connection_keeps_the_latest_manifests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = [make_chain_manifest(count) for count in (1, 2, 3)]
    models, fetched = open_models(manifests, tmp_path, monkeypatch)
    first, second, third = (manifest.model_id for manifest in manifests)
    for model_id in (first, second, first, third, first, second):
        assert (await models.fetch(model_id)).model_id == model_id
    assert fetched == [first, second, third, second]


async def test_s103_a_strangers_template_runs_in_no_other_models_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Tokenizer(WordLevel({"a": 0}, unk_token="a")).to_str().encode()

    async def fetch(*_: object, **__: object) -> bytes:
        return file

    grants = SimpleNamespace(find=lambda *_: None)
    manifest = make_chain_manifest(1)
    models, _ = open_models([manifest], tmp_path, monkeypatch)
    monkeypatch.setattr("splitup.client.models.get_object", fetch)
    http = SimpleNamespace(session=None)
    monkeypatch.setattr(models, "_http", http)

    async def model_grants(_: str) -> object:
        return grants

    monkeypatch.setattr(models, "_gateway", SimpleNamespace(model_grants=model_grants))

    def make(template: str) -> Model:
        chat = ChatInfo(template=template, bos_token="", eos_token="")
        info = TextInfo(
            **{"tokenizer_digest": f"{1:064x}", "tokenizer_bytes": len(file), "eos_ids": ()},
            **{"vocab": 1, "context": 8, "chat": chat},
        )
        return Model(template, f"0x{2:064x}", manifest.model_copy(update={"text": info}))

    try:
        ours, copy = [await models.fetch_tokenizer(make("{{ messages }}")) for _ in range(2)]
        theirs = await models.fetch_tokenizer(make("{% for _ in x %}{% endfor %}"))
        assert ours is copy
        theirs.close()  # as it ends when a template takes too long or too much memory
        assert ours.is_running and ours.encode("a") == [0]
    finally:
        models.close()
