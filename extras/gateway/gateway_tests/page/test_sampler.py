"""The page's sampler chooses the tokens of the Python one: same logits, seed and options."""

from __future__ import annotations

from typing import Any

import numpy as np
from gateway_tests.page.device import run_on_device

from splitup.decode.adjusted_sampler import AdjustedSampler, Adjustments
from splitup.decode.sampler import Sampler, compute_gumbel

CASES = 100
STEPS = 4
CHOOSE = """
    return given.map(({ options, prompt, logits, position }) => {
        const sampling = { ...page.GREEDY, ...options, seed: BigInt(options.seed) };
        const sampler = new page.Sampler(kernels, sampling, prompt);
        return logits.map((values, step) =>
            sampler.choose(page.makeKnown(Float32Array.from(values)), position + step));
    });
"""


def make_case(random: np.random.Generator) -> dict[str, Any]:
    """Return options and logits; many are equal, so that ties are decided too."""
    vocab = int(random.choice([1, 2, 9, 100, 1_500, 3_000]))
    logits = random.normal(0, random.choice([0.1, 1, 5]), (STEPS, vocab)).astype(np.float32)
    if random.random() < 0.4:
        logits = np.round(logits)
    options: dict[str, Any] = {
        "temperature": float(random.choice([0, 0.01, 0.7, 1, 3])),
        "seed": str(random.integers(0, 2**64, dtype=np.uint64)),
        "top_k": int(random.choice([0, 0, 1, 7, 5_000])),
        "top_p": float(random.choice([1, 1, 0.01, 0.5, 0.9, 0.999])),
        "min_p": float(random.choice([0, 0, 0.05, 0.5, 1])),
    }
    if random.random() < 0.5:
        options |= {
            "repetition_penalty": float(random.choice([1, 0.8, 1.3])),
            "frequency_penalty": float(random.choice([0, -0.3, 0.7])),
            "presence_penalty": float(random.choice([0, 1.1])),
        }
    prompt = random.integers(0, vocab, random.integers(0, 5)).tolist()
    position = int(random.integers(0, 2**31))
    return {"options": options, "prompt": prompt, "logits": logits.tolist(), "position": position}


def choose(case: dict[str, Any]) -> list[int]:
    logits = np.array(case["logits"], np.float32)
    given = dict(case["options"])
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    adjustments = Adjustments(**{name: given.pop(name) for name in names if name in given})
    sampler = Sampler(**{**given, "seed": int(given["seed"])})
    adjusted = AdjustedSampler(sampler, adjustments, logits.shape[1], prompt=case["prompt"])
    return [adjusted.choose(row, case["position"] + step) for step, row in enumerate(logits)]


def test_tokens_are_those_of_the_python_sampler() -> None:
    random = np.random.default_rng(15)
    cases = [make_case(random) for _ in range(CASES)]
    found = run_on_device(CHOOSE, cases)
    for case, tokens in zip(cases, found, strict=True):
        assert tokens == choose(case), case["options"]


def test_the_noise_is_the_same() -> None:
    keys = [(0, 0), (5, 7), (2**64 - 1, 2**31), (2**63 + 11, 1)]
    program = """
        return given.map(([seed, position, count]) => {
            const uniform = kernels.drawUniform(BigInt(seed), position, count);
            return [Array.from(uniform), Array.from(uniform, (u) => -Math.log(-Math.log(u)))];
        });
    """
    found = run_on_device(program, [[str(seed), position, 1_001] for seed, position in keys])
    for (seed, position), (uniform, noise) in zip(keys, found, strict=True):
        key = np.array([seed, position], np.uint64)
        raw = np.random.Philox(counter=0, key=key).random_raw(1_001)
        assert uniform == (((raw >> np.uint64(11)).astype(float) + 0.5) * 2.0**-53).tolist()
        wanted = compute_gumbel(seed, position, 1_001)  # logarithms of libraries differ in 1 ulp
        assert np.abs(noise - wanted).max() <= 4e-16 * max(1, np.abs(wanted).max())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature is -1"),
    ({"temperature": None}, "temperature is null"),
    ({"top_k": 1.5}, "top_k is 1.5"),
    ({"top_p": 0}, "top_p is 0"),
    ({"min_p": 1.1}, "min_p is 1.1"),
    ({"seed": "-1"}, "the seed is"),
    ({"seed": str(2**64)}, "the seed is"),
    ({}, "contain NaN"),
]


def test_what_cannot_be_sampled_is_refused() -> None:
    program = """
        return given.map((options) => {
            try {
                const sampling = { ...page.GREEDY, ...options, seed: BigInt(options.seed ?? 0) };
                const logits = page.makeKnown(Float32Array.of(1, NaN));
                return String(new page.Sampler(kernels, sampling).choose(logits, 0));
            } catch (error) { return error.message; }
        });
    """
    found = run_on_device(program, [options for options, _ in REFUSED])
    assert all(words in text for (_, words), text in zip(REFUSED, found, strict=True)), found
