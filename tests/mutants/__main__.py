"""Takes out each protection of docs/security.md in a copy, and shows that its test fails.

    python -m tests.mutants            # all; a table: protection, test, killed or not, seconds
    python -m tests.mutants --quick    # the cheapest, which run with the tests; --every 6: some
    python -m tests.mutants NAME …     # these

A protection is a piece of text that stands exactly once in its file, and what the code would say
without it. A line that has moved or changed is an error here: say where it is now.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

from tests.mutants import MUTANTS
from tests.mutants.mutant import ROOT, Mutant, find_moved

COPIED: Final = ("splitup", "node", "oracle", "deploy", "extras", "tests")
LINKED: Final = (
    "bench",
    "contracts",
    "docs",
    "examples",
    ".venv",
    "pyproject.toml",
    "constraints.txt",
)
# Third parties, imported once: every mutant then runs in a fork that imports only our code.
PRELOADED: Final = (
    "numpy",
    "pydantic",
    "pytest",
    "nacl.bindings",
    "coincurve",
    "eth_abi.abi",
    "eth_hash.auto",
    "aiohttp",
)


@contextmanager
def copy_tree() -> Iterator[Path]:
    """Copy what tests import into a folder of its own."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for folder in COPIED:
            ignored = shutil.ignore_patterns("*.pyc.*", "e2e", "node_modules")
            shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
        shutil.copy(ROOT / "conftest.py", root)
        for part in LINKED:
            (root / part).symlink_to(ROOT / part)
        yield root


def run_test(root: Path, test: str) -> bool:
    """Run tests in a fork, with our code from ``root``; return whether they pass."""
    output = root / "output.txt"
    child = os.fork()
    if child == 0:
        _run_here(root, test, output)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1, -signal.SIGSEGV):  # without its check, machine code leaves its buffers
        raise RuntimeError(f"{test} could not be run:\n{output.read_text()[-2000:]}")
    return code == 0


def _run_here(root: Path, test: str, output: Path) -> NoReturn:
    """Run tests in this process, which is a fork, and end it."""
    code = 99
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(root)
        extras = [path.name for path in (root / "extras").iterdir() if path.is_dir()]
        parts = ("", "node", "oracle", "deploy", *(f"extras/{name}" for name in extras))
        paths = [str(root / part) for part in parts]
        sys.path[:0] = paths
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        import pytest

        code = int(pytest.main(["-x", "-q", "-m", "", "-p", "no:cacheprovider", *test.split()]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def try_mutant(root: Path, mutant: Mutant) -> bool:
    """Return whether the mutant's test fails without the protection."""
    file = root / mutant.path
    whole = file.read_text()
    try:
        file.write_text(whole.replace(mutant.text, mutant.without))
        return not run_test(root, mutant.test)
    finally:
        file.write_text(whole)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Takes out protections, one after the other.")
    parser.add_argument("names", nargs="*", help="the protections to take out; default all")
    parser.add_argument("--quick", action="store_true", help="only those with a quick test")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each Nth of them")
    options = parser.parse_args(arguments)
    chosen = [
        m
        for m in MUTANTS
        if (not options.names or m.name in options.names) and (m.is_quick or not options.quick)
    ][:: options.every]
    moved = [text for mutant in chosen if (text := find_moved(mutant))]
    if moved:
        print(*moved, sep="\n")
        return 1
    for name in PRELOADED:
        importlib.import_module(name)
    sys.dont_write_bytecode = False
    failed = 0
    with copy_tree() as root:
        if not run_test(root, " ".join(sorted({mutant.test for mutant in chosen}))):
            print("the tests fail before anything is taken out")
            return 1
        sys.dont_write_bytecode = True  # of what is changed and restored within a second
        width = max(len(mutant.name) for mutant in chosen)
        for mutant in chosen:
            begun = time.monotonic()
            killed = try_mutant(root, mutant)
            failed += not killed
            seconds = time.monotonic() - begun
            word = "killed" if killed else "NOT KILLED"
            print(f"{mutant.name:{width}}  {word:10}  {seconds:5.1f} s  {mutant.test}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} protections are held by their tests")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
