"""What the block model writes and drafts: ``python -m bench.measure.block_model [--quick]``.

Writes tables of bench/reports/{diffusion,speculation}.md, and a plot; takes about five minutes.
Records of the block model are judged by the autoregressive model that it was adapted from, in nats
per token, beside that model's own records. Prompts are descriptions of packages that neither was
trained on. Then the block model drafts for that model: ranks of the target's tokens among the
drafts, and speculative decoding on a clock that assumes a slow link. ``--quick`` writes a few
records, to see that everything runs, and no file.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from tokenizers import Tokenizer

from bench.economics.plot import BAD, GOOD, QUIET, TEXT, Panel
from bench.economics.report import fill, make_table
from bench.report import ROOT, say
from bench.testbed.models import BLOCKS, RECORDS, load_draft
from splitup.client.private.private_tasks import ClientPrograms
from splitup.client.text.drafting import LocalModel, make_blocks
from splitup.decode.block_diffusion import BlockDiffusionDecoder, DiffusionOptions
from splitup.decode.prompt import Blocks, TextRequest
from splitup.decode.sampler import Sampler
from splitup.decode.sequential import SequentialDecoder
from splitup.decode.speculation.decoder import Experience, SpeculativeDecoder
from splitup.decode.speculation.ngrams import InstantDrafts, NgramDrafts
from splitup.decode.speculation.sources import DraftSource
from splitup.decode.step import Decoder, make_block_step, make_causal_step
from splitup.graph.manifest import Manifest

REPORTS: Final = ROOT / "bench/reports"
PAGES: Final = (REPORTS / "diffusion.md", REPORTS / "speculation.md")
PLOT: Final = REPORTS / "diffusion.svg"
CHUNK: Final = 64
TOKENS: Final = 128  # at most; a record is shorter
THRESHOLDS: Final = (0.3, 0.5, 0.7, 0.9)
AHEAD: Final = (1, 2)  # blocks, at the default threshold
GREEDY, SAMPLED = 0.0, 1.0  # temperatures
WORSE: Final = 1.03  # times the judge's own nats per token
RANKS: Final = (1, 2, 4, 8)
DRAFTED_AT: Final = (0.0, 0.8)
ROUND_TRIP_S: Final = 0.08
STEP_S: Final = (0.01, 2e-4)  # of a step of either model, and of each of its rows
PROMPTS: Final = (  # of source packages that were held out
    *("bindings to the ICU library; documentation", "library of Unicode annotation data"),
    *("GNU R client-side REST access to KEGG", "LDAP interface module for Python3"),
    *("GRIB decoding/encoding software (utilities)", "Flexible test automation (Documentation)"),
    *("Supplementary CLI bindings for GTK 2.14+", "Go package for writing services"),
    *("Libretro wrapper for mGBA", "QGIS - architecture-independent data"),
    *("SimTK multibody dynamics API - shared library", "Password guessing program (MD5 variant)"),
    *("k-induction for Copilot.", "Asteroids screensaver for Kodi"),
    *("screensaver settings module", "nx-X11 Composite extension wire protocol"),
    *("QGIS - development files", "friendly gopher and gemini client"),
    *("Gartoon icon theme for GTK+", "C++ multi-purpose reflection library"),
    *("test fallback behaviour in absence of modules", "Sony PlayStation emulator"),
    *("Python 3 extension wrapping the ICU C++ API", "Cairo 2D vector graphics library"),
    *("Google Authenticator TOTP Abstraction", "ORM library for Golang"),
    *("NX compression library (development headers)", "Enum-like behavior for Ruby"),
    *("session settings service process", "Automated Solution of Differential Equations"),
    *("Extra commands for git", "Generic Monitor for the Xfce4 panel"),
    *("Implementation of tslib for javascript", "library for phylogenetic tasks"),
    *("Unicode Tokenizer", "Utility library", "Qt 5 Data Visualization HTML documentation"),
    "Freescale/NXP I.MX Chip image deploy tools",
    "Grid Community Toolkit - Globus authz library",
    *("Get a unique thread ID - Rust source code", "Skytools Python modules"),
    *("Python3 bindings for genometools", "Object Oriented DOM Tree in Ruby"),
    *("Unified Font Object (UFO) fonts library", "GNUstep Workspace Manager", "DNS cache for Go"),
    *("Multi-language application scripting.", "console bridge - development files"),
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
    """Texts of one kind; ``options`` is None for those of the judge.

    ``fresh`` is the share of their three-token sequences that did not occur before in the text.
    """

    temperature: float
    options: DiffusionOptions | None
    tokens_per_step: float
    nats: float
    fresh: float


def make_request(
    model: Example, prompt: Sequence[int], temperature: float, seed: int
) -> TextRequest:
    """Return a request for a record, which <|endoftext|> ends."""
    info = model.manifest.text
    assert info is not None
    return TextRequest(
        tuple(prompt),
        Sampler(temperature, seed),
        TOKENS,
        frozenset(info.eos_ids),
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
    """Return the nats of a text under the autoregressive model, of all tokens together."""
    tokens = [*prompt, *text]
    found = []
    for start in range(0, len(tokens) - 1, CHUNK):
        fed = tokens[start : start + CHUNK]
        found.append(await model.compute(make_causal_step(fed, start, range(len(fed)))))
    await model.end()
    logits = np.concatenate(found)[len(prompt) - 1 : len(tokens) - 1].astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    chosen = logits[np.arange(len(text)), list(text)]
    return float((np.log(np.exp(logits).sum(1)) - chosen).sum())


def count_fresh(text: Sequence[int]) -> int:
    """Return the number of sequences of three tokens in the text, equal ones counted once."""
    return len({tuple(text[place : place + 3]) for place in range(len(text) - 2)})


async def measure_quality(
    autoregressive: Example,
    blocks: Example,
    prompts: list[list[int]],
    options: Sequence[DiffusionOptions],
    temperatures: Sequence[float] = (GREEDY, SAMPLED),
) -> list[Quality]:
    """Return the quality of both models' texts; the autoregressive one judges."""
    found = []
    for temperature in temperatures:
        for each in (None, *options):
            say(f"T = {temperature}, {name_options(each)}")
            rows = []
            for seed, prompt in enumerate(prompts):
                writer = autoregressive if each is None else blocks
                request = make_request(writer, prompt, temperature, seed)
                decoder: Decoder
                if each is None:
                    decoder = SequentialDecoder(request)
                else:
                    decoder = BlockDiffusionDecoder(request, each)
                text, steps = await write(decoder, writer.start())
                nats = await judge(autoregressive.start(), prompt, text)
                rows.append((len(text), steps, nats, count_fresh(text), max(len(text) - 2, 0)))
            tokens, all_steps, all_nats, fresh, triples = np.sum(rows, 0).tolist()
            rates = tokens / all_steps, all_nats / tokens, fresh / triples
            found.append(Quality(temperature, each, *rates))
            say("  {:.2f} tokens/step, {:.3f} nats/token, {:.0%} fresh".format(*rates))
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
    target: Example,
    draft: Example | None,
    request: TextRequest,
    experience: Experience,
    make_decoder: Callable[..., SpeculativeDecoder] = SpeculativeDecoder,
    draft_step_s: tuple[float, float] = STEP_S,
) -> tuple[list[int], float, int]:
    """Return a speculative text, its time on the assumed link, and the number of rounds."""
    now_s = 0.0
    model, local = target.start(), None if draft is None else draft.start()
    sources: list[DraftSource | InstantDrafts] = [NgramDrafts(request, experience.ngrams)]
    if local is not None:
        sources.append(local.make_source(request, experience))
    decoder = make_decoder(request, sources, experience, clock=lambda: now_s)
    tokens: list[int] = []
    waiting: list[tuple[float, int, np.ndarray]] = []
    drafted: tuple[float, np.ndarray] | None = None
    steps = rounds = 0
    while not decoder.finished:
        while (step := decoder.next_step()) is not None:
            seconds = ROUND_TRIP_S + STEP_S[0] + STEP_S[1] * len(step.tokens)
            waiting.append((now_s + seconds, steps, await model.compute(step)))
            steps += 1
        if local is not None and drafted is None:
            wanted = decoder.next_draft()
            if wanted is not None:
                logits = await local.compute(wanted)
                drafted = now_s + draft_step_s[0] + draft_step_s[1] * len(wanted.tokens), logits
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
    target: Example, draft: Example, prompts: list[list[int]]
) -> dict[str, str]:
    """Return the tables of ranks and of rounds. Raises ValueError for a text that differs."""
    ranks, rounds = [], []
    for temperature in DRAFTED_AT:
        kind = f"T = {temperature}" if temperature else "greedy"
        texts = []
        for seed, prompt in enumerate(prompts):
            request = make_request(target, prompt, temperature, seed)
            texts.append((request, (await write(SequentialDecoder(request), target.start()))[0]))
        say(f"ranks, {kind}")
        for place, found in (await count_ranks(draft, texts)).items():
            shares = [f"{np.mean([rank < most for rank in found]):.0%}" for most in RANKS]
            ranks.append([f"mask {place + 1}", kind, *shares])
        for each in (None, draft):
            say(f"rounds with {each.name if each else 'n-grams'}, {kind}")
            experience, seconds, count, total = Experience(), 0.0, 0, 0
            for request, text in texts:
                tokens, took_s, needed = await draft_text(target, each, request, experience)
                if tokens != text:
                    raise ValueError("a speculative text differs from the sequential one")
                seconds, count, total = seconds + took_s, count + needed, total + len(tokens)
            plain_s = total * (ROUND_TRIP_S + sum(STEP_S))
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
        own = find_own(found, one)
        what = f"T = {one.temperature:g}" if one.temperature else "greedy"
        worse = f"{one.nats / own.nats - 1:+.1%}".replace("-", "−")
        rows.append(
            [
                *(what, name_options(one.options), f"{one.tokens_per_step:.2f}", f"{one.nats:.3f}"),
                *("" if one is own else worse, f"{one.fresh:.0%}"),
            ]
        )
    head = ["", "", "tokens a step", "nats/token", "against the judge", "fresh triples"]
    return make_table(head, rows)


