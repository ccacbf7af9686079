"""The manifests that one connection keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from splitup.client.models import Models
from splitup.core import tuning
from splitup.graph.manifest import Manifest
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
