"""One server for all tests of its API: to start it, and to settle its leases, takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.conftest import Network
from tests.e2e.server import run_server


@pytest.fixture(scope="package")
def url(network: Network) -> Iterator[str]:
    with run_server(network, "--lease-steps", "800") as url:
        yield url


@pytest.fixture(scope="package")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client
