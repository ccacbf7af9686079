"""API keys with budgets, in a database that several servers may share.

A key is 32 random bytes and is stored as its SHA-256 only, so that whoever reads the database
cannot use it. A request is charged its highest price before it begins, in one statement that
checks the budget; what it did not use is given back when it ends. Meanwhile a row says what it is
charged, for the server that goes on with it: a budget is never exceeded.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sql
from sqlalchemy import exc

from splitup.core.errors import InvalidInput
from splitup_gateway.database import Database

PREFIX: Final = "sk-splitup-"
_NAME: Final = re.compile(r"[a-zA-Z0-9._-]{1,64}")
_METADATA: Final = sql.MetaData()
_KEYS: Final = sql.Table(
    "api_keys",
    _METADATA,
    sql.Column("name", sql.String(64), primary_key=True),
    sql.Column("digest", sql.String(64), nullable=False, unique=True),
    sql.Column("budget_micro_usdc", sql.BigInteger, nullable=True),  # None: no limit
    sql.Column("spent_micro_usdc", sql.BigInteger, nullable=False),
    sql.Column("requests_per_minute", sql.Integer, nullable=True),  # None: no limit
    sql.Column("models", sql.Text, nullable=False),  # names, one a line; "": all
    sql.Column("created_s", sql.BigInteger, nullable=False),
    sql.Column("is_revoked", sql.Boolean, nullable=False),
    # keys of one group share what caches hold
    sql.Column("cache_group", sql.String(64), nullable=False, server_default=""),
)
_CHARGES: Final = sql.Table(
    "open_charges",
    _METADATA,
    sql.Column("id", sql.String(64), primary_key=True),
    sql.Column("name", sql.String(64), nullable=False),  # of the key
    sql.Column("server", sql.String(64), nullable=False, index=True),
    sql.Column("amount_micro_usdc", sql.BigInteger, nullable=False),
    sql.Column("used_micro_usdc", sql.BigInteger, nullable=False),
    sql.Column("orders", sql.Text, nullable=False),  # [[execution, first step, last], …] in JSON
)


@dataclass(frozen=True, slots=True)
class OrderedSteps:
    """Steps of an execution that a request has ordered: from ``first`` up to before ``last``.

    ``last`` is None while it may order more.
    """

    execution_id: str
    first: int
    last: int | None = None


@dataclass(frozen=True, slots=True)
class OpenCharge:
    """What a request that runs is charged, and what is known of its cost; micro-USDC."""

    id: str
    name: str  # of the key
    amount_micro_usdc: int
    used_micro_usdc: int = 0  # without the orders
    orders: tuple[OrderedSteps, ...] = ()


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key's rights and spending; amounts in micro-USDC, None for no limit."""

    name: str
    budget_micro_usdc: int | None
    spent_micro_usdc: int
    requests_per_minute: int | None
    models: tuple[str, ...]  # empty: all
    created_s: int
    is_revoked: bool
    group: str = ""  # of keys that share caches, times and receipts; "": none

    def allows(self, model: str) -> bool:
        """Return whether the key may use a model."""
        return not self.models or model in self.models


def get_principal(key: ApiKey | None) -> str:
    """Return whose a key's caches and executions are: its group's, or its own.

    Without keys there is one principal, "".
    """
    if key is None:
        return ""
    return f"group {key.group}" if key.group else f"key {key.name}"


