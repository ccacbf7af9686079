"""A slow link between the client and four nodes: ways to decode.

The nodes are a millisecond from each other; a TCP proxy delays what the client says and hears. All
ways to decode give the same tokens; those with drafts turn them off where they lose. A model that
writes blocks stands against the autoregressive one that it was adapted from, on records.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.report import Bar, Report, say, spread
from bench.testbed.delay import HOST, Quality, run_delay
from bench.testbed.engines import Engines, Model, run_engines
from bench.testbed.models import BLOCKS as BLOCK_MODEL
from bench.testbed.models import RECORDS, cut_example, place_tasks, spread_tasks
from splitup.client.text.drafting import Speculation, make_blocks
from splitup.client.text.generation import generate_tokens, get_text_info
from splitup.client.text.tokenizer import ModelTokenizer
from splitup.decode.block_diffusion import BlockDiffusionDecoder
from splitup.decode.prompt import TextRequest
from splitup.decode.sampler import Sampler
from splitup.decode.sequential import SequentialDecoder
from splitup.decode.speculation.decoder import Experience
from splitup.decode.speculation.lookahead import LookaheadOptions, make_lookahead_decoder
from splitup.decode.step import Decoder
from splitup.demo.models import find_example

CHUNK: Final = 64  # lookahead's rows
TOKENS: Final = 40
FEW_TOKENS: Final = 24
RECORD_TOKENS: Final = 48  # a record has more
COMPARED_MS: Final = 80
OTHERS_MS: Final = (20, 40, 120, 150)
CODE: Final = (  # text with repeated tokens, as in code
    "int read_int(int value) { return value; }\nint read_long(int value) { return value; }\nint ",
    "def get_name(self):\n    return self.name\n\ndef get_size(self):\n    return self.",
)
PROMPTS: Final = {
    "code": CODE,
    "prose": ("network monitoring tool that", "library for"),
    "dialogue": (
        "User: How do I install the package?\nAssistant: You install the package with apt.\n"
        "User: How do I remove the package?\nAssistant:",
    ),
    "records": (
        "Package: libfoo1\nSection: libs\nPriority: optional\n\nPackage: libbar1\nSection: libs\n"
        "Priority: optional\n\nPackage:",
    ),
}
DESCRIPTIONS: Final = (  # of source packages that the models of records were not trained on
    *("bindings to the ICU library; documentation", "library of Unicode annotation data"),
    *("GNU R client-side REST access to KEGG", "LDAP interface module for Python3"),
    *("GRIB decoding/encoding software (utilities)", "Flexible test automation (Documentation)"),
    *("Supplementary CLI bindings for GTK 2.14+", "Go package for writing services"),
)
LINKS: Final = {
    "jitter 40 ms": Quality(COMPARED_MS, jitter_ms=40),
    "loss 1 %": Quality(COMPARED_MS, loss=0.01),
    "100 kB/s": Quality(COMPARED_MS, kilobytes_s=100),
}
PAPER: Final = "7B on one link of 80 ms: 8.1 tokens/s, with lookahead 8.8"

SPECULATIVE: Final = "speculative n-grams"
Decode = Callable[[TextRequest], Decoder]
DECODERS: Final[dict[str, Decode]] = {
    "sequential": SequentialDecoder,
    "lookahead": make_lookahead_decoder,
    "prompt n-grams": lambda request: make_lookahead_decoder(request, LookaheadOptions(columns=0)),
    SPECULATIVE: lambda request: Speculation().make_decoder(request),
}
COMPARED: Final = tuple(DECODERS)
ADAPTIVE: Final = ("sequential", "lookahead", SPECULATIVE)  # the last two turn drafts off


@dataclass(frozen=True, slots=True)
class Case:
    """One text of the example: over which link, continued how."""

    link: Quality
    kind: str
    prompt: str
    decoder: str
    tokens: int


def list_cases(*, quick: bool) -> Iterator[Case]:
    """Yield what is measured, in order."""
    few, many = (6, 8) if quick else (FEW_TOKENS, TOKENS)
    compared = Quality(COMPARED_MS)
    for kind, prompts in PROMPTS.items():
        for prompt in prompts[: 1 if quick else None]:
            for decoder in COMPARED:
                yield Case(compared, kind, prompt, decoder, many)
    for link in (*map(Quality, OTHERS_MS), *LINKS.values()):
        for kind in ("prose",) if quick or not is_plain(asdict(link)) else ("code", "prose"):
            for decoder in COMPARED[:1] if quick else ADAPTIVE:
                yield Case(link, kind, PROMPTS[kind][0], decoder, few)


def is_plain(link: dict[str, float]) -> bool:
    """Return whether a link delays, and nothing else."""
    return link == asdict(Quality(link["round_trip_ms"]))


Timed = tuple[float, int, list[int]]  # seconds after the first token, steps, tokens


class Link:
    """The nodes behind the proxies."""

    def __init__(self, engines: Engines, model: Model, ports: list[int]) -> None:
        self._engines = engines
        self._model = model
        self._tokenizer = ModelTokenizer(
            (find_example() / "tokenizer.json").read_bytes(), "example"
        )
        entries = [node.entry for node in engines.nodes]
        self._endpoints = {
            entry.node: f"http://{HOST}:{port}" for entry, port in zip(entries, ports, strict=True)
        }

    def close(self) -> None:
        """End the tokenizer's process."""
        self._tokenizer.close()

    async def generate(
        self,
        prompt: str,
        decode: Decode,
        sampler: Sampler | None = None,
        speculation: Speculation | None = None,
        *,
        tokens: int = 64,
    ) -> Timed:
        """Generate over the slow link, greedily without a sampler."""
        manifest = self._model.manifest
        info = get_text_info(manifest, "example")
        request = TextRequest(
            prompt=tuple(self._tokenizer.encode(prompt)),
            sampler=sampler or Sampler(),
            max_tokens=tokens,
            eos_ids=frozenset(),  # so that every prompt gives equally many tokens
            vocab=info.vocab,
            context=info.context,
            chunk=CHUNK,
            blocks=make_blocks(info.diffusion),
        )
        machine = decode(request)
        drafting = speculation.start(machine) if speculation else None
        found, steps, begun = [], [0], 0.0

        def count(inputs: Any, logits: Any) -> None:
            steps[0] += 1

        async with self._engines.session(
            manifest,
            spread_tasks(self._model),
            machine.max_steps,
            endpoints=self._endpoints,
        ) as session:
            async for token in generate_tokens(
                session, machine, self._tokenizer, on_step=count, drafting=drafting
            ):
                if not found:
                    begun, steps[0] = time.perf_counter(), 0
                found.append(token.id)
            seconds = time.perf_counter() - begun
        return seconds, steps[0], found


