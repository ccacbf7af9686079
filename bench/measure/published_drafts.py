"""Drafts for a published model: of n-grams alone, and of a model that is distilled from it here.

``bench.measure.published_models`` runs it, as a part of the uses of SmolLM2. On a clock the
product's decoder takes real steps of both models, uncut in this process, whose times are set: those
below. So the figures are of texts, and not of what else this machine does.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from splitup_deploy.cutting.build import prepare
from splitup_deploy.frontends.source_model import Sizes, SourceText
from splitup_deploy.uncut_model import load_reference

from bench.report import ROOT, say
from bench.testbed.published import QUESTION, SHORT
from splitup.backend.runtime import State, TaskProgram
from splitup.client.text.tokenizer import ModelTokenizer
from splitup.core.tensors import array_to_bytes, bytes_to_array
from splitup.decode.prompt import TextRequest
from splitup.decode.sampler import Sampler
from splitup.decode.sequential import SequentialDecoder
from splitup.decode.speculation.decoder import Experience, SpeculativeDecoder
from splitup.decode.speculation.ngrams import NgramDrafts
from splitup.decode.speculation.sources import ModelDrafts
from splitup.decode.speculation.target_ngrams import TargetNgrams
from splitup.decode.step import Decoder, StepInput, make_arrays
from tests.decode.pairs import Always

MINUTES: Final = 20
DRAFT: Final = replace(SHORT, name="smollm2-draft", target_vram="200MB")
PROMPTS: Final = {
    "answers": (QUESTION, "What is the capital of France, and what is it known for?"),
    "prose": ("The rain in Spain", "The history of the lighthouse begins"),
}
WARMING: Final = "Why do leaves fall?"  # so that rates are learnt
TEMPERATURES: Final = (0.0, 0.8)
SEED: Final = 7
ROUND_TRIPS_MS: Final = (0, 80)
TOKENS: Final = 64
# Seconds of a step, and of each row: SmolLM2's at a context of 1,024 (docs/models.md), and those of
# a draft of 21 MB (0.5 ms for one row and 4.4 for 16) with the ranking of its logits.
TARGET_S: Final = 0.013, 0.0034
DRAFT_S: Final = 0.002, 0.0006


async def distil(folder: Path) -> None:
    """Make the draft model, with the minutes that are allowed."""
    script = ROOT / "examples/distil_draft.py"
    path = await asyncio.to_thread(DRAFT.find)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, script, path, folder, "--minutes", str(MINUTES)), stdout=sys.stderr
    )
    if await process.wait():
        raise RuntimeError(f"{script.name} failed")


class Model:
    """A model of text, uncut in this process."""

    def __init__(self, path: Path) -> None:
        self.program: TaskProgram = load_reference(str(path), Sizes(DRAFT.context, DRAFT.chunk))

    def compute(self, state: State, step: StepInput) -> npt.NDArray[np.float32]:
        """Return the logits of a step, float32 [R, vocab]."""
        arrays = make_arrays(step, DRAFT.chunk)
        inputs = [array_to_bytes(spec, arrays[spec.name]) for spec in self.program.inputs]
        [data] = self.program.run(state, inputs)
        return bytes_to_array(self.program.outputs[0], data)


@dataclass(slots=True)
class Way:
    """A way to decode: with which draft model, and what it has learnt; without that in sequence."""

    name: str
    draft: Model | None = None
    experience: Experience | None = None

    def make_decoder(self, request: TextRequest, clock: Callable[[], float]) -> Decoder:
        """Return the decoder of a text, as ``splitup.client.text.drafting`` makes it."""
        if (known := self.experience) is None:
            return SequentialDecoder(request)
        sources: list[Any] = [
            NgramDrafts(request, known.ngrams),
            TargetNgrams(request, known.target_ngrams),
        ]
        if self.draft is not None:
            sizes = {"chunk": request.chunk, "context": request.context}
            sources.append(ModelDrafts(request, known.model, **sizes))
        return SpeculativeDecoder(request, sources, known, clock=clock)


@dataclass(slots=True)
class Clock:
    """Runs a text; the nodes take one step after the other, and the draft model has a processor."""

    target: Model
    round_trip_s: float
    now_s: float = 0.0
    free_s: float = 0.0  # when the nodes are
    events: list[tuple[float, int, Any]] = field(default_factory=list)  # time, step or -1, answer

    def run(self, way: Way, request: TextRequest) -> tuple[list[int], int]:
        """Return the tokens and the number of steps."""
        decoder = way.make_decoder(request, lambda: self.now_s)
        state, steps, tokens = self.target.program.new_state(), 0, list[int]()
        drafting = None if way.draft is None else way.draft.program.new_state()
        while not decoder.finished:
            while (step := decoder.next_step()) is not None:
                begins_s = max(self.now_s + self.round_trip_s / 2, self.free_s)
                self.free_s = begins_s + TARGET_S[0] + TARGET_S[1] * step.rows
                arrives_s = self.free_s + self.round_trip_s / 2
                self.events.append((arrives_s, steps, self.target.compute(state, step)))
                steps += 1
            if isinstance(decoder, SpeculativeDecoder) and drafting is not None:
                asked = decoder.next_draft()
                if isinstance(asked, StepInput) and way.draft is not None:
                    done_s = self.now_s + DRAFT_S[0] + DRAFT_S[1] * asked.rows
                    self.events.append((done_s, -1, way.draft.compute(drafting, asked)))
            event = min(self.events, key=lambda each: each[:2])
            self.events.remove(event)
            self.now_s, number, answer = event
            if number >= 0:
                tokens += decoder.receive_logits(number, answer)
            elif isinstance(decoder, SpeculativeDecoder):
                decoder.receive_draft(answer)
        return tokens, steps


def draft_on_a_clock(folder: Path) -> str:
    """Write texts at round trips of 0 and 80 ms; compare with the sequential decoder's."""
    source = prepare(str(DRAFT.find()), Sizes(DRAFT.context, DRAFT.chunk)).text
    assert source is not None and isinstance(source.tokenizer, bytes)
    target, draft = Model(DRAFT.find()), Model(folder)
    figures = []
    with closing(ModelTokenizer(source.tokenizer, DRAFT.name)) as tokenizer:
        for round_trip_ms in ROUND_TRIPS_MS:
            clock = Clock(target, round_trip_ms / 1e3)
            ways = (
                Way("sequential"),
                Way("n-grams", None, Experience()),
                Way("draft model", draft, Experience()),
                Way("without pauses", draft, unpaused := Experience()),
            )
            unpaused.pace = Always()
            for way in ways:
                clock.run(way, make_request(tokenizer, source, WARMING, 0.0, is_chat=True))
            for kind, prompts in PROMPTS.items():
                for temperature in TEMPERATURES:
                    requests = [
                        make_request(tokenizer, source, each, temperature, kind == "answers")
                        for each in prompts
                    ]
                    said = compare_ways(clock, ways, requests)
                    figures.append(f"{round_trip_ms} ms, {kind}, T = {temperature:g}: {said}")
                    say(figures[-1])
    return f"tokens a step (times the sequential speed): {'; '.join(figures)}; the same texts"


