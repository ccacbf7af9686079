"""One protection that is taken out, and where such a text stands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
SETTLEMENT: Final = "splitup/protocol/settlement"
PLANNING: Final = "splitup/protocol/planning"
COMMITTEE: Final = "splitup/protocol/committee"
EXECUTION: Final = "splitup/protocol/execution"
TESTS: Final = "tests/protocol"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One protection: ``text`` in ``path`` becomes ``without``, and ``test`` must fail."""

    name: str
    path: str
    text: str
    without: str
    test: str
    is_quick: bool = True


def find_moved(mutant: Mutant, root: Path = ROOT) -> str:
    """Return what is wrong with a mutant's text or test, or ""."""
    file = root / mutant.path
    count = file.read_text().count(mutant.text) if file.is_file() else 0
    if count != 1:
        return f"{mutant.name}: its text stands {count} times in {mutant.path}:\n{mutant.text}"
    test, _, function = mutant.test.partition("::")
    source = (root / test).read_text() if (root / test).is_file() else ""
    if f"def {function.partition('[')[0]}(" not in source:
        return f"{mutant.name}: there is no test {mutant.test}"
    return ""
