"""Random adapters of typical size: they change a hidden state of unit variance by about 0.1."""

from __future__ import annotations

import numpy as np
from splitup_private.adapters.ckks import ClientKeys, Evaluation
from splitup_private.adapters.layout import get_layout
from splitup_private.adapters.weights import Adapter, get_total_bits, make_adapter


def make_random(width: int, rank: int, seed: int = 0, name: str = "random") -> Adapter:
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(rank, width)) / width**0.5
    b = rng.normal(size=(width, rank)) * 0.1 / rank**0.5
    return make_adapter(a, b, 1.0, name)


def make_evaluation(adapter: Adapter, keys: ClientKeys) -> Evaluation:
    """Return a host's evaluation with a client's keys, in this process."""
    layout = get_layout(adapter.info)
    made = Evaluation(layout, adapter.a, adapter.b, get_total_bits(adapter.info))
    made.load_keys(keys.make_rotation_keys(layout.steps))
    return made
