"""A sequence model in plain Python: its logits are a function of the tokens that a row sees."""

from __future__ import annotations

import numpy as np

from splitup.decode.step import Decoder, StepInput, make_arrays

VOCAB = 16


class SequenceModel:
    """Takes steps in the layout of real models. The next token depends on the last ``memory``."""

    def __init__(self, chunk: int = 64, memory: int = 2, vocab: int = VOCAB) -> None:
        self.chunk, self.memory, self.vocab = chunk, memory, vocab
        self.cache: list[int] = []  # the rows that counted, and those of the last step
        self.rows = self.steps = 0

    def run(self, step: StepInput) -> np.ndarray:
        arrays = make_arrays(step, self.chunk)
        tokens, layout, outputs = arrays["tokens"], arrays["layout"], arrays["outputs"]
        start, chunk = int(layout[0, 1]), self.chunk
        kept = []
        for row in range(start):
            place = row - (start - chunk)
            shift = int(layout[0, 2 + chunk + place]) if place >= 0 else 0
            kept.append(self.cache[row + shift])
        self.cache = kept + [int(token) for token in tokens]
        self.rows, self.steps = self.rows + len(tokens), self.steps + 1
        logits = []
        for output in outputs:
            seen = [int(source) for source in layout[output, 2 : 2 + chunk]]
            depth = int(layout[output, 0]) - start + 1
            assert all(seen[:depth]) and not any(seen[depth:]), "a row sees its path, no more"
            logits.append(self.compute_logits(kept + [int(tokens[s - 1]) for s in seen[:depth]]))
        return np.stack(logits)

    def compute_logits(self, sequence: list[int]) -> np.ndarray:
        key = sum((token + 1) * 31**place for place, token in enumerate(sequence[-self.memory :]))
        return np.random.default_rng(key).normal(0, 2, self.vocab).astype(np.float32)


def decode(
    decoder: Decoder, model: SequenceModel, *, pipelined: bool = False
) -> tuple[list[int], int]:
    """Return the tokens and the number of steps; pipelined, a step runs before the last is seen."""
    tokens: list[int] = []
    waiting: list[tuple[int, np.ndarray]] = []
    steps = 0
    while not decoder.finished:
        step = decoder.next_step()
        if step is not None:
            waiting.append((steps, model.run(step)))
            steps += 1
            if pipelined:
                continue
        number, logits = waiting.pop(0)
        tokens += decoder.receive_logits(number, logits)
    return tokens, steps


class BlockModel:
    """Takes steps whose rows see blocks, and attends twice, as two layers do.

    So a row that saw a mask, or a later block, gives other logits to whoever sees it.
    """

    def __init__(self, chunk: int = 64, vocab: int = VOCAB, sharpness: float = 3.0) -> None:
        self.chunk, self.vocab, self.sharpness = chunk, vocab, sharpness
        self.cache: list[tuple[int, int]] = []  # of each row, what the layers keep
        self.rows = 0

    def run(self, step: StepInput) -> np.ndarray:
        arrays = make_arrays(step, self.chunk)
        tokens, layout = arrays["tokens"], arrays["layout"]
        start = int(layout[0, 1])
        assert start <= len(self.cache) and not layout[0, 2 + self.chunk :].any()
        seen = [[int(source) - 1 for source in row[2 : 2 + self.chunk] if source] for row in layout]
        first = [hash(pair) for pair in zip(tokens.tolist(), layout[:, 0].tolist(), strict=True)]
        second = self._attend(first, seen, [kept for kept, _ in self.cache[:start]])
        third = self._attend(second, seen, [kept for _, kept in self.cache[:start]])
        self.cache = self.cache[:start] + list(zip(first, second, strict=True))
        self.rows += len(tokens)
        return np.stack([self._draw(third[row]) for row in arrays["outputs"]])

    @staticmethod
    def _attend(rows: list[int], seen: list[list[int]], cached: list[int]) -> list[int]:
        return [
            hash((rows[row], *cached, *(rows[other] for other in others)))
            for row, others in enumerate(seen)
        ]

    def _draw(self, key: int) -> np.ndarray:
        random = np.random.default_rng(key % 2**63)
        return random.normal(0, self.sharpness, self.vocab).astype(np.float32)
