"""Tests that compute with tinygrad's own tensors do so on the device that the product chooses."""

from __future__ import annotations

import pytest

from splitup.backend.devices.device_choice import select_device


@pytest.fixture(scope="session", autouse=True)
def device() -> None:
    """Choose it, whichever test is the first of its process."""
    select_device()
