"""All uses of a published model, SmolLM2, on a network of six nodes: rows of a Markdown table.

``bench.measure.published_models`` runs them. Texts are greedy.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import openai
from playwright.async_api import Page, async_playwright, expect
from safetensors.numpy import save_file
from splitup_private.adapters.client import AdapterOptions, EncryptedAdapter
from splitup_private.adapters.weights import load_adapter

from bench.measure import published_drafts as drafts
from bench.report import ROOT, say
from bench.testbed.network import put_model, run_network
from bench.testbed.page_memory import PeakReader
from bench.testbed.programs import run_server, run_service
from bench.testbed.published import CASES, QUESTION, SHORT
from splitup.client.connection import SplitUp
from splitup.client.execution.session import Session
from splitup.demo.models import DemoModel
from splitup.demo.report import Generation
from splitup.demo.run import NODES, compare, encode_prompt, generate
from splitup.devnet.network import Devnet
from splitup.devnet.processes import find_program, run_program
from tests.page_build import find_browser
from tests.texts import read_account

MODEL: Final = replace(SHORT, node_vram_bytes=500_000_000)
PRIVATE: Final = replace(MODEL, name="smollm2-private", prompt="The rain in Spain", is_chat=False)
GEMMA: Final = replace(
    CASES["gemma3-270m"][0], name="gemma3-private", prompt="The rain in Spain", max_tokens=24
)
PRIVATE_0: Final = replace(PRIVATE, name="smollm2-private-0", max_tokens=12)
TURNS: Final = (QUESTION, "And snow?", "Say it in one short sentence.")
REPETITION: Final = "Write five times: The rain in Spain stays mainly in the plain."
RANK: Final = 4
PATIENCE_MS: Final = 240_000  # of a page
LEASE: Final = ("--lease-steps", "1000")
TEXT: Final = ROOT / "docs/security.md"  # like that of users, to learn from

Use = Callable[[], Awaitable[str]]


class Failed(Exception):
    """A use did not do what it should; the text says how."""


def check(holds: bool, said: str) -> None:
    """Raise Failed unless it holds."""
    if not holds:
        raise Failed(said)


def squeeze(text: str) -> str:
    """Return a text as a page shows it: without the white space that HTML folds."""
    return " ".join(text.split())


@asynccontextmanager
async def open_page(url: str) -> AsyncIterator[Page]:
    """Open a page in Chromium."""
    expect.set_options(timeout=PATIENCE_MS)
    async with async_playwright() as play:
        browser = await play.chromium.launch(
            executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            page = await browser.new_page()
            page.set_default_timeout(PATIENCE_MS)
            await page.goto(url)
            yield page
        finally:
            await browser.close()


@dataclass(slots=True)
class Uses:
    """The uses of models on one network, each of which returns its figures."""

    devnet: Devnet
    net: SplitUp
    draft_folder: Path | None = None  # of a draft model, once there is one
    texts: dict[str, Generation] = field(default_factory=dict)  # of the uncut models, too

    @property
    def directory(self) -> Path:
        return self.devnet.directory

    async def put(self, model: DemoModel, *flags: str) -> str:
        """Register a model, and wait until nodes hold it."""
        made = await put_model(self.devnet, self.net, model, None, *flags)
        return (
            f"{made.tasks} tasks; {made.seconds:.1f} s ({made.cpu_s:.1f} s of CPU), "
            f"held after {made.held_s:.0f} s"
        )

    async def write(self, model: DemoModel) -> str:
        """Let the network write; compare with the uncut model."""
        self.texts[model.name] = text = await generate(self.net, model)
        whole = await compare(self.directory, await asyncio.to_thread(model.find), text, model)
        check(whole.equal, f"logits differ by {whole.largest_difference:g}")
        speed = (text.tokens - 1) / text.rest_s
        return f"{text.tokens} tokens, {speed:.1f} a second; all logits equal bit for bit"

    async def converse(self) -> str:
        """Hold a conversation by the client of OpenAI's API."""
        said: list[Any] = []
        figures = []
        async with (
            run_server(self.directory, MODEL.name, *LEASE) as (url, _),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            for turn in TURNS:
                said.append({"role": "user", "content": turn})
                answer = await client.chat.completions.create(
                    model=MODEL.name, messages=said, max_tokens=MODEL.max_tokens, temperature=0
                )
                content, usage = answer.choices[0].message.content, answer.usage
                assert usage is not None and usage.prompt_tokens_details is not None
                figures.append((usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens))
                check(
                    len(said) > 1 or content == self.texts[MODEL.name].text,
                    f"another text: {content}",
                )
                said.append({"role": "assistant", "content": content})
        check(all(cached for cached, _ in figures[1:]), f"nothing was reused: {figures}")
        cached = ", ".join(f"{cached} of {tokens}" for cached, tokens in figures)
        return f"three turns; prompt tokens that were there already: {cached}"

    async def chat_on_the_page(self) -> str:
        """Ask on the page of ``splitup serve``."""
        async with (
            run_server(self.directory, MODEL.name, *LEASE) as (url, _),
            open_page(url) as page,
        ):
            await page.get_by_label("Most tokens").fill(str(MODEL.max_tokens))
            await page.get_by_label("Temperature").fill("0")
            await page.get_by_label("Message").fill(QUESTION)
            await page.get_by_label("Message").press("Enter")
            await expect(page.locator("#cost")).not_to_have_text("0 USDC")
            await expect(page.get_by_role("button", name="Send")).to_be_visible()
            text = await page.locator(".assistant .text").last.inner_text()
        check(squeeze(text) == squeeze(self.texts[MODEL.name].text), f"another text: {text}")
        return "the same text"

    async def draft(self) -> str:
        """Decode by drafts of n-grams."""
        model = replace(MODEL, prompt=REPETITION)
        plain = await self.collect(model)
        drafted = await self.collect(model, decoder="speculative")
        check(drafted.tokens == plain.tokens, f"another text: {drafted.text}")
        count = len(plain.tokens)
        return (
            f"{count} tokens in {drafted.session.steps} steps instead of {plain.session.steps}: "
            f"{count / drafted.session.steps:.2f} a step; {drafted.seconds:.1f} s instead of "
            f"{plain.seconds:.1f}; the same text"
        )

    async def distil(self) -> str:
        """Distil a draft model, unless one was given, and register it."""
        folder = self.draft_folder or self.directory / drafts.DRAFT.name
        if self.draft_folder is None:
            await drafts.distil(folder)
            self.draft_folder = folder
        made = await put_model(self.devnet, self.net, drafts.DRAFT, folder)
        size = (folder / "model.safetensors").stat().st_size
        return f"{size / 1e6:.0f} MB; registered in {made.seconds:.1f} s"

    async def draft_by_model(self) -> str:
        """Decode by drafts of n-grams, and of the draft model as well."""
        figures = []
        for kind, prompts in drafts.PROMPTS.items():
            models = [replace(MODEL, prompt=each, is_chat=kind == "answers") for each in prompts]
            for temperature in drafts.TEMPERATURES:
                options = {"temperature": temperature, "seed": drafts.SEED}
                plain = [await self.collect(model, **options) for model in models]
                said = []
                for name, draft in (("n-grams", None), ("draft model", drafts.DRAFT.name)):
                    options |= {"decoder": "speculative", "draft": draft}
                    found = [await self.collect(model, **options) for model in models]
                    is_same = [text.tokens for text in found] == [text.tokens for text in plain]
                    check(is_same, f"{name}: another text")
                    rate = sum(len(text.tokens) for text in found) / sum(
                        text.session.steps for text in found
                    )
                    gain = sum(text.seconds for text in plain) / sum(text.seconds for text in found)
                    said.append(f"{name} {rate:.2f} ({gain:.2f} ×)")
                figures.append(f"{kind}, T = {temperature:g}: {', '.join(said)}")
                say(figures[-1])
        return f"tokens a step (times the sequential speed): {'; '.join(figures)}; the same texts"

    async def draft_on_a_clock(self) -> str:
        """Do so where steps take set times, on nodes that are near and far."""
        if self.draft_folder is None:
            raise Failed("there is no draft model")
        return await asyncio.to_thread(drafts.draft_on_a_clock, self.draft_folder)

    async def survive(self) -> str:
        """Kill a node in the middle of an answer; then settle, check and read the receipt."""
        plain = await self.collect(MODEL)
        names = {read_account(self.directory / child.name): child for child in self.devnet.children}

        def kill(session: Session, count: int) -> None:
            if count == len(plain.tokens) // 2:
                node = names[session.executors[len(session.executors) // 2]]
                os.kill(node.pid, signal.SIGKILL)
                say(f"killed {node.name}")

        torn = await self.collect(MODEL, on_token=kill)
        check(torn.tokens == plain.tokens, f"another text: {torn.text}")
        check(torn.session.takeovers > 0, "no node took over")
        options = (torn.session.execution_id, "--json", "--config", self.directory)
        receipt, checked = [
            await run_program(find_program("splitup"), command, *options)
            for command in ("receipt", "check")
        ]
        check(receipt["status"] == "settled", f"the receipt says {receipt['status']}")
        check(receipt["steps"] == torn.session.steps, f"paid {receipt['steps']} steps")
        return (
            f"the same text; the longest pause between two tokens {torn.gap_s:.2f} s, "
            f"{torn.session.takeovers} takeovers; receipt: settled, {receipt['steps']} steps, "
            f"{receipt['paid_micro_usdc'] / 1e6:.6f} USDC; check: the same plan, signed by "
            f"{len(checked['signers'])} members"
        )

    async def collect(self, model: DemoModel, **options: Any) -> Text:
        """Write with the SDK's ``generate``, which takes every option."""
        on_token = options.pop("on_token", None)
        prompt = await encode_prompt(self.net, model)
        sessions: list[Session] = []
        tokens, pieces, gap_s, at, started = [], [], 0.0, 0.0, 0.0
        async for token in self.net.generate(
            model.name,
            prompt,
            max_tokens=model.max_tokens,
            on_session=sessions.append,
            deadline_s=240,
            **options,
        ):
            now = time.monotonic()
            gap_s, at, started = max(gap_s, now - (at or now)), now, started or now
            tokens.append(token.id)
            pieces.append(token.text)
            if on_token is not None:
                on_token(sessions[0], len(tokens))
        return Text(tokens, "".join(pieces), gap_s, at - started, sessions[0])

    async def chat_privately(self, model: DemoModel) -> str:
        """Let a browser be the device."""
        async with (
            run_server(self.directory, model.name, "--private", *LEASE) as (url, _),
            open_page(f"{url}/private") as page,
        ):
            await page.get_by_text("What stays here").wait_for()
            reader = PeakReader()
            reader.start()
            await page.evaluate(_WATCH)
            started = time.monotonic()
            await page.get_by_role("button", name="Load onto this device").click()
            ready = page.get_by_role("button", name="On this device", exact=True)
            await expect(ready.or_(page.get_by_role("alert"))).to_be_visible()
            check(await ready.count() == 1, await page.locator("main").inner_text())
            loaded_s = time.monotonic() - started
            fetched = await page.evaluate("window.fetched")
            await page.get_by_label("Form").select_option("text")
            await page.get_by_label("Most tokens").fill(str(model.max_tokens))
            await page.get_by_label("Temperature").fill("0")
            await page.get_by_label("Message").fill(model.prompt)
            await page.get_by_label("Message").press("Enter")
            await expect(page.get_by_role("button", name="Send")).to_be_enabled()
            answer = page.locator(".assistant").last
            said = await answer.inner_text()
            text = await answer.locator(".text").inner_text()
            peak = reader.stop()
        check(squeeze(text) == squeeze(self.texts[model.name].text), f"another text: {said}")
        [each] = re.findall(r"([0-9.,]+ m?s) a token", said)
        return (
            f"{fetched} of weights, on the device after {loaded_s:.1f} s; the page's memory grows "
            f"by {peak / 1e6:.0f} MB at most; {each} a token; the same text"
        )

    async def adapt(self) -> str:
        """Apply an adapter of random weights under encryption."""
        with tempfile.TemporaryDirectory(prefix="splitup-adapter-") as name:
            folder = Path(name) / "random"
            width = (await self.net.fetch_model(PRIVATE_0.name)).manifest.outputs[0].shape[-1]
            write_adapter(folder, width)
            adapter = load_adapter(folder)
            plain = await self.collect(PRIVATE_0)
            host = ("adapter-host", folder, "--port", "0")
            async with run_service(r"adapter host: (\S+)", *host) as (url, _):
                options = AdapterOptions(url, folder.name)
                encrypted = await self.collect(PRIVATE_0, adapter=options)

                async def apply(self: EncryptedAdapter, hidden: Any) -> Any:
                    return adapter.compute(hidden)

                with mock.patch.object(EncryptedAdapter, "apply", apply):
                    unencrypted = await self.collect(PRIVATE_0, adapter=options)
        check(encrypted.tokens == unencrypted.tokens, f"another text: {encrypted.text}")
        check(encrypted.tokens != plain.tokens, "the adapter changes nothing")
        each = [1e3 * text.seconds / (len(text.tokens) - 1) for text in (encrypted, plain)]
        return (
            f"{len(encrypted.tokens)} tokens, {each[0]:.0f} ms each instead of {each[1]:.0f}; "
            "the text that the adapter gives unencrypted"
        )


@dataclass(frozen=True, slots=True)
class Text:
    """What a generation gave."""

    tokens: list[int]
    text: str
    gap_s: float  # the longest between two tokens
    seconds: float  # from the first token to the last
    session: Session


_WATCH: Final = """
    new MutationObserver(() => {
        const found = /of (.+) on this device/.exec(document.body.innerText);
        if (found) window.fetched = found[1];
    }).observe(document.body, { subtree: true, childList: true, characterData: true });
"""


def write_adapter(folder: Path, width: int) -> None:
    """Write a LoRA adapter of random weights in PEFT's form."""
    folder.mkdir()
    random = np.random.default_rng(0)
    pair = {
        "base_model.model.lora_A.weight": random.normal(size=(RANK, width)) / width**0.5,
        "base_model.model.lora_B.weight": random.normal(size=(width, RANK)) / RANK**0.5,
    }
    save_file(
        {name: array.astype(np.float32) for name, array in pair.items()},
        folder / "adapter_model.safetensors",
    )
    config = {"r": RANK, "lora_alpha": RANK, "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


async def attack() -> str:
    """Measure what nodes reconstruct."""
    sizes = ("--context", str(MODEL.context), "--chunk", str(MODEL.chunk))
    started = time.monotonic()
    flags = ("--json", "--text", TEXT, "--private", "1", "--tokens", "16", *sizes)
    found = await run_program(find_program("splitup-deploy"), "privacy", MODEL.find(), *flags)
    [split] = found["splits"].values()
    pairs, learned = split["pairs"][-1]
    return (
        f"{time.monotonic() - started:.0f} s; {split['with_weights_bps'] / 100:.0f} % of "
        f"{split['tested']} tokens with the weights, {learned / 100:.0f} % after learning from "
        f"{pairs:,} pairs"
    )


async def export() -> str:
    """Write the model as one file for a small device."""
    with tempfile.TemporaryDirectory(prefix="splitup-edge-") as folder:
        file = Path(folder) / "smollm2.onnx"
        flags = ("--json", "--backend", "onnx", "--max-len", str(MODEL.context), "--output", file)
        found = await run_program(find_program("splitup-deploy"), "export", MODEL.find(), *flags)
    return f"an ONNX file of {found['file_bytes'] / 1e6:.0f} MB"


# ---- parts -------------------------------------------------------------------------------------

Row = tuple[str, Use]


def list_private(uses: Uses) -> list[Row]:
    """Return the uses of SmolLM2 that leave text with its users."""
    return [
        ("register --private 1", lambda: uses.put(PRIVATE, "--private", "1")),
        ("private text in Python", lambda: uses.write(PRIVATE)),
        ("private page in Chromium", lambda: uses.chat_privately(PRIVATE)),
        ("register --private 0", lambda: uses.put(PRIVATE_0, "--private", "0")),
        (f"random adapter of rank {RANK}, encrypted", uses.adapt),
    ]


def list_gemma(uses: Uses) -> list[Row]:
    """Return the same of a model of 262,144 tokens."""
    return [
        ("Gemma 3, `--private 0`", lambda: uses.put(GEMMA, "--private", "0")),
        ("its text in Python", lambda: uses.write(GEMMA)),
        ("its private page in Chromium", lambda: uses.chat_privately(GEMMA)),
    ]


def list_open(uses: Uses) -> list[Row]:
    """Return the uses of SmolLM2 as everybody registers it."""
    return [
        ("register", lambda: uses.put(MODEL)),
        ("generate", lambda: uses.write(MODEL)),
        ("`openai` client", uses.converse),
        ("page in Chromium", uses.chat_on_the_page),
        ("drafts of n-grams", uses.draft),
        ("a node killed in mid-answer; receipt, check", uses.survive),
    ]


def list_draft(uses: Uses) -> list[Row]:
    """Return the uses of a draft model that is distilled from SmolLM2."""
    return [
        ("register", lambda: uses.put(MODEL)),
        (f"a draft distilled in {drafts.MINUTES} minutes", uses.distil),
        ("its drafts on the network", uses.draft_by_model),
        ("its drafts on a clock", uses.draft_on_a_clock),
    ]


_ON_A_NETWORK: Final = {
    "private": list_private,
    "gemma": list_gemma,
    "draft": list_draft,
    "open": list_open,
}
_HERE: Final = (("`splitup-deploy privacy`", attack), ("`splitup-deploy export`", export))
PARTS: Final = (*_ON_A_NETWORK, "here")  # in order: ``open`` kills a node, ``here`` needs none


async def run_uses(parts: Sequence[str], draft: Path | None) -> bool:
    """Run the parts, on one network; return whether no use failed.

    ``draft`` is a draft model that was distilled before.
    """
    is_fine = True
    if lists := [_ON_A_NETWORK[part] for part in parts if part != "here"]:
        async with run_network(NODES, MODEL.node_vram_bytes) as (devnet, net):
            uses = Uses(devnet, net, draft)
            for list_rows in lists:
                is_fine &= await report(list_rows(uses))
    return await report(_HERE) and is_fine if "here" in parts else is_fine


async def report(rows: Sequence[Row]) -> bool:
    """Print a row for each use; return whether none failed."""
    is_fine = True
    for name, use in rows:
        say(name)
        try:
            row = f"ok | {await use()}"
        except Exception as error:  # the row is the report, and other uses go on
            is_fine = False
            said = str(error) or type(error).__name__
            row = f"**failed** | {said}".replace("\n", " ")
        print(f"| {name} | {row} |", flush=True)
    return is_fine
