"""The index: events of the chain in a database, and under whom each is listed.

Nothing derived is stored. An event that a reorganisation reverted is deleted again, so that every
page is right afterwards. Rows are the same whoever writes them: several servers may share one
database.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import sqlalchemy as sql
from sqlalchemy.dialects import postgresql, sqlite

from splitup.chain.event_stream import BlockId, ChainEvent
from splitup.chain.mentions import find_mentions, name_subject
from splitup.messages.network import Deployment
from splitup_gateway.database import Database

_SCHEMA: Final = 2  # another number in the database: it is filled again from block 0
_METADATA: Final = sql.MetaData()
_SOURCE: Final = sql.Table(
    "explorer_source",
    _METADATA,
    sql.Column("name", sql.Text, primary_key=True),
)
_EVENTS: Final = sql.Table(
    "explorer_events",
    _METADATA,
    sql.Column("block_number", sql.BigInteger, primary_key=True),
    sql.Column("log_index", sql.Integer, primary_key=True),
    sql.Column("block_hash", sql.String(66), primary_key=True),
    sql.Column("transaction", sql.String(66), nullable=False),
    sql.Column("contract", sql.String(16), nullable=False),
    sql.Column("name", sql.String(40), nullable=False),
    sql.Column("args", sql.Text, nullable=False),
    sql.Index("explorer_events_name", "name", "block_number", "log_index"),
)
_MENTIONS: Final = sql.Table(
    "explorer_mentions",
    _METADATA,
    sql.Column("subject", sql.String(66), primary_key=True),
    sql.Column("block_number", sql.BigInteger, primary_key=True),
    sql.Column("log_index", sql.Integer, primary_key=True),
    sql.Column("block_hash", sql.String(66), primary_key=True),
    sql.Column("role", sql.String(16), primary_key=True),
    sql.Column("amount", sql.BigInteger, nullable=True),
    sql.Column("execution_id", sql.String(66), nullable=False),  # "" outside an execution
    sql.Index("explorer_mentions_execution", "execution_id", "role"),
    sql.Index("explorer_mentions_place", "block_number", "log_index"),
)
PAGE: Final = 50  # entries of a page
MOST_ROLES: Final = 4  # that one event gives to one subject


class EventPlace(NamedTuple):
    """Where an event stands on the chain; a page goes on before the last one of the page before."""

    block_number: int
    log_index: int


@dataclass(frozen=True, slots=True)
class Total:
    """How many events name a subject in one role, and the sum of their amounts in micro-USDC."""

    count: int
    amount: int


class EventIndex(Database):
    """The tables; they are emptied when they are of another chain than ``open`` gets."""

    what = "the explorer's database"
    tables = _METADATA
    # pages are read while events are written; what a crash loses is read again
    pragmas = "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL"

    def _prepare(self, *given: Deployment) -> None:
        (deployment,) = given
        source = f"{_SCHEMA}:{deployment.chain_id}:{deployment.genesis_hash}:{deployment.market}"
        with self._begin() as connection:
            if connection.execute(sql.select(_SOURCE.c.name)).scalars().all() == [source]:
                return
            _METADATA.drop_all(connection)
            _METADATA.create_all(connection)
            connection.execute(_SOURCE.insert().values(name=source))

    # ---- writing -------------------------------------------------------------------------------

    def apply(self, events: Sequence[ChainEvent]) -> None:
        """Add events in order, and delete those that were removed; each may come twice."""
        batch: list[ChainEvent] = []
        with self._begin() as connection:
            for event in events:
                if event.removed:
                    self._add(connection, batch)
                    batch = []
                    for table in (_EVENTS, _MENTIONS):
                        connection.execute(
                            table.delete().where(
                                table.c.block_number == event.block_number,
                                table.c.block_hash == event.block_hash,
                            )
                        )
                else:
                    batch.append(event)
            self._add(connection, batch)

    def _add(self, connection: sql.Connection, events: Sequence[ChainEvent]) -> None:
        rows, mentions = [], []
        for event in events:
            found = find_mentions(event)
            if not found:
                continue
            place = {
                "block_number": event.block_number,
                "log_index": event.log_index,
                "block_hash": event.block_hash,
            }
            args = json.dumps(dict(event.args), default=_describe_blob)
            rows.append({name: getattr(event, name) for name in _EVENTS.c.keys()} | {"args": args})
            execution_id = event.args.get("executionId", "")
            mentions += [
                place | mention._asdict() | {"execution_id": execution_id} for mention in found
            ]
        dialect = postgresql if self._engine.dialect.name == "postgresql" else sqlite
        for table, values in ((_EVENTS, rows), (_MENTIONS, mentions)):
            if values:
                connection.execute(dialect.insert(table).on_conflict_do_nothing(), values)

    def delete_from(self, block_number: int) -> None:
        """Delete all events from this block on."""
        with self._begin() as connection:
            for table in (_EVENTS, _MENTIONS):
                connection.execute(table.delete().where(table.c.block_number >= block_number))

    def find_last_block(self, *, before: int | None = None) -> BlockId | None:
        """Return the last block with an event, or the last one ``before`` a number."""
        query = sql.select(_EVENTS.c.block_number, _EVENTS.c.block_hash)
        if before is not None:
            query = query.where(_EVENTS.c.block_number < before)
        order = _EVENTS.c.block_number.desc()
        with self._begin() as connection:
            row = connection.execute(query.order_by(order).limit(1)).first()
        return None if row is None else BlockId(row.block_number, row.block_hash)

    # ---- reading -------------------------------------------------------------------------------

    def list_events(
        self,
        subject: str = "",
        *,
        names: Collection[str] = (),
        before: EventPlace | None = None,
        limit: int = PAGE,
    ) -> list[ChainEvent]:
        """Return the latest events, latest first: of a subject, and of these names."""
        query, table = sql.select(_EVENTS), _EVENTS
        if subject:  # in the order of its mentions, which are read no further than the page
            query, table = query.join(_MENTIONS, _SAME_PLACE), _MENTIONS
            query = query.where(_MENTIONS.c.subject == subject)
        if names:
            query = query.where(_EVENTS.c.name.in_(names))
        if before is not None:
            place = sql.tuple_(table.c.block_number, table.c.log_index)
            query = query.where(place < sql.tuple_(*before))
        query = query.order_by(table.c.block_number.desc(), table.c.log_index.desc())
        with self._begin() as connection:
            rows = connection.execute(query.limit(limit * (MOST_ROLES if subject else 1))).all()
        return [_read(row) for row in dict.fromkeys(rows)][:limit]

    def list_of_executions(self, execution_ids: Sequence[str]) -> dict[str, list[ChainEvent]]:
        """Return all events of at most a page of executions, in order, by execution."""
        found: dict[str, list[ChainEvent]] = {execution_id: [] for execution_id in execution_ids}
        query = (
            sql.select(_EVENTS)
            .join(_MENTIONS, _SAME_PLACE)
            .where(_MENTIONS.c.subject.in_(execution_ids), _MENTIONS.c.role == "execution")
            .order_by(_EVENTS.c.block_number, _EVENTS.c.log_index)
        )
        with self._begin() as connection:
            for row in connection.execute(query):
                event = _read(row)
                found[event.args["executionId"]].append(event)
        return found

    def sum_roles(
        self, subject: str, *, first_block: int = 0, end_block: int | None = None
    ) -> dict[str, Total]:
        """Return the totals of an account or model by role, of the blocks before ``end_block``."""
        query = (
            sql.select(
                _MENTIONS.c.role,
                sql.func.count().label("count"),
                sql.func.coalesce(sql.func.sum(_MENTIONS.c.amount), 0).label("amount"),
            )
            .where(_MENTIONS.c.subject == subject, _MENTIONS.c.block_number >= first_block)
            .group_by(_MENTIONS.c.role)
        )
        if end_block is not None:
            query = query.where(_MENTIONS.c.block_number < end_block)
        with self._begin() as connection:
            rows = connection.execute(query).all()
        return {role: Total(count, int(amount)) for role, count, amount in rows}

    def sum_costs(self, model_id: str) -> int:
        """Return what all executions of a model have cost, in micro-USDC."""
        costs = _MENTIONS.alias()
        query = (
            sql.select(sql.func.coalesce(sql.func.sum(costs.c.amount), 0))
            .join_from(_MENTIONS, costs, costs.c.execution_id == _MENTIONS.c.execution_id)
            .where(_MENTIONS.c.subject == model_id, _MENTIONS.c.role == "model")
            .where(_MENTIONS.c.execution_id != "", costs.c.role == "cost")
        )
        with self._begin() as connection:
            return int(connection.execute(query).scalar_one())

    def count(self, name: str) -> int:
        """Return how many events have a name."""
        query = sql.select(sql.func.count()).where(_EVENTS.c.name == name)
        with self._begin() as connection:
            return int(connection.execute(query).scalar_one())

    def find_subjects(self, text: str, *, limit: int = 10) -> list[tuple[str, str]]:
        """Return subjects that begin with ``text``, or models whose name does: (subject, role).

        A model is found by its id for both.
        """
        start = text.lower().replace("\0", "\ufffd")  # PostgreSQL takes no NUL
        subjects = _MENTIONS.c.subject
        query = (
            sql.select(subjects, sql.func.min(_MENTIONS.c.role).label("role"))
            .where(self._begins_with(subjects, start))
            .group_by(subjects)
            .order_by(subjects)
            .limit(limit)
        )
        name = name_subject(text)
        by_name = (
            sql.select(_EVENTS.c.args)
            .join(_MENTIONS, _SAME_PLACE)
            .where(self._begins_with(subjects, name))
            .order_by(_EVENTS.c.block_number.desc(), _EVENTS.c.log_index.desc())
            .limit(limit)
        )
        found: dict[str, str] = {}
        with self._begin() as connection:
            if start.startswith("0x"):
                found |= {row.subject: row.role for row in connection.execute(query)}
            for args in connection.execute(by_name).scalars():
                found.setdefault(json.loads(args)["modelId"], "model")
        return list(found.items())[:limit]

    def _begins_with(self, column: sql.Column[str], text: str) -> sql.ColumnElement[bool]:
        """Return a condition that SQLite, too, looks up in an index: it does not for LIKE."""
        if self._engine.dialect.name == "sqlite":
            return sql.and_(column >= text, column < text + "\U0010ffff")
        return column.startswith(text, autoescape=True)


_SAME_PLACE: Final = sql.and_(
    _MENTIONS.c.block_number == _EVENTS.c.block_number,
    _MENTIONS.c.log_index == _EVENTS.c.log_index,
    _MENTIONS.c.block_hash == _EVENTS.c.block_hash,
)


def _describe_blob(value: object) -> str:
    """Stand for bytes, which no page shows, by their length."""
    assert isinstance(value, bytes)
    return f"{len(value)} bytes"


def _read(row: sql.Row[Any]) -> ChainEvent:
    return ChainEvent(**{**row._mapping, "args": json.loads(row.args)})
