"""Drafts of a model that writes blocks of tokens: several levels of the tree from one step.

Behind a node the rest of its block is masks, and one step of the draft model ranks tokens for all
of them (DFlash, arXiv 2602.06036; as a tree: arXiv 2604.12989). They are ranked one by one, not
together: all nodes at one place of the block get the same drafts, and how often these come true is
counted by place.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from splitup.core.errors import InvalidInput
from splitup.decode.prompt import Blocks, TextRequest
from splitup.decode.speculation.rates import RANKS
from splitup.decode.speculation.sources import ModelDrafts, ModelRates
from splitup.decode.speculation.tree import TreeNode, walk
from splitup.decode.step import StepInput, make_block_step

_GROWN_AT_ONCE: Final = 64  # nodes among which those of one step get their drafts
_Ranked = list[tuple[int, float]]  # tokens and their scores


class BlockDrafts(ModelDrafts):
    """A block model's likeliest tokens for the rest of a block, under the target's noise.

    A step feeds the certain text in blocks, and for every node its path and masks behind it. The
    cache keeps whole blocks of certain tokens only.
    """

    def __init__(
        self,
        request: TextRequest,
        rates: ModelRates,
        *,
        chunk: int,
        context: int,
        blocks: Blocks,
    ) -> None:
        """Take the draft model's values. Raises InvalidInput for steps without room for blocks."""
        super().__init__(request, rates, chunk=chunk, context=context)
        self._size, self._mask_id = blocks.size, blocks.mask_id
        self._are_shifted = blocks.are_shifted
        least = blocks.size * (1 + blocks.are_shifted)
        if chunk < least:
            raise InvalidInput(
                f"the draft model takes {chunk} rows a step, too few for its blocks of "
                f"{blocks.size} tokens; register one that was cut with --chunk {least} or more"
            )
        self._counts: list[int] = []  # of the masks behind each node of the step

    def begin(
        self, text: Sequence[int], root: TreeNode, nodes: Sequence[TreeNode]
    ) -> StepInput | None:
        """Return a step of the model, which may feed blocks of a long text at first."""
        size, self._nodes, self._counts = self._size, [], []
        certain = len(text) // size * size
        # where logits are shifted, those of the first mask are of the block before
        start = max(0, min(self._fed, certain - size * self._are_shifted))
        tokens = list(text[start:certain])
        if len(tokens) + size > self._chunk and len(text) < self._context:
            whole = min(len(tokens), self._chunk // size * size)
            self._fed = start + whole
            return make_block_step(tokens[:whole], start, (whole - 1,), block_size=size)
        sees: list[Sequence[int]] = list(make_block_step(tokens, start, block_size=size).sees)
        positions = list(range(start, certain))
        outputs: list[int] = []
        lines: dict[tuple[int, ...], list[int]] = {(): list(range(len(tokens)))}

        def add(fed: Sequence[int], before: list[int], position: int) -> list[int]:
            """Add the rows of a block; return them behind those before it."""
            line = [*before, *range(len(tokens), len(tokens) + len(fed))]
            tokens.extend(fed)
            sees.extend([line] * len(fed))
            positions.extend(range(position, position + len(fed)))
            return line

        for node in nodes:
            known = (*text[certain:], *(node.list_path(root) or ()))
            ends = range(size, len(known) + 1, size)  # of the whole blocks in it
            missing = [end for end in ends if known[:end] not in lines]
            rest = known[len(ends) * size :]
            place = certain + len(ends) * size
            masks = min(size, self._context - place) - len(rest)
            count = size * len(missing) + len(rest) + masks
            last = place + len(rest) + masks
            if masks > 0 and max(len(tokens) + count, last - start) > self._chunk:
                continue
            node.seen_by.append(self)
            if masks <= 0:
                continue  # the model has no further position
            for end in missing:
                block = known[end - size : end]
                lines[known[:end]] = add(block, lines[known[: end - size]], certain + end - size)
            behind = lines[known[: len(ends) * size]]
            line = add((*rest, *(self._mask_id,) * masks), behind, place)
            outputs += [line[row - start - self._are_shifted] for row in range(last - masks, last)]
            self._nodes.append(node)
            self._counts.append(masks)
        if not self._nodes:
            for node in nodes:
                node.seen_by.append(self)
            return None
        self._fed = certain
        return StepInput(tuple(tokens), tuple(positions), start, tuple(sees), tuple(outputs))

    def finish(self, root: TreeNode, logits: npt.NDArray[np.float32]) -> None:
        """Rank the logits of all masks, and let the tree grow where it is likeliest."""
        places: dict[
            TreeNode, tuple[TreeNode, int]
        ] = {}  # a node behind which, or below which, are masks
        ranked: dict[TreeNode, list[_Ranked]] = {}
        row = 0
        for base, count in zip(self._nodes, self._counts, strict=True):
            found, row = logits[row : row + count], row + count
            path = base.list_path(root)
            if path is not None and not np.isnan(found).any():
                ranked[base] = self._rank(found, base.position, path)
                places[base] = base, 0
        last = max((base.position + len(ranks) for base, ranks in ranked.items()), default=0)
        ends = self._request.eos_ids
        for _, node, _ in itertools.islice(walk(root, last), _GROWN_AT_ONCE):
            if node not in places:
                continue
            base, depth = places[node]
            if depth:
                if self in node.seen_by:
                    continue
                node.seen_by.append(self)
            drafts = ranked[base][depth]
            rate = self._rates.find([score for _, score in drafts], depth)
            node.add_drafts(rate, [token for token, _ in drafts], ends)
            for token, _ in drafts if depth + 1 < len(ranked[base]) else ():
                if (child := node.children.get(token)) is not None:
                    places.setdefault(child, (base, depth + 1))
        self._nodes, self._counts = [], []

    def _rank(
        self, logits: npt.NDArray[np.float32], position: int, path: list[int]
    ) -> list[_Ranked]:
        """Return the likeliest tokens for each mask behind ``position``, as if the best came."""
        ranked, ahead = [], list(path)
        found = logits.copy()
        found[:, self._mask_id] = -np.inf
        for place, row in enumerate(found[:, : self._request.vocab]):
            ranked.append(self._request.sampler.rank(row, position + place, RANKS, ahead))
            ahead.append(ranked[-1][0][0])
        return ranked
