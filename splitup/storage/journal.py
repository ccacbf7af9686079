"""A durable journal of key-value records by kind; a record is on disk before its call returns.

Persist before send: a process that signs something for a slot first calls ``put_once`` and sends
what that returns. It never sends two different things for one slot, even after a restart.

The journal is SQLite in WAL mode with ``synchronous=FULL``: a committed transaction survives
SIGKILL and power loss, and an interrupted one leaves no trace. Every record carries a digest,
because SQLite checks its structure but not its contents.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

from splitup.core import limits, tuning
from splitup.core.codec import decode_canonical, encode_canonical
from splitup.core.errors import ConfigurationError, InvalidInput, Unavailable
from splitup.core.files import find_holder, take_lock

_FORMAT: Final = 1  # PRAGMA user_version
_APPLICATION: Final = 0x53504A31  # PRAGMA application_id: "SPJ1"
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS records (
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    value BLOB NOT NULL,
    digest BLOB NOT NULL,
    PRIMARY KEY (kind, key)
) WITHOUT ROWID, STRICT
"""


class Journal:
    """The records of one process, in one directory.

    Thread-safe. A write blocks for an fsync, about 1 ms.
    """

    def __init__(self, directory: Path, lock: int, connection: sqlite3.Connection) -> None:
        self._path = directory / "journal.sqlite"
        self._lock_descriptor = lock
        self._connection = connection
        self._mutex = threading.RLock()
        self._depth = 0
        self._failed = False  # an inner transaction failed: the outer one must not commit
        self._closed = False

    @classmethod
    def open(cls, directory: Path) -> Journal:
        """Lock the directory for this process and open its journal, creating it if there is none.

        Raises ConfigurationError when another process has the lock or the journal is damaged or of
        another format, Unavailable when the disk is full or fails.
        """
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = _take_lock(directory)
        except OSError as error:
            raise Unavailable(
                f"cannot use the data directory {directory}: {error.strerror}"
            ) from None
        path = directory / "journal.sqlite"
        connection: sqlite3.Connection | None = None
        try:
            path.touch(mode=0o600)  # before SQLite does: its other files get the same mode
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            _prepare(connection, path)
        except BaseException as error:
            if connection is not None:
                connection.close()
            os.close(lock)
            if isinstance(error, sqlite3.Error):
                raise _translate(error, path) from None
            if isinstance(error, UnicodeDecodeError):  # SQLite's message would quote the bytes
                raise _damaged(path, "its schema is no text") from None
            if isinstance(error, OSError):
                raise Unavailable(f"cannot write {path}: {error.strerror}") from None
            raise
        return cls(directory, lock, connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the journal and unlock the directory."""
        with self._mutex:
            if not self._closed:
                self._closed = True
                self._connection.close()
                os.close(self._lock_descriptor)

    def put(self, kind: str, key: str, value: Mapping[str, Any]) -> None:
        """Write a record, replacing an older one; it is on disk when this returns."""
        data = _encode(value)
        with self.transaction():
            self._connection.execute(
                "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)",
                (kind, key, data, _compute_check(kind, key, data)),
            )

    def put_once(self, kind: str, key: str, value: Mapping[str, Any]) -> dict[str, Any]:
        """Write a record unless the slot holds one; return the record of the slot."""
        with self.transaction():
            stored = self.get(kind, key)
            if stored is not None:
                return stored
            self.put(kind, key, value)
            return dict(value)

    def get(self, kind: str, key: str) -> dict[str, Any] | None:
        """Return a record's value, or None."""
        with self._access():
            row = self._connection.execute(
                "SELECT kind, key, value, digest FROM records WHERE kind = ? AND key = ?",
                (kind, key),
            ).fetchone()
        return None if row is None else _decode(row, self._path)

    def items(self, kind: str) -> list[tuple[str, dict[str, Any]]]:
        """Return all records of a kind, ordered by key."""
        with self._access():
            rows = self._connection.execute(
                "SELECT kind, key, value, digest FROM records WHERE kind = ? ORDER BY key", (kind,)
            ).fetchall()
        return [(str(row[1]), _decode(row, self._path)) for row in rows]

    def delete(self, kind: str, key: str) -> None:
        """Remove a record durably, if it exists."""
        with self.transaction():
            self._connection.execute("DELETE FROM records WHERE kind = ? AND key = ?", (kind, key))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Apply all writes of the block or none, with one fsync at the end. May be nested.

        Other threads wait meanwhile; do not await inside.
        """
        with self._access():
            if self._depth == 0:
                self._connection.execute("BEGIN IMMEDIATE")
                self._failed = False
            self._depth += 1
            try:
                yield
            except BaseException:
                self._failed = True
                raise
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._finish()

    def _finish(self) -> None:
        if not self._failed:
            try:
                self._connection.execute("COMMIT")
                return
            except sqlite3.Error:
                self._roll_back()
                raise
        self._roll_back()

    def _roll_back(self) -> None:
        if self._connection.in_transaction:  # SQLite rolls back by itself on some errors
            self._connection.execute("ROLLBACK")

    @contextmanager
    def _access(self) -> Iterator[None]:
        with self._mutex:
            if self._closed:
                raise InvalidInput(f"the journal {self._path} is closed")
            try:
                yield
            except sqlite3.Error as error:
                raise _translate(error, self._path) from None


def _take_lock(directory: Path) -> int:
    descriptor = take_lock(directory)
    if descriptor is None:
        raise ConfigurationError(
            f"the data directory {directory} is in use by process "
            f"{find_holder(directory) or 'unknown'}; stop that process or choose another directory"
        )
    return descriptor


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    (form,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if tables and (form, application) != (_FORMAT, _APPLICATION):
        raise ConfigurationError(
            f"{path} is not a journal of this version (format {form}, expected {_FORMAT}); "
            "use the version that wrote it or choose another directory"
        )
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise ConfigurationError(
            f"the file system of {path} does not support SQLite's WAL; choose a local directory"
        )
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA busy_timeout = 0")  # the lock excludes other processes
    for (finding,) in connection.execute("PRAGMA quick_check(1)").fetchall():
        if finding != "ok":
            raise _damaged(path, str(finding))
    if tables:
        # check all records now: one whose kind or key has changed would just not be found later
        for row in connection.execute("SELECT kind, key, value, digest FROM records"):
            _decode(row, path)
    else:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(_SCHEMA)
        connection.execute(f"PRAGMA user_version = {_FORMAT}")
        connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        connection.execute("COMMIT")


def _encode(value: Mapping[str, Any]) -> bytes:
    data = encode_canonical(dict(value))
    if len(data) > tuning.MAX_JOURNAL_VALUE_BYTES:
        raise InvalidInput(
            f"a journal record has {len(data)} bytes; the limit is {tuning.MAX_JOURNAL_VALUE_BYTES}"
        )
    return data


def _decode(row: tuple[str, str, bytes, bytes], path: Path) -> dict[str, Any]:
    kind, key, data, digest = row
    if _compute_check(kind, key, data) != digest:
        raise _damaged(path, f"record {kind}/{key} has changed")
    value: dict[str, Any] = decode_canonical(
        data, max_bytes=tuning.MAX_JOURNAL_VALUE_BYTES, max_values=limits.MAX_DOCUMENT_VALUES
    )
    return value


def _compute_check(kind: str, key: str, data: bytes) -> bytes:
    state = hashlib.sha256()
    for part in (kind.encode(), key.encode(), data):
        state.update(len(part).to_bytes(8) + part)
    return state.digest()


def _damaged(path: Path, finding: str) -> ConfigurationError:
    return ConfigurationError(
        f"the journal {path} is damaged ({finding}); restore it from a backup, or start in an "
        "empty directory with a new identity: without its journal an old identity may sign two "
        "different things for one slot"
    )


def _translate(error: sqlite3.Error, path: Path) -> ConfigurationError | Unavailable:
    # extended codes hold the primary code in their low byte; text that is not UTF-8 has no code
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (0, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return _damaged(path, str(error))
    if code == sqlite3.SQLITE_FULL:
        return Unavailable(f"the disk of {path} is full; free some space, then try again")
    return Unavailable(
        f"the journal {path} cannot be used ({error}); check its disk and permissions"
    )
