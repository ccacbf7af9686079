"""A model that says what it is told to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from gateway_tests.serve.apis.scripted_server import ScriptedModel


@pytest.fixture(scope="package")
def model() -> Iterator[ScriptedModel]:
    with closing(ScriptedModel()) as running:
        yield running
