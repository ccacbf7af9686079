"""Every file and function that "One execution, read along" names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from splitup.core import limits

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs/one-execution.md"
STEP: Final = re.compile(r"`([\w/]+\.(?:py|sol)):([\w.]+)`")
WALKS: Final = ("A hidden state", "Money", "A weight", "A heartbeat")
LINES: Final = PAGE.read_text("utf-8").splitlines()
NAMED: Final = sorted(set(STEP.findall("\n".join(LINES))))


@cache
def list_names(path: Path) -> frozenset[str]:
    """Return the functions, classes and methods ("Class.method") that a file defines."""
    text = path.read_text("utf-8")
    if path.suffix == ".sol":
        return frozenset(re.findall(r"\b(?:function|contract|library) (\w+)", text))
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            if isinstance(node, ast.ClassDef):
                functions = (ast.FunctionDef, ast.AsyncFunctionDef)
                found |= {f"{node.name}.{f.name}" for f in node.body if isinstance(f, functions)}
    return frozenset(found)


def find_steps(walk: str) -> list[str]:
    """Return the numbered steps of a walk, each as one text."""
    start = LINES.index(f"## {walk}") + 1
    steps: list[str] = []
    for line in LINES[start:]:
        if line.startswith("## "):
            break
        if re.match(r"\d+\. ", line):
            steps.append(line)
        elif steps and line.startswith("   "):
            steps[-1] += line
    return steps


@pytest.mark.parametrize(("path", "name"), NAMED, ids=":".join)
def test_a_step_is_where_the_page_says(path: str, name: str) -> None:
    assert (ROOT / path).is_file(), f"there is no {path}"
    assert name in list_names(ROOT / path), f"{path} defines no {name}"


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_names_a_function_in_every_step(walk: str) -> None:
    steps = find_steps(walk)
    assert [int(step.split(".")[0]) for step in steps] == list(range(1, len(steps) + 1))
    for step in steps:
        assert re.search(r"`[\w/]+\.(?:py|sol)[:`]", step) or "steps 4 to 9" in step, step


def test_the_figures_are_those_of_the_code() -> None:
    text = " ".join(" ".join(LINES).split())
    assert f"After every {limits.INTERIM_STEPS} steps the client signs" in text
    assert f"A tensor above {limits.INLINE_TENSOR_BYTES // 2**20} MiB goes to the store" in text


def test_a_missing_function_would_be_noticed() -> None:
    assert "Session.submit" in list_names(ROOT / "splitup/client/execution/session.py")
    assert "Session.send" not in list_names(ROOT / "splitup/client/execution/session.py")
    assert "settle" in list_names(ROOT / "contracts/src/Market.sol")
    assert "pay" not in list_names(ROOT / "contracts/src/Market.sol")
