"""Speculative decoding gives the sequential decoder's tokens, whatever the drafts are."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitup.decode.adjusted_sampler import AdjustedSampler, Adjustments
from splitup.decode.prompt import Blocks, TextRequest
from splitup.decode.sampler import Sampler, TokenChooser
from splitup.decode.sequential import SequentialDecoder
from splitup.decode.speculation.block_drafts import BlockDrafts
from splitup.decode.speculation.decoder import Experience, SpeculativeDecoder
from splitup.decode.speculation.ngrams import InstantDrafts, NgramDrafts
from splitup.decode.speculation.rates import DraftRate, Pace
from splitup.decode.speculation.sources import DraftSource, ModelDrafts, ModelRates
from splitup.decode.speculation.target_ngrams import TargetNgrams
from splitup.decode.speculation.tree import Frontier, TreeNode, walk
from splitup.decode.step import StepInput, check_path, make_arrays
from tests.decode.models import VOCAB, SequenceModel, decode

ROUND_TRIP_S, DRAFT_S = 0.08, 0.003
BLOCK = 4
COUNT = 60


class Imitation(SequenceModel):
    """A draft model: the target's logits, and errors of a given size."""

    def __init__(self, chunk: int, memory: int = 2, error: float = 0.5, vocab: int = VOCAB) -> None:
        super().__init__(chunk, memory, vocab)
        self.error = error

    def compute_logits(self, sequence: list[int]) -> np.ndarray:
        errors = np.random.default_rng(sum(sequence)).normal(0, self.error, self.vocab)
        return (super().compute_logits(sequence) + errors).astype(np.float32)


def make_request(
    prompt: list[int], sampler: TokenChooser, max_tokens: int = 60, **change: object
) -> TextRequest:
    values = {"eos_ids": frozenset(), "vocab": VOCAB, "context": 256, "chunk": 32, **change}
    return TextRequest(tuple(prompt), sampler, max_tokens, **values)  # type: ignore[arg-type]


class BlockImitation(Imitation):
    """A draft model that writes blocks: for each mask, what follows if the likeliest came before.

    It checks that each row sees all rows before its block, and its whole block. With ``shift`` 1 a
    row's logits are of the next token.
    """

    def __init__(self, chunk: int, memory: int = 2, error: float = 0.5, shift: int = 0) -> None:
        super().__init__(chunk, memory, error, VOCAB + 1)  # the last token is the mask
        self.shift = shift

    def run(self, step: StepInput) -> np.ndarray:
        make_arrays(step, self.chunk)
        assert step.start % BLOCK == 0 and step.start <= len(self.cache)
        self.cache = self.cache[: step.start] + list(step.tokens)
        for row, seen in enumerate(step.sees):
            places = [step.positions[other] for other in seen]
            assert places == list(range(step.start, places[-1] + 1)) and row in seen
            assert places[-1] // BLOCK == step.positions[row] // BLOCK
        return np.stack([self._write(step, row) for row in step.outputs])

    def _write(self, step: StepInput, output: int) -> np.ndarray:
        text, wanted = self.cache[: step.start], step.positions[output] + self.shift
        for row in step.sees[output]:
            if step.positions[row] == wanted:
                break
            if (token := step.tokens[row]) == VOCAB:
                token = int(self.compute_logits(text)[:VOCAB].argmax())
            text.append(token)
        return self.compute_logits(text)


def make_drafts(
    draft: Imitation, request: TextRequest, rates: ModelRates, context: int
) -> DraftSource:
    size: dict[str, int] = {"chunk": draft.chunk, "context": context}
    if not isinstance(draft, BlockImitation):
        return ModelDrafts(request, rates, **size)
    return BlockDrafts(request, rates, blocks=Blocks(BLOCK, VOCAB, bool(draft.shift)), **size)


