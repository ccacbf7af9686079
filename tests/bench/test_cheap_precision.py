from __future__ import annotations

import numpy as np
import pytest

from bench.measure.cheap_precision import EXECUTION_TOKENS, SHARES, expect_tokens, list_cheaper
from tests.deploy.calibration.test_calibrate import BLOCK, GRAPH


def test_every_token_counts_until_a_drawn_task_convicts() -> None:
    assert expect_tokens(10_000, 1) == EXECUTION_TOKENS
    assert expect_tokens(800, 1) == pytest.approx(EXECUTION_TOKENS / 0.08)
    assert expect_tokens(800, 5) < expect_tokens(800, 1) < expect_tokens(800, 1, is_pool_small=True)
    alike = [expect_tokens(share, 1, is_pool_small=True) for share in SHARES]
    assert max(alike) < 1.01 * min(alike), "who looks at a small pool looks as often at each share"


def test_cheaper_weights_are_rounded_as_their_names_say() -> None:
    made = {name: weights for name, _, weights in list_cheaper(GRAPH, BLOCK.weight_bytes)}
    right = np.frombuffer(made["as it should"]["w0"], np.float32)
    for name, bits in (("float16 weights", 10), ("bfloat16 weights", 7), ("int8 weights", 6)):
        found = np.frombuffer(made[name]["w0"], np.float32)
        largest = np.abs(right).max() if name == "int8 weights" else np.abs(right)
        assert 0 < np.abs(found - right).max()
        assert (np.abs(found - right) <= largest * 2.0 ** -(bits + 1) + 1e-7).all()
