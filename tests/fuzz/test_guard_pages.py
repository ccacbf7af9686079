"""Legal graphs stay in their buffers; and the fuzzer finds those that left them before."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest

from tests.fuzz.guard_pages import describe_find, search

CASES: Final = 125  # of a test
PARTS: Final = [range(10 * first, 10 * (first + CASES)) for first in range(0, 16 * CASES, CASES)]
FEW: Final = 10  # graphs, with those of three of the protections below
LONG: Final = pytest.mark.long
# Python that takes a protection away, and a graph of those below that it protects from
PROTECTIONS: Final = {
    "s15": (
        """
from tinygrad.uop.ops import UOp
from splitup.backend.compiler import lowering
lowering.hide_range = lambda value: value
lowering.compute_wrapped = lambda op, *operands: UOp(op, src=operands)
lowering.convert = lambda value, dtype: value.cast(dtype)
""",
        9,
    ),
    "s16": (
        """
from splitup.backend.compiler import tinygrad_fixes
tinygrad_fixes._simplify_address = tinygrad_fixes.coalesce.indexing_simplify.patterns[0][1]
""",
        48,
    ),
    "s17": (
        """
from splitup.graph import rules
rules._check_in_memory = lambda value: None
""",
        8,
    ),
    "registers": (
        """
from splitup.backend.compiler import tinygrad_fixes
tinygrad_fixes._allocate_registers = tinygrad_fixes.regalloc.regalloc_rewrite
""",
        1,
    ),
}
TRY: Final = """
from tests.fuzz.guard_pages import search
print(*search([{}], cases=1).finds.values())
"""


@pytest.mark.parametrize("part", [range(FEW), *(pytest.param(one, marks=LONG) for one in PARTS)])
def test_hostile_inputs_of_legal_graphs_stay_in_their_buffers(part: range) -> None:
    cases = min(CASES, len(part))
    report = search(part, cases=cases)
    finds = [describe_find(*find) for find in report.finds.items()]
    assert not finds, "\n".join(finds)
    assert report.cases >= cases and report.kinds["refused"] < sum(report.kinds.values()) / 20


@pytest.mark.long  # what each protection prevents has a test of its own beside it
@pytest.mark.parametrize("name", PROTECTIONS)
def test_the_fuzzer_finds_what_a_protection_prevents(name: str) -> None:
    """The graphs are among those of the test above; other drawing needs other numbers here."""
    removal, graph = PROTECTIONS[name]
    run = [sys.executable, "-c", removal + TRY.format(graph)]
    found = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert "ended by SIGSEGV" in found or "is not the reference's" in found
    assert not search([graph], cases=1).finds
