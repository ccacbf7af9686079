"""Where drafts come from: a smaller model, here or elsewhere, and n-grams of the text."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from splitup.decode.prompt import TextRequest
from splitup.decode.speculation.rates import RANKS, DraftRate
from splitup.decode.speculation.tree import TreeNode
from splitup.decode.step import StepInput, make_causal_step, make_tree_step

_MARGINS: Final = (0.25, 0.5, 1.0, 2.0, 4.0)  # bounds of situations, in units of logits
_MARGIN_PRIORS: Final = (  # those of the example's pair, as a first guess for any other
    (0.31, 0.26, 0.11, 0.05, 0.04, 0.04, 0.03, 0.02),
    (0.38, 0.22, 0.10, 0.06, 0.03, 0.03, 0.02, 0.02),
    (0.49, 0.20, 0.07, 0.03, 0.04, 0.02, 0.02, 0.02),
    (0.69, 0.09, 0.05, 0.03, 0.02, 0.02, 0.02, 0.01),
    (0.89, 0.02, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01),
    (0.98, 0.01, 0.01, 0.00, 0.00, 0.00, 0.00, 0.00),
)
_NGRAM_PRIORS: Final = {4: (0.75, 0.08), 3: (0.6, 0.1), 2: (0.3, 0.1)}  # by tokens that agree


_TREE_NODES: Final = 32  # of one answer of a model elsewhere
_TREE_DEPTH: Final = 3  # steps of that model, one after the other; more come too late


@dataclass(frozen=True, slots=True)
class TreeQuestion:
    """Asks a model elsewhere for a tree behind certain tokens and guessed ones."""

    text: tuple[int, ...]
    guessed: tuple[int, ...]
    most: int = _TREE_NODES  # nodes
    depth: int = _TREE_DEPTH

    @property
    def rows(self) -> int:
        """Return what the time of an answer depends on."""
        return self.most


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Drafts: node i continues node ``parents[i]``, an earlier one, or the text (-1).

    ``chances`` are those of a node after its parent.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()


Question = StepInput | TreeQuestion  # what a source asks of its model


class DraftSource(Protocol):
    """Proposes what may follow nodes of a tree, by ``Node.add_drafts``."""

    @property
    def is_instant(self) -> bool:
        """Return whether it drafts without a step."""
        ...

    @property
    def awaited(self) -> Collection[TreeNode]:
        """Return the nodes whose drafts its step will give."""
        ...

    @property
    def typical(self) -> Sequence[float]:
        """Return the chances that its drafts behind a node have, before they are known."""
        ...

    def begin(
        self, text: Sequence[int], root: TreeNode, nodes: Sequence[TreeNode]
    ) -> Question | None:
        """Draft behind ``nodes`` of the tree below ``root``, which is the last token of ``text``.

        Returns what its model has to answer first, None when it is done. It adds itself to
        ``seen_by`` of the nodes that it has taken, which without a question are all.
        """
        ...

    def finish(self, root: TreeNode, answer: Any) -> None:
        """Take the answer: a step's logits, float32 [R, vocab], or a TokenTree.

        ``root`` may be another one by now.
        """
        ...


class ModelRates:
    """How often a model's drafts come true, by how much its best one is ahead of the next.

    The drafts of a block model are also told apart by how many tokens before them are drafts of
    the same step.
    """

    def __init__(self) -> None:
        self._rates: defaultdict[int, list[DraftRate]] = defaultdict(
            lambda: [DraftRate(prior) for prior in _MARGIN_PRIORS]
        )

    @property
    def typical(self) -> Sequence[float]:
        """Return the chances at a middling margin."""
        return self._rates[0][len(_MARGINS) // 2 + 1].chances

    def find(self, scores: Sequence[float], depth: int = 0) -> DraftRate:
        """Return the rate where a model gives its drafts these scores, largest first."""
        margin = scores[0] - scores[1] if len(scores) > 1 else np.inf
        return self._rates[depth][bisect.bisect(_MARGINS, margin)]


class ModelDrafts:
    """A smaller model's likeliest choices, under the noise that the target's choice will have.

    Every step feeds the tree's nodes anew behind the certain text, because a cache holds one path.
    """

    def __init__(
        self, request: TextRequest, rates: ModelRates, *, chunk: int, context: int
    ) -> None:
        """Take the draft model's ``chunk`` and ``context``; its vocabulary is the target's."""
        self._request = request
        self._rates = rates
        self._chunk = chunk
        self._context = context
        self._fed = 0  # tokens of the text in the cache
        self._nodes: list[TreeNode] = []  # whose logits are awaited

    @property
    def is_instant(self) -> bool:
        """Return False: it needs the model's logits."""
        return False

    @property
    def awaited(self) -> Collection[TreeNode]:
        """Return the nodes of the step that is computed."""
        return self._nodes

    @property
    def typical(self) -> Sequence[float]:
        """Return the chances at a middling margin."""
        return self._rates.typical

    def begin(
        self, text: Sequence[int], root: TreeNode, nodes: Sequence[TreeNode]
    ) -> StepInput | None:
        """Return a step of the model, which may feed a part of a long text at first."""
        start = min(self._fed, len(text) - 1)
        certain = text[start:]
        limit = min(self._chunk, self._context - start)
        if len(certain) > limit:
            if len(text) > self._context:
                for node in nodes:
                    node.seen_by.append(self)
                return None
            self._fed, self._nodes = start + limit, []
            return make_causal_step(certain[:limit], start)
        tokens, parents = list(certain), list(range(-1, len(certain) - 1))
        rows = {root: len(certain) - 1}
        self._nodes = []
        for node in nodes:
            path: list[TreeNode] = []  # its ancestors without a row, and itself
            above = node
            while above not in rows:
                path.append(above)
                assert above.parent is not None
                above = above.parent
            if len(tokens) + len(path) > limit:
                continue
            for each in reversed(path):
                parents.append(rows[above])
                rows[each] = len(tokens)
                tokens.append(each.token)
                above = each
            self._nodes.append(node)
            node.seen_by.append(self)
        if not self._nodes:
            for node in nodes:
                node.seen_by.append(self)
            return None
        self._fed = len(text)
        outputs = [rows[node] for node in self._nodes]
        return make_tree_step(tokens, parents, start, outputs)

    def roll_back(self, length: int) -> None:
        """Forget what the cache holds behind the first ``length`` tokens of the text."""
        self._fed = min(self._fed, length)

    def finish(self, root: TreeNode, logits: npt.NDArray[np.float32]) -> None:
        """Rank the logits of every node that the tree still has."""
        vocab, ends = self._request.vocab, self._request.eos_ids
        for node, row in zip(self._nodes, logits, strict=False):
            path = node.list_path(root)
            if path is not None and not np.isnan(row).any():
                ranked = self._request.sampler.rank(row[:vocab], node.position, RANKS, path)
                rate = self._rates.find([score for _, score in ranked])
                node.add_drafts(rate, [token for token, _ in ranked], ends)
        self._nodes = []


