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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from splitup.decode.prompt import TextRequest, split_prompt
from splitup.decode.speculation.rates import Pace, StepTimes
from splitup.decode.speculation.sources import DraftSource, ModelRates, NgramRates, Question
from splitup.decode.speculation.tree import Frontier, Node, choose_rows
from splitup.decode.step import StepInput, make_tree_step

_DRAFTED_AT_ONCE: Final = 16  # nodes behind which one step of a draft model drafts
_LEAST_DRAFTED: Final = 0.01  # reach of a node behind which it is worth drafting
_FEW_DRAFTS: Final = 6  # steps of the draft model in the time of one of the target's
_LEAST_GAIN: Final = 0.25  # tokens that a step ahead of the certain text has to promise
_FIRST_GAP: Final = 0.25  # of a step's time until the nodes can take the next, before it is known


class Experience:
    """What is learnt of a target and its drafts; it serves text after text."""

    def __init__(self) -> None:
        self.model = ModelRates()
        self.ngrams = NgramRates()
        self.steps = StepTimes()
        self.drafts = StepTimes()
        self.pace = Pace()
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

    def find(self, tokens: list[int]) -> tuple[int, list[int]]:
        """Return how many of ``tokens`` need no feeding, and which rows of the last step to keep.

        Rows can be kept only behind all that was valid before the last step.
        """
        held = len(self._before)
        if tokens[:held] != self._before:
            pairs = zip(self._before, tokens, strict=False)
            return next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens)), []
        kept: list[int] = []
        row = -1
        for token in tokens[held:]:
            if (row, token) not in self._rows:
                break
            row = self._rows[row, token]
            kept.append(row)
        return held + len(kept), kept

    def feed(self, step: StepInput, parents: Sequence[int]) -> None:
        """Note a step; row i continues row ``parents[i]``."""
        self._before += [self._tokens[row] for row in step.kept]
        del self._before[step.start :]
        self._tokens = step.tokens
        self._rows = {pair: row for row, pair in enumerate(zip(parents, step.tokens, strict=True))}


@dataclass(frozen=True, slots=True)
class _Sent:
    """A step on its way: the nodes whose logits it will bring."""

    nodes: tuple[Node, ...]
    rows: int
    sent_s: float


