"""Trees of drafts and samplings as messages of strangers: what is taken from them, and given."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from splitup.core.errors import InvalidInput
from splitup.decode.adjusted_sampler import AdjustedSampler, Adjustments
from splitup.decode.sampler import Sampler, TokenChooser
from splitup.decode.speculation.sources import TokenTree
from splitup.decode.step import StepInput
from splitup_speculation import speculation_pb2 as pb

MAX_DEPTH: Final = 32  # of a recursive tree; protobuf's own parser stops at 100 nested messages


def write_tree(tree: TokenTree) -> pb.TokenTree:
    """Return the flat form of a tree."""
    logs = [math.log(max(chance, 1e-30)) for chance in tree.chances]
    return pb.TokenTree(tokens=tree.tokens, parents=tree.parents, log_probs=logs)


def read_tree(message: pb.TokenTree, *, vocabulary: int, most: int) -> TokenTree:
    """Return a tree in either form, which a stranger made; raise InvalidInput for a bad one.

    ``most`` is the largest number of nodes. Without probabilities all are 1.
    """
    if message.roots and (message.tokens or message.parents or message.log_probs):
        raise InvalidInput("the drafts are given both as tokens and as roots; give one of them")
    if message.roots:
        tokens, parents, logs = _flatten(message.roots, most)
    else:
        tokens, parents = list(message.tokens), list(message.parents)
        logs = list(message.log_probs) or [0.0] * len(tokens)
    if not len(tokens) == len(parents) == len(logs):
        raise InvalidInput(
            f"the drafts have {len(tokens)} tokens, {len(parents)} parents and {len(logs)} "
            "log_probs; give as many of each"
        )
    if len(tokens) > most:
        raise InvalidInput(f"the drafts have {len(tokens)} nodes; there is room for {most}")
    _check_tokens(tokens, vocabulary)
    known: set[tuple[int, int]] = set()
    for node, (token, parent, log) in enumerate(zip(tokens, parents, logs, strict=True)):
        if not -1 <= parent < node:
            raise InvalidInput(f"draft {node} continues node {parent}, which is no earlier one")
        if not (math.isfinite(log) and log <= 1e-6):
            raise InvalidInput(f"draft {node} has the log_prob {log}; it is finite and at most 0")
        if (parent, token) in known:
            raise InvalidInput(f"node {parent} of the drafts is followed by token {token} twice")
        known.add((parent, token))
    return TokenTree(tuple(tokens), tuple(parents), tuple(math.exp(min(log, 0.0)) for log in logs))


def _flatten(roots: Sequence[pb.TokenNode], most: int) -> tuple[list[int], list[int], list[float]]:
    tokens: list[int] = []
    parents: list[int] = []
    logs: list[float] = []
    waiting: list[tuple[pb.TokenNode, int, int]] = []

    def add(nodes: Sequence[pb.TokenNode], parent: int, depth: int) -> None:
        if nodes and (depth > MAX_DEPTH or len(tokens) + len(waiting) + len(nodes) > most):
            raise InvalidInput(  # before each node becomes an object of 200 bytes
                f"the drafts have more than {most} nodes, or are deeper than {MAX_DEPTH}"
            )
        waiting.extend((node, parent, depth) for node in reversed(nodes))

    add(roots, -1, 1)
    while waiting:
        node, parent, depth = waiting.pop()
        tokens.append(node.token_id)
        parents.append(parent)
        logs.append(node.log_prob)
        add(node.children, len(tokens) - 1, depth + 1)
    return tokens, parents, logs


def find_path(tree: TokenTree, tokens: Iterable[int]) -> int:
    """Return how many of the first ``tokens`` are a path of the tree; the rest is not looked at."""
    below = {pair: node for node, pair in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    node, length = -1, 0
    for token in tokens:
        if (node, token) not in below:
            break
        node, length = below[node, token], length + 1
    return length


def read_tokens(tokens: Sequence[int], *, vocabulary: int, most: int) -> list[int]:
    """Return tokens of a stranger; raise InvalidInput for too many, or unknown ones."""
    if len(tokens) > most:
        raise InvalidInput(f"the request has {len(tokens)} tokens; there is room for {most}")
    found = list(tokens)
    _check_tokens(found, vocabulary)
    return found


def _check_tokens(tokens: Sequence[int], vocabulary: int) -> None:
    unknown = next((token for token in tokens if token >= vocabulary), None)
    if unknown is not None:
        raise InvalidInput(f"token {unknown} is outside the vocabulary of {vocabulary}")


@dataclass(frozen=True, slots=True)
class TreeSampling:
    """How tokens of one text are chosen; its first ``prompt_length`` tokens are the prompt."""

    sampler: Sampler
    adjustments: Adjustments
    prompt_length: int

    def make_chooser(self, vocabulary: int, text: Sequence[int]) -> TokenChooser:
        """Return what chooses the tokens behind ``text``."""
        if self.adjustments.is_empty:
            return self.sampler
        chooser = AdjustedSampler(self.sampler, self.adjustments, vocabulary)
        chooser.follow(text[: self.prompt_length], text[self.prompt_length :])
        return chooser


def read_sampling(message: pb.Sampling) -> TreeSampling:
    """Return a stranger's sampling; raise InvalidInput for an impossible one."""
    top_p = message.top_p or 1.0
    return TreeSampling(
        Sampler(message.temperature, message.seed, message.top_k, top_p, message.min_p),
        Adjustments(
            frequency_penalty=message.frequency_penalty,
            presence_penalty=message.presence_penalty,
            repetition_penalty=message.repetition_penalty or 1.0,
        ),
        message.prompt_length,
    )


def write_sampling(sampling: TreeSampling) -> pb.Sampling:
    """Return a sampling as a message. Raises InvalidInput for what workers do not take."""
    sampler, ours = sampling.sampler, sampling.adjustments
    if ours.bias or ours.top_logprobs is not None:
        raise InvalidInput("workers take penalties, but neither token biases nor logprobs")
    return pb.Sampling(
        temperature=sampler.temperature,
        seed=sampler.seed,
        top_k=sampler.top_k,
        top_p=sampler.top_p,
        min_p=sampler.min_p,
        frequency_penalty=ours.frequency_penalty,
        presence_penalty=ours.presence_penalty,
        repetition_penalty=ours.repetition_penalty,
        prompt_length=sampling.prompt_length,
    )


def compute_digest(tokens: Sequence[int]) -> int:
    """Return the digest of a prefix."""
    digest = hashlib.sha256(np.array(tokens, "<u4").tobytes()).digest()
    return int.from_bytes(digest[:8], "little")


class HeldTokens:
    """The tokens of one cache: those before the last step's start, and that step's rows."""

    def __init__(self) -> None:
        self._before: list[int] = []
        self._last: StepInput | None = None

    @property
    def start(self) -> int:
        """Return where the last step began."""
        return len(self._before)

    def find(self, start: int, kept: Sequence[int]) -> list[int] | None:
        """Return the first ``start`` tokens if rows ``kept`` of the last step are their end.

        None if a step cannot begin there.
        """
        before, last = self._before, self._last
        if not kept:
            return before[:start] if start <= len(before) else None
        if last is None or start != len(before) + len(kept):
            return None
        for count, row in enumerate(kept, 1):
            if row >= len(last.sees) or list(last.sees[row]) != list(kept[:count]):
                return None
        return before + [last.tokens[row] for row in kept]

    def feed(self, before: list[int], step: StepInput) -> None:
        """Note a step behind the tokens that ``find`` has returned for it."""
        self._before, self._last = before, step
