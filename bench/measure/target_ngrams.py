"""What n-grams of the target add to drafts: ``python -m bench.measure.target_ngrams [--quick]``.

The example pair on a clock that assumes a slow link, with and without the pool that rows of wrong
drafts fill (``splitup/decode/speculation/target_ngrams.py``), and the target with lookahead, with
and without its window. Writes tables of bench/reports/speculation.md; takes about two minutes.
``--quick`` takes one prompt of each kind and writes no file. Every text is compared with the
sequential decoder's.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from bench.economics.report import fill, make_table
from bench.measure.block_model import (
    DRAFTED_AT,
    PAGES,
    PROMPTS,
    ROUND_TRIP_S,
    STEP_S,
    Example,
    draft_text,
    make_request,
    write,
)
from bench.modes.slowlink import CHUNK, CODE
from bench.modes.speculation import PROSE
from bench.report import ROOT, say
from bench.testbed.models import DRAFT, load_draft
from splitup.decode.prompt import TextRequest
from splitup.decode.sequential import SequentialDecoder
from splitup.decode.speculation.decoder import Experience, SpeculativeDecoder
from splitup.decode.speculation.lookahead import LookaheadOptions, make_lookahead_decoder
from splitup.decode.speculation.ngrams import InstantDrafts
from splitup.decode.speculation.sources import DraftSource
from splitup.decode.speculation.target_ngrams import TargetNgrams
from splitup.demo.models import MODEL

PAGE: Final = PAGES[1]
TOKENS: Final = 64
TEXTS: Final = {"prose": (*PROSE, *PROMPTS[:8]), "code": CODE}
DRAFT_STEP_S: Final = (0.003, 5e-5)


class Counting(SpeculativeDecoder):
    """Counts whose drafts the target's tokens are; has a pool if it ``has_pool``."""

    has_pool = False

    def __init__(
        self,
        request: TextRequest,
        sources: Sequence[DraftSource | InstantDrafts],
        experience: Experience,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._pool_rates = list(experience.target_ngrams.by_length.values())
        if self.has_pool:
            sources = [*sources, TargetNgrams(request, experience.target_ngrams)]
        super().__init__(request, sources, experience, clock=clock)
        # tokens; of them: the pool drafted something, that token, and no other source did
        self.counts = np.zeros(4, int)

    def _accept(self, token: int) -> list[int]:
        own, others = list[bool](), list[bool]()
        for rate, drafts in self._root.drafts:
            found = own if any(rate is each for each in self._pool_rates) else others
            found.append(token in drafts)
        self.counts += (1, bool(own), any(own), any(own) and not any(others))
        return super()._accept(token)


class Pooling(Counting):
    """With a pool."""

    has_pool = True


async def measure(
    target: Example, draft: Example, texts: dict[str, list[list[int]]]
) -> dict[str, str]:
    """Return the tables. Raises ValueError for a text that differs from the sequential one."""
    table, windows = [], []
    for kind, prompts in texts.items():
        for temperature in DRAFTED_AT:
            requests = [
                replace(make_request(target, prompt, temperature, seed), max_tokens=TOKENS)
                for seed, prompt in enumerate(prompts)
            ]
            what = f"{kind}, T = {temperature}" if temperature else f"{kind}, greedy"
            plain = [(await write(SequentialDecoder(each), target.start()))[0] for each in requests]
            for model in (None, draft):
                cells = []
                for decoder_type in (Counting, Pooling):
                    name = decoder_type.__name__
                    say(f"{what}, {model and model.name}, {name}")
                    cell, counts = await measure_pool(target, model, decoder_type, requests, plain)
                    cells.append(cell)
                shares = [f"{count / counts[0]:.0%}" for count in counts[1:]]
                name = "n-grams" if model is None else "n-grams and model"
                table.append([what, name, *cells, *shares])
            say(f"{what}, lookahead")
            windows.append([what, *(await measure_windows(target, requests, plain))])
    head = ["", "other drafts of", "tokens a round, gain", "the same with the pool"]
    return {
        "pool": make_table([*head, "the pool drafts", "rightly", "alone"], table),
        "window": make_table(["", "with the window", "n-grams of the text alone"], windows),
    }


async def measure_windows(
    target: Example, requests: Sequence[TextRequest], plain: Sequence[list[int]]
) -> list[str]:
    """Return tokens a step and gain of lookahead with its window, and without."""
    cells = []
    for options in (LookaheadOptions(), LookaheadOptions(columns=0)):

        def make_decoder(
            request: TextRequest,
            sources: Sequence[object],
            experience: Experience,
            *,
            clock: Callable[[], float],
            options: LookaheadOptions = options,
        ) -> SpeculativeDecoder:
            return make_lookahead_decoder(request, options, clock=clock)

        cells.append(await compare(target, None, requests, plain, Experience(), make_decoder))
    return cells


async def compare(
    target: Example,
    model: Example | None,
    requests: Sequence[TextRequest],
    plain: Sequence[list[int]],
    experience: Experience,
    make_decoder: Callable[..., SpeculativeDecoder],
) -> str:
    """Return the tokens a round of all texts, and how much faster they are than without drafts."""
    total, rounds, seconds = 0, 0, 0.0
    for request, text in zip(requests, plain, strict=True):
        tokens, took_s, needed = await draft_text(
            target, model, request, experience, make_decoder, DRAFT_STEP_S
        )
        if tokens != text:
            raise ValueError("a speculative text differs from the sequential one")
        total, rounds, seconds = total + len(tokens), rounds + needed, seconds + took_s
    plain_s = total * (ROUND_TRIP_S + sum(STEP_S))
    return f"{total / rounds:.2f}, {plain_s / seconds:.2f} ×"


async def measure_pool(
    target: Example,
    model: Example | None,
    decoder_type: type[Counting],
    requests: Sequence[TextRequest],
    plain: Sequence[list[int]],
) -> tuple[str, npt.NDArray[np.int_]]:
    """Return what ``compare`` says, and the ``counts`` of all texts together."""
    made = list[Counting]()

    def make_decoder(
        request: TextRequest,
        sources: Sequence[DraftSource | InstantDrafts],
        experience: Experience,
        *,
        clock: Callable[[], float],
    ) -> Counting:
        made.append(decoder_type(request, sources, experience, clock=clock))
        return made[-1]

    found = await compare(target, model, requests, plain, Experience(), make_decoder)
    return found, np.sum([each.counts for each in made], 0)


async def run(*, is_quick: bool) -> None:
    """Measure, and write the page unless it is quick."""
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as folder:
        models = []
        try:
            for name in (MODEL, DRAFT):
                models.append(Example(name, *await load_draft(Path(folder) / name, CHUNK, name)))
            tokenizer = Tokenizer.from_file(str(ROOT / "examples" / MODEL / "tokenizer.json"))
            texts = {
                kind: [tokenizer.encode(text).ids for text in some[: 1 if is_quick else None]]
                for kind, some in TEXTS.items()
            }
            tables = await measure(models[0], models[1], texts)
        finally:
            for model in models:
                model.programs.close()
    print(*tables.values(), sep="\n\n")
    if not is_quick:
        PAGE.write_text(fill(PAGE.read_text(), tables))


if __name__ == "__main__":
    asyncio.run(run(is_quick="--quick" in sys.argv))
