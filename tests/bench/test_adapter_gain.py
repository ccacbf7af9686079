"""The shipped adapter's gain on the shipped sample, with and without encryption."""

from __future__ import annotations

from splitup_private.adapters.weights import load_adapter

from bench.measure.adapter_gain import ADAPTER, SAMPLE, measure_gain

TOKENS = 96


def test_encryption_leaves_the_gain_as_it_is() -> None:
    assert sum(path.stat().st_size for path in ADAPTER.iterdir()) <= 100_000
    gain = measure_gain(load_adapter(ADAPTER), SAMPLE.read_text(), TOKENS)
    assert gain.tokens == TOKENS
    assert gain.without - gain.plain > 0.2
    assert abs(gain.encrypted - gain.plain) <= 1e-4
