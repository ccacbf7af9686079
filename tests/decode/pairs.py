"""A made-up pair of models on a clock, for what the speculative decoder decides by times.

The draft model's first choice is the target's token with a given chance, whatever came before; it
looks equally sure everywhere. The times of steps are SmolLM2's and those of a draft of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from splitup.decode.prompt import TextRequest
from splitup.decode.speculation.decoder import Experience, SpeculativeDecoder
from splitup.decode.speculation.rates import Pace
from splitup.decode.speculation.sources import ModelDrafts

CHUNK, TOKENS, RANKS = 16, 64, 8
TARGET_S = 0.013, 0.0034  # of a step, and of each of its rows
DRAFT_S = 0.002, 0.0006


class Pair:
    """Chooses and ranks for both models: a token is its rank among the draft model's choices."""

    def __init__(self, acceptance: float, seed: int) -> None:
        others = [(1 - acceptance) * 0.25 * 0.6**rank for rank in range(RANKS - 1)]
        bounds = np.cumsum([acceptance, *others])
        drawn = np.random.default_rng(seed).random(TOKENS + 1)
        self._ranks = np.searchsorted(bounds, drawn).tolist()

    def choose(self, logits: np.ndarray, position: int) -> int:
        return self._ranks[position]

    def rank(
        self, logits: np.ndarray, position: int, count: int, ahead: Sequence[int] = ()
    ) -> list[tuple[int, float]]:
        return [(token, 0.7 * (not token)) for token in range(count)]

    async def ready(self) -> None:
        pass

    def prepare(self, position: int, count: int) -> None:
        pass


class Always(Pace):
    """Never does without drafts."""

    def learn(self, tokens: int, seconds: float, step_s: float) -> None:
        pass


def write_in_sequence(round_trip_s: float) -> float:
    """Return the seconds of a text without drafts."""
    return TOKENS * (round_trip_s + sum(TARGET_S))


def write_with_drafts(pair: Pair, round_trip_s: float, experience: Experience) -> float:
    """Return the seconds of a text, where each party has a processor of its own."""
    now_s = 0.0
    request = TextRequest((0,), pair, TOKENS, frozenset(), RANKS + 1, TOKENS + 1, CHUNK)
    source = ModelDrafts(request, experience.model, chunk=CHUNK, context=request.context)
    decoder = SpeculativeDecoder(request, [source], experience, clock=lambda: now_s)
    logits, steps = np.zeros((CHUNK, 1), np.float32), 0
    answer_s = draft_s = np.inf  # when each comes
    outputs = drafted = 0
    while not decoder.finished:
        if (step := decoder.next_step()) is not None:
            outputs = len(step.outputs)
            answer_s = now_s + round_trip_s + TARGET_S[0] + TARGET_S[1] * step.rows
        if (asked := decoder.next_draft()) is not None:
            drafted = len(asked.outputs)
            draft_s = now_s + DRAFT_S[0] + DRAFT_S[1] * asked.rows
        now_s = min(answer_s, draft_s)
        if draft_s <= now_s:
            draft_s = np.inf
            decoder.receive_draft(logits[:drafted])
        else:
            answer_s = np.inf
            decoder.receive_logits(steps, logits[:outputs])
            steps += 1
    return now_s


def compare(acceptance: float, round_trip_s: float, seeds: int, texts: int) -> np.ndarray:
    """Return the seconds of texts, float64 [texts, 3]: in sequence, always with drafts, decided.

    What is learnt serves text after text; ``seeds`` times all begins anew.
    """
    found = np.zeros((texts, 3))
    for seed in range(seeds):
        always, decided = Experience(), Experience()
        always.pace = Always()
        for text in range(texts):
            pair = Pair(acceptance, 1_000 * seed + text)
            found[text] += (
                write_in_sequence(round_trip_s),
                write_with_drafts(pair, round_trip_s, always),
                write_with_drafts(pair, round_trip_s, decided),
            )
    return found
