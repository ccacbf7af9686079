"""An image in, text out, on a real network: the tower's execution, then the text's."""

from __future__ import annotations

import asyncio
import json
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from splitup.client.connection import SplitUp
from splitup.core.errors import InvalidInput
from splitup.devnet.processes import find_program
from tests.deploy.checkpoints import GOLDEN
from tests.deploy.towers import NEW, PHOTO_PROMPT, make_photos, save_images
from tests.e2e.conftest import MODEL, Network

EYES, GEMMA = "gemma-eyes", "gemma"


async def test_images_become_text(network: Network, tmp_path: Path) -> None:
    source = Path(save_images(tmp_path / "model", NEW))
    wanted = np.load(GOLDEN / "image_logits.npz")["tokens"].tolist()
    photos = [tmp_path / "a.png", tmp_path / "b.webp"]
    for path, data in zip(photos, make_photos(), strict=True):
        path.write_bytes(data)
    network.register_model(source, EYES, "--vision", "--target-vram", "100MB")
    async with SplitUp.connect(network.config) as net:
        tower = (await net.fetch_model(EYES)).model_id
    network.register_model(source, GEMMA, "--images", tower, "--target-vram", "100MB")
    for name in (EYES, GEMMA):
        await asyncio.to_thread(network.wait_for_holders, 3, name)
    command = [find_program("splitup"), "generate", GEMMA, "--prompt", PHOTO_PROMPT, "--json"]
    command += ["--max-tokens", str(len(wanted)), "--config", str(network.directory)]
    for path in photos:
        command += ["--image", str(path)]
    run = partial(subprocess.run, command, capture_output=True, text=True, check=False)
    done = await asyncio.to_thread(run)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == wanted
    assert ", with an execution for the images" in done.stderr
    async with SplitUp.connect(network.config) as net:
        images = [path.read_bytes() for path in photos]
        quote = await net.quote_generation(GEMMA, PHOTO_PROMPT, max_tokens=2, images=2)
        assert quote == await net.quote(GEMMA, steps=5) + await net.quote(EYES, steps=2)
        most = quote.locked_micro_usdc
        with pytest.raises(InvalidInput, match="2 images and 5 steps of model gemma cost"):
            options = {"max_tokens": 2, "max_price_usdc": (most - 1) / 10**6}
            await anext(net.generate(GEMMA, PHOTO_PROMPT, images=images, **options))
        options = {"max_tokens": 2, "max_price_usdc": most / 10**6}
        found = [
            token.id async for token in net.generate(GEMMA, PHOTO_PROMPT, images=photos, **options)
        ]
        assert found == wanted[:2]
        with pytest.raises(InvalidInput, match="takes no images"):
            await anext(net.generate(MODEL, "a", images=images))
