"""The npm packages of ``page/``: they build the page, and bring the browser that tests it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).resolve().parents[1] / "page"
_MODULES: Final = PAGE / "node_modules"
_BROWSER: Final = "page/node_modules/.chromium/.stamp"  # a target of the Makefile
# Playwright's own Node wants libatomic, which a bare machine lacks.
os.environ.setdefault("PLAYWRIGHT_NODEJS_PATH", shutil.which("node") or "")


def run_node(*arguments: str, stdin: str = "", **environment: str) -> str:
    """Run Node in ``page/``; return what it printed."""
    assert _MODULES.is_dir(), f"{_MODULES} is missing; run: (cd page && npm ci)"
    done = subprocess.run(
        ["node", *arguments],
        cwd=PAGE,
        input=stdin,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def find_browser() -> Path:
    """Return the program that starts Chromium; ``make`` unpacks it before the tests."""
    assert (PAGE.parent / _BROWSER).is_file(), f"Chromium is not unpacked; run: make {_BROWSER}"
    return Path(__file__).with_name("chromium.sh")
