"""How much room a network's disk has."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

LEAST_FREE_BYTES: Final = 2 * 10**9  # a devnet's chain and objects, and the kernel cache


def get_free(directory: Path) -> tuple[Path, int]:
    """Return the free bytes of a directory's disk, and the existing directory asked for them."""
    existing = next(p for p in (directory.absolute(), *directory.absolute().parents) if p.exists())
    return existing, shutil.disk_usage(existing).free


def describe_low(directory: Path) -> str:
    """Return a warning when the disk has little room, "" when it has enough."""
    existing, free = get_free(directory)
    if free >= LEAST_FREE_BYTES:
        return ""
    return (
        f"warning: {free / 10**9:.1f} GB are free on the disk of {existing}, and a network needs "
        f"about {LEAST_FREE_BYTES / 10**9:.0f}; free some, or use another disk with --dir"
    )
