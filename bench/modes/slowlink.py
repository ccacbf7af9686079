"""80 ms between the client and four nodes: lookahead and block diffusion against sequential.

Lookahead has equal tokens. The block model stands against the autoregressive one of its size and
training, on records, from the start of a session to the last token.

The nodes are a millisecond from each other; a TCP proxy holds back what the client says and hears.
Time per step as a line over the round trip is fitted at 20 and 80 ms and tested at 40 and 120.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

from bench.measure.block_model import PROMPTS
from bench.report import Bar, Report, fit_line, say, spread
from bench.testbed.delay import HOST, run_delay
from bench.testbed.engines import Engines, Model, run_engines
from bench.testbed.models import BLOCKS, RECORDS, cut_example, place_tasks, spread_tasks
from splitup.client.drafting import Drafting, Speculation, make_blocks
from splitup.client.generation import DecoderName, generate_tokens, get_text_info, make_decoder
from splitup.client.tokenizer import ModelTokenizer
from splitup.decode.prompt import TextRequest
from splitup.decode.sampler import Sampler
from splitup.decode.speculation.decoder import SpeculativeDecoder
from splitup.demo.run import MODEL, find_example

CHUNK: Final = 64  # lookahead's rows
TOKENS: Final = 64
RECORD_TOKENS: Final = 48  # a record has more
FITTED_MS: Final = (20, 80)
TESTED_MS: Final = (40, 120)
CODE: Final = (  # text with repeated tokens, as in code
    "int read_int(int value) { return value; }\nint read_long(int value) { return value; }\nint ",
    "def get_name(self):\n    return self.name\n\ndef get_size(self):\n    return self.",
)
PROSE: Final = ("network monitoring tool that",)
DECODERS: Final[tuple[DecoderName, ...]] = ("sequential", "lookahead")

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
        decoder: DecoderName | None,
        sampler: Sampler | None = None,
        speculation: Speculation | None = None,
        max_tokens: int = TOKENS,
    ) -> Timed:
        """Generate over the slow link, greedily without a sampler, by default as the model does."""
        manifest = self._model.manifest
        info = get_text_info(manifest, "example")
        request = TextRequest(
            prompt=tuple(self._tokenizer.encode(prompt)),
            sampler=sampler or Sampler(),
            max_tokens=max_tokens,
            eos_ids=frozenset(),  # so that every prompt gives equally many tokens
            vocab=info.vocab,
            context=info.context,
            chunk=CHUNK,
            blocks=make_blocks(info.diffusion),
        )
        machine = make_decoder(decoder, request, None, speculation)
        drafting = None
        if isinstance(machine, SpeculativeDecoder) and speculation and speculation.draft:
            drafting = Drafting(machine, speculation.draft)
        tokens, steps, begun = [], [0], 0.0

        def count(inputs: Any, logits: Any) -> None:
            steps[0] += 1

        async with self._engines.session(
            manifest, spread_tasks(self._model), machine.max_steps, endpoints=self._endpoints
        ) as session:
            async for token in generate_tokens(
                session, machine, self._tokenizer, on_step=count, drafting=drafting
            ):
                if not tokens:
                    begun, steps[0] = time.perf_counter(), 0
                tokens.append(token.id)
            seconds = time.perf_counter() - begun
        return seconds, steps[0], tokens


async def run(quick: bool) -> Report:
    """Measure every decoder at every round trip."""
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as name:
        models = [
            await asyncio.to_thread(cut_example, Path(name) / each, CHUNK, each)
            for each in (MODEL, RECORDS, BLOCKS)
        ]
        async with run_engines(place_tasks(models)) as engines:
            targets = [int(n.entry.endpoint.rpartition(":")[2]) for n in engines.nodes]
            file = Path(name) / "ports"
            async with run_delay(file, targets) as set_round_trip:
                ports = json.loads(file.read_text())
                with ExitStack() as stack:
                    link, plain, block_link = (
                        stack.enter_context(closing(Link(engines, model, ports)))
                        for model in models
                    )
                    prompts = (CODE[:1] if quick else CODE) + PROSE
                    rows = await measure(link, set_round_trip, prompts)
                    await set_round_trip(80)
                    blocks = await measure_blocks(plain, block_link, PROMPTS[: 2 if quick else 8])
    report = make_report(rows)
    return Report([*report.bars, blocks], report.figures)


async def measure_blocks(plain: Link, blocks: Link, prompts: Sequence[str]) -> Bar:
    """Return the gain of blocks over one token after the other; the models alternate."""
    gains, rates = [], []
    for number, prompt in enumerate((prompts[0], *prompts)):
        say(f"blocks: {prompt!r}")
        seconds = []
        for link in (plain, blocks):
            begun = time.perf_counter()
            _, steps, tokens = await link.generate(f"{prompt}\n", None, max_tokens=RECORD_TOKENS)
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


async def measure(
    link: Link, set_round_trip: Any, prompts: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Return one row for each round trip, prompt and decoder; decoders alternate."""
    rows = []
    for decoder in DECODERS:
        await link.generate(PROSE[0], decoder)  # everything is loaded and warm
    for round_trip_ms in sorted(FITTED_MS + TESTED_MS):
        await set_round_trip(round_trip_ms)
        for prompt in prompts:
            say(f"{round_trip_ms} ms: {prompt[:30]!r}")
            for decoder in DECODERS:
                seconds, steps, tokens = await link.generate(prompt, decoder)
                rows.append(
                    {
                        "round_trip_ms": round_trip_ms,
                        "code": prompt in CODE,
                        "prompt": prompt,
                        "decoder": decoder,
                        "seconds": round(seconds, 3),
                        "steps": steps,
                        "tokens": tokens,
                    }
                )
    return rows


