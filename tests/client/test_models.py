"""The manifests that one connection keeps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from splitup.client.models import Models
from splitup.core import tuning
from tests.builders import make_chain_manifest


async def test_s66_a_connection_keeps_the_latest_manifests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = [make_chain_manifest(count) for count in (1, 2, 3)]
    files = {manifest.model_id: manifest.to_bytes() for manifest in manifests}
    fetched: list[str] = []

    async def fetch_manifest(model_id: str) -> bytes:
        fetched.append(model_id)
        return files[model_id]

    async def check(_: object) -> None: ...

    monkeypatch.setattr(tuning, "MAX_CACHED_MANIFESTS", 2)
    nothing: Any = None
    gateway: Any = SimpleNamespace(fetch_manifest=fetch_manifest)
    models = Models(nothing, gateway, nothing, tmp_path)
    monkeypatch.setattr(models, "_recorded", SimpleNamespace(check=check))
    first, second, third = files
    for model_id in (first, second, first, third, first, second):
        assert (await models.fetch(model_id)).model_id == model_id
    assert fetched == [first, second, third, second]
