"""Modules that are started as programs of their own, which no import shows."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = "splitup", "node", "oracle", "deploy", "extras", "bench", "tests"
STARTED = re.compile(
    r'(?:"-m",\s*|make_command\(\s*|Child\(\s*|_MODULE: Final = )'
    r'"((?:splitup|bench|tests)[a-z_0-9.]*)"'
)


def list_started() -> dict[str, Path]:
    """Return the modules, each with a file that starts it."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    return {name: file for file in files for name in STARTED.findall(file.read_text())}


@pytest.mark.parametrize(("name", "file"), sorted(list_started().items()))
def test_a_module_that_is_started_is_a_program(name: str, file: Path) -> None:
    found = find_spec(name)
    if found is not None and found.submodule_search_locations:
        found = find_spec(f"{name}.__main__")
    assert found is not None and found.origin is not None, f"{file} starts it"
    source = Path(found.origin).read_text()
    is_program = Path(found.origin).stem == "__main__" or 'if __name__ == "__main__"' in source
    assert is_program, f"{file} starts it, and it does nothing"
