from __future__ import annotations

import pytest

from splitup.core import tuning
from splitup.core.tensors import TensorSpec
from splitup.graph.step_groups import StepGroup


def test_s74_steps_that_take_one_pass_have_a_number_of_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An input without rows comes with every step: 64 of 1 GiB do not fit a validator."""
    monkeypatch.setattr(tuning, "MERGE_INPUT_BYTES", 48)
    group = StepGroup([TensorSpec("x", "float32", (4,))], [], None, most=64)
    added = [group.add([bytes(16)]) for _ in range(5)]
    assert added == [True, True, True, False, False]
    group.pop([[]] * 3)
    monkeypatch.setattr(tuning, "MERGE_INPUT_BYTES", 8)
    assert group.add([bytes(16)]) and not group.add([bytes(16)])
