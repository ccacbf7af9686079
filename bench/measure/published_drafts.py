"""Drafts for a published model: of n-grams alone, and of a model that is distilled from it here.

``bench.measure.published_models`` runs it, as a part of the uses of SmolLM2.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench.modes.slowlink import Link
from bench.report import ROOT, say
from bench.testbed.delay import Quality, run_delay
from bench.testbed.engines import run_engines
from bench.testbed.models import cut_published, load_draft, place_tasks
from bench.testbed.published import QUESTION, SHORT
from splitup.client.private.private_tasks import ClientPrograms
from splitup.client.text.drafting import LocalModel, Speculation
from splitup.client.text.tokenizer import ModelTokenizer
from splitup.decode.sampler import Sampler
from splitup.decode.sequential import SequentialDecoder
from splitup.decode.speculation.decoder import Experience
from splitup.graph.manifest import Manifest

MINUTES: Final = 20
DRAFT: Final = replace(SHORT, name="smollm2-draft", target_vram="200MB")
PROMPTS: Final = {
    "answers": (QUESTION, "What is the capital of France, and what is it known for?"),
    "prose": ("The rain in Spain", "The history of the lighthouse begins"),
}
WARMING: Final = "Why do leaves fall?"  # so that rates are learnt
TEMPERATURES: Final = (0.0, 0.8)
SEED: Final = 7
FAR_MS: Final = 80
TOKENS: Final = 64


async def distil(folder: Path) -> None:
    """Make the draft model, with the minutes that are allowed."""
    script = ROOT / "examples/distil_draft.py"
    path = await asyncio.to_thread(DRAFT.find)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, script, path, folder, "--minutes", str(MINUTES)), stdout=sys.stderr
    )
    if await process.wait():
        raise RuntimeError(f"{script.name} failed")


@dataclass(slots=True)
class Way:
    """A way to decode: with which draft model, if any, and what it has learnt."""

    name: str
    draft: tuple[Manifest, ClientPrograms] | None = None
    experience: Experience | None = None

    def speculate(self) -> Speculation | None:
        """Return what a text drafts with, None for the sequential decoder."""
        if self.experience is None:
            return None
        if self.draft is None:
            return Speculation(None, self.experience)
        manifest, programs = self.draft
        assert manifest.text is not None
        local = LocalModel(DRAFT.name, manifest, manifest.text, programs)
        return Speculation(local, self.experience)


async def draft_far(folder: Path) -> str:
    """Write texts on four nodes 80 ms away; the ways to decode alternate."""
    assert DRAFT.context is not None
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as name:
        model = await asyncio.to_thread(
            cut_published, DRAFT.find(), Path(name) / "cut", DRAFT.chunk, DRAFT.context
        )
        loaded = await load_draft(Path(name) / "draft", DRAFT.chunk, folder)
        tokenizer = (folder / "tokenizer.json").read_bytes()
        async with run_engines(place_tasks([model])) as engines:
            async with run_delay(engines.ports) as (ports, set_quality):
                link = Link(engines, model, ports, tokenizer)
                with closing(loaded[1]), closing(link):
                    await set_quality(Quality(FAR_MS))
                    ways = (
                        Way("sequential"),
                        Way("n-grams", None, Experience()),
                        Way("draft model", loaded, Experience()),
                    )
                    return await compare_ways(link, ways, model.manifest, tokenizer)


async def compare_ways(
    link: Link, ways: tuple[Way, ...], manifest: Manifest, tokenizer: bytes
) -> str:
    """Return tokens a round trip, and speed against the sequential decoder, of each kind."""
    figures = []
    prompts = {**PROMPTS, "answers": render(PROMPTS["answers"], manifest, tokenizer)}
    for way in ways:
        await write(link, way, render((WARMING,), manifest, tokenizer)[0], 0.0)
    for kind, texts in prompts.items():
        for temperature in TEMPERATURES:
            found: dict[str, list[Any]] = {way.name: [] for way in ways}
            for prompt in texts:
                for way in ways:
                    found[way.name].append(await write(link, way, prompt, temperature))
            plain = found.pop("sequential")
            said = []
            for name, rows in found.items():
                if [row[2] for row in rows] != [row[2] for row in plain]:
                    raise RuntimeError(f"{name}: another text than the sequential decoder's")
                tokens = sum(len(row[2]) - 1 for row in rows)
                rate = tokens / sum(row[1] for row in rows)
                gain = sum(row[0] for row in plain) / sum(row[0] for row in rows)
                said.append(f"{name} {rate:.2f} ({gain:.2f} ×)")
            figures.append(f"{kind}, T = {temperature:g}: {', '.join(said)}")
            say(figures[-1])
    return f"tokens a step (times the sequential speed): {'; '.join(figures)}; the same texts"


def render(questions: tuple[str, ...], manifest: Manifest, tokenizer: bytes) -> tuple[str, ...]:
    """Return questions as the chat model is asked them."""
    text = manifest.text
    assert text is not None and text.chat is not None
    with closing(ModelTokenizer(tokenizer, DRAFT.name)) as made:
        return tuple(
            made.render_chat(text.chat, [{"role": "user", "content": each}], context=text.context)
            for each in questions
        )


async def write(link: Link, way: Way, prompt: str, temperature: float) -> tuple[Any, ...]:
    """Return the seconds and steps after the first token, and all tokens."""
    speculation = way.speculate()
    decode = SequentialDecoder if speculation is None else speculation.make_decoder
    sampler = Sampler(temperature, SEED)
    return await link.generate(prompt, decode, sampler, speculation, tokens=TOKENS)
