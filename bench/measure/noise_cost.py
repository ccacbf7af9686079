"""What noise on hidden states costs, in nats per token, beside its ε.

    python -m bench.measure.noise_cost [TEXT]    by default the documentation's guides

The example model with 0 and with 1 private block, texts of 64 tokens, δ = 1e-6 for one text. Prints
one JSON object per number of blocks: nats per token without noise, and by ε, for a text and for a
row. ``inf`` adds none: it is what unit vectors alone cost.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends.source_model import Sizes
from splitup_private.attacks.measure import open_tokenizer
from splitup_private.attacks.split_model import AttackedModel, AttackedText
from splitup_private.split.noise import Noise, RowNoise, compute_epsilon

from splitup.core.tensors import array_to_bytes, bytes_to_array
from splitup.decode.step import StepInput, make_causal_step

ROOT: Final = Path(__file__).resolve().parents[2]
EPSILONS: Final = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6, math.inf)
_LENGTH: Final = 64  # tokens of a text, which is one session
_TOKENS: Final = 2_048
_DELTA: Final = 1e-6


class NoisyText(AttackedText):
    """A text whose hidden states get noise before the nodes see them."""

    def __init__(self, model: AttackedModel, noise: RowNoise | None) -> None:
        super().__init__(model)
        self._noise = noise

    def _begin(self, step: StepInput) -> Any:
        values = super()._begin(step)
        [(spec, place)] = self._sent
        if self._noise is not None:
            rows = bytes_to_array(spec, values[place])
            values[place] = array_to_bytes(spec, self._noise.add(rows))
        return values


def compute_loss(model: AttackedModel, tokens: list[int], make_noise: Any) -> float:
    """Return the nats per token of texts of ``_LENGTH`` tokens, the first of each left out."""
    total, count = 0.0, 0
    for start in range(0, len(tokens) - _LENGTH + 1, _LENGTH):
        part = tokens[start : start + _LENGTH]
        text = NoisyText(model, make_noise())
        for first in range(0, _LENGTH, model.chunk):
            fed = part[first : first + model.chunk]
            logits = text.feed(make_causal_step(fed, first, range(len(fed)))).logits
            wanted = part[first + 1 : first + len(fed) + 1]
            scores = logits[: len(wanted)].astype(np.float64)
            scores -= scores.max(axis=1, keepdims=True)
            chosen = scores[np.arange(len(wanted)), wanted]
            total += float((np.log(np.exp(scores).sum(axis=1)) - chosen).sum())
            count += len(wanted)
    return total / count


def measure(blocks: int, text: str) -> dict[str, Any]:
    """Return the cost of noise when the user keeps so many blocks at each end."""
    example = str(ROOT / "examples" / "packages-4m")
    compiled = build(example, 10**9, sizes=Sizes(chunk=_LENGTH), private=blocks)
    with open_tokenizer(compiled) as tokenizer:
        model, tokens = AttackedModel(compiled), tokenizer.encode(text)[:_TOKENS]
    assert compiled.manifest.text is not None
    spread = np.linspace(0, compiled.manifest.text.vocab - 1, _LENGTH).astype(int).tolist()
    length = float(
        np.median(np.linalg.norm(AttackedText(model).send(make_causal_step(spread, 0)), axis=1))
    )

    def cost(epsilon: float) -> dict[str, float]:
        noises = []

        def make_noise() -> RowNoise:
            noises.append(RowNoise(Noise(min(epsilon, 1e6), _DELTA), _LENGTH, length))
            if epsilon == math.inf:
                noises[-1].sigma = 0.0
            return noises[-1]

        loss = compute_loss(model, tokens, make_noise)
        sigma = noises[0].sigma
        row = compute_epsilon(sigma, _DELTA, 1) if sigma else math.inf
        return {"epsilon": epsilon, "epsilon_row": row, "sigma": sigma, "nats": loss}

    without = compute_loss(model, tokens, lambda: None)
    return {"blocks": blocks, "without": without, "noise": [cost(one) for one in EPSILONS]}


def main() -> None:
    """Measure with 0 and with 1 private block."""
    files = [Path(name) for name in sys.argv[1:]] or sorted((ROOT / "docs/guides").glob("*.md"))
    text = "".join(path.read_text() for path in files)
    for blocks in (0, 1):
        print(json.dumps(measure(blocks, text)), flush=True)


if __name__ == "__main__":
    main()