class Run:
    """A decoder with its models, on a clock of its own: results come after their delay."""

    def __init__(
        self,
        request: TextRequest,
        draft: Imitation | None,
        target: SequenceModel,
        *,
        experience: Experience | None = None,
        seed: int | None = None,
        fails_after: int = 10**9,
    ) -> None:
        experience = experience or Experience()
        self.draft, self.target = draft, target
        sources: list[DraftSource | InstantDrafts] = [
            NgramDrafts(request, experience.ngrams),
            TargetNgrams(request, experience.target_ngrams),
        ]
        if draft is not None:
            context = request.context if seed is None else max(1, request.context // 2)
            sources.append(make_drafts(draft, request, experience.model, context))
        self.now_s = 0.0
        self.decoder = SpeculativeDecoder(request, sources, experience, clock=lambda: self.now_s)
        self.promised = self.decoder.max_steps
        self.tokens: list[int] = []
        self.steps: list[StepInput] = []
        self._random = None if seed is None else random.Random(seed)
        self._fails_after = fails_after

    def finish(self) -> list[int]:
        """Run to the end. With a seed results come in random times, otherwise as on a network."""
        waiting: list[tuple[float, int, np.ndarray]] = []
        draft: tuple[float, np.ndarray | None] | None = None
        while not self.decoder.finished:
            while (step := self.decoder.next_step()) is not None:
                delay_s = ROUND_TRIP_S if self._random is None else self._random.random()
                waiting.append((self.now_s + delay_s, len(self.steps), self.target.run(step)))
                self.steps.append(step)
            if draft is None and self.draft is not None:
                wanted = self.decoder.next_draft()
                if wanted is not None:
                    delay_s = DRAFT_S if self._random is None else self._random.random() / 2
                    self._fails_after -= 1
                    logits = self.draft.run(wanted) if self._fails_after >= 0 else None
                    draft = self.now_s + delay_s, logits
            assert waiting or draft is not None, "it waits for nothing"
            if draft is not None and (not waiting or draft[0] < waiting[0][0]):
                self.now_s = max(self.now_s, draft[0])
                self.decoder.receive_draft(draft[1])
                draft = None
                continue
            at_s, number, logits = waiting.pop(0)
            self.now_s = max(self.now_s, at_s)
            self.tokens += self.decoder.receive_logits(number, logits)
        assert self.decoder.next_step() is None and self.decoder.next_draft() is None
        assert len(self.steps) <= self.promised, "no more steps than were paid"
        return self.tokens


@settings(max_examples=50, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.7]),
    penalty=st.sampled_from([0.0, 0.9]),
    error=st.sampled_from([0.0, 0.5, 5.0]),
    chunk=st.integers(1, 24),
    draft_chunk=st.integers(0, 24),
    eos=st.sets(st.integers(0, VOCAB - 1), max_size=2),
    max_tokens=st.integers(1, 50),
    room=st.integers(0, 50),
    memory=st.integers(1, 3),
    block_shift=st.sampled_from([None, None, 0, 1]),
    fails_after=st.sampled_from([0, 3, 10**9]),
)
def test_tokens_are_those_of_sequential_decoding(
    prompt: list[int],
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    penalty: float,
    error: float,
    chunk: int,
    draft_chunk: int,
    eos: set[int],
    max_tokens: int,
    room: int,
    memory: int,
    block_shift: int | None,
    fails_after: int,
) -> None:
    def make() -> TextRequest:
        sampler: TokenChooser = Sampler(temperature, seed, top_k, top_p)
        if penalty:
            sampler = AdjustedSampler(Sampler(temperature, seed), Adjustments(penalty), VOCAB)
        return make_request(
            prompt,
            sampler,
            min(max_tokens, room + 1),
            chunk=chunk,
            eos_ids=frozenset(eos),
            context=len(prompt) + room,
        )

    wanted, _ = decode(SequentialDecoder(make()), SequenceModel(chunk, memory))
    draft = Imitation(draft_chunk, memory, error) if draft_chunk else None
    if block_shift is not None and draft_chunk >= 2 * BLOCK:
        draft = BlockImitation(draft_chunk, memory, error, block_shift)
    run = Run(
        make(),
        draft,
        SequenceModel(chunk, memory),
        seed=seed,
        fails_after=fails_after,
    )
    assert run.finish() == wanted
    for before, step in zip([None, *run.steps], run.steps, strict=False):
        check_path(step, before)


