"""An image in, text out, on a real network: by the SDK, the CLI and the OpenAI API."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import PIL.Image
import pytest
from playwright.sync_api import expect, sync_playwright

from splitup.client.connection import SplitUp
from splitup.core.errors import InvalidInput
from splitup.devnet.processes import find_program
from tests.builders import HANG_S
from tests.deploy.checkpoints import GOLDEN
from tests.deploy.towers import NEW, PHOTO_PROMPT, make_photos, save_images
from tests.e2e.conftest import MODEL, Network
from tests.e2e.server import run_server
from tests.page_build import find_browser

EYES, GEMMA = "gemma-eyes", "gemma"
TEMPLATE = """
{%- for message in messages -%}
    {%- if message.content is string -%}{{ message.content }}{%- else -%}
        {%- for part in message.content -%}
            {{ '<start_of_image>' if part.type == 'image' else part.text }}
        {%- endfor -%}
    {%- endif -%}{{ ' ' }}
{%- endfor -%}
"""


# in small: deploy/frontends/test_images.py computes them, serve/apis/test_requests.py reads them
@pytest.mark.long
async def test_images_become_text(network: Network, tmp_path: Path) -> None:
    source = Path(save_images(tmp_path / "model", NEW))
    (source / "chat_template.jinja").write_text(TEMPLATE)
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
    said = json.loads(done.stdout)
    assert said["tokens"] == wanted
    assert said["image_execution_id"] != said["execution_id"]
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
    with run_server(network, "--lease-steps", "200", model=GEMMA) as url:
        await asyncio.to_thread(check_server, url, images, len(wanted), said["text"])
        await asyncio.to_thread(check_page, url.removesuffix("/v1"), photos, tmp_path)


def check_server(url: str, images: list[bytes], count: int, wanted: str) -> None:
    """Chat about two photos: the first turn, the next one, and one about other photos."""
    begin, middle, end = PHOTO_PROMPT.split("<start_of_image>")

    def ask(
        files: list[bytes], *more: dict[str, str], most: int = count
    ) -> tuple[str, dict[str, Any], int]:
        first, second = ({"type": "image_url", "image_url": {"url": encode(f)}} for f in files)
        texts = [{"type": "text", "text": text} for text in (begin, middle, end)]
        content = [texts[0], first, texts[1], second, texts[2]]
        messages: Any = [{"role": "user", "content": content}, *more]
        answer = client.chat.completions.create(
            model=GEMMA, messages=messages, max_tokens=most, temperature=0
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cost = answer.usage.model_extra["splitup"]  # type: ignore[index]
        text = answer.choices[0].message.content
        return text or "", cost, answer.usage.prompt_tokens_details.cached_tokens or 0

    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        text, cost, cached = ask(images)
        assert text == wanted and cost["image_steps"] == 2 and cached == 0
        assert len(cost["executions"]) == len(cost["receipts"]) == 2
        said = {"role": "assistant", "content": text.split()[0]}  # the context is short
        _, cost, held = ask(images, said, {"role": "user", "content": "w3"}, most=1)
        assert held > 8 and "image_steps" not in cost, "what was seen is in the cache"
        other, cost, cached = ask(images[::-1])
        assert cost["image_steps"] == 2 and cached < 8 and other != text
        with pytest.raises(openai.BadRequestError, match="image 2 cannot be read") as caught:
            ask([images[0], images[1][:60]])
        assert caught.value.param == "image_url"
        with pytest.raises(openai.BadRequestError, match="no data URL"):
            client.responses.create(model=GEMMA, input=make_item("http://127.0.0.1/a.png"))
        answer = client.responses.create(
            model=GEMMA, input=make_item(encode(images[0])), max_output_tokens=2
        )
        assert answer.output_text


def check_page(url: str, photos: list[Path], directory: Path) -> None:
    """Send a photo from the page, after files that it refuses, makes smaller, or takes away."""
    large, broken = directory / "large.png", directory / "broken.png"
    pixels = np.random.default_rng(1).integers(0, 256, (400, 1600, 3), np.uint8)
    PIL.Image.fromarray(pixels).save(large)
    broken.write_bytes(b"no image")
    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page()
        page.set_default_timeout(HANG_S * 1_000)
        expect.set_options(timeout=HANG_S * 1_000)
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.goto(url)
        page.get_by_label("Add images").set_input_files([broken, large, photos[0]])
        expect(page.get_by_role("alert")).to_have_text(
            "broken.png is no image that this browser can read"
        )
        written = page.get_by_label("Images of this message")
        expect(written.get_by_role("img")).to_have_count(2)
        widths = "images => images.map(image => image.naturalWidth)"
        assert written.get_by_role("img").evaluate_all(widths)[0] == 1280
        page.get_by_label("Remove image 1").click()
        expect(written.get_by_role("img")).to_have_count(1)
        page.get_by_label("Most tokens").fill("2")
        page.get_by_label("Message", exact=True).fill("w3")
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        expect(page.locator(".user img")).to_have_count(1)
        expect(page.locator(".assistant .facts")).to_contain_text("2 tokens")
        cost = page.locator("#cost").inner_text()
        expect(page.locator(".assistant .facts")).to_contain_text(f"· {cost} ·")
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(written).to_have_count(0)
        assert not complaints
        browser.close()


def encode(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()


def make_item(url: str) -> Any:
    return [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
