"""The decoder's own work in a round of speculation; ``python -m bench speculation`` reports it.

The product's decoder runs on a clock of its own, with a made-up pair of models: how sure the draft
model is of a token, and which of its choices is right, are drawn with the rates that were measured
of the example's pair. The times of steps are assumptions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from splitup.decode.prompt import TextRequest
from splitup.decode.speculation.decoder import Experience, SpeculativeDecoder
from splitup.decode.speculation.sources import _MARGIN_PRIORS, _MARGINS, ModelDrafts
from splitup.decode.step import StepInput

CHUNK, TOKENS = 64, 160
SURE: Final = (0.18, 0.13, 0.21, 0.21, 0.19, 0.08)  # shares of the classes of margins, greedy
NODES: Final = 4
ROUND_TRIP_S: Final = 0.08
TARGET_S: Final = (0.01, 2e-4)  # of a step of the model, and of each of its rows
DRAFT_S: Final = (0.003, 5e-5)
Path = tuple[int, ...]


def draw(path: Path) -> tuple[int, int]:
    """Return how sure the draft model is behind a path, and which of its choices is right."""
    random = np.random.default_rng(path)
    sure = int(random.choice(len(SURE), p=SURE))
    chances = _MARGIN_PRIORS[sure]
    return sure, int(random.choice(len(chances) + 1, p=(*chances, 1 - sum(chances))))


class Pretended:
    """Chooses and ranks by ``draw``; logits are the number of a path."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self._known: dict[Path, tuple[int, int]] = {}

    def find(self, path: Path) -> tuple[int, int]:
        """Return what is drawn behind a path."""
        if path not in self._known:
            self._known[path] = draw(path)
        return self._known[path]

    def choose(self, logits: npt.NDArray[np.float32], position: int) -> int:
        """Return the target's token: the number of the draft model's choice that is right."""
        return self.find(self.paths[int(logits[0])])[1]

    def rank(
        self, logits: npt.NDArray[np.float32], position: int, count: int, ahead: Sequence[int]
    ) -> list[tuple[int, float]]:
        """Return the draft model's choices."""
        sure, _ = self.find(self.paths[int(logits[0])])
        margin = (0.0, *_MARGINS)[sure] + 1e-3
        return [(token, margin * (not token)) for token in range(len(_MARGIN_PRIORS[0]))]

    async def ready(self) -> None:
        """Return at once."""

    def prepare(self, position: int, count: int) -> None:
        """Do nothing."""


class Cache:
    """The tokens of a model's cache, and the logits of a step behind them."""

    def __init__(self, chooser: Pretended) -> None:
        self._tokens: list[int] = []
        self._start = 0
        self._chooser = chooser

    def run(self, step: StepInput) -> npt.NDArray[np.float32]:
        """Return the number of each wanted row's path, float32 [R, 1]."""
        held = self._tokens[: step.start]
        for place, row in enumerate(step.kept, step.start - len(step.kept)):
            held[place] = self._tokens[self._start + row]
        self._tokens, self._start = [*held, *step.tokens], step.start
        first = len(self._chooser.paths)
        for output in step.outputs:
            behind = (step.tokens[row] for row in step.sees[output])
            self._chooser.paths.append((*held, *behind))
        return np.arange(first, len(self._chooser.paths), dtype=np.float32)[:, None]


class Client:
    """One text: its decoder, and what is on its way."""

    def __init__(self) -> None:
        self.now_s = 0.0
        chooser = Pretended()
        self.target, self.draft = Cache(chooser), Cache(chooser)
        request = TextRequest((0,), chooser, TOKENS, frozenset(), 9, TOKENS + 9, CHUNK)
        experience = Experience()
        sources = [ModelDrafts(request, experience.model, chunk=CHUNK, context=TOKENS + 9)]
        self.decoder = SpeculativeDecoder(
            request,
            sources,
            experience,
            may_go_back=True,
            clock=lambda: self.now_s,
        )
        self.waiting: list[tuple[float, int, npt.NDArray[np.float32]]] = []
        self.drafted: tuple[float, npt.NDArray[np.float32]] | None = None
        self.steps = self.rounds = 0

    @property
    def next_s(self) -> float:
        """Return when something comes."""
        times = [at_s for at_s, _, _ in self.waiting[:1]]
        return min([*times, *([self.drafted[0]] if self.drafted else [])])

    def take(self) -> None:
        """Take what comes next."""
        self.now_s = self.next_s
        if self.drafted is not None and self.drafted[0] <= self.now_s:
            drafted, self.drafted = self.drafted, None
            self.decoder.receive_draft(drafted[1])
            return
        _, number, logits = self.waiting.pop(0)
        self.rounds += bool(self.decoder.receive_logits(number, logits))

    def run(self) -> None:
        """Run the decoder to its end."""
        free_s = 0.0  # when the nodes can begin the next step
        while not self.decoder.finished:
            while (step := self.decoder.next_step()) is not None:
                took_s = TARGET_S[0] + TARGET_S[1] * step.rows
                begun_s = max(self.now_s + ROUND_TRIP_S / 2, free_s)
                free_s = begun_s + took_s / NODES
                back_s = begun_s + took_s + ROUND_TRIP_S / 2
                self.waiting.append((back_s, self.steps, self.target.run(step)))
                self.steps += 1
            if self.drafted is None and (asked := self.decoder.next_draft()) is not None:
                done_s = self.now_s + DRAFT_S[0] + DRAFT_S[1] * asked.rows
                self.drafted = done_s, self.draft.run(asked)
            self.take()


def time_decoder(repeats: int = 7) -> float:
    """Return the milliseconds a round that the decoder itself takes: the tree, and to follow it.

    What its sources and the models do is left out. The decoder makes the same calls in every
    repeat; of each the shortest time counts, because other work on the machine only adds to it.
    """
    runs = [_time_calls() for _ in range(repeats)]
    shortest = (min(times) for times in zip(*(calls for calls, _ in runs), strict=True))
    return sum(shortest) * 1e3 / runs[0][1]


def _time_calls() -> tuple[list[float], int]:
    """Return the seconds of each call of the decoder in one text, and the rounds."""
    text, apart_s, calls = Client(), 0.0, list[float]()
    decoder = text.decoder

    def leave_out(owner: object, name: str) -> None:
        call = getattr(owner, name)

        def timed(*values: object) -> object:
            nonlocal apart_s
            begun_s = time.perf_counter()
            found = call(*values)
            apart_s += time.perf_counter() - begun_s
            return found

        setattr(owner, name, timed)

    def note(name: str) -> None:
        call = getattr(decoder, name)

        def timed(*values: object) -> object:
            nonlocal apart_s
            apart_s, begun_s = 0.0, time.perf_counter()
            found = call(*values)
            calls.append(time.perf_counter() - begun_s - apart_s)
            return found

        setattr(decoder, name, timed)

    for instant in decoder._instant:
        leave_out(instant, "draft")
        leave_out(instant, "learn")
    for source in decoder._models:
        leave_out(source, "begin")
        leave_out(source, "finish")
    leave_out(decoder.request.sampler, "choose")
    for name in ("next_step", "receive_logits", "next_draft", "receive_draft"):
        note(name)
    text.run()
    return calls, text.rounds
