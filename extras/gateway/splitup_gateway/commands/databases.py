"""Where ``splitup serve`` keeps its databases and streams, and the flags that name them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

KeysFlag = Annotated[
    str | None,
    typer.Option(
        "--keys",
        metavar="URL",
        help="Database of API keys (default: api-keys.sqlite beside the network's file).",
    ),
]
IndexFlag = Annotated[
    str | None,
    typer.Option(
        "--index",
        metavar="URL",
        help="Database of the explorer (default: explorer.sqlite beside the network's file).",
    ),
]


def find_database_url(url: str | None, config: Path | None, name: str) -> str:
    """Return the URL of a database, in SQLAlchemy's form: by default a file of this name."""
    from splitup.config import find_network_file

    return url or f"sqlite:///{find_network_file(config).absolute().parent / name}"


def find_streams_folder(config: Path | None, host: str, port: int) -> Path | None:
    """Return where a server at this address keeps streams; none at a port that is drawn."""
    from splitup.config import find_network_file

    folder = find_network_file(config).absolute().parent / "streams"
    return folder / f"{host}:{port}" if port else None


def find_keys_url(keys: str | None, config: Path | None) -> str:
    """Return the URL of the database of API keys."""
    return find_database_url(keys, config, "api-keys.sqlite")
