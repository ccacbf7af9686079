"""The clone of the repository that this package runs from, if it is not installed from a wheel."""

from __future__ import annotations

import sys
from pathlib import Path


def find_source_tree() -> Path | None:
    """Return the root of the clone, None when the package is installed elsewhere."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "contracts" / "package.json").exists() else None


def compose_package_install(extra: str = "") -> str:
    """Return the command that installs SplitUp beside this interpreter, again or with an extra.

    Never pip's ``splitup`` without a path: on PyPI that name belongs to a package of somebody else.
    """
    tree = find_source_tree()
    package = "splitup-….whl" if tree is None else str(tree)
    named = f"'{package}[{extra}]'" if extra else package
    flag = "" if extra and tree is None else "--force-reinstall " if tree is None else "-e "
    return f"{sys.executable} -m pip install {flag}{named}"
