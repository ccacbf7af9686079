"""Tests that compute with tinygrad's own tensors do so on the device that the product chooses."""

from __future__ import annotations

import pytest
from splitup_deploy.frontends.decoder import step_function

from splitup.backend.devices.device_choice import select_device


@pytest.fixture(scope="session", autouse=True)
def device() -> None:
    """Choose it, whichever test is the first of its process."""
    select_device()


@pytest.fixture
def float32_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep keys and values as the references do, in float32: then the bounds are of the rest."""
    monkeypatch.setattr(step_function, "choose_cache_dtype", lambda source: "float32")
