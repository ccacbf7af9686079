"""Tables in a database that several servers may share, SQLite or PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import sqlalchemy as sql
from sqlalchemy import event, exc

from splitup.core.errors import ConfigurationError, Unavailable
from splitup.storage.private_files import open_database


class Database:
    """Calls block for a query, so servers make them in a thread."""

    what: ClassVar[str]  # in errors
    tables: ClassVar[sql.MetaData]
    pragmas: ClassVar[str] = "PRAGMA journal_mode=WAL"  # one write for a change, not three

    def __init__(self, engine: sql.Engine) -> None:
        self._engine = engine

    @classmethod
    def open(cls, url: str, *given: Any) -> Self:
        """Open a database, creating the tables that it lacks; ``given`` is for ``_prepare``.

        ``url`` is SQLAlchemy's: ``sqlite:///keys.sqlite``, ``postgresql+psycopg://user@host/name``.
        Raises ConfigurationError.
        """
        name = ""
        try:
            name = sql.make_url(url).render_as_string(hide_password=True)
            engine = open_database(url)
            if engine.dialect.name == "sqlite":
                event.listen(engine, "connect", lambda made, _: made.executescript(cls.pragmas))
            cls.tables.create_all(engine)
            opened = cls(engine)
            opened._prepare(*given)
        except (exc.SQLAlchemyError, ImportError, OSError, Unavailable) as error:
            raise ConfigurationError(
                f"{cls.what} {name} cannot be opened: {_shorten(error)}"
            ) from None
        return opened

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    def _prepare(self, *given: Any) -> None:
        """Make an open database ready to be used, with what else ``open`` was given."""

    @contextmanager
    def _begin(self) -> Iterator[sql.Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except exc.IntegrityError:
            raise
        except exc.SQLAlchemyError as error:
            raise Unavailable(f"{self.what} failed: {_shorten(error)}") from None


def _shorten(error: Exception) -> str:
    """Return the first line of a database's error, without the statement and its values."""
    original = getattr(error, "orig", None) or error
    return str(original).strip().partition("\n")[0][:200]
