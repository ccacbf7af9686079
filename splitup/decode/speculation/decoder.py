"""Speculative decoding: several tokens per step, from drafts that others make.

All that may follow the certain text is one tree, whose root is the last certain token. Sources of
drafts extend it where it is likeliest. A step takes the likeliest nodes to the target model. When
their logits are back, the target's own token is chosen at the root, as the sequential decoder
chooses it; if the tree has that token, its node is the new root, and so on, until a node without
logits. So the tokens are the sequential decoder's, whatever the drafts are, and a source that
knows the sampler's noise proposes them more often (arXiv 2408.07978).

While a step is on its way the tree grows. A text takes no more steps than the sequential decoder's,
which is what the client pays for, because each makes a token certain at least.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
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


class Experience:
    """What is learnt of a target and its drafts; it serves text after text."""

    def __init__(self) -> None:
        self.model = ModelRates()
        self.ngrams = NgramRates()
        self.target_ngrams = TargetNgramRates()
        self.steps = StepTimes()
        self.drafts = StepTimes()
        self.pace = Pace()


class _Cache:
    """The target's cache: certain tokens up to the last step's start, and that step's rows."""

    def __init__(self, held: int) -> None:
        self._start = held
        self._rows: dict[tuple[int, int], int] = {}  # (row before, token) -> row

    def find(self, text: Sequence[int], length: int) -> tuple[int, list[int]]:
        """Return how many of the text's first ``length`` tokens need no feeding.

        Also return which rows of the last step they keep.
        """
        kept: list[int] = []
        for token in text[self._start : length]:
            row = self._rows.get((kept[-1] if kept else -1, token))
            if row is None:
                break
            kept.append(row)
        return self._start + len(kept), kept

    def feed(self, step: StepInput, parents: Sequence[int]) -> None:
        """Note a step; row i continues row ``parents[i]``."""
        self._start = step.start
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
    takes the result. If no step is on its way and ``next_step`` returns none, it waits for drafts,
    and should be asked again after ``patience_s`` seconds if none come. No step starts before the
    last one's start. Times are ``clock``'s.
    """

    def __init__(
        self,
        request: TextRequest,
        sources: Sequence[DraftSource | InstantDrafts],
        experience: Experience,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(request)
        self._instant = [source for source in sources if isinstance(source, InstantDrafts)]
        self._models = [source for source in sources if not isinstance(source, InstantDrafts)]
        self._known = experience
        self._clock = clock
        self._text = list(request.prompt)  # prompt and certain tokens
        self._root = TreeNode(self._text[-1], len(self._text) - 1, extended=[])
        self._last_position = len(self._text) + request.max_tokens - 2  # of a token that is fed
        self._remaining = request.max_tokens
        self._left = len(split_prompt(request)) + request.max_tokens - 1  # steps to be paid
        self._frontier = Frontier(self._root, self._last_position)
        self._asked: TreeNode | None = None  # the root behind which the last step continues
        self._cache = _Cache(request.cached)
        self._in_flight: dict[int, _Sent] = {}
        self._steps = 0
        self._last_s: float | None = None  # when the last tokens came
        self.patience_s = 0.0
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
            self._frontier = Frontier(self._root, self._last_position)
        self._extend_tree()
        return None if self._asked is self._root else self._make_step()

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
                step_s = self._known.steps.compute_s(1)
                self._known.pace.learn(len(tokens), now_s - self._last_s, step_s)
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

    def _make_step(self) -> StepInput | None:
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
        nodes = self._choose(space)
        return None if nodes is None else self._send(text[start:fed], start, kept, nodes, columns)

    def _choose(self, limit: int) -> list[TreeNode] | None:
        """Return the nodes that a step takes, None if drafts are worth waiting for."""
        steps, places = self._known.steps, self._frontier.places
        now = choose_rows(places, limit, *steps.line)
        if self._pending is not None and steps.is_known:
            awaited, wait_s = self._expect_drafts()
            price = max(now.tokens_per_s * steps.line[1], LEAST_REACH)
            if now.rows == limit:  # a row more takes the place of the last
                price = max(price, -places[limit - 1][0])
            later = self._frontier.expect(awaited, self._pending.typical, price)
            if later > now.tokens_per_s * wait_s:
                self.patience_s = max(later / now.tokens_per_s - self._compute_passed_s(), wait_s)
                return None
        return [node for _, _, node in places[: now.rows]]

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
        read = (*nodes, *(column[-1] for column in columns))
        step = make_tree_step(
            tokens, parents, start, [rows[each] for each in read] or [behind], kept
        )
        self._cache.feed(step, parents)
        self._asked = nodes[0] if nodes else None
        self._in_flight[self._steps] = _Sent(read, len(tokens), self._clock())
        self._steps += 1
        self._left -= 1
        return step

    def _learn_times(self, sent: _Sent, now_s: float) -> None:
        """Note a step's time; a prompt's where nothing is known, unless its parts were queued."""
        is_prompt = self._root.position < len(self.request.prompt)
        if sent.nodes and (not is_prompt or (self._steps == 1 and not self._known.steps.is_known)):
            self._known.steps.learn(sent.rows, now_s - sent.sent_s)

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
                unseen = _find_unseen(sorted(new), instant)
                instant.draft(self._text, self._root, [node for _, _, node in unseen])
        for source in () if is_paused else self._models:
            if self._pending is None and (nodes := self._list_next(source)):
                self._draft = source.begin(self._text, self._root, nodes)
                self._pending = None if self._draft is None else source

    def _list_next(self, source: DraftSource) -> list[TreeNode]:
        """Return the nodes behind which the source should draft next: the most reach in time."""
        unseen = list(
            itertools.islice(_find_unseen(self._frontier.places, source), _DRAFTED_AT_ONCE)
        )
        chosen = choose_rows(unseen, len(unseen), *self._known.drafts.line)
        return [node for _, _, node in unseen[: chosen.rows]]

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
        passed_s = self._compute_passed_s()
        return whole_s - passed_s if passed_s < whole_s else passed_s  # late: who knows how long

    def _compute_passed_s(self) -> float:
        """Return for how many seconds the pending drafts have been computed."""
        return 0.0 if self._draft_begun_s is None else self._clock() - self._draft_begun_s


def _find_unseen(places: Sequence[Place], source: object) -> Iterator[Place]:
    """Yield the places, likely ones, that the source has not seen; ``places`` are sorted."""
    for place in places:
        if -place[0] < _LEAST_DRAFTED:
            return
        if source not in place[2].seen_by:
            yield place