@pytest.mark.parametrize(
    ("make", "temperature", "least"),
    [
        (Imitation, 0.0, 3.0),
        pytest.param(Imitation, 0.8, 2.0, marks=pytest.mark.long),
        pytest.param(BlockImitation, 0.0, 2.5, marks=pytest.mark.long),
        (BlockImitation, 0.8, 2.0),
    ],
)
def test_good_drafts_take_fewer_round_trips(
    make: type[Imitation], temperature: float, least: float
) -> None:
    request = make_request([3, 1], Sampler(temperature, 9), COUNT)
    run = Run(request, make(32, 8), SequenceModel(32, 8))
    run.finish()
    assert len(run.tokens) == COUNT
    assert COUNT * ROUND_TRIP_S / run.now_s > least


def test_drafts_that_never_come_true_are_given_up() -> None:
    experience = Experience()
    experience.steps.learn(1, ROUND_TRIP_S)
    request = make_request([3, 1], Sampler(), 240, vocab=512)
    run = Run(
        request, Imitation(32, 8, 50.0, 512), SequenceModel(32, 8, 512), experience=experience
    )
    run.finish()
    plain = sum(len(step.tokens) == 1 for step in run.steps)
    assert plain > 200
    assert run.now_s < 240 * ROUND_TRIP_S * 1.02


def test_a_draft_that_does_not_come_is_not_waited_for() -> None:
    experience = Experience()
    experience.steps.learn(1, ROUND_TRIP_S)
    experience.drafts.learn(1, DRAFT_S)
    request = make_request([3, 1], Sampler(), 40)
    run = Run(request, Imitation(32, 8), SequenceModel(32, 8), experience=experience)
    assert run.decoder.next_step() is None, "the drafts will be worth their time"
    assert run.decoder.next_draft() is not None
    assert DRAFT_S <= run.decoder.patience_s < ROUND_TRIP_S
    run.now_s += run.decoder.patience_s * 1.01
    assert run.decoder.next_step() is not None, "it was asked again when it said"


def test_drafts_of_a_text_that_went_elsewhere_are_not_those_to_come() -> None:
    experience = Experience()
    for rows in (1, 32):
        experience.steps.learn(rows, ROUND_TRIP_S)
    experience.drafts.learn(1, DRAFT_S)
    run = Run(
        make_request([3, 1], Sampler(), 40),
        Imitation(32, 8),
        SequenceModel(32, 8),
        experience=experience,
    )
    decoder, draft = run.decoder, run.draft
    assert draft is not None
    while (step := decoder.next_step()) is None:
        asked = decoder.next_draft()
        assert isinstance(asked, StepInput)
        run.now_s += DRAFT_S
        decoder.receive_draft(draft.run(asked))
    assert decoder.next_step() is None
    run.now_s += ROUND_TRIP_S
    assert decoder.next_draft() is not None, "it drafts while the step is on its way"
    known = decoder._root.children
    logits = np.zeros((len(step.outputs), VOCAB), np.float32)
    logits[:, next(token for token in range(VOCAB) if token not in known)] = 9.0
    assert len(decoder.receive_logits(0, logits)) == 1
    experience.pace = Pace()
    assert decoder.next_step() is None, "drafts behind the new token are worth their time"


@given(
    st.lists(
        st.tuples(
            st.integers(0, 99),
            st.lists(st.sampled_from([0.9, 0.5, 0.2, 0.001]), max_size=3),
            st.integers(0, 3),
        ),
        max_size=30,
    )
)
def test_the_frontier_holds_what_a_walk_finds(drafts: list[tuple[int, list[float], int]]) -> None:
    """Drafts come one after another, also of tokens that another source drafted before."""
    root = TreeNode(0, 0, extended=[])
    frontier = Frontier(root, 5)
    nodes = [root]
    for number, chances, first in drafts:
        node = nodes[number % len(nodes)]
        node.add_drafts(DraftRate(chances), range(first, first + len(chances)), frozenset())
        nodes += [child for child in node.children.values() if child not in nodes]
        frontier.take_drafts()
        expected = {node: reach for reach, node, _ in walk(root, 5)}
        assert frontier.reaches == pytest.approx(expected)
        order = [node for _, _, node in frontier.places]
        assert len(order) == len(expected) and set(order) == set(expected)
        assert all(order.index(n.parent) < order.index(n) for n in order if n.parent)
        reaches = [-negative for negative, _, _ in frontier.places]
        assert reaches == sorted(reaches, reverse=True)