def make_report(rows: list[dict[str, Any]]) -> Report:
    """Return the speed-ups at 80 ms, and how well a line explains the steps."""
    table = {(r["round_trip_ms"], r["prompt"], r["decoder"]): r for r in rows}
    prompts = sorted({row["prompt"] for row in rows})
    gains: dict[bool, list[float]] = {True: [], False: []}
    for prompt in prompts:
        slow, fast = (table[80, prompt, decoder] for decoder in DECODERS)
        gains[slow["code"]].append(slow["seconds"] / fast["seconds"])
    equal = all(r["tokens"] == table[80, r["prompt"], "sequential"]["tokens"] for r in rows)
    fit = fit_steps(rows)
    per_step = statistics.median(fit["step_ms"][80])
    bars = [
        Bar(
            "lookahead's tokens/s against sequential at 80 ms, code",
            round(statistics.median(gains[True]), 2),
            "×",
            at_least=1.5,
            beside={"tokens equal": equal, "prose, ×": round(statistics.median(gains[False]), 2)},
        ),
        Bar(
            "error of the model of round trips at 40 and 120 ms",
            fit["error_percent"],
            "%",
            at_most=10.0,
            beside={"ms per step": fit["line"], "floor at 80 ms: 80, measured": round(per_step, 1)},
        ),
    ]
    steps = {str(ms): spread(values) for ms, values in fit["step_ms"].items()}
    for row in rows:
        row["tokens"] = len(row["tokens"])
    return Report(bars, {"step_ms": steps, "rows": rows})


def fit_steps(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Fit milliseconds per step over the round trip; return the greatest error in percent."""
    step_ms: dict[int, list[float]] = {}
    for row in rows:
        if row["decoder"] == "sequential":
            step_ms.setdefault(row["round_trip_ms"], []).append(
                1000 * row["seconds"] / row["steps"]
            )
    medians = {ms: statistics.median(values) for ms, values in step_ms.items()}
    constant, slope = fit_line(FITTED_MS, [medians[ms] for ms in FITTED_MS])
    errors = [abs((constant + slope * ms) / medians[ms] - 1) for ms in TESTED_MS]
    return {
        "step_ms": step_ms,
        "line": f"{constant:.1f} + {slope:.3f} × round trip",
        "error_percent": round(100 * max(errors), 1),
    }
