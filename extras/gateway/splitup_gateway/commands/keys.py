"""``splitup keys``: who may use ``splitup serve``, for how much, and in which database that is."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.console import Output, print_table
from splitup.cli.options import ConfigFlag
from splitup.config import find_network_file
from splitup.core.errors import InvalidInput
from splitup.core.extras import require

if TYPE_CHECKING:
    from splitup_gateway.api_keys import ApiKey


KeysFlag = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Database of API keys (default: api-keys.sqlite beside the network's file).",
    ),
]
IndexFlag = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Database of the explorer (default: explorer.sqlite beside the network's file).",
    ),
]


class Action(StrEnum):
    """What to do with keys."""

    new = "new"
    list = "list"
    revoke = "revoke"


@as_command
def command(
    action: Annotated[Action, typer.Argument(help="Create a key, list all, or refuse one.")],
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Name of the key; not secret.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="USDC", help="Most that it may spend (default: no limit)."),
    ] = None,
    rate: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Most requests a minute (default: no limit)."),
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model", metavar="MODEL", help="Model it may use (default: all). Repeatable."
        ),
    ] = None,
    group: Annotated[
        str,
        typer.Option(
            metavar="GROUP",
            help="Keys of one group share cached prompts, times and receipts (default: no key's).",
        ),
    ] = "",
    keys: KeysFlag = None,
    config: ConfigFlag = None,
    *,
    output: JsonOutput,
) -> None:
    """Manage the API keys of "splitup serve", which needs keys as soon as there is one.

    A new key is printed once and stored only as a hash.
    """
    require("sqlalchemy")
    from splitup.client.inputs import parse_usdc
    from splitup_gateway.api_keys import ApiKeys

    if (name is None) != (action is Action.list):
        named = f"name the key: splitup keys {action} NAME"
        raise InvalidInput(named if name is None else "splitup keys list takes no name")
    with closing(ApiKeys.open(find_keys_url(keys, config))) as table:
        if action is Action.list:
            found = table.list()
            output.give({"keys": [asdict(key) for key in found]}, lambda: _show(output, found))
        elif action is Action.revoke:
            table.revoke(name or "")
            output.say(f"key '{name}' is refused from now on")
        else:
            secret = table.create(
                name or "",
                budget_micro_usdc=None if budget is None else parse_usdc(budget, name="--budget"),
                requests_per_minute=rate,
                models=tuple(models or ()),
                group=group,
            )
            output.give({"name": name, "key": secret}, lambda: output.out.print(secret))
            if not output.as_json:
                output.say("keep it now: it is shown once")


def _show(output: Output, found: list[ApiKey]) -> None:
    from rich.table import Table

    from splitup.client.inputs import format_usdc

    if not found:
        output.say("there is no key, so the server needs none; create one: splitup keys new NAME")
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "spent", "budget", "a minute", "models", "group", "state"):
        table.add_column(heading)
    for key in found:
        budget, rate = key.budget_micro_usdc, key.requests_per_minute
        table.add_row(
            key.name,
            format_usdc(key.spent_micro_usdc),
            "no limit" if budget is None else format_usdc(budget),
            "no limit" if rate is None else str(rate),
            ", ".join(key.models) or "all",
            key.group or "none",
            "revoked" if key.is_revoked else "valid",
        )
    print_table(output.out, table)


def find_database_url(url: str | None, config: Path | None, name: str) -> str:
    """Return the URL of a database, in SQLAlchemy's form: by default a file of this name."""
    return url or f"sqlite:///{find_network_file(config).absolute().parent / name}"


def find_streams_folder(config: Path | None, host: str, port: int) -> Path | None:
    """Return where a server at this address keeps streams; none at a port that is drawn."""
    folder = find_network_file(config).absolute().parent / "streams"
    return folder / f"{host}:{port}" if port else None


def find_keys_url(keys: str | None, config: Path | None) -> str:
    """Return the URL of the database of API keys."""
    return find_database_url(keys, config, "api-keys.sqlite")
