"""What the block model writes and drafts: ``python -m bench.measure.block_model [--quick]``.

Writes tables of docs/diffusion.md and docs/speculation.md, and a plot; takes about five minutes.
Texts of the block model are judged by the autoregressive example model that it was adapted from, in
nats per token, beside that model's own texts. As a draft model it stands beside the example's draft
model: ranks of the target's tokens among the drafts, and speculative decoding on a clock that
assumes a slow link. ``--quick`` writes a few texts, to see that everything runs, and no file.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from tokenizers import Tokenizer

from bench.economics.plot import BAD, GOOD, QUIET, TEXT, Panel
from bench.economics.report import fill, make_table
from bench.report import ROOT, say
from bench.testbed.models import DRAFT, load_draft
from splitup.client.drafting import LocalModel, make_blocks
from splitup.client.execution.private_tasks import ClientPrograms
from splitup.decode.block_diffusion import BlockDiffusionDecoder, DiffusionOptions
from splitup.decode.prompt import Blocks, TextRequest
from splitup.decode.sampler import Sampler
from splitup.decode.sequential import SequentialDecoder
from splitup.decode.speculation.decoder import Experience, SpeculativeDecoder
from splitup.decode.speculation.sources import DraftSource, NgramDrafts
from splitup.decode.step import Decoder, make_block_step, make_causal_step
from splitup.demo.run import MODEL
from splitup.graph.manifest import Manifest

BLOCKS: Final = "packages-4m-blocks"
PAGES: Final = (ROOT / "docs" / "diffusion.md", ROOT / "docs" / "speculation.md")
PLOT: Final = ROOT / "docs" / "diffusion.svg"
CHUNK: Final = 64
TOKENS: Final = 64
THRESHOLDS: Final = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
GREEDY, SAMPLED = (0.0, 0.0), (1.0, 0.25)  # temperatures of the block model and of its teacher
WORSE: Final = 1.03  # times the teacher's own nats per token
RANKS: Final = (1, 2, 4, 8)
DRAFTED_AT: Final = (0.0, 0.8)
ROUND_TRIP_S: Final = 0.08
TARGET_S: Final = (0.01, 2e-4)  # of a step, and of each of its rows
DRAFT_S: Final = {DRAFT: (0.003, 5e-5), BLOCKS: TARGET_S}  # the block model is of the target's size
PROMPTS: Final = (
    *("network monitoring tool", "library for", "utility to convert", "Python bindings for"),
    *("documentation for the", "simple text editor", "graphical user interface for", "fast and"),
    *("command line tool to", "development files for", "game in which", "Perl module to"),
    *("parser for XML", "client for the", "fonts for", "music player", "Haskell library"),
    *("server that", "plugin for", "tools to manage disks", "image viewer", "email program"),
    *("debugging symbols", "scientific computing with"),
)


@dataclass(frozen=True, slots=True)
class Example:
    """An example model, loaded as a client loads a draft model."""

    name: str
    manifest: Manifest
    programs: ClientPrograms

    def start(self) -> LocalModel:
        """Return a run of it."""
        assert self.manifest.text is not None
        return LocalModel(self.name, self.manifest, self.manifest.text, self.programs)

    @property
    def blocks(self) -> Blocks | None:
        """Return its blocks, if it writes any."""
        assert self.manifest.text is not None
        return make_blocks(self.manifest.text.diffusion)


@dataclass(frozen=True, slots=True)
class Quality:
    """Texts of one kind; ``threshold`` is None for those of the teacher.

    ``fresh`` is the share of their three-token sequences that did not occur before in the text.
    """

    temperature: float
    threshold: float | None
    tokens_per_step: float
    nats: float
    fresh: float


def make_request(
    model: Example, prompt: Sequence[int], temperature: float, seed: int
) -> TextRequest:
    """Return a request for a text that no token ends, so that all have the same length."""
    info = model.manifest.text
    assert info is not None
    return TextRequest(
        tuple(prompt),
        Sampler(temperature, seed),
        TOKENS,
        frozenset(),
        info.vocab,
        info.context,
        CHUNK,
        blocks=model.blocks,
    )


async def write(decoder: Decoder, model: LocalModel) -> tuple[list[int], int]:
    """Return a text and the number of steps."""
    tokens: list[int] = []
    steps = 0
    while (step := decoder.next_step()) is not None:
        tokens += decoder.receive_logits(steps, await model.compute(step))
        steps += 1
    await model.end()
    return tokens, steps


async def judge(model: LocalModel, prompt: Sequence[int], text: Sequence[int]) -> float:
    """Return the nats per token of a text under the autoregressive model."""
    tokens = [*prompt, *text]
    found = []
    for start in range(0, len(tokens) - 1, CHUNK):
        fed = tokens[start : start + CHUNK]
        found.append(await model.compute(make_causal_step(fed, start, range(len(fed)))))
    await model.end()
    logits = np.concatenate(found)[len(prompt) - 1 : len(tokens) - 1].astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    chosen = logits[np.arange(len(text)), list(text)]
    return float((np.log(np.exp(logits).sum(1)) - chosen).mean())


def measure_fresh(text: Sequence[int]) -> float:
    """Return the share of sequences of three tokens that are new in the text."""
    parts = [tuple(text[place : place + 3]) for place in range(len(text) - 2)]
    return len(set(parts)) / len(parts)


async def measure_quality(
    teacher: Example,
    blocks: Example,
    prompts: list[list[int]],
    thresholds: Sequence[float],
    temperatures: Sequence[tuple[float, float]] = (GREEDY, SAMPLED),
) -> list[Quality]:
    """Return the quality of the teacher's texts and the block model's, greedy and sampled."""
    found = []
    for temperature, teachers in temperatures:
        for threshold in (None, *thresholds):
            say(f"T = {temperature}, threshold {threshold}")
            rows = []
            for seed, prompt in enumerate(prompts):
                if threshold is None:
                    writer, request = teacher, make_request(teacher, prompt, teachers, seed)
                    decoder: Decoder = SequentialDecoder(request)
                else:
                    writer, request = blocks, make_request(blocks, prompt, temperature, seed)
                    options = DiffusionOptions(threshold=threshold)
                    decoder = BlockDiffusionDecoder(request, options)
                text, steps = await write(decoder, writer.start())
                nats = await judge(teacher.start(), prompt, text)
                rows.append((len(text) / steps, nats, measure_fresh(text)))
            # the steps of all texts together, not the mean of their rates
            rate = len(rows) / sum(1 / row[0] for row in rows)
            nats, fresh = np.mean(rows, 0).tolist()[1:]
            found.append(Quality(temperature, threshold, rate, nats, fresh))
            say(f"  {rate:.2f} tokens/step, {nats:.3f} nats/token, {fresh:.0%} fresh")
    return found


# ---- drafts ------------------------------------------------------------------------------------


async def count_ranks(
    draft: Example, texts: list[tuple[TextRequest, list[int]]]
) -> dict[int, list[int]]:
    """Return the ranks of the target's tokens among the drafts, by place in a block; 99: none."""
    ranks: dict[int, list[int]] = {}
    size = 1 if draft.blocks is None else draft.blocks.size
    for request, text in texts:
        model, tokens = draft.start(), [*request.prompt, *text]
        start, fed = -(-len(request.prompt) // size) * size, 0
        while start + size <= len(tokens):
            certain = tokens[fed:start]
            step = make_causal_step(certain, fed)
            if (blocks := draft.blocks) is not None:
                wanted = range(len(certain), len(certain) + size)
                masked = [*certain, *(blocks.mask_id,) * size]
                step = make_block_step(masked, fed, wanted, block_size=size)
            for place, row in enumerate(await model.compute(step)):
                ahead = tokens[start : start + place]
                position = start + place - 1
                ranked = request.sampler.rank(row, position, max(RANKS), ahead)
                chosen = [token for token, _ in ranked]
                token = tokens[start + place]
                ranks.setdefault(place, []).append(chosen.index(token) if token in chosen else 99)
            fed, start = start, start + size
        await model.end()
    return ranks


async def draft_text(
    target: Example, draft: Example | None, request: TextRequest, experience: Experience
) -> tuple[list[int], float, int]:
    """Return a speculative text, its time on the assumed link, and the number of rounds."""
    now_s = 0.0
    model, local = target.start(), None if draft is None else draft.start()
    sources: list[DraftSource] = [NgramDrafts(request, experience.ngrams)]
    if local is not None:
        sources.append(local.make_source(request, experience))
    decoder = SpeculativeDecoder(request, sources, experience, clock=lambda: now_s)
    tokens: list[int] = []
    waiting: list[tuple[float, int, np.ndarray]] = []
    drafted: tuple[float, np.ndarray] | None = None
    steps = rounds = 0
    while not decoder.finished:
        while (step := decoder.next_step()) is not None:
            seconds = ROUND_TRIP_S + TARGET_S[0] + TARGET_S[1] * len(step.tokens)
            waiting.append((now_s + seconds, steps, await model.compute(step)))
            steps += 1
        if draft is not None and local is not None and drafted is None:
            wanted = decoder.next_draft()
            if wanted is not None:
                fixed_s, row_s = DRAFT_S[draft.name]
                logits = await local.compute(wanted)
                drafted = now_s + fixed_s + row_s * len(wanted.tokens), logits
        if drafted is not None and (not waiting or drafted[0] < waiting[0][0]):
            now_s, logits = max(now_s, drafted[0]), drafted[1]
            drafted = None
            decoder.receive_draft(logits)
            continue
        at_s, number, logits = waiting.pop(0)
        now_s = max(now_s, at_s)
        given = decoder.receive_logits(number, logits)
        rounds += bool(given)
        tokens += given
    await model.end()
    if local is not None:
        await local.end()
    return tokens, now_s, rounds


async def measure_drafts(
    target: Example, drafts: Sequence[Example], prompts: list[list[int]]
) -> dict[str, str]:
    """Return the tables of ranks and of rounds. Raises ValueError for a text that differs."""
    ranks, rounds = [], []
    for temperature in DRAFTED_AT:
        kind = f"T = {temperature}" if temperature else "greedy"
        texts = []
        for seed, prompt in enumerate(prompts):
            request = make_request(target, prompt, temperature, seed)
            texts.append((request, (await write(SequentialDecoder(request), target.start()))[0]))
        for draft in drafts:
            say(f"ranks of {draft.name}, {kind}")
            for place, found in (await count_ranks(draft, texts)).items():
                where = f", mask {place + 1}" if draft.name == BLOCKS else ""
                shares = [f"{np.mean([rank < most for rank in found]):.0%}" for most in RANKS]
                ranks.append([f"{draft.name}{where}", kind, *shares])
        for each in (None, *drafts):
            say(f"rounds with {each.name if each else 'n-grams'}, {kind}")
            experience, seconds, count, total = Experience(), 0.0, 0, 0
            for request, text in texts:
                tokens, took_s, needed = await draft_text(target, each, request, experience)
                if tokens != text:
                    raise ValueError("a speculative text differs from the sequential one")
                seconds, count, total = seconds + took_s, count + needed, total + len(tokens)
            plain_s = total * (ROUND_TRIP_S + sum(TARGET_S))
            name = f"n-grams and {each.name}" if each else "n-grams alone"
            rounds.append([name, kind, f"{total / count:.2f}", f"{plain_s / seconds:.2f} ×"])
    head = ["drafts of", "", *("first" if n == 1 else f"first {n}" for n in RANKS)]
    return {
        "ranks": make_table(head, ranks),
        "rounds": make_table(["drafts", "", "tokens a round", "against sequential"], rounds),
    }


# ---- the page ----------------------------------------------------------------------------------


def make_quality_table(found: list[Quality]) -> str:
    """Return the table of texts."""
    rows = []
    for one in found:
        greedy, teacher = one.temperature == 0, find_teacher(found, one)
        what = "greedy" if greedy else f"T = {SAMPLED[one.threshold is None]}"
        who = "example model" if one.threshold is None else f"threshold {one.threshold}"
        worse = f"{one.nats / teacher.nats - 1:+.0%}".replace("-", "−")
        rows.append(
            [
                *(what, who, f"{one.tokens_per_step:.2f}", f"{one.nats:.3f}"),
                *("" if one is teacher else worse, f"{one.fresh:.0%}"),
            ]
        )
    head = ["", "", "tokens a step", "nats/token", "against the example model", "fresh triples"]
    return make_table(head, rows)


def find_teacher(found: list[Quality], of: Quality) -> Quality:
    """Return the teacher's texts beside these."""
    return next(o for o in found if o.threshold is None and o.temperature == of.temperature)


def draw_plot(found: list[Quality]) -> str:
    """Return the SVG: nats per token against tokens per step, greedy and sampled."""
    parts: list[str] = []
    for left, (temperature, _), title in ((70, GREEDY, "Greedy"), (550, SAMPLED, "Sampled")):
        rows = [one for one in found if one.temperature == temperature]
        teacher, written = find_teacher(rows, rows[0]), [o for o in rows if o.threshold is not None]
        top = max(o.nats for o in rows) * 1.1
        panel = Panel(left, 60, 370, 280, (0.9, 2.6), (0.0, top))
        panel.title(f"{title}: nats per token, judged by the example model")
        name = "tokens per step; at the dots: threshold"
        panel.x_axis([(n / 2, f"{n / 2:g}") for n in (2, 3, 4, 5)], name)
        panel.y_axis([(n / 2, f"{n / 2:g}") for n in range(int(2 * top) + 1)])
        panel.line([(2, 0), (2, top)], QUIET, more='stroke-dasharray="4 4"')
        ends = panel.x
        panel.line([(x, teacher.nats) for x in ends], TEXT, more='stroke-width="1.5"')
        panel.line([(x, WORSE * teacher.nats) for x in ends], BAD, more='stroke-dasharray="6 4"')
        words = "example model's own (dashed: 3 % worse)"
        panel.text(ends[1], teacher.nats, words, anchor="end", shift=(0, 16))
        for one, other in pairwise(written):
            panel.line([(o.tokens_per_step, o.nats) for o in (one, other)], GOOD)
        for place, one in enumerate(written):
            panel.dot(one.tokens_per_step, one.nats, GOOD)
            if place % 2 == 0:  # more would overlap
                panel.text(one.tokens_per_step, one.nats, f"{one.threshold:g}", shift=(0, -9))
        parts += panel.parts
    body = "\n".join(parts)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 400" '
        'font-family="Inter, \'Segoe UI\', Helvetica, Arial, sans-serif" font-size="13" '
        'role="img" aria-label="Tokens per step against judged quality, by threshold">\n'
        f'<rect width="960" height="400" fill="#fff"/>\n{body}\n</svg>\n'
    )


async def run(*, is_quick: bool) -> None:
    """Measure everything; write the pages unless it is quick."""
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as folder:
        models = []
        try:
            for name in (MODEL, DRAFT, BLOCKS):
                models.append(Example(name, *await load_draft(Path(folder) / name, CHUNK, name)))
            target, draft, blocks = models
            tokenizer = Tokenizer.from_file(str(ROOT / "examples" / MODEL / "tokenizer.json"))
            prompts = [tokenizer.encode(text).ids for text in PROMPTS[: 2 if is_quick else None]]
            thresholds = THRESHOLDS[::4] if is_quick else THRESHOLDS
            found = await measure_quality(target, blocks, prompts, thresholds)
            tables = {"quality": make_quality_table(found)}
            tables |= await measure_drafts(target, (draft, blocks), prompts[:12])
        finally:
            for model in models:
                model.programs.close()
    print("\n\n".join(tables.values()))
    if not is_quick:
        for page in PAGES:
            page.write_text(fill(page.read_text(), tables))
        PLOT.write_text(draw_plot(found))


if __name__ == "__main__":
    asyncio.run(run(is_quick="--quick" in sys.argv))
