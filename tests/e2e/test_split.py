"""A device that keeps text and tokens to itself, on the real network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from splitup.client.connection import SplitUp
from splitup.client.split_client import SplitClient
from splitup.config import NetworkConfig
from splitup.decode.sampler import Sampler
from tests.e2e.conftest import MODEL, PRIVATE, Network
from tests.e2e.test_serve import run_server

PROMPT = "a fast parser of package descriptions, with"
TOKENS = 6
SAMPLERS = (Sampler(), Sampler(0.8, 5, top_k=40, top_p=0.9))


@pytest.fixture(scope="module")
def url(private: Network) -> Iterator[str]:
    with run_server(private, "--private", model=PRIVATE) as url:
        yield url


async def test_a_device_gets_the_tokens_of_the_uncut_model(
    private: Network, url: str, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    given, wanted = [], []
    async with SplitClient(url, cache=cache) as device:
        for sampler in SAMPLERS:
            found = device.generate(PRIVATE, PROMPT, max_tokens=TOKENS, sampler=sampler)
            given.append([token.id async for token in found])
    config = NetworkConfig.load(private.config, cache=cache)
    async with SplitUp.connect(config) as net:
        for sampler in SAMPLERS:
            options = {"temperature": sampler.temperature, "seed": sampler.seed}
            options |= {"top_k": sampler.top_k, "top_p": sampler.top_p}
            for model in (MODEL, PRIVATE):
                found = net.generate(model, PROMPT, max_tokens=TOKENS, **options)
                wanted.append([token.id async for token in found])
    assert [given[0], given[0], given[1], given[1]] == wanted
