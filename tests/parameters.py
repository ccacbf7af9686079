"""Parameters of tests: which of them ``make test`` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some_of(names: Iterable[Any], *kept: Any) -> list[Any]:
    """Return one parameter for each name; those that are not kept run in make test-all only."""
    names = list(names)
    assert set(kept) <= set(names), "a name that is none of them"
    return [n if n in kept else pytest.param(n, marks=pytest.mark.long) for n in names]
