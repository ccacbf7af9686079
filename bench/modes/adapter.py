"""Encrypted adapters: CPU time, bytes and error of one hidden state; the example adapter's gain."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Final

import numpy as np
from splitup_private.adapters.ckks import ClientKeys, Evaluation, get_library
from splitup_private.adapters.layout import get_layout
from splitup_private.adapters.weights import get_total_bits, load_adapter, make_adapter

from bench.measure.adapter_gain import ADAPTER, SAMPLE, measure_gain
from bench.report import Bar, Report, say

WIDTH: Final = 1536
RANK: Final = 16
ROUNDS: Final = 200
QUICK_ROUNDS: Final = 10
QUICK_TOKENS: Final = 50
CPU_BAR_MS: Final = 15.0
BYTES_BAR: Final = 260_000
ERROR_BAR: Final = 1e-5
GAIN_BAR: Final = 1e-4


def run(quick: bool) -> Report:
    """Encrypt random hidden states of unit variance, apply a random adapter, decrypt."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=(RANK, WIDTH)) / WIDTH**0.5
    b = rng.normal(size=(WIDTH, RANK)) * 0.1 / RANK**0.5
    adapter = make_adapter(a, b, 1.0, "random")
    layout, keys = get_layout(adapter.info), ClientKeys(adapter.info.parameters)
    started = time.thread_time()
    rotations = keys.make_rotation_keys(layout.steps)
    keys_ms = 1e3 * (time.thread_time() - started)
    host = Evaluation(layout, adapter.a, adapter.b, get_total_bits(adapter.info))
    host.load_keys(rotations)
    stages: list[list[float]] = []
    errors, sizes = [], []
    for number in range((QUICK_ROUNDS if quick else ROUNDS) + 1):
        hidden = rng.normal(size=WIDTH)
        length = float(np.linalg.norm(hidden))
        times = [time.thread_time()]
        sent = keys.encrypt(layout.pack(hidden / length))
        times.append(time.thread_time())
        answer, _ = host.apply(sent)
        times.append(time.thread_time())
        found = layout.unpack(keys.decrypt(answer)) * (2.0**adapter.info.answer_bits * length)
        times.append(time.thread_time())
        if number:  # the first one fills caches
            stages.append([*(1e3 * np.diff(times)), 1e3 * (times[-1] - times[0])])
        errors.append(float(np.abs(found - adapter.compute(hidden)).max()))
        sizes.append((len(sent), len(answer)))
    say(f"{len(stages)} hidden states of {WIDTH} elements")
    medians = np.median(stages, 0).round(2).tolist()
    gain = measure_gain(load_adapter(ADAPTER), SAMPLE.read_text(), QUICK_TOKENS if quick else 10**6)
    figures = {
        "library": get_library(),
        "bytes up, down (largest)": np.max(sizes, 0).tolist(),
        "bytes of the keys, once": len(rotations),
        "ms to make the keys, once": round(keys_ms, 1),
        "example adapter, nats/token": asdict(gain),
    }
    parts = dict(zip(("encrypt ms", "host ms", "decrypt ms"), medians, strict=False))
    parts["fastest ms"] = round(min(row[-1] for row in stages), 2)
    return Report(
        [
            Bar("CPU time of one hidden state", medians[-1], "ms", CPU_BAR_MS, beside=parts),
            Bar("bytes both ways", float(max(map(sum, sizes))), "B", at_most=BYTES_BAR),
            Bar("largest error", max(errors), "", at_most=ERROR_BAR),
            Bar(
                "difference that encryption makes to the gain",
                abs(gain.encrypted - gain.plain),
                "nats/token",
                at_most=GAIN_BAR,
                beside={"gain": round(gain.without - gain.encrypted, 4)},
            ),
        ],
        figures,
    )
