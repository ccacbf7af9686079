from __future__ import annotations

import pytest
from tinygrad.dtype import dtypes
from tinygrad.uop.ops import UOp

from splitup.backend.compiler import simplified_sizes
from splitup.backend.compiler.simplified_sizes import keep_simplified


def make_size(rows: int) -> UOp:
    return (UOp.variable("T", 1, 64) * rows + rows) // rows


@pytest.fixture(autouse=True)
def keep(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_simplified()
    monkeypatch.setattr(simplified_sizes, "_kept", {})


def test_an_expression_is_simplified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_size(3).simplify()
    assert first is (UOp.variable("T", 1, 64) + 1).simplify()
    monkeypatch.delattr(simplified_sizes, "_simplify")
    assert make_size(3).simplify() is first
    with pytest.raises(NameError):
        make_size(4).simplify()


def test_few_are_kept_and_none_with_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simplified_sizes, "_MAX_KEPT", 8)
    for rows in range(2, 40):
        assert make_size(rows).simplify() is make_size(2).simplify()
        assert len(simplified_sizes._kept) <= 8
    loaded = UOp.new_buffer("CPU", 4, dtypes.int32).index(UOp.const(1, dtypes.weakint)) + 0
    loaded.simplify()
    assert loaded not in simplified_sizes._kept
