from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

from splitup_oracle.cli.app import app
from typer.testing import CliRunner

HEAVY = ("aiohttp", "numpy", "pydantic", "py_ecc", "tinygrad", "uvloop", "web3", "splitup.chain")


def test_version_and_completion() -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["--version"]).output == f"splitup-oracle {version('splitup')}\n"
    assert "--install-completion" in runner.invoke(app, ["--help"]).stdout


def test_help_loads_no_heavy_library() -> None:
    code = f"import sys, splitup_oracle.cli.app; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