class ApiKeys(Database):
    """The table of keys."""

    what = "the database of API keys"
    tables = _METADATA

    def create(
        self,
        name: str,
        *,
        budget_micro_usdc: int | None = None,
        requests_per_minute: int | None = None,
        models: tuple[str, ...] = (),
        group: str = "",
    ) -> str:
        """Add a key and return its secret, which is not stored.

        Raises InvalidInput for a name that exists, and for a name or group that has other
        characters than letters, digits, dots, dashes and underscores.
        """
        for word in (name, group) if group else (name,):
            if not _NAME.fullmatch(word):
                raise InvalidInput(
                    f"'{word:.80}' is no name of a key or group; use up to 64 letters, digits, "
                    "'.', '-', '_'"
                )
        secret = PREFIX + secrets.token_urlsafe(32)
        row = {
            "name": name,
            "digest": _hash(secret),
            "budget_micro_usdc": budget_micro_usdc,
            "spent_micro_usdc": 0,
            "requests_per_minute": requests_per_minute,
            "models": "\n".join(models),
            "created_s": int(time.time()),
            "is_revoked": False,
            "cache_group": group,
        }
        try:
            with self._begin() as connection:
                connection.execute(_KEYS.insert().values(row))
        except exc.IntegrityError:
            raise InvalidInput(f"there is a key '{name}' already; choose another name") from None
        return secret

    def revoke(self, name: str) -> None:
        """Refuse a key from now on; raise InvalidInput when there is none of this name."""
        change = _KEYS.update().where(_KEYS.c.name == name).values(is_revoked=True)
        with self._begin() as connection:
            if connection.execute(change).rowcount != 1:
                raise InvalidInput(f"there is no key '{name:.80}'; list them: splitup keys list")

    def has_any(self) -> bool:
        """Return whether there is a key, be it revoked."""
        with self._begin() as connection:
            return connection.execute(sql.select(_KEYS.c.name).limit(1)).first() is not None

    def list(self) -> list[ApiKey]:
        """Return all keys by name, revoked ones too."""
        with self._begin() as connection:
            rows = connection.execute(_KEYS.select().order_by(_KEYS.c.name)).all()
        return [_read(row) for row in rows]

    def find(self, secret: str) -> ApiKey | None:
        """Return the key with this secret, None when there is none or it is revoked."""
        query = _KEYS.select().where(_KEYS.c.digest == _hash(secret), ~_KEYS.c.is_revoked)
        with self._begin() as connection:
            row = connection.execute(query).first()
        return None if row is None else _read(row)

    def charge(
        self, name: str, charge_id: str, amount_micro_usdc: int, server: str, used: int = 0
    ) -> bool:
        """Add to what a key has spent, and to what a request of a server is charged.

        ``used`` of it is known to be its cost. Returns False, without a change, beyond the budget.
        """
        spent = _KEYS.c.spent_micro_usdc + amount_micro_usdc
        budget = _KEYS.c.budget_micro_usdc
        change = (
            _KEYS.update()
            .where(_KEYS.c.name == name, ~_KEYS.c.is_revoked)
            .where(sql.or_(budget.is_(None), spent <= budget))
            .values(spent_micro_usdc=spent)
        )
        raised = _CHARGES.c.amount_micro_usdc + amount_micro_usdc
        raising = _CHARGES.update().where(_CHARGES.c.id == charge_id)
        row = {
            **{"id": charge_id, "name": name, "server": server, "orders": "[]"},
            **{"amount_micro_usdc": amount_micro_usdc, "used_micro_usdc": used},
        }
        with self._begin() as connection:
            if connection.execute(change).rowcount != 1:
                return False
            if connection.execute(raising.values(amount_micro_usdc=raised)).rowcount != 1:
                connection.execute(_CHARGES.insert().values(row))
        return True

    def note_orders(
        self, charge_id: str, used_micro_usdc: int, orders: Sequence[OrderedSteps]
    ) -> None:
        """Keep what a request has ordered, beside what is known to be its cost."""
        text = json.dumps([[each.execution_id, each.first, each.last] for each in orders])
        change = _CHARGES.update().where(_CHARGES.c.id == charge_id)
        with self._begin() as connection:
            connection.execute(change.values(used_micro_usdc=used_micro_usdc, orders=text))

    def list_charges(self, server: str) -> tuple[OpenCharge, ...]:
        """Return what requests of a server are charged that have not ended."""
        with self._begin() as connection:
            rows = connection.execute(_CHARGES.select().where(_CHARGES.c.server == server)).all()
        return tuple(
            OpenCharge(
                row.id,
                row.name,
                row.amount_micro_usdc,
                row.used_micro_usdc,
                tuple(OrderedSteps(*each) for each in json.loads(row.orders)),
            )
            for row in rows
        )

    def close_charge(self, charge_id: str, used_micro_usdc: int) -> None:
        """Give back what a request was charged and did not use, once."""
        this = _CHARGES.c.id == charge_id
        with self._begin() as connection:
            row = connection.execute(_CHARGES.select().where(this)).first()
            if row is None or connection.execute(_CHARGES.delete().where(this)).rowcount != 1:
                return
            spent = _KEYS.c.spent_micro_usdc - max(row.amount_micro_usdc - used_micro_usdc, 0)
            change = _KEYS.update().where(_KEYS.c.name == row.name).values(spent_micro_usdc=spent)
            connection.execute(change)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _read(row: sql.Row[tuple[object, ...]]) -> ApiKey:
    known = {name: value for name, value in row._mapping.items() if name in ApiKey.__slots__}
    models = tuple(row.models.split("\n")) if row.models else ()
    return ApiKey(**known | {"models": models, "group": row.cache_group})
