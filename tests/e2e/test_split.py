"""A device that keeps text and tokens to itself, on the real network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from splitup_private.split.client import SplitClient
from splitup_private.split.noise import Noise

from splitup.client.connection import SplitUp
from splitup.config import NetworkConfig
from splitup.core.errors import InvalidInput
from splitup.core.tensors import check_inputs
from splitup.decode.sampler import Sampler
from splitup.decode.step import make_arrays, make_causal_step
from tests.e2e.conftest import MODEL, PRIVATE, Network
from tests.e2e.server import run_server

PROMPT = "a fast parser of package descriptions, with"
TOKENS = 6
SAMPLERS = (Sampler(), Sampler(0.8, 5, top_k=40, top_p=0.9))

# In small: gateway_tests/split/test_client.py runs this client before nodes in its own process,
# test_private_page.py the page's client before this network, private_tests/split the noise.
pytestmark = pytest.mark.long


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


async def test_noise_is_on_every_row_that_leaves_the_device(url: str, tmp_path: Path) -> None:
    sent = []
    async with SplitClient(url, cache=tmp_path / "cache") as device:
        found = await device.open(PRIVATE)
        tokens = tuple(found.tokenizer.encode(PROMPT))[: found.cut.chunk]
        arrays = make_arrays(make_causal_step(tokens, 0), found.cut.chunk)
        run = found.programs.new_run()
        specs = [port.spec for port in found.manifest.user_inputs]
        begun = await run.begin(check_inputs(specs, arrays))
        await run.end()
        plain = np.frombuffer(begun.sends[found.sent], "<f4").reshape(len(tokens), -1)
        for noise in (Noise(1e6), Noise(100.0)):
            async with device.session(PRIVATE, noise=noise, most_rows=len(tokens)) as session:
                await session.submit(arrays)
                sent.append(np.concatenate(session._fed))
                assert session.noise is not None
                assert session.noise.epsilon == pytest.approx(noise.epsilon)
                more = make_causal_step(tokens[:1], len(tokens))
                with pytest.raises(InvalidInput, match="open a session for more rows"):
                    await session.submit(make_arrays(more, found.cut.chunk))
    little, much = sent
    units = plain / np.linalg.norm(plain, axis=1, keepdims=True)
    length = np.median(np.linalg.norm(plain, axis=1))
    lengths = np.linalg.norm(little, axis=1)
    assert (np.sum(little * units, axis=1) > 0.9 * lengths).all(), "nearly the same directions"
    assert (np.abs(lengths / length - 1) < 0.5).all(), "and all of the usual length"
    assert (np.linalg.norm(much, axis=1) > 5 * length).all()
