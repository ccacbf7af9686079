"""Files that other users of the machine must not read, whatever the umask says."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from splitup.core.errors import ConfigurationError
from splitup.core.files import write_whole
from splitup.crypto.keys import Identity
from splitup.crypto.keystore import create_identity, create_passphrase

if TYPE_CHECKING:
    import sqlalchemy as sql


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user may read. Raises OSError."""
    write_whole(path, text, 0o600)


def create_party(
    directory: Path,
    name: str,
    text: str,
    *,
    passphrase: Callable[[], str] = str,
    check: Callable[[Path], object] = lambda draft: None,
    option: str = "--data-dir",
) -> Identity:
    """Write a new party's configuration ``name``, keystore.json and passphrase into a directory.

    ``passphrase`` is asked last; the key gets a random one for "". Raises ConfigurationError, and
    leaves nothing behind, when one of the files exists or when ``check``, which gets the path of a
    draft of the configuration, raises it. ``option`` names the directory on the command line.
    """
    path, draft = directory / name, directory / f".{name}"
    keystore, passphrase_file = directory / "keystore.json", directory / "passphrase"
    check_unused(directory, name, option)
    with make_directory(directory, option):
        try:
            with explain_write(directory, option):
                write_private(draft, text)
            check(draft)
            create_passphrase(passphrase_file, passphrase())
            identity = create_identity(keystore, passphrase_file)
            draft.replace(path)
        except BaseException:
            if not keystore.exists():
                passphrase_file.unlink(missing_ok=True)
            raise
        finally:
            draft.unlink(missing_ok=True)
    return identity


def check_unused(directory: Path, name: str, option: str = "--data-dir") -> None:
    """Raise ConfigurationError when a directory holds a file that ``create_party`` would write."""
    for file in (directory / name, directory / "keystore.json", directory / "passphrase"):
        if file.exists():
            raise ConfigurationError(f"{file} exists already; use it, or choose another {option}")


@contextmanager
def make_directory(directory: Path, option: str) -> Iterator[None]:
    """Make a directory for this user alone; a new one goes again when nothing stays in it."""
    is_new = not directory.exists()
    with explain_write(directory, option):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):  # it holds something
                directory.rmdir()


@contextmanager
def explain_write(directory: Path, option: str) -> Iterator[None]:
    """Turn an OSError into a ConfigurationError that says which ``option`` to change."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"cannot write to {directory} ({error.strerror}); choose another {option}"
        ) from None


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
