"""What the commands share: their common options, and access to the node's account.

Modules of this package import the rest of the node inside their functions: ``--help`` must not load
the chain's and the crypto libraries, which takes a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from splitup_node.settlement.account import Account

DEFAULT_CONFIG: Final = Path("node.toml")
CONFIG_VARIABLE: Final = "SPLITUP_NODE_CONFIG"

ConfigOption = Annotated[
    Path,
    typer.Option(
        "--config", "-c", metavar="FILE", envvar=CONFIG_VARIABLE, help="The node's configuration."
    ),
]


@contextlib.asynccontextmanager
async def open_account(config: Path) -> AsyncIterator[Account]:
    """Open the account of the node with this configuration."""
    from splitup_node.config import NodeConfig
    from splitup_node.settlement.account import Account

    async with await Account.open(NodeConfig.load(config)) as account:
        yield account
