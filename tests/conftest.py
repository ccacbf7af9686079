"""How the suite is spread over processes: a file stays together, the long ones start first."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

TESTS: Final = Path(__file__).parent
# Folders whose tests share one network, which is started once and not once per file.
TOGETHER: Final = ("e2e",)
# What takes longest, longest first: begun last, it would run when the others have nothing left.
FIRST: Final = ("e2e", "oracle", "protocol", "node", "deploy")


def pytest_itemcollected(item: pytest.Item) -> None:
    path = item.path.relative_to(TESTS)
    group = path.parts[0] if path.parts[0] in TOGETHER else str(path)
    item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {folder: place for place, folder in enumerate(FIRST)}
    items.sort(
        key=lambda item: places.get(item.path.relative_to(TESTS).parts[0], len(places))
    )  # stable: the order within a folder stays
