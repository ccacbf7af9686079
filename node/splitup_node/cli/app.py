"""splitup-node: what a GPU owner types. One module a command; this one registers them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import typer

from splitup.cli.command_group import make_group
from splitup.cli.console import EXIT_CODES, add_version_option
from splitup.cli.service import Service, make_service_app
from splitup_node.cli.audit import audit_command
from splitup_node.cli.command import CONFIG_VARIABLE, DEFAULT_CONFIG
from splitup_node.cli.earnings import earnings_command
from splitup_node.cli.init import init_command
from splitup_node.cli.join import join_command
from splitup_node.cli.run import run_node_command
from splitup_node.cli.stake import stake_command
from splitup_node.cli.status import status_command
from splitup_node.cli.top import top_command
from splitup_node.cli.unstake import unstake_command
from splitup_node.cli.withdraw import withdraw_command

_HELP: Final = f"Serve models on your GPU and be paid in USDC.\n\n{EXIT_CODES}"

app = typer.Typer(
    cls=make_group("splitup-node"),
    name="splitup-node",
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("init")(init_command)
app.command("join", short_help="Make a key and a configuration for a network.")(join_command)
app.command("stake", short_help="Register the node and put down its stake.")(stake_command)
app.command("unstake", short_help="Leave; the stake is free after a while.")(unstake_command)
app.command("withdraw", short_help="Take out USDC that is ready, or the stake.")(withdraw_command)
app.command("status")(status_command)
app.command("earnings", short_help="Show what the node was paid, by day.")(earnings_command)
app.command("top")(top_command)
app.command("audit", short_help="Does this machine compute correctly?")(audit_command)
app.command("run")(run_node_command)


def check_node(config: Path) -> None:
    """Open a node's configuration and key; raise ConfigurationError."""
    from splitup_node.config import NodeConfig

    NodeConfig.load(config).load_identity()


SERVICE: Final = Service(
    *("splitup-node", "run", "node"),
    DEFAULT_CONFIG,
    check_node,
    config_variable=CONFIG_VARIABLE,
)
app.add_typer(make_service_app(SERVICE), name=SERVICE.group)
add_version_option(app, "splitup-node")


def main() -> None:
    """Entry point of ``splitup-node``."""
    app()
