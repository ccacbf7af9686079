"""What speculation gives by a model of times: ``python -m bench.measure.speculation_times``.

The product's decoder runs on a clock of its own, with a made-up pair of models: how sure the draft
model is of a token, and which of its choices is right, are drawn with the rates that were measured
of the example's pair. The times of steps are assumptions, or follow from the sizes of models. It
takes half a minute, needs no model, and writes tables of bench/reports/speculation.md.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from bench.economics.report import fill, make_table
from bench.report import ROOT
from splitup.decode.prompt import TextRequest
from splitup.decode.speculation.decoder import Experience, SpeculativeDecoder
from splitup.decode.speculation.sources import _MARGIN_PRIORS, _MARGINS, ModelDrafts
from splitup.decode.speculation.tree import LEAST_REACH, TreeNode, walk
from splitup.decode.step import StepInput

PAGE: Final = ROOT / "bench/reports/speculation.md"
CHUNK, TOKENS = 64, 160
SURE: Final = (0.18, 0.13, 0.21, 0.21, 0.19, 0.08)  # shares of the classes of margins, greedy
ROUND_TRIPS_MS: Final = (20, 40, 80, 150)
CLIENTS: Final = (1, 4, 8)
Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """The times of a pair: of a target's step by its rows, over so many nodes, and of a draft's."""

    name: str
    target_s: Callable[[int], float]
    draft_s: Callable[[int], float]
    nodes: int
    is_local: bool = False  # both models take turns on one processor, without a network


def make_pair(
    name: str, *, dense: float, experts: float, share: float, draft: float, nodes: int
) -> Pair:
    """Return the times of a pair by its parameters, in billions, in float16.

    A step reads its weights at 0.9 TB/s and computes at 60 TFLOP/s, whichever takes longer; of
    ``experts`` a row takes a ``share``, and other rows mostly other ones. Between nodes is 1 ms.
    The draft model runs on one such card at the client.
    """

    def target_s(rows: int) -> float:
        read = dense + experts * (1 - (1 - share) ** rows)
        return max(read * 2 / 900, rows * (dense + experts * share) * 2 / 60_000) + 1e-3 * nodes

    def draft_s(rows: int) -> float:
        return max(draft * 2 / 900, rows * draft * 2 / 60_000) + 1e-3

    return Pair(name, target_s, draft_s, nodes)


EXAMPLE: Final = Pair("example", lambda n: 0.01 + 2e-4 * n, lambda n: 0.003 + 5e-5 * n, 4)
LLAMA: Final = make_pair("Llama-70B, 8B", dense=70.6, experts=0, share=0, draft=8.0, nodes=7)
QWEN: Final = make_pair(
    "Qwen3-235B, 0.6B", dense=7.6, experts=227.4, share=1 / 16, draft=0.6, nodes=24
)


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
    """One text: its decoder, what is on its way, and when it is done."""

    def __init__(self, number: int, pair: Pair, *, may_overlap: bool) -> None:
        self.now_s = self.done_s = 0.0
        chooser = Pretended()
        self.target, self.draft = Cache(chooser), Cache(chooser)
        request = TextRequest((number,), chooser, TOKENS, frozenset(), 9, TOKENS + 9, CHUNK)
        self.experience = Experience()
        sources = [ModelDrafts(request, self.experience.model, chunk=CHUNK, context=TOKENS + 9)]
        self.decoder = SpeculativeDecoder(
            request,
            sources,
            self.experience,
            may_go_back=may_overlap,
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


def simulate(
    pair: Pair, round_trip_s: float, clients: int = 1, *, may_overlap: bool = True
) -> tuple[float, float]:
    """Return the tokens of a round, and how much faster texts are than sequential ones."""
    texts = [Client(number, pair, may_overlap=may_overlap) for number in range(clients)]
    run_texts(texts, pair, round_trip_s)
    alone_s = round_trip_s + pair.target_s(1)
    # sequential clients wait for each other where all their steps keep the nodes busy
    busy_s = clients * pair.target_s(1) / (1 if pair.is_local else pair.nodes)
    plain_s = TOKENS * max(alone_s, busy_s)
    rounds = sum(text.rounds for text in texts)
    mean_s = sum(text.now_s for text in texts) / clients
    return TOKENS * clients / rounds, plain_s / mean_s


def run_texts(texts: Sequence[Client], pair: Pair, round_trip_s: float) -> None:
    """Run the decoders to their ends, on the same nodes."""
    free_s = 0.0  # when the nodes, or the one processor, can begin the next step
    asked_now = list(texts)
    while running := [text for text in texts if not text.decoder.finished]:
        for text in asked_now:
            while (step := text.decoder.next_step()) is not None:
                took_s = pair.target_s(step.rows)
                begun_s = max(text.now_s + round_trip_s / 2, free_s)
                free_s = begun_s + took_s / (1 if pair.is_local else pair.nodes)
                back_s = begun_s + took_s + round_trip_s / 2
                text.waiting.append((back_s, text.steps, text.target.run(step)))
                text.steps += 1
            if text.drafted is None and (asked := text.decoder.next_draft()) is not None:
                begun_s = max(text.now_s, free_s) if pair.is_local else text.now_s
                done_s = begun_s + pair.draft_s(asked.rows)
                free_s = done_s if pair.is_local else free_s
                text.drafted = done_s, text.draft.run(asked)
        asked_now = [min(running, key=lambda text: text.next_s)]
        asked_now[0].take()


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
    text, apart_s, calls = Client(0, EXAMPLE, may_overlap=True), 0.0, list[float]()
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
    run_texts([text], EXAMPLE, 0.08)
    return calls, text.rounds


def compute_bound(pair: Pair, round_trip_s: float, roots: int = 200) -> tuple[float, float]:
    """Return the tokens of a round and the gain of the best trees, without a wait for drafts.

    One step is in flight; the rates are known.
    """
    tokens = seconds = 0.0
    for number in range(roots):
        root = TreeNode(0, 0)
        paths: dict[TreeNode, Path] = {root: (roots + number,)}
        grown = itertools.count()
        heap = walk(root, 40)
        for reach, node, _ in heap:
            if reach < LEAST_REACH or next(grown) > 4 * CHUNK:
                break
            chances = _MARGIN_PRIORS[draw(paths[node])[0]]
            for token, chance in enumerate(chances):
                child = node.children[token] = TreeNode(token, node.position + 1, node, chance)
                paths[child] = (*paths[node], token)
        by_rows = itertools.accumulate(reach for reach, _, _ in walk(root, 40))
        steps_s = (round_trip_s + pair.target_s(rows) for rows in range(1, CHUNK + 1))
        best = max(zip(by_rows, steps_s, strict=False), key=lambda step: step[0] / step[1])
        tokens, seconds = tokens + best[0], seconds + best[1]
    return tokens / roots, tokens / seconds * (round_trip_s + pair.target_s(1))


def make_tables() -> dict[str, str]:
    """Return the tables of the page by name."""
    rows = []
    for pair in (EXAMPLE, LLAMA, QWEN):
        for round_trip_ms in ROUND_TRIPS_MS:
            seconds = round_trip_ms / 1e3
            one, several = (simulate(pair, seconds, may_overlap=o) for o in (False, True))
            bound = compute_bound(pair, seconds)
            tokens = f"{one[0]:.1f} of {bound[0]:.1f}"
            gains = (f"{gain:.2f} ×" for gain in (bound[1], one[1], several[1]))
            near = f"{one[1] / bound[1]:.0%}"
            rows.append([pair.name, f"{round_trip_ms} ms", tokens, *gains, near])
    head = ["pair", "round trip", "tokens a round, of the bound", "bound", "one step in flight"]
    tables = {"times": make_table([*head, "several", "one, of the bound"], rows)}
    rows = []
    for round_trip_ms in (0, 1, 2, 5, *ROUND_TRIPS_MS):
        gains = [simulate(EXAMPLE, round_trip_ms / 1e3, clients)[1] for clients in CLIENTS]
        rows.append([f"{round_trip_ms} ms", *(f"{gain:.2f} ×" for gain in gains)])
    local = simulate(replace(EXAMPLE, is_local=True), 0.0)[1]
    rows.append(["draft and target in one process", f"{local:.2f} ×", *("" for _ in CLIENTS[1:])])
    head = ["round trip", *("1 client" if n == 1 else f"{n} clients" for n in CLIENTS)]
    tables["clients"] = make_table(head, rows)
    rows = []
    for name, away_ms, draft_s in (
        ("at the client, 4 ms a step", 0, 0.003),
        ("at the client, 30 ms a step", 0, 0.03),
        *((f"at a node {ms} ms away", ms, 0.003) for ms in (5, 10, 20, 40)),
    ):
        pair = replace(EXAMPLE, draft_s=lambda n, s=draft_s + away_ms / 1e3: s + 5e-5 * n)
        gains = [simulate(pair, ms / 1e3)[1] for ms in (80, 150)]
        rows.append([name, *(f"{gain:.2f} ×" for gain in gains)])
    tables["bought"] = make_table(["the draft model runs", "80 ms", "150 ms"], rows)
    return tables


async def run() -> None:
    """Print the tables and write them into the page."""
    tables = make_tables()
    print("\n\n".join(tables.values()))
    PAGE.write_text(fill(PAGE.read_text(), tables))


if __name__ == "__main__":
    asyncio.run(run())
