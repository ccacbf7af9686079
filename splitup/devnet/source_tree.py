"""The clone of the repository that this package runs from, if it is not installed from a wheel."""

from __future__ import annotations

import sys
from pathlib import Path


def find_source_tree() -> Path | None:
    """Return the root of the clone, None when the package is installed elsewhere."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "contracts" / "package.json").exists() else None


def compose_package_install() -> str:
    """Return the command that installs SplitUp's programs again, beside this interpreter."""
    tree = find_source_tree()
    package = "--force-reinstall splitup" if tree is None else f"-e {tree}"
    return f"{sys.executable} -m pip install {package}"
