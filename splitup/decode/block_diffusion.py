"""Block diffusion: a model writes a text block by block, and several tokens of a block at once.

A block begins as mask tokens and is ACTIVE. A step feeds it as it is, and a row attends to the
whole block and to all blocks before it, so every mask gets a token and a confidence. The tokens of
the highest confidence are chosen and never change; the others stay masks for the next iteration.
When all are chosen, the block is FROZEN. Only then is it committed: a step feeds its tokens once
more and the next step begins behind them, so that the cache keeps their rows. What an iteration
leaves in the cache is overwritten by the next step.

The commit takes no step of its own where the model's steps have room for two blocks: the next
block's first iteration is in the same step, behind the frozen block. Where logits are shifted, the
frozen block's last row then gives the next block's first token.

Blocks begin at multiples of their size. Whole blocks of the prompt are fed like frozen ones; what
remains of it is the beginning of the first active block. With ``ahead`` further blocks become
active, each once half of the block before it is chosen. They may choose confident tokens only.

Sources: SDAR (arXiv 2510.06303), Fast-dLLM v2 (arXiv 2509.26328), and D2F (arXiv 2508.09192) for
blocks ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from splitup.core.errors import InvalidInput
from splitup.decode.prompt import TextRequest
from splitup.decode.sampler import Sampler
from splitup.decode.step import Decoder, StepInput, make_block_step

Confidence = Literal["probability", "margin", "entropy"]
CONFIDENCES: Final[tuple[Confidence, ...]] = get_args(Confidence)
_MAX_AHEAD: Final = 7
_Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DiffusionOptions:
    """How the tokens of a block are chosen. ``block_size`` None is what the model was trained with.

    An iteration chooses the tokens whose confidence is above ``threshold``, and at least one. With
    ``iterations`` the threshold is without effect: the tokens are spread evenly over so many.
    ``confidence`` is the token's probability, the difference of the two largest probabilities, or
    e to the power of minus the entropy, which is 1 over the number of equally likely tokens.
    ``ahead`` is how many blocks may begin before the one in front of them is frozen. Raises
    InvalidInput for impossible values.
    """

    block_size: int | None = None
    threshold: float = 0.9
    confidence: Confidence = "probability"
    iterations: int | None = None
    ahead: int = 0

    def __post_init__(self) -> None:
        if self.block_size is not None and self.block_size < 1:
            raise InvalidInput(
                f"a block of {self.block_size} tokens is not possible; give 1 or more"
            )
        if not 0 <= self.threshold <= 1:
            raise InvalidInput(f"the threshold is {self.threshold}; give a number from 0 to 1")
        if self.confidence not in CONFIDENCES:
            raise InvalidInput(
                f"there is no confidence '{self.confidence}'; use one of {', '.join(CONFIDENCES)}"
            )
        if self.iterations is not None and self.iterations < 1:
            raise InvalidInput(f"{self.iterations} iterations are not possible; give 1 or more")
        if not 0 <= self.ahead <= _MAX_AHEAD:
            raise InvalidInput(
                f"{self.ahead} blocks ahead are not possible; give 0 to {_MAX_AHEAD}"
            )
        if self.ahead and self.iterations is not None:
            raise InvalidInput("blocks ahead choose tokens by the threshold; give no iterations")


@dataclass(slots=True)
class _Block:
    """An active block: its tokens, with masks in place of those that are not chosen yet."""

    start: int
    tokens: list[int]
    chosen: list[bool]
    iteration: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def list_open(self) -> list[int]:
        """Return the positions of the masks."""
        return [self.start + place for place, is_done in enumerate(self.chosen) if not is_done]


@dataclass(slots=True)
class _Iteration:
    """A step on its way: the masks that its logits are for.

    ``is_behind``: the logits for the first of them come from the step before.
    """

    number: int
    blocks: list[_Block]
    positions: list[int]
    is_behind: bool


class BlockDiffusionDecoder(Decoder):
    """Writes blocks with a model trained for them; the text is not that of other decoders.

    Raises InvalidInput for a model that writes no blocks, for blocks that no step has room for, and
    for a sampler that depends on the text so far.
    """

    def __init__(self, request: TextRequest, options: DiffusionOptions | None = None) -> None:
        if (blocks := request.blocks) is None:
            raise InvalidInput(
                "the model writes one token after the other, and the decoder 'diffusion' needs one "
                "that was trained for blocks; use another decoder"
            )
        super().__init__(request)
        self._options = options or DiffusionOptions()
        self._size = self._options.block_size or blocks.size
        self._mask_id, self._are_shifted = blocks.mask_id, blocks.are_shifted
        self._sampler = _check(request, self._size, self._options.ahead)
        self._limit = len(request.prompt) + request.max_tokens
        whole = len(request.prompt) // self._size * self._size
        self._frozen = list(request.prompt[:whole])  # whole blocks
        self._fed = min(request.cached // self._size * self._size, whole)  # valid cache rows
        self._active: list[_Block] = []
        self._told = len(request.prompt)  # the position of the next token to return
        self._steps = 0
        self._pending: _Iteration | None = None
        self._commit = -1  # the last step that fed frozen blocks alone
        self._first: _Logits | None = None  # of the token behind them, where logits are shifted
        self._open_blocks()

    @property
    def max_steps(self) -> int:
        """Return the largest number of further steps that may be needed: one token in each."""
        if self.finished:
            return 0
        most = self._options.iterations or self._size
        first = sum(min(len(block.list_open()), most) for block in self._active)
        steps = first + self._count_commits(len(self._frozen) - self._fed)
        for start in range(self._active[-1].end, self._last_end, self._size):
            steps += min(most, self._last_end - start)
            steps += self.request.chunk < 2 * self._size * (1 + self._options.ahead)
        return steps

    def next_step(self) -> StepInput | None:
        """Return the next step's rows, or None while logits are awaited or all is done."""
        if self.finished or self._pending is not None:
            return None
        number, self._steps = self._steps, self._steps + 1
        start, certain = self._fed, self._frozen[self._fed :]
        active = [token for block in self._active for token in block.tokens]
        chunk, size = self.request.chunk, self._size
        if len(certain) + len(active) > chunk:
            certain = certain[: chunk // size * size]
            self._commit = number
            self._fed += len(certain)
            return make_block_step(certain, start, (len(certain) - 1,), block_size=size)
        opened = [position for block in self._active for position in block.list_open()]
        rows = [position - self._are_shifted - start for position in opened]
        is_behind = rows[0] < 0
        self._pending = _Iteration(number, list(self._active), opened, is_behind)
        self._fed = len(self._frozen)
        outputs = rows[is_behind:] or [0]  # a step gives logits of one row at least
        return make_block_step([*certain, *active], start, outputs, block_size=size)

    def receive_logits(self, step: int, logits: _Logits) -> list[int]:
        """Take the logits of ``step``, float32 [R, vocab]; return the tokens they make certain.

        They are the chosen ones up to the first mask. An end token finishes the machine and is not
        returned.
        """
        if step == self._commit:
            self._first = logits[0]
        if self.finished or self._pending is None or step != self._pending.number:
            return []
        done, self._pending = self._pending, None
        rows: list[_Logits] = list(logits)
        if done.is_behind:
            assert self._first is not None
            rows.insert(0, self._first)
        found = dict(zip(done.positions, rows, strict=False))
        for block in done.blocks:
            self._choose(block, found)
        tokens = self._tell()
        while self._active and all(self._active[0].chosen):
            self._frozen += self._active.pop(0).tokens
        self._open_blocks()
        return tokens

    # ---- choosing ------------------------------------------------------------------------------

    def _choose(self, block: _Block, found: dict[int, _Logits]) -> None:
        """Choose tokens of a block, as many as an iteration chooses."""
        ends = [position for position, token in self._iter_chosen() if self._is_end(token)]
        opened = [place for place in block.list_open() if not ends or place < ends[0]]
        drawn = {place: self._draw(found[place], place, block.iteration) for place in opened}
        ranked = sorted(opened, key=lambda place: (-drawn[place][1], place))
        is_first = block is self._active[0]
        # all before it is certain, and the model's own next token follows
        sure = [
            place for place in opened if self._are_shifted and is_first and place == block.start
        ]
        if (most := self._options.iterations) is not None:
            count = self._size // most + (block.iteration < self._size % most)
            taken = [*sure, *(place for place in ranked if place not in sure)][: max(count, 1)]
        else:
            taken = [place for place in ranked if drawn[place][1] > self._options.threshold]
            taken += sure or (ranked[:1] if is_first and not taken else [])
        for place in taken:
            block.tokens[place - block.start] = drawn[place][0]
            block.chosen[place - block.start] = True
        block.iteration += 1

    def _draw(self, logits: _Logits, position: int, iteration: int) -> tuple[int, float]:
        """Return a token for a mask, and how confident the model is of it, 0 to 1."""
        logits = logits.copy()
        logits[self._mask_id] = -np.inf
        token = self._sampler.choose(logits, position, iteration)
        likely = self._sampler.compute_probabilities(logits)
        if not np.isfinite(likely).all():
            return token, 0.0
        if self._options.confidence == "probability":
            return token, float(likely[token])
        if self._options.confidence == "margin":
            second, first = np.partition(likely, -2)[-2:]
            return token, float(first - second)
        kept = likely[likely > 0]
        return token, float(np.exp((kept * np.log(kept)).sum()))

    def _tell(self) -> list[int]:
        """Return the chosen tokens that follow those returned so far, up to the first mask."""
        tokens: list[int] = []
        for position, token in self._iter_chosen():
            if position > self._told or self.finished:
                break
            if position < self._told:
                continue
            if self._is_end(token):
                self.finished = True
                break
            tokens.append(token)
            self._told += 1
            self.finished = self._told == self._limit
        return tokens

    def _iter_chosen(self) -> Iterator[tuple[int, int]]:
        """Yield the chosen tokens of the active blocks that are no part of the prompt."""
        for block in self._active:
            for place, token in enumerate(block.tokens):
                if block.chosen[place] and block.start + place >= len(self.request.prompt):
                    yield block.start + place, token

    def _is_end(self, token: int) -> bool:
        return token in self.request.eos_ids

    # ---- blocks --------------------------------------------------------------------------------

    @property
    def _last_end(self) -> int:
        """Return where the last block ends: it is a whole one unless the model has no positions."""
        return min(-(-self._limit // self._size) * self._size, self.request.context)

    def _open_blocks(self) -> None:
        """Begin the first active block, and blocks ahead where half of the last one is chosen."""
        while not self.finished and len(self._active) <= self._options.ahead:
            start = len(self._frozen)
            if self._active:
                last = self._active[-1]
                start = last.end
                if 2 * sum(last.chosen) < len(last.tokens) or start >= self._last_end:
                    return
            given = self.request.prompt[start : start + self._size] if not self._active else ()
            masks = min(self._size, self.request.context - start) - len(given)
            self._active.append(
                _Block(
                    start,
                    [*given, *(self._mask_id,) * masks],
                    [True] * len(given) + [False] * masks,
                )
            )

    def _count_commits(self, certain: int) -> int:
        """Return how many steps feed frozen tokens alone, before the first iteration."""
        chunk, count = self.request.chunk, 0
        active = sum(len(block.tokens) for block in self._active)
        while certain and certain + active > chunk:
            certain -= min(certain, chunk // self._size * self._size)
            count += 1
        return count


def _check(request: TextRequest, size: int, ahead: int) -> Sampler:
    """Return the request's sampler; raise InvalidInput where blocks of this size cannot be fed."""
    if size * (1 + ahead) > request.chunk:
        raise InvalidInput(
            f"{1 + ahead} blocks of {size} tokens take {size * (1 + ahead)} rows a step, and the "
            f"model takes {request.chunk}; give smaller blocks or fewer ahead"
        )
    if not isinstance(request.sampler, Sampler):
        raise InvalidInput(
            "a model that writes blocks of tokens chooses them in any order; penalties, biases, "
            "grammars and recorded probabilities need a model that writes one after the other"
        )
    return request.sampler
