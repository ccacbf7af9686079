"""Files that are written whole or not at all, and that no link in their folder leads elsewhere.

A folder may be a stranger's, who left links in it under the names that will be written there.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace a file, or a link, in one step; ``mode`` is less the umask.

    Raises OSError, whose ``filename`` is the path.
    """
    made = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(
            made, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, mode)
        ) as file:
            file.write(text)
        made.replace(path)
    except OSError as error:  # a full disk names no file
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        made.unlink(missing_ok=True)


def follow_no_link(path: str, flags: int) -> int:
    """Open a file as ``open`` does; raise OSError for a link. For its ``opener``."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