async def run(quick: bool) -> Report:
    """Measure the example, then a model of blocks."""
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as name:
        model = await asyncio.to_thread(cut_example, Path(name) / "whole", CHUNK)
        report = make_report(await measure(model, list_cases(quick=quick)))
        blocks = await measure_blocks(Path(name), quick=quick)
    return Report([*report.bars, blocks], report.figures)


async def measure_blocks(folder: Path, *, quick: bool) -> Bar:
    """Return the gain of blocks over one token after the other at 80 ms; the models alternate.

    Everything from the start of a session to the last token is timed.
    """
    models = [
        await asyncio.to_thread(cut_example, folder / each, CHUNK, each)
        for each in (RECORDS, BLOCK_MODEL)
    ]
    ways: tuple[Decode, ...] = SequentialDecoder, lambda request: BlockDiffusionDecoder(request)
    prompts = DESCRIPTIONS[: 2 if quick else None]
    gains, rates = [], []
    async with run_engines(place_tasks(models)) as engines:
        async with run_delay(engines.ports) as (ports, set_quality):
            with closing(Link(engines, models[0], ports)) as plain:
                with closing(Link(engines, models[1], ports)) as blocks:
                    await set_quality(Quality(COMPARED_MS))
                    for number, prompt in enumerate((prompts[0], *prompts)):
                        say(f"blocks: {prompt!r}")
                        seconds = []
                        for link, decode in zip((plain, blocks), ways, strict=True):
                            begun = time.perf_counter()
                            _, steps, tokens = await link.generate(
                                f"{prompt}\n", decode, tokens=RECORD_TOKENS
                            )
                            seconds.append(time.perf_counter() - begun)
                        if number > 0:  # everything is loaded and warm
                            gains.append(seconds[0] / seconds[1])
                            rates.append(len(tokens) / (steps + 1))
    return Bar(
        "block diffusion's tokens/s against sequential at 80 ms, records",
        round(statistics.median(gains), 2),
        "×",
        at_least=1.8,
        beside={"tokens a step": round(statistics.median(rates), 2), "each": spread(gains)},
    )


