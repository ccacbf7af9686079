"""The npm packages of ``page/``: they build the page, and bring the browser that tests it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).resolve().parents[1] / "page"
_MODULES: Final = PAGE / "node_modules"
_UNPACK: Final = 'console.log(await (await import("@sparticuz/chromium")).default.executablePath())'


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
    """Return the program of Chromium, unpacked beside its package."""
    folder = _MODULES / ".chromium"
    folder.mkdir(exist_ok=True)
    return Path(run_node("--input-type=module", "--eval", _UNPACK, TMPDIR=str(folder)))
