from __future__ import annotations

from pathlib import Path

import pytest

from bench.measure.prediction import (
    Measured,
    compute_overhead,
    rank_correlation,
    run_bench,
)
from tests.deploy.llamas import save_llama


@pytest.mark.long  # in small: tests/deploy/cutting/test_predicted_memory.py
def test_memory_is_what_was_predicted(tmp_path: Path) -> None:
    """Every task and the uncut model; what is less than 256 bytes counts as 256."""
    save_llama(
        tmp_path / "m", {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    )
    report = run_bench(str(tmp_path / "m"), 110_000, chunk=8, rounds=1)
    assert report["tasks"] > 1
    assert 0 <= report["memory_excess"]["min"] <= report["memory_excess"]["max"] <= 0.1


def test_ranks() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 99]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([5, 5, 5], [1, 2, 3]) == 1  # nothing was said
    # equal tasks count once, at their median
    assert rank_correlation([1, 2, 1, 1], [5, 6, 4, 9]) == pytest.approx(1)
    assert 0.8 < rank_correlation([1, 2, 3], [1, 2, 2]) < 1


def test_overhead_is_of_rounds() -> None:
    def row(*seconds: float) -> Measured:
        return Measured("", 1, 1, 1, seconds)

    assert compute_overhead([row(1, 2, 3), row(1, 2, 3)], row(2, 4, 3)) == 0
