"""A model whose ends stay with its users, on the real network: the same text, and nothing told."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitup.client.connection import SplitUp
from splitup.client.outcome import Array
from splitup.client.text.generation import generate_tokens
from splitup.config import NetworkConfig
from splitup.decode.sampler import Sampler
from tests.e2e.conftest import MODEL, PRIVATE, Network

PROMPT = "library for"
OTHER_PROMPT = "a fast parser of"
TOKENS = 6


# in small: client/private/test_private_session.py, and test_private_page.py on this network
@pytest.mark.long
async def test_the_text_is_the_same_and_stays_here(private: Network, tmp_path: Path) -> None:
    config = NetworkConfig.load(private.config, cache=tmp_path / "cache")
    raw: list[bytes] = []
    layouts: list[bytes] = []

    def keep(inputs: dict[str, Array], outputs: Array) -> None:
        raw.append(outputs.tobytes()[:256])
        layouts.append(inputs["layout"].tobytes())

    async with SplitUp.connect(config) as net:
        options = {"max_tokens": TOKENS, "temperature": 0.8, "seed": 5}
        wanted = [token.id async for token in net.generate(MODEL, PROMPT, **options)]
        given = [token.id async for token in net.generate(PRIVATE, PROMPT, **options)]
        assert given == wanted
        machine, tokenizer = await net.make_decoder(  # a text that nobody else has computed
            PRIVATE, OTHER_PROMPT, max_tokens=TOKENS, sampler=Sampler(0.8, 5)
        )
        async with net.session(PRIVATE, steps=machine.max_steps) as session:
            async for _ in generate_tokens(session, machine, tokenizer, on_step=keep):
                pass
        receipt = await net.receipt(session.execution_id)
    assert receipt.status == "settled" and not receipt.slashes
    assert receipt.paid_micro_usdc >= sum(
        task.pay_micro_usdc(receipt.steps) for task in session.manifest.tasks
    )
    stored = b"".join(path.read_bytes() for path in private.directory.rglob("objects/**/*.dat"))
    assert all(layout in stored for layout in layouts)  # the logs of what crossed the network
    assert not any(logits in stored for logits in raw)
    assert any((tmp_path / "cache").glob("*.safetensors"))