async def measure(model: Model, cases: Iterator[Case]) -> list[dict[str, Any]]:
    """Return one row for each case."""
    rows = []
    async with run_engines(place_tasks([model])) as engines:
        async with run_delay(engines.ports) as (ports, set_quality):
            with closing(Link(engines, model, ports)) as link:
                for decode in DECODERS.values():
                    await link.generate(CODE[0], decode, tokens=6)  # loads and warms
                learnt: dict[Quality, Experience] = {}
                for case in cases:
                    say(f"{case.link}: {case.kind}, {case.decoder}")
                    await set_quality(case.link)
                    decode = DECODERS[case.decoder]
                    if case.decoder == SPECULATIVE:
                        experience = learnt.setdefault(case.link, Experience())
                        decode = Speculation(experience=experience).make_decoder
                    seconds, steps, tokens = await link.generate(
                        case.prompt, decode, tokens=case.tokens
                    )
                    found = {"seconds": round(seconds, 3), "steps": steps}
                    rows.append({**asdict(case), **found, "found": tokens})
    return rows


def make_report(rows: list[dict[str, Any]]) -> Report:
    """Return the speed-ups at 80 ms."""
    slow = {_find_place(row): row for row in rows if row["decoder"] == "sequential"}
    for row in rows:
        base = slow.get(_find_place(row), row)
        row["gain"] = round(base["seconds"] / row["seconds"], 2)
        row["tokens_per_round_trip"] = round((len(row["found"]) - 1) / max(1, row["steps"]), 2)
        row["equal"] = base["found"] == row["found"]
    compared = [row for row in rows if row["link"] == asdict(Quality(COMPARED_MS))]
    table = {
        kind: {
            decoder: {
                "gain": _median(compared, kind, decoder, "gain"),
                "tokens_per_round_trip": _median(compared, kind, decoder, "tokens_per_round_trip"),
            }
            for decoder in DECODERS
            if any((row["kind"], row["decoder"]) == (kind, decoder) for row in compared)
        }
        for kind in PROMPTS
    }
    equal = all(row["equal"] for row in rows)
    bars = [
        Bar(
            f"lookahead's or n-grams' tokens/s against sequential at 80 ms, {kind}",
            max(table[kind][name]["gain"] for name in COMPARED[1:4] if name in table[kind]),
            "×",
            at_least=least,
            beside={"tokens equal": equal, "a paper": PAPER},
        )
        for kind, least in (("code", 3.0), ("prose", 1.3))
    ]
    adaptive = [row for row in rows if row["decoder"] in ADAPTIVE[1:]]
    worst = min(adaptive, key=lambda row: row["gain"])
    return Report(
        bars,
        {
            "at_80_ms": table,
            "worst gain of a decoder that turns drafts off": {
                name: worst[name] for name in ("gain", "link", "kind", "decoder")
            },
            "rows": [{name: row[name] for name in row if name != "found"} for row in rows],
        },
    )


def _find_place(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what has one sequential text."""
    return row["prompt"], row["tokens"], str(row["link"])


def _median(rows: list[dict[str, Any]], kind: str, decoder: str, name: str) -> float:
    values = [row[name] for row in rows if row["kind"] == kind and row["decoder"] == decoder]
    return round(statistics.median(values), 2)
