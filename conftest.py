"""What holds for all tests: how Hypothesis searches, and how ``pytest -n`` spreads the work.

A file stays together in one process, and what takes longest starts first. Examples are the same in
every run, unless ``--hypothesis-profile search`` asks for others: a fault that one run in ten finds
would stop whoever has changed something else.

Tests marked ``long`` run with ``make test-all`` only (``-m ""``).
"""

from __future__ import annotations

import functools
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings

from splitup.devnet.processes import make_death_pact

pytest_plugins = ["pytester"]  # runs pytest in a test, in tests/test_faults.py

# What is imported and collected stays: looking for garbage there takes an eighth of the time.
gc.disable()

ROOT: Final = Path(__file__).parent
# One process runs all tests of whole networks, in this order: two networks that start at once take
# three times as long. The first has its own, on WebGPU; the others share one, and those that damage
# it for good come last. A node that was killed loads all models again, so that comes early; the
# last one stays down until "restart".
NETWORKS: Final = (
    *("devices", "network", "unfaithful", "metrics", "failover", "page", "private"),
    *("private_page", "split", "texts", "formats", "embeddings", "images", "diffusion"),
    *("encrypted_adapter", "workers", "gateways", "restart", "seven_members", "chaos", "hosts"),
)
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
_starter = ThreadPoolExecutor(max_workers=1)


@functools.wraps(_start)
def _start_mortal(self: Any, *arguments: Any, preexec_fn: Any = None, **options: Any) -> None:
    """Start from a thread that lives as long as this process: the pact is with the thread."""
    pact = preexec_fn or make_death_pact()
    start = functools.partial(_start, self, *arguments, preexec_fn=pact, **options)
    if threading.current_thread() is threading.main_thread() or _is_in_own_network():
        start()
    else:
        _starter.submit(start).result()


def _is_in_own_network() -> bool:
    """Whether this thread is a host of ``tests/e2e/hosts.py``, where what it starts belongs."""
    namespace = Path("/proc/thread-self/ns/net")
    return namespace.exists() and namespace.readlink() != Path("/proc/self/ns/net").readlink()


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
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {folder: place for place, folder in enumerate(FIRST)}

    networks = {f"test_{name}": place for place, name in enumerate(NETWORKS)}

    def get_place(item: pytest.Item) -> tuple[int, int]:
        folder = item.path.relative_to(ROOT).parts[1]
        within = networks.get(item.path.stem, len(networks)) if folder == "e2e" else 0
        return places.get(folder, len(places)), within

    items.sort(key=get_place)  # stable: otherwise the order within a folder stays


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "networks" if file.startswith("tests/e2e/") else file

    config.option.loadscopereorder = False  # ours is better
    return ByFile(config, log)


@pytest.fixture
def raised_recursion_limit() -> Iterator[None]:
    """The limit that web3 leaves behind, whatever else has been imported."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    yield
    sys.setrecursionlimit(before)
