"""How much room a network's disk and this machine's memory have."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

LEAST_FREE_BYTES: Final = 2 * 10**9  # a devnet's chain and objects, and the kernel cache

# Resident bytes of a network that computes nothing, measured: 0.2 GB for each of six nodes with its
# worker, 0.1 GB for each of four members and two gateways, 0.2 GB for chain and object store.
LEAST_MEMORY_BYTES: Final = 2 * 10**9
_MEMORY_FILE: Final = Path("/proc/meminfo")


def get_available_memory() -> int | None:
    """Return the bytes that programs may take without swapping; None where Linux does not say."""
    try:
        lines = _MEMORY_FILE.read_text("ascii").splitlines()
    except OSError:
        return None
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return next((1024 * int(kib) for kib in found), None)


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
