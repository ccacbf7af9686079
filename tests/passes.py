"""Run the tests; what failed runs once more, alone, when all the others have ended.

    python -m tests.passes [options of pytest]      # make test

Tests of whole networks run in a process of their own, which imports no others, and its output is
shown when it has ended; one process for each core, four at most, runs the rest at the same time.

Tests that start processes depend on the machine's load, which the other tests are most of. One that
passes when it has the machine to itself is listed, and needs mending all the same. A test that
starts no process has no such excuse: if one fails, or more than a few do, the run has failed.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
CACHES: Final = ROOT / ".pytest_cache"
NETWORKS: Final = "tests/e2e"
MOST: Final = 5  # tests that run a second time
PASSED, FAILED, NONE = 0, 1, 5  # exit codes of pytest: the last when no test was asked for
# folders whose tests start programs, chains, stores or browsers
PROCESSES: Final = (
    *("tests/backend", "tests/chain", "tests/cli", "tests/contracts", "tests/deploy/cli"),
    *("tests/deploy/publishing", "tests/devnet", "tests/e2e", "tests/fuzz", "tests/net"),
    *("tests/node", "tests/oracle", "tests/sandbox", "tests/storage"),
    *("extras/gateway/gateway_tests/page", "extras/gateway/gateway_tests/serve"),
    *("extras/private/private_tests/adapters", "extras/speculation/speculation_tests"),
)


def may_run_again(failed: Sequence[str]) -> bool:
    """Return whether these tests, by pytest's ids, may owe their failure to the machine's load."""
    return 0 < len(failed) <= MOST and all(test.startswith(PROCESSES) for test in failed)


def run_tests(options: Sequence[str]) -> int:
    """Run networks and the rest side by side, say what they took; return the worse exit code."""
    started, used = time.monotonic(), _get_cpu_s()
    workers = str(min(os.cpu_count() or 1, 4))
    others = ["-n", workers, "--ignore", NETWORKS, *options]
    with ThreadPoolExecutor(1) as beside:
        networks = beside.submit(_run_pytest, "networks", [*options, NETWORKS], shown=False)
        codes = {_run_pytest("others", others, shown=True), networks.result()} - {NONE}
    took, cpu = time.monotonic() - started, _get_cpu_s() - used
    print(f"tests: {took:.0f} s, {cpu:.0f} s of processor time", flush=True)
    return max(codes, default=NONE)


def _run_pytest(name: str, options: Sequence[str], *, shown: bool) -> int:
    cache = ("-o", f"cache_dir={CACHES / name}", "--cache-clear")
    command = [sys.executable, "-m", "pytest", *cache, *options]
    done = subprocess.run(command, cwd=ROOT, stdout=None if shown else subprocess.PIPE, text=True)
    if not shown:
        print(f"\n{name}:\n{done.stdout}", flush=True)
    return done.returncode


def _list_failed(name: str) -> list[str]:
    path = CACHES / name / "v" / "cache" / "lastfailed"  # pytest writes it when something fails
    return list(json.loads(path.read_text())) if path.exists() else []


def _get_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(options: Sequence[str] | None = None) -> int:
    """Run all tests, and what failed again; return the exit code."""
    options = sys.argv[1:] if options is None else options
    code = run_tests(options)
    if code != FAILED:
        return code
    failed = [*_list_failed("networks"), *_list_failed("others")]
    if not may_run_again(failed):
        return code
    print(f"\n{len(failed)} failed and run again, alone:", *failed, sep="\n  ", flush=True)
    code = _run_pytest("again", ["-m", "", *failed], shown=True)
    if code == PASSED:
        print("passed alone, so mend them:", *failed, sep="\n  ", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
