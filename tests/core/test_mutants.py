"""Every protection of docs/security.md is where it is said to be, and its test fails without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import MUTANTS
from tests.mutants.mutant import ROOT, Mutant, find_moved

SECURITY = Path(ROOT, "docs", "security.md")


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_protection_stands_where_it_is_said_to_stand(mutant: Mutant) -> None:
    assert find_moved(mutant) == ""


def test_the_security_page_names_every_protection_once_and_no_other() -> None:
    section = SECURITY.read_text().partition("## Who says what")[2].partition("\n## ")[0]
    table = [row for row in section.splitlines() if row.startswith("| ")][1:]
    named = [
        name
        for row in table
        for name in row.removesuffix(" |").split(" | ")[-1].split(", ")
        if not name.startswith("`")
    ]
    assert sorted(named) == sorted(mutant.name for mutant in MUTANTS)


@pytest.mark.parametrize("every", [96, pytest.param(1, marks=pytest.mark.long)])
def test_cheap_tests_fail_without_the_protections_that_they_hold(every: int) -> None:
    """``make mutants`` tries all of them."""
    command = [sys.executable, "-m", "tests.mutants", "--quick", "--every", str(every)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
