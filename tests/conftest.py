"""What holds for all tests: how Hypothesis searches, and how ``pytest -n`` spreads the work.

A file stays together in one process, and what takes longest starts first. Examples are the same in
every run, unless ``--hypothesis-profile search`` asks for others: a fault that one run in ten finds
would stop whoever has changed something else.

An end-to-end test that fails runs a second time, because twenty processes on two cores depend on
the machine's load. The summary lists it as RERUN; such a test needs mending.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings

from splitup.devnet.processes import make_death_pact

TESTS: Final = Path(__file__).parent
# Files that share one network, started once per process: half of them here, half there, in this
# order. Devices and seven members have their own, in turn: to start three at once takes three times
# as long.
TOGETHER: Final = {
    "tests/e2e/test_devices.py": "faults",
    "tests/e2e/test_failover.py": "faults",
    "tests/e2e/test_gateways.py": "faults",
    "tests/e2e/test_embeddings.py": "faults",
    "tests/e2e/test_images.py": "faults",
    "tests/e2e/test_diffusion.py": "faults",
    "tests/e2e/test_encrypted_adapter.py": "faults",
    "tests/e2e/test_workers.py": "faults",
    "tests/e2e/test_seven_members.py": "faults",
    "tests/e2e/test_network.py": "market",
    "tests/e2e/test_unfaithful.py": "market",  # before leases of serve, which end later
    "tests/e2e/test_metrics.py": "market",
    "tests/e2e/test_page.py": "market",
    "tests/e2e/test_private.py": "market",
    "tests/e2e/test_private_page.py": "market",
    "tests/e2e/test_serve.py": "market",
    "tests/e2e/test_serve_formats.py": "market",
    "tests/e2e/test_split.py": "market",
}
# What takes longest, longest first: begun last, it would run when the others have nothing left.
FIRST: Final = ("e2e", "fuzz", "protocol", "oracle", "node", "deploy")

# A machine with other work stops for longer than any example may take.
BUSY: Final = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **BUSY)
settings.register_profile("search", **BUSY)
settings.load_profile("same")

# Whatever a test starts ends with this process, even when that is killed: a worker of pytest-xdist
# has no time to stop a network when somebody presses Ctrl-C.
_start = subprocess.Popen.__init__


@functools.wraps(_start)
def _start_mortal(self: Any, *arguments: Any, preexec_fn: Any = None, **options: Any) -> None:
    _start(self, *arguments, preexec_fn=preexec_fn or make_death_pact(), **options)


subprocess.Popen.__init__ = _start_mortal  # type: ignore[method-assign]

# A shell lets what it runs in the background ignore Ctrl-C, and so would every program that a test
# starts and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What was imported stays: no collection has to look at it, nor as often as every 700 objects.

    Histories alone are a seventh faster.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """For ``-n auto``: one more than cores, since half of the time is waiting for blocks."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {folder: place for place, folder in enumerate(FIRST)}

    files = {file: place for place, file in enumerate(TOGETHER)}

    def get_place(item: pytest.Item) -> tuple[int, int]:
        path = item.path.relative_to(TESTS)
        place = places.get(path.parts[0], len(places))
        return place, files.get(f"tests/{path.as_posix()}", len(files))

    items.sort(key=get_place)  # stable: otherwise the order within a folder stays
    for item in items:
        if item.path.is_relative_to(TESTS / "e2e"):
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show why a test that ran a second time failed the first time."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.write_sep("_", f"first run of {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return TOGETHER.get(file, file)

    config.option.loadscopereorder = False  # ours is better
    return ByFile(config, log)


@pytest.fixture
def raised_recursion_limit() -> Iterator[None]:
    """The limit that web3 leaves behind, whatever else has been imported."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    yield
    sys.setrecursionlimit(before)