def make_request(
    tokenizer: ModelTokenizer, source: SourceText, prompt: str, temperature: float, is_chat: bool
) -> TextRequest:
    """Return a text to write, which does not end early, so that every prompt gives as many."""
    if is_chat:
        assert source.chat is not None
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.render_chat(source.chat, messages, context=source.context)
    return TextRequest(
        prompt=tuple(tokenizer.encode(prompt, add_special_tokens=not is_chat)),
        sampler=Sampler(temperature, SEED),
        max_tokens=TOKENS,
        eos_ids=frozenset(),
        vocab=source.vocab,
        context=source.context,
        chunk=DRAFT.chunk,
    )


def compare_ways(clock: Clock, ways: Sequence[Way], requests: Sequence[TextRequest]) -> str:
    """Return tokens a step, those of prompts included, and times the first way's speed."""
    said, plain, plain_s = [], list[list[int]](), 0.0
    for way in ways:
        begun_s, texts, steps = clock.now_s, list[list[int]](), 0
        for request in requests:
            tokens, count = clock.run(way, request)
            texts.append(tokens)
            steps += count
        seconds = clock.now_s - begun_s
        if not plain:
            plain, plain_s = texts, seconds
            continue
        if texts != plain:
            raise RuntimeError(f"{way.name}: another text than the sequential decoder's")
        rate = sum(map(len, texts)) / steps
        said.append(f"{way.name} {rate:.2f} ({plain_s / seconds:.2f} ×)")
    return ", ".join(said)
