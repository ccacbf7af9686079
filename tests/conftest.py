"""What holds for all tests: how Hypothesis searches, and how ``pytest -n`` spreads the work.

A file stays together in one process, and what takes longest starts first. Examples are the same in
every run, unless ``--hypothesis-profile search`` asks for others: a fault that one run in ten finds
would stop whoever has changed something else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings

TESTS: Final = Path(__file__).parent
# Folders whose files share one network: it is started once, and not once per process.
TOGETHER: Final = ("tests/e2e/",)
# What takes longest, longest first: begun last, it would run when the others have nothing left.
FIRST: Final = ("e2e", "protocol", "oracle", "node", "deploy")

# A machine with other work stops for longer than any example may take.
BUSY: Final = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **BUSY)
settings.register_profile("search", **BUSY)
settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {folder: place for place, folder in enumerate(FIRST)}

    def get_place(item: pytest.Item) -> int:
        return places.get(item.path.relative_to(TESTS).parts[0], len(places))

    items.sort(key=get_place)  # stable: the order within a folder stays


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = (folder for folder in TOGETHER if nodeid.startswith(folder))
            return next(shared, nodeid.partition("::")[0])

    config.option.loadscopereorder = False  # ours is better
    return ByFile(config, log)
