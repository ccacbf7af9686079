"""Files that other users of the machine must not read, whatever the umask says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlalchemy as sql


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user may read. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)  # also one that was there
        file.write(text)


def open_database(url: str) -> sql.Engine:
    """Open a database by SQLAlchemy's URL; files of SQLite are made private.

    Raises SQLAlchemyError, ImportError and OSError.
    """
    import sqlalchemy as sql

    parsed = sql.make_url(url)
    engine = sql.create_engine(parsed, pool_pre_ping=True)
    if parsed.get_backend_name() == "sqlite" and parsed.database not in (None, "", ":memory:"):
        path = Path(parsed.database or "")
        path.touch(mode=0o600)  # before SQLite does: its other files get the same mode
        for each in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))):
            if each.exists() and each.stat().st_uid == os.geteuid():
                each.chmod(0o600)  # an earlier version left it to the umask
    return engine
