"""Legal graphs stay in their buffers; and the fuzzer finds those that used to leave them."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import pytest
from tinygrad.codegen.late import coalesce
from tinygrad.uop.ops import Ops, UOp

from splitup.backend import lowering, schedule
from splitup.graph import rules
from tests.fuzz.guard_pages import describe_find, search

CASES = 2_000
_simplify = coalesce.simplify_valid_load


def test_hostile_inputs_of_legal_graphs_stay_in_their_buffers() -> None:
    report = search(itertools.count(), cases=CASES)
    finds = [describe_find(*find) for find in report.finds.items()]
    assert not finds, "\n".join(finds)
    assert report.cases >= CASES and report.kinds["refused"] < sum(report.kinds.values()) / 20


def compute_plainly(op: Ops, *operands: UOp) -> UOp:
    return UOp(op, src=operands)


def use_plain_integers() -> list[AbstractContextManager[Any]]:
    """Let tinygrad believe what it likes of integers and indices."""
    return [
        patch.object(lowering, "hide_range", lambda value: value),
        patch.object(lowering, "compute_wrapped", compute_plainly),
        patch.object(lowering, "convert", lambda value, dtype: value.cast(dtype)),
    ]


def forget_fixes() -> list[AbstractContextManager[Any]]:
    original = getattr(_simplify, "__wrapped__", _simplify)
    return [
        patch.object(coalesce, "simplify_valid_load", original),
        patch.object(schedule, "install_fixes", lambda: None),
    ]


def allow_symbols_anywhere() -> list[AbstractContextManager[Any]]:
    return [patch.object(rules, "_check_in_memory", lambda value: None)]


@pytest.mark.parametrize(
    ("patches", "graph", "find"),
    [
        (use_plain_integers(), 43, "ended by SIGSEGV"),
        (forget_fixes(), 48, "ended by SIGSEGV"),
        (allow_symbols_anywhere(), 6, "is not the reference's"),
    ],
    ids=["s15", "s16", "s17"],
)
def test_the_fuzzer_finds_what_a_protection_prevents(
    patches: list[AbstractContextManager[Any]], graph: int, find: str
) -> None:
    """The graphs are among those of the test above; other drawing needs other numbers here."""
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        report = search([graph], cases=1)
    assert list(report.finds) == [graph] and find in report.finds[graph]
    assert not search([graph], cases=1).finds
