from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def raised_recursion_limit() -> Iterator[None]:
    """The limit that web3 leaves behind, whatever else has been imported."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    yield
    sys.setrecursionlimit(before)
