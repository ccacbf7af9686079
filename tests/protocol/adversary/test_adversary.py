"""Ten thousand worlds with one dishonest party each, and proof that missing protections are found.

More with ``python -m tests.protocol.adversary.search --seeds N``; a find prints the line that
replays it.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.protocol.adversary.search import search
from tests.protocol.committee.test_histories import run_all

SEEDS = int(os.environ.get("SPLITUP_SEEDS", "10000"))
SECURITY = Path(__file__).parents[3] / "docs" / "security.md"


def test_no_deviation_of_ten_thousand_breaks_a_promise() -> None:
    assert run_all(search, range(SEEDS)) == []