class SpeculativeDecoder:
    """Generates what ``SequentialDecoder`` generates, in fewer steps.

    ``next_draft`` returns what the draft model should compute, if there is one, ``receive_draft``
    takes the result. ``may_go_back``: a step may start before the last one's start, by less than
    two chunks before the furthest start. A target with recurrent layers cannot take that
    (``splitup.decode.step.check_path``). Times are ``clock``'s.
    """

    def __init__(
        self,
        request: TextRequest,
        sources: Sequence[DraftSource],
        experience: Experience,
        *,
        may_go_back: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._request = request
        self._sources = list(sources)
        self._known = experience
        self._may_go_back = may_go_back
        self._clock = clock
        self._text = list(request.prompt)  # prompt and certain tokens
        self._root = Node(self._text[-1], len(self._text) - 1, extended=set())
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
        self._has_grown = True  # the tree, since sources drafted last
        self._finished = False

    @property
    def finished(self) -> bool:
        """Return whether no token follows."""
        return self._finished

    @property
    def request(self) -> TextRequest:
        """Return what it generates."""
        return self._request

    @property
    def max_steps(self) -> int:
        """Return the largest number of steps that may be needed: that without any draft."""
        return self._left

    # ---- steps of the target -------------------------------------------------------------------

    def next_step(self) -> StepInput | None:
        """Return the next step, or None while logits or drafts are awaited or all is done."""
        if self._finished:
            return None
        if self._frontier.root is not self._root:
            self._frontier = self._make_frontier()
        self._frontier.sort()
        self._extend_tree()
        return self._step_ahead() if self._root.is_sent else self._step_behind_text()

    def receive_logits(self, step: int, logits: npt.NDArray[np.float32]) -> list[int]:
        """Take the logits of ``step``, float32 [R, vocab]; return the tokens they make certain.

        An end token finishes the machine and is not returned.
        """
        sent, now_s = self._in_flight.pop(step), self._clock()
        self._learn_times(sent, now_s)
        for node, row in zip(sent.nodes, logits, strict=False):
            node.logits = row
        tokens: list[int] = []
        while (found := self._root.logits) is not None and not self._finished:
            tokens += self._accept(self._request.sampler.choose(found, self._root.position))
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
        if token in self._request.eos_ids:
            self._finished = True
            return []
        self._text.append(token)
        self._remaining -= 1
        self._finished = self._remaining == 0
        child = root.children.get(token)
        self._root = child or Node(token, root.position + 1, extended=root.extended)
        self._root.parent = None  # the nodes beside it are forgotten
        self._has_grown = True
        return [token]

    def _step_behind_text(self) -> StepInput | None:
        """Return a step that begins at the root, or None if drafts are worth waiting for."""
        trunk, request = self._text[:-1], self._request
        start, kept = self._cache.find(trunk)
        limit = min(request.chunk, request.context - start)
        if len(trunk) - start >= limit:  # a part of a long prompt
            return self._send(trunk[: start + limit], start, kept, ())
        space = 1 if self._known.pace.is_paused else limit - (len(trunk) - start)
        nodes = self._choose(self._root, space)
        return None if nodes is None else self._send(trunk, start, kept, nodes)

    def _step_ahead(self) -> StepInput | None:
        """Return a step below the likeliest place that no step has reached, if that pays."""
        known, spare = self._known, self._left - (self._remaining - 1)
        round_s = known.steps.compute_s(1)
        gap_s = _FIRST_GAP * round_s if known.gap_s is None else known.gap_s
        is_idle = (len(self._in_flight) + 1) * gap_s <= round_s  # the nodes, for long enough
        if spare < 1 or not is_idle or not self._may_go_back or known.pace.is_paused:
            return None
        awaited = () if self._pending is None else self._pending.awaited
        typical = () if self._pending is None else self._pending.typical
        place = self._frontier.find_unsent(awaited, typical)
        if place is None:
            return None
        trunk = self._text + (place.list_path(self._root) or [])
        start, kept = self._cache.find(trunk)
        limit = min(self._request.chunk, self._request.context - start) - (len(trunk) - start)
        nodes = self._choose(place, limit, _LEAST_GAIN)
        return None if nodes is None else self._send(trunk, start, kept, nodes)

    def _choose(self, place: Node, limit: int, least: float = 0.0) -> list[Node] | None:
        """Return the nodes of a step below ``place``.

        None if drafts are worth waiting for, or the step promises less than the ``least`` tokens.
        """
        seconds, frontier = self._known.steps.list_s(limit), self._frontier
        unsent = frontier.list_unsent(place)
        now = choose_rows([-negative for negative, _, _ in unsent], seconds)
        if now.tokens < least:
            return None
        if self._pending is not None and self._known.steps.is_known:
            awaited, wait_s = self._expect_drafts()
            reaches = frontier.expect(place, unsent, awaited, self._pending.typical)
            later = choose_rows(reaches, seconds, wait_s=wait_s)
            if later.tokens_per_s > now.tokens_per_s:
                return None
        return [node for _, _, node in unsent[: now.rows]]

    def _make_frontier(self) -> Frontier:
        # a path that is accepted as a whole has to fit into a step, should it be fed again
        last = min(self._last_position, self._root.position + self._request.chunk - 1)
        return Frontier(self._root, last)

    def _send(
        self, trunk: list[int], start: int, kept: list[int], nodes: Sequence[Node]
    ) -> StepInput:
        """Return a step that feeds what the cache lacks of ``trunk``, and behind it ``nodes``."""
        tokens = trunk[start:]
        parents, behind = list(range(-1, len(tokens) - 1)), len(tokens) - 1
        rows: dict[Node | None, int] = {}
        for node in nodes:
            parents.append(rows.get(node.parent, behind))
            rows[node] = len(tokens)
            tokens.append(node.token)
            node.is_sent = True
        step = make_tree_step(tokens, parents, start, list(rows.values()) or [behind], kept)
        self._cache.feed(step, parents)
        self._in_flight[self._steps] = _Sent(tuple(nodes), len(tokens), self._clock())
        self._steps += 1
        self._left -= 1
        return step

    def _learn_times(self, sent: _Sent, now_s: float) -> None:
        known = self._known
        is_round = self._root in sent.nodes
        is_prompt = self._root.position < len(self._request.prompt)
        if is_round and not (is_prompt and known.steps.is_known):
            known.steps.learn(sent.rows, now_s - sent.sent_s)
        if self._arrival is not None and self._arrival[1] > sent.sent_s:  # both were on their way
            known.learn_gap(sent.sent_s - self._arrival[0], now_s - self._arrival[1])
        self._arrival = sent.sent_s, now_s

    # ---- drafts --------------------------------------------------------------------------------

    def next_draft(self) -> Question | None:
        """Return what the draft model is asked next, None while it computes or has nothing to."""
        if self._draft is None or self._draft_begun_s is not None or self._finished:
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
            self._sources.remove(source)
            return
        self._known.drafts.learn(asked.rows, self._clock() - begun_s)
        source.finish(self._root, answer)
        self._has_grown = True

    def _extend_tree(self) -> None:
        """Let every source draft behind the likeliest nodes that it has not seen."""
        if self._pending is not None or not self._has_grown or self._known.pace.is_paused:
            return
        self._has_grown = False
        unseen: dict[DraftSource, list[Node]] = {}
        undrafted = self._frontier.undrafted
        place = 0
        while place < len(undrafted) and -undrafted[place][0] >= _LEAST_DRAFTED:
            node = undrafted[place][2]
            sources = [source for source in self._sources if source not in node.seen_by]
            if not sources:
                del undrafted[place]
                continue
            place += 1
            for source in sources:
                if source.is_instant:  # what it adds comes behind this place
                    source.begin(self._text, self._root, [node])
                    self._frontier.take_drafts()
                else:
                    unseen.setdefault(source, []).append(node)
            if any(len(nodes) == _DRAFTED_AT_ONCE for nodes in unseen.values()):
                break
        for source, nodes in unseen.items():
            if self._pending is None:
                self._draft = source.begin(self._text, self._root, nodes)
                self._pending = None if self._draft is None else source

    def _expect_drafts(self) -> tuple[Collection[Node], float]:
        """Return the nodes whose drafts come next, and in how many seconds.

        What is computed may be of use no more, because the text goes on elsewhere; what comes next
        are then the drafts that the source will be asked for behind it.
        """
        source, wait_s = self._pending, self._compute_wait_s()
        assert source is not None
        if any(node in self._frontier.reaches for node in source.awaited):
            return set(source.awaited), wait_s
        found = (node for _, _, node in self._frontier.undrafted if source not in node.seen_by)
        nodes = set(itertools.islice(found, _DRAFTED_AT_ONCE))
        return nodes, wait_s + self._known.drafts.compute_s(len(nodes))

    def _compute_wait_s(self) -> float:
        """Return in how many seconds the pending drafts may be expected."""
        assert self._draft is not None
        whole_s = self._known.drafts.compute_s(self._draft.rows)
        if self._draft_begun_s is None:
            return whole_s
        passed_s = self._clock() - self._draft_begun_s
        return whole_s - passed_s if passed_s < whole_s else passed_s  # late: who knows how long
