"""Run the tests; what failed runs once more, alone, when all the others have ended.

    python -m tests.passes [options of pytest]      # make test

Tests that start processes depend on the machine's load, which the other tests are most of. One that
passes when it has the machine to itself is listed, and needs mending all the same. A test that
starts no process has no such excuse: if one fails, or more than a few do, the run has failed.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
CACHE: Final = "v/cache/lastfailed"  # below pytest's own folder
MOST: Final = 5  # tests that run a second time
FAILED: Final = 1  # pytest's exit code when tests failed, and nothing else
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
    """Run pytest in a process of its own; say what it took; return its exit code."""
    started, used = time.monotonic(), _get_cpu_s()
    code = subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT).returncode
    took, cpu = time.monotonic() - started, _get_cpu_s() - used
    print(f"tests: {took:.0f} s, {cpu:.0f} s of processor time", flush=True)
    return code


def _get_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(options: Sequence[str] | None = None) -> int:
    """Run all tests, and what failed again; return the exit code."""
    options = sys.argv[1:] if options is None else options
    code = run_tests(["--cache-clear", *options])
    if code != FAILED:
        return code
    failed = list(json.loads((ROOT / ".pytest_cache" / CACHE).read_text()))
    if not may_run_again(failed):
        return code
    print(f"\n{len(failed)} failed and run again, alone:", *failed, sep="\n  ", flush=True)
    code = run_tests(["-p", "no:xdist", *failed])
    if code == 0:
        print("passed alone, so mend them:", *failed, sep="\n  ", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
