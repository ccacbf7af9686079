"""How ``pytest -n`` spreads tests: a file stays together, what takes longest starts first."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

TESTS: Final = Path(__file__).parent
# Folders whose files share one network: it is started once, and not once per process.
TOGETHER: Final = ("tests/e2e/",)
# What takes longest, longest first: begun last, it would run when the others have nothing left.
FIRST: Final = ("e2e", "protocol", "oracle", "node", "deploy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {folder: place for place, folder in enumerate(FIRST)}

    def get_place(item: pytest.Item) -> int:
        return places.get(item.path.relative_to(TESTS).parts[0], len(places))

    items.sort(key=get_place)  # stable: the order within a folder stays


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc,no-any-unimported]
        def _split_scope(self, nodeid: str) -> str:
            shared = (folder for folder in TOGETHER if nodeid.startswith(folder))
            return next(shared, nodeid.partition("::")[0])

    config.option.loadscopereorder = False  # ours is better
    return ByFile(config, log)