def name_options(options: DiffusionOptions | None) -> str:
    """Return what the tables call texts of these options."""
    if options is None:
        return "the judge itself"
    return f"threshold {options.threshold}" + f", {options.ahead} ahead" * bool(options.ahead)


def find_own(found: list[Quality], of: Quality) -> Quality:
    """Return the judge's own texts beside these."""
    return next(o for o in found if o.options is None and o.temperature == of.temperature)


def draw_plot(found: list[Quality]) -> str:
    """Return the SVG: nats per token against tokens per step, greedy and sampled."""
    parts: list[str] = []
    for left, temperature, title in ((70, GREEDY, "Greedy"), (550, SAMPLED, "Sampled")):
        rows = [one for one in found if one.temperature == temperature]
        own = find_own(rows, rows[0])
        written = [(o, o.options.threshold) for o in rows if o.options and not o.options.ahead]
        top = max(o.nats for o in rows) * 1.1
        panel = Panel(left, 60, 370, 280, (0.9, 4.1), (0.0, top))
        panel.title(f"{title}: nats per token, judged by the autoregressive model")
        name = "tokens per step; at the dots: threshold"
        panel.x_axis([(n, str(n)) for n in (1, 2, 3, 4)], name)
        panel.y_axis([(n / 5, f"{n / 5:g}") for n in range(int(5 * top) + 1)])
        panel.line([(2, 0), (2, top)], QUIET, more='stroke-dasharray="4 4"')
        ends = panel.x
        panel.line([(x, own.nats) for x in ends], TEXT, more='stroke-width="1.5"')
        panel.line([(x, WORSE * own.nats) for x in ends], BAD, more='stroke-dasharray="6 4"')
        words = "its own (dashed: 3 % worse)"
        panel.text(ends[1], own.nats, words, anchor="end", shift=(0, 16))
        for (one, _), (other, _) in pairwise(written):
            panel.line([(o.tokens_per_step, o.nats) for o in (one, other)], GOOD)
        for one, threshold in written:
            panel.dot(one.tokens_per_step, one.nats, GOOD)
            panel.text(one.tokens_per_step, one.nats, f"{threshold:g}", shift=(0, -9))
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
            for name in (RECORDS, BLOCKS):
                models.append(Example(name, *await load_draft(Path(folder) / name, CHUNK, name)))
            target, blocks = models
            tokenizer = Tokenizer.from_file(str(ROOT / "examples" / BLOCKS / "tokenizer.json"))
            some = PROMPTS[: 2 if is_quick else None]
            prompts = [tokenizer.encode(f"{text}\n").ids for text in some]
            options = [
                *(DiffusionOptions(threshold=threshold) for threshold in THRESHOLDS),
                *(DiffusionOptions(ahead=ahead) for ahead in AHEAD),
            ]
            options = options[::4] if is_quick else options
            found = await measure_quality(target, blocks, prompts, options)
            tables = {"quality": make_quality_table(found)}
            tables |= await measure_drafts(target, blocks, prompts[:12])
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
