"""Speculative decoding: several tokens per step, from drafts that others make.

All that may follow the certain text is one tree, whose root is the last certain token. Sources of
drafts extend it where it is likeliest. A step takes the likeliest nodes to the target model. When
their logits are back, the target's own token is chosen at the root, as the sequential decoder
chooses it; if the tree has that token, its node is the new root, and so on, until a node without
logits. So the tokens are the sequential decoder's, whatever the drafts are, and a source that
knows the sampler's noise proposes them more often (arXiv 2408.07978).

While a step is on its way the tree grows, and a further step may continue below the likeliest
place that no step has reached, as if all before it were accepted. If it is, a round trip is saved.
If not, the next step starts again behind what the cache holds of the certain text; nobody waits.

A text takes no more steps than the sequential decoder's, which is what the client pays for: a step
ahead of the certain text is sent only where accepted drafts have saved one before.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from splitup.decode.prompt import TextRequest, split_prompt
from splitup.decode.speculation.ngrams import InstantDrafts, NgramRates
from splitup.decode.speculation.rates import Pace, StepTimes
from splitup.decode.speculation.sources import DraftSource, ModelRates, Question
from splitup.decode.speculation.target_ngrams import TargetNgramRates
from splitup.decode.speculation.tree import LEAST_REACH, Frontier, Place, TreeNode, choose_rows
from splitup.decode.step import Decoder, StepInput, make_tree_step

_DRAFTED_AT_ONCE: Final = 16  # nodes behind which one step of a draft model drafts
_LEAST_DRAFTED: Final = 0.01  # reach of a node behind which it is worth drafting
_FEW_DRAFTS: Final = 6  # steps of the draft model in the time of one of the target's
_LEAST_AHEAD: Final = 0.05  # reach of the first node of a step ahead of the certain text
_LEAST_PER_TAKEN: Final = 0.5  # the same, by the share of a round in which it keeps nodes busy
_FIRST_GAP: Final = 0.25  # of a step's time until the nodes can take the next, before it is known


class Experience:
    """What is learnt of a target and its drafts; it serves text after text."""

    def __init__(self, pace: Pace | None = None) -> None:
        self.model = ModelRates()
        self.ngrams = NgramRates()
        self.target_ngrams = TargetNgramRates()
        self.steps = StepTimes()
        self.drafts = StepTimes()
        self.pace = pace or Pace()
        self.gap_s: float | None = None  # between results of steps that were sent together

    def learn_gap(self, sent_s: float, arrived_s: float) -> None:
        """Note how long after its predecessor a step was sent, and its result arrived."""
        if self.gap_s is None:
            self.gap_s = arrived_s
        elif arrived_s > sent_s:  # it had to wait: this is how long a step takes the nodes
            self.gap_s += (arrived_s - self.gap_s) / 8
        else:
            self.gap_s = min(self.gap_s, arrived_s)


class _Cache:
    """The tokens of the target's cache: those before the last step's start, and its rows."""

    def __init__(self, held: Sequence[int]) -> None:
        self._before = list(held)
        self._tokens: Sequence[int] = ()
        self._rows: dict[tuple[int, int], int] = {}  # (row before, token) -> row
        self._agreed = 0  # tokens before that are the text's, which only grows

    def find(
        self, text: Sequence[int], length: int, path: Sequence[int] = ()
    ) -> tuple[int, list[int]]:
        """Return how many tokens need no feeding, and which rows of the last step to keep.

        The tokens are the first ``length`` of the text, and the ``path`` behind them. Rows can be
        kept only behind all that was valid before the last step.
        """
        agreed, most = self._agreed, min(len(self._before), length)
        while agreed < most and self._before[agreed] == text[agreed]:
            agreed += 1
        self._agreed = agreed
        held, wanted = self._before[agreed:], [*text[agreed:length], *path]
        if wanted[: len(held)] != held:
            pairs = zip(held, wanted, strict=False)
            return agreed + next((i for i, (a, b) in enumerate(pairs) if a != b), len(wanted)), []
        kept: list[int] = []
        row = -1
        for token in wanted[len(held) :]:
            if (row, token) not in self._rows:
                break
            row = self._rows[row, token]
            kept.append(row)
        return agreed + len(held) + len(kept), kept

    def feed(self, step: StepInput, parents: Sequence[int]) -> None:
        """Note a step; row i continues row ``parents[i]``."""
        self._before += [self._tokens[row] for row in step.kept]
        del self._before[step.start :]
        self._agreed = min(self._agreed, step.start)
        self._tokens = step.tokens
        self._rows = {pair: row for row, pair in enumerate(zip(parents, step.tokens, strict=True))}


@dataclass(frozen=True, slots=True)
class _Sent:
    """A step on its way: the nodes whose logits it will bring."""

    nodes: tuple[TreeNode, ...]
    rows: int
    sent_s: float


class SpeculativeDecoder(Decoder):
    """Generates what ``SequentialDecoder`` generates, in fewer steps.

    ``next_draft`` returns what the draft model should compute, if there is one, ``receive_draft``
    takes the result. ``may_go_back``: a step may start before the last one's start, by less than
    two chunks before the furthest start. A target with recurrent layers cannot take that
    (``splitup.decode.step.check_path``). Times are ``clock``'s.
    """

    def __init__(
        self,
        request: TextRequest,
        sources: Sequence[DraftSource | InstantDrafts],
        experience: Experience,
        *,
        may_go_back: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(request)
        self._instant = [source for source in sources if isinstance(source, InstantDrafts)]
        self._models = [source for source in sources if not isinstance(source, InstantDrafts)]
        self._known = experience
        self._may_go_back = may_go_back
        self._clock = clock
        self._text = list(request.prompt)  # prompt and certain tokens
        self._root = TreeNode(self._text[-1], len(self._text) - 1, extended=[])
        self._last_position = len(self._text) + request.max_tokens - 2  # of a token that is fed
        self._remaining = request.max_tokens
        self._left = len(split_prompt(request)) + request.max_tokens - 1  # steps to be paid
        self._frontier = self._make_frontier()
        self._cache = _Cache(request.prompt[: request.cached])
        self._in_flight: dict[int, _Sent] = {}
        self._steps = 0
        self._arrival: tuple[float, float] | None = None  # when the last result was sent, and came
        self._last_s: float | None = None  # when the last tokens came
        self._pending: DraftSource | None = None  # whose step is computed, or waits for that
        self._draft: Question | None = None  # what it is asked
        self._draft_begun_s: float | None = None

    @property
    def max_steps(self) -> int:
        """Return the largest number of steps that may be needed: that without any draft."""
        return self._left

    # ---- steps of the target -------------------------------------------------------------------

    def next_step(self) -> StepInput | None:
        """Return the next step, or None while logits or drafts are awaited or all is done."""
        if self.finished:
            return None
        if self._frontier.root is not self._root:
            self._frontier = self._make_frontier()
        self._extend_tree()
        return self._step_ahead() if self._root.is_sent else self._step_behind_text()

    def receive_logits(self, step: int, logits: npt.NDArray[np.float32]) -> list[int]:
        """Take the logits of ``step``, float32 [R, vocab]; return the tokens they make certain."""
        sent, now_s = self._in_flight.pop(step), self._clock()
        self._learn_times(sent, now_s)
        for node, row in zip(sent.nodes, logits, strict=False):
            node.logits = row
        for source in () if self._known.pace.is_paused else self._instant:
            source.learn(self._text, sent.nodes, logits)
        tokens: list[int] = []
        while (found := self._root.logits) is not None and not self.finished:
            tokens += self._accept(self.request.sampler.choose(found, self._root.position))
        if tokens:
            if self._last_s is not None:
                pair = self._known.steps, self._known.drafts
                step_s, draft_s = (times.compute_s(_DRAFTED_AT_ONCE) for times in pair)
                is_doubtful = pair[1].is_known and step_s < _FEW_DRAFTS * draft_s
                self._known.pace.learn(len(tokens), now_s - self._last_s, is_doubtful=is_doubtful)
            self._last_s = now_s
        return tokens

    def _accept(self, token: int) -> list[int]:
        """Continue the text by the target's token, and the tree below it; return it unless last."""
        root = self._root
        for rate, drafts in root.drafts:
            rate.learn(drafts.index(token) if token in drafts else None)
        if token in self.request.eos_ids:
            self.finished = True
            return []
        self._text.append(token)
        self._remaining -= 1
        self.finished = self._remaining == 0
        child = root.children.get(token)
        self._root = child or TreeNode(token, root.position + 1, extended=root.extended)
        self._root.parent = None  # the nodes beside it are forgotten
        return [token]

    def _step_behind_text(self) -> StepInput | None:
        """Return a step that begins at the root, or None if drafts are worth waiting for."""
        text, request, fed = self._text, self.request, len(self._text) - 1
        start, kept = self._cache.find(text, fed)
        limit = min(request.chunk, request.context - start)
        if fed - start >= limit:  # a part of a long prompt
            return self._send(text[start : start + limit], start, kept, ())
        space, columns = 1, list[list[TreeNode]]()
        if not self._known.pace.is_paused:
            space = limit - (fed - start)
            for source in self._instant:
                placed = source.place_columns(self._root, space - 1)
                space -= sum(map(len, placed))
                columns += placed
        nodes = self._choose(self._frontier.places, self._frontier.reaches, space)
        return None if nodes is None else self._send(text[start:fed], start, kept, nodes, columns)

    def _step_ahead(self) -> StepInput | None:
        """Return a step below the likeliest place that no step has reached, if that pays."""
        known, spare = self._known, self._left - (self._remaining - 1)
        round_s = known.steps.compute_s(1)
        gap_s = _FIRST_GAP * round_s if known.gap_s is None else known.gap_s
        is_idle = (len(self._in_flight) + 1) * gap_s <= round_s  # the nodes, for long enough
        if spare < 1 or not is_idle or not self._may_go_back or known.pace.is_paused:
            return None
        # the chance to save a round trip, against the time that the step takes the nodes
        taken = 0.0 if known.gap_s is None else gap_s / round_s
        least = max(_LEAST_AHEAD, _LEAST_PER_TAKEN * taken)
        if not (unsent := self._frontier.list_ahead(least)):
            return None
        place = unsent[0][2].parent
        assert place is not None
        text, path = self._text, place.list_path(self._root) or []
        start, kept = self._cache.find(text, len(text), path)
        if start == len(text) + len(path) and not kept:
            start -= 1  # a target worker needs the row before the drafts to judge them
        fed = len(text) + len(path) - start
        limit = min(self.request.chunk, self.request.context - start) - fed
        among = {place, *(node for _, _, node in unsent)}
        nodes = self._choose(unsent, among, limit) if limit > 0 else None
        return None if nodes is None else self._send([*text, *path][start:], start, kept, nodes)

    def _choose(
        self, unsent: Sequence[Place], among: Container[TreeNode], limit: int
    ) -> list[TreeNode] | None:
        """Return which ``unsent`` nodes a step takes, None if drafts are worth waiting for.

        These come behind nodes ``among`` those given.
        """
        steps = self._known.steps
        now = choose_rows(unsent, limit, *steps.line)
        if self._pending is not None and steps.is_known:
            awaited, wait_s = self._expect_drafts()
            price = max(now.tokens_per_s * steps.line[1], LEAST_REACH)
            if now.rows == limit:  # a row more takes the place of the last
                price = max(price, -unsent[limit - 1][0])
            later = self._frontier.expect(awaited, among, self._pending.typical, price)
            if later > now.tokens_per_s * wait_s:
                return None
        return [node for _, _, node in unsent[: now.rows]]

    def _make_frontier(self) -> Frontier:
        # a path that is accepted as a whole has to fit into a step, should it be fed again
        last = min(self._last_position, self._root.position + self.request.chunk - 1)
        return Frontier(self._root, last)

    def _send(
        self,
        tokens: list[int],
        start: int,
        kept: list[int],
        nodes: Sequence[TreeNode],
        columns: Sequence[list[TreeNode]] = (),
    ) -> StepInput:
        """Return a step that feeds the ``tokens`` that the cache lacks, and behind it ``nodes``.

        ``columns`` are further rows behind these, of which each column's last is read.
        """
        parents, behind = list(range(-1, len(tokens) - 1)), len(tokens) - 1
        rows: dict[TreeNode | None, int] = {}
        for node in itertools.chain(nodes, *columns):
            parents.append(rows.get(node.parent, behind))
            rows[node] = len(tokens)
            tokens.append(node.token)
            node.is_sent = True
        read = (*nodes, *(column[-1] for column in columns))
        step = make_tree_step(
            tokens, parents, start, [rows[each] for each in read] or [behind], kept
        )
        self._cache.feed(step, parents)
        self._in_flight[self._steps] = _Sent(read, len(tokens), self._clock())
        self._steps += 1
        self._left -= 1
        return step

    def _learn_times(self, sent: _Sent, now_s: float) -> None:
        known = self._known
        is_round = self._root in sent.nodes
        is_prompt = self._root.position < len(self.request.prompt)
        if is_round and not (is_prompt and known.steps.is_known):
            known.steps.learn(sent.rows, now_s - sent.sent_s)
        if self._arrival is not None and self._arrival[1] > sent.sent_s:  # both were on their way
            known.learn_gap(sent.sent_s - self._arrival[0], now_s - self._arrival[1])
        self._arrival = sent.sent_s, now_s

    # ---- drafts --------------------------------------------------------------------------------

    def next_draft(self) -> Question | None:
        """Return what the draft model is asked next, None while it computes or has nothing to."""
        if self._draft is None or self._draft_begun_s is not None or self.finished:
            return None
        self._draft_begun_s = self._clock()
        return self._draft

    def receive_draft(self, answer: Any) -> None:
        """Take the draft model's answer (``DraftSource.finish``); None when it gives no more."""
        source, asked, begun_s = self._pending, self._draft, self._draft_begun_s
        self._pending = self._draft = self._draft_begun_s = None
        if source is None or asked is None or begun_s is None:
            return
        if answer is None:
            self._models.remove(source)
            return
        self._known.drafts.learn(asked.rows, self._clock() - begun_s)
        source.finish(self._root, answer)

    def _extend_tree(self) -> None:
        """Let every source draft behind the likeliest nodes that it has not seen."""
        is_paused = self._known.pace.is_paused
        while new := self._frontier.take_drafts():
            for instant in () if is_paused else self._instant:
                instant.draft(self._text, self._root, list(_find_unseen(sorted(new), instant)))
        for source in () if is_paused else self._models:
            if self._pending is None and (nodes := self._list_next(source)):
                self._draft = source.begin(self._text, self._root, nodes)
                self._pending = None if self._draft is None else source

    def _list_next(self, source: DraftSource) -> list[TreeNode]:
        """Return the nodes behind which the source should draft next."""
        return list(itertools.islice(_find_unseen(self._frontier.places, source), _DRAFTED_AT_ONCE))

    def _expect_drafts(self) -> tuple[Collection[TreeNode], float]:
        """Return the nodes whose drafts come next, and in how many seconds.

        What is computed may be of use no more, because the text goes on elsewhere; what comes next
        are then the drafts that the source will be asked for behind it.
        """
        source, wait_s = self._pending, self._compute_wait_s()
        assert source is not None
        if any(node in self._frontier.reaches for node in source.awaited):
            return source.awaited, wait_s
        nodes = self._list_next(source)
        return nodes, wait_s + self._known.drafts.compute_s(len(nodes))

    def _compute_wait_s(self) -> float:
        """Return in how many seconds the pending drafts may be expected."""
        assert self._draft is not None
        whole_s = self._known.drafts.compute_s(self._draft.rows)
        if self._draft_begun_s is None:
            return whole_s
        passed_s = self._clock() - self._draft_begun_s
        return whole_s - passed_s if passed_s < whole_s else passed_s  # late: who knows how long


def _find_unseen(places: Sequence[Place], source: object) -> Iterator[TreeNode]:
    """Yield the nodes, likely ones, that the source has not seen; ``places`` are sorted."""
    for negative, _, node in places:
        if -negative < _LEAST_DRAFTED:
            return
        if source not in node.seen_by:
            yield node
