"""``splitup-node``: what a GPU owner types. Modules are imported when their commands are used."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import typer

from splitup.cli.command_group import list_own_commands, make_group
from splitup.cli.console import EXIT_CODES, add_version_option
from splitup.cli.service import Service, make_service_app
from splitup_node.cli.account import CONFIG_VARIABLE, DEFAULT_CONFIG

_HELP: Final = f"Serve models on your GPU and be paid in USDC.\n\n{EXIT_CODES}"
COMMANDS: Final = list_own_commands(
    "splitup_node.cli",
    {
        "init": "Make a key and a configuration.",
        "join": "Make a key and a configuration for a network.",
        "stake": "Register the node and put down its stake.",
        "unstake": "Leave; the stake is free after a while.",
        "withdraw": "Take out USDC that is ready, or the stake.",
        "status": "Show what the chain knows of the node, and what the node is doing.",
        "earnings": "Show what the node was paid, by day.",
        "top": "Show what status and earnings say, live, until Ctrl-C.",
        "audit": "Does this machine compute correctly?",
        "run": "Serve until Ctrl-C or SIGTERM.",
    },
    {
        "node_setup": ("init", "join"),
        "money": ("stake", "unstake", "withdraw"),
        "status": ("status", "earnings", "top"),
    },
)

app = typer.Typer(
    cls=make_group("splitup-node", COMMANDS),
    name="splitup-node",
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def check_node(config: Path) -> None:
    """Open a node's configuration and key; raise ConfigurationError."""
    from splitup_node.config import NodeConfig

    NodeConfig.load(config).load_identity()


SERVICE: Final = Service(
    *("splitup-node", "run", "node"), DEFAULT_CONFIG, check_node, config_variable=CONFIG_VARIABLE
)
app.add_typer(make_service_app(SERVICE), name=SERVICE.group)
add_version_option(app, "splitup-node")


def main() -> None:
    """Entry point of ``splitup-node``."""
    app()
