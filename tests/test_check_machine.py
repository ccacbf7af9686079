"""What ``make`` says on a machine that lacks something, before it installs anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECK = Path(__file__).resolve().parents[1] / ".ci" / "check-machine"


def check_machine(programs: Path, python: str) -> subprocess.CompletedProcess[str]:
    """Check a machine that has a Python, and the programs of a folder."""
    return subprocess.run(
        ["/bin/sh", str(CHECK), python],
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
        check=False,
    )


def add_program(folder: Path, name: str, status: int) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\nexit {status}\n")
    program.chmod(0o755)


def test_a_bare_machine_is_told_in_one_line_what_to_install(tmp_path: Path) -> None:
    done = check_machine(tmp_path, str(tmp_path / "python3"))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("apt-get install --yes python3 python3-venv nodejs npm\n")


def test_an_old_node_is_named_and_nothing_else(tmp_path: Path) -> None:
    add_program(tmp_path, "npm", 0)
    add_program(tmp_path, "node", 1)  # what Node 18 answers
    done = check_machine(tmp_path, sys.executable)
    assert done.returncode == 1
    assert done.stderr.startswith("this machine lacks Node 20 or newer (")
    assert done.stderr.endswith("apt-get install --yes nodejs\n")


def test_a_machine_that_has_all_is_told_nothing(tmp_path: Path) -> None:
    for name in ("node", "npm"):
        add_program(tmp_path, name, 0)
    done = check_machine(tmp_path, sys.executable)
    assert (done.returncode, done.stderr) == (0, "")