class TreeDrafts:
    """Trees of a model elsewhere, which is asked for one behind the likeliest node at a time."""

    def __init__(self, request: TextRequest) -> None:
        self._ends = request.eos_ids
        self._text: Sequence[int] = ()
        self._asked: tuple[TreeNode, TreeQuestion] | None = None

    @property
    def is_instant(self) -> bool:
        """Return False: it needs an answer."""
        return False

    @property
    def awaited(self) -> Collection[TreeNode]:
        """Return the node behind which a tree is made."""
        return () if self._asked is None else (self._asked[0],)

    @property
    def typical(self) -> Sequence[float]:
        """Return the chances at a middling margin."""
        return _MARGIN_PRIORS[len(_MARGINS) // 2 + 1]

    def begin(
        self, text: Sequence[int], root: TreeNode, nodes: Sequence[TreeNode]
    ) -> TreeQuestion | None:
        """Ask for a tree behind the first of ``nodes``; ``text`` may grow meanwhile."""
        place = nodes[0]
        place.seen_by.append(self)
        self._text = text
        question = TreeQuestion(tuple(text), tuple(place.list_path(root) or ()))
        self._asked = place, question
        return question

    def finish(self, root: TreeNode, answer: TokenTree) -> None:
        """Add the tree, or what is left of it below ``root``."""
        assert self._asked is not None
        (place, question), self._asked = self._asked, None
        below: dict[int, list[int]] = {}
        for number, above in enumerate(answer.parents):
            below.setdefault(above, []).append(number)
        start = -1
        if place.list_path(root) is None:  # the text has gone past the place, or elsewhere
            asked = (*question.text, *question.guessed)
            if tuple(self._text[: len(asked)]) != asked:
                return
            for token in self._text[len(asked) :]:
                found = (each for each in below.get(start, ()) if answer.tokens[each] == token)
                if (start := next(found, -1)) < 0:
                    return
            place = root
        waiting = [(place, start)]
        while waiting:
            parent, number = waiting.pop()
            numbers = sorted(below.get(number, ()), key=lambda each: -answer.chances[each])
            if not numbers:
                continue
            if self not in parent.seen_by:
                parent.seen_by.append(self)
            rate = DraftRate([answer.chances[each] for each in numbers])
            parent.add_drafts(rate, [answer.tokens[each] for each in numbers], self._ends)
            for each in numbers:
                if (child := parent.children.get(answer.tokens[each])) is not None:
                    waiting.append((child, each))


class NgramRates:
    """How often n-grams come true, by their length."""

    def __init__(self) -> None:
        self.by_length = {length: DraftRate(prior) for length, prior in _NGRAM_PRIORS.items()}


class InstantDrafts:
    """What sources that need no step have alike."""

    is_instant = True
    awaited: Collection[TreeNode] = ()
    typical: Sequence[float] = ()  # nobody waits for them

    def finish(self, root: TreeNode, answer: object) -> None:
        """Never called: there is no step."""


class NgramDrafts(InstantDrafts):
    """What followed the last tokens where they occurred before in the text, newest first."""

    def __init__(self, request: TextRequest, rates: NgramRates) -> None:
        self._request = request
        self._rates = rates.by_length
        self._known: dict[tuple[int, ...], list[int]] = {}
        self._read = 0  # tokens of the text that are known as followers

    def begin(self, text: Sequence[int], root: TreeNode, nodes: Sequence[TreeNode]) -> None:
        """Draft at once."""
        for place in range(self._read, len(text)):
            for length, rate in self._rates.items():
                if place >= length:
                    known = self._known.setdefault(tuple(text[place - length : place]), [])
                    if text[place] in known:
                        known.remove(text[place])
                    known.insert(0, text[place])
                    del known[len(rate.chances) :]
        self._read = len(text)
        longest = max(self._rates)
        for node in nodes:
            node.seen_by.append(self)
            path = node.list_path(root) or []
            last = [*text[-longest:], *path][-longest:]
            for length, rate in self._rates.items():
                found = self._known.get(tuple(last[-length:])) if len(last) >= length else None
                if found:
                    node.add_drafts(rate, found, self._request.eos_ids)
                    break
