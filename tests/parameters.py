"""Parameters of tests: which of them ``make test`` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some_of(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return one parameter for each value; those that are not kept run in make test-all only."""
    values = list(values)
    assert set(kept) <= set(values), "a value that is none of them"
    return [v if v in kept else pytest.param(v, marks=pytest.mark.long) for v in values]
