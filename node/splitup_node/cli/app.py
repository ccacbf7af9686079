"""splitup-node: what a GPU owner types. Parses, calls, prints; decides nothing."""

from __future__ import annotations

import gc
import json
import logging
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from splitup.client.inputs import format_usdc
from splitup.config import NetworkConfig
from splitup.core import event_loop
from splitup.core.errors import InvalidInput, SplitUpError
from splitup_node.cli.node_setup import create_node
from splitup_node.config import NodeConfig
from splitup_node.daemon import run_node
from splitup_node.settlement.account import Account, check_registration
from splitup_node.status_file import NodeStatus, read_status
from splitup_node.tasks.audit import audit_node, check_machine

_HELP: Final = """Serve models on your GPU and be paid in USDC.

\b
Exit codes: 0 done; 1 the network, the chain, a peer or an audit failed;
2 a flag, file, key or balance is wrong; 130 interrupted.
"""
_app = typer.Typer(
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigOption = Annotated[
    Path,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        envvar="SPLITUP_NODE_CONFIG",
        help="The node's configuration.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_CONFIG: Final = Path("node.toml")


@_app.command()
def init(
    data_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for all of the node's files.")
    ],
    vram: Annotated[
        str, typer.Option(metavar="SIZE", help='Device memory to serve with, for example "8GB".')
    ],
    rpc_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The chain's RPC endpoint.")
    ] = None,
    deployment: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON file with the contracts' addresses.")
    ] = None,
    gateway: Annotated[
        str | None, typer.Option(metavar="URLS", help="The storage gateways' URLs, with commas.")
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen.")
    ] = "127.0.0.1:7700",
    endpoint: Annotated[
        str,
        typer.Option(
            metavar="URL", help="How others reach the node, if it is not what it listens on."
        ),
    ] = "",
    allow_loopback: Annotated[
        bool, typer.Option(help="Accept peers on loopback and private addresses.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a key and a configuration.

    What is not given comes from the network file that 'splitup up' writes, when there is one.
    """

    def work() -> dict[str, Any]:
        network = NetworkConfig.load(
            None, rpc_url=rpc_url, deployment=deployment, gateway_urls=gateway
        )
        made = create_node(
            data_dir,
            network,
            vram=vram,
            listen=listen,
            endpoint=endpoint,
            allow_loopback=allow_loopback,
        )
        return {"config": str(made.config_path), "address": made.address, "vram_gb": made.vram_gb}

    def show(result: dict[str, Any], console: Console) -> None:
        console.print(f"Made node [bold]{result['address']}[/] for {result['vram_gb']} GB.")
        console.print("Next: send USDC and ether to it; on a network of this machine with:")
        console.print(f"  splitup fund {result['address']}", soft_wrap=True)
        console.print("Then put down the stake with:")
        console.print(f"  splitup-node stake --config {result['config']}", soft_wrap=True)

    _finish(work, show, as_json)


@_app.command(short_help="Register the node and put down its stake.")
def stake(
    config: ConfigOption = _CONFIG,
    audit: Annotated[
        bool, typer.Option(help="Try every task that fits before a new node registers.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Register the node and put down its stake: 1000 USDC plus 100 USDC per GB.

    A new node is audited first, and stakes nothing when it would be slashed.
    """

    def show(result: dict[str, Any], console: Console) -> None:
        if result["added_micro_usdc"]:
            console.print(f"Staked {format_usdc(result['added_micro_usdc'])}.")
        console.print(
            f"Node {result['address']} holds a stake of {format_usdc(result['stake_micro_usdc'])}. "
            f"Next: splitup-node run --config {config}"
        )

    def act(account: Account) -> Coroutine[Any, Any, dict[str, Any]]:
        return account.stake(partial(check_machine, NodeConfig.load(config)) if audit else None)

    _finish(lambda: _with_account(config, act), show, as_json)


@_app.command(short_help="Leave; the stake is free after a while.")
def unstake(
    config: ConfigOption = _CONFIG,
    cancel: Annotated[bool, typer.Option("--cancel", help="Stay after all.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Leave: no new work at once, the stake free after the unbonding period."""

    def show(result: dict[str, Any], console: Console) -> None:
        if not result["unbonding_at_s"]:
            console.print("The node stays.")
            return
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(result["unbonding_at_s"]))
        console.print(
            f"The stake is free from {when}; take it then with: splitup-node withdraw --stake"
        )

    def act(account: Account) -> Coroutine[Any, Any, dict[str, Any]]:
        return account.cancel_unstake() if cancel else account.unstake()

    _finish(lambda: _with_account(config, act), show, as_json)


@_app.command()
def withdraw(
    config: ConfigOption = _CONFIG,
    stake: Annotated[bool, typer.Option("--stake", help="The stake, after unbonding.")] = False,
    balance: Annotated[bool, typer.Option("--balance", help="What the node has earned.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Take out earned USDC (the default), the stake, or both."""

    def show(result: dict[str, Any], console: Console) -> None:
        for name, what in (("balance", "earnings"), ("stake", "stake")):
            amount = result[f"{name}_micro_usdc"]
            if amount:
                console.print(f"Withdrew {format_usdc(amount)} of {what}.")
        if not any(result.values()):
            console.print("There is nothing to withdraw.")

    take_balance = balance or not stake
    _finish(
        lambda: _with_account(config, lambda account: account.withdraw(stake, take_balance)),
        show,
        as_json,
    )


@_app.command(short_help="Say what the node has, and what it does.")
def status(config: ConfigOption = _CONFIG, as_json: JsonOption = False) -> None:
    """Say what the chain knows of the node, and what the node is doing."""

    def work() -> dict[str, Any]:
        loaded = NodeConfig.load(config)
        chain = _with_account(config, lambda account: account.fetch())
        return {"chain": chain, "node": read_status(loaded.data_dir).to_dict()}

    _finish(work, _show_status, as_json)


@_app.command(short_help="Would this machine be slashed? Try its tasks.")
def audit(
    config: ConfigOption = _CONFIG,
    models: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="MODEL", help="Name or id; repeatable (default: all)."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Before there is a stake: do not look for one.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say whether this machine would be slashed: try every task that fits it, serve none.

    Tasks are computed on seeded inputs and compared with what their models were registered with.
    Exit code 1 when there is a task that this machine must not serve.
    """

    def work() -> dict[str, Any]:
        check = None if dry_run else check_registration
        device, rows = event_loop.run(audit_node(NodeConfig.load(config), models or (), check))
        return {
            "determinism_class": device["determinism_class"],
            "may_serve": all(row.may_serve for row in rows),
            "tasks": [row.to_dict() for row in rows],
        }

    result = _finish(work, _show_audit, as_json)
    if not result["may_serve"]:
        raise typer.Exit(1)


def _show_audit(result: dict[str, Any], console: Console) -> None:
    console.print(f"This machine is {result['determinism_class']}.", soft_wrap=True)
    if not result["tasks"]:
        console.print("No registered task fits it.")
        return
    table = Table("model", "task", "verdict", "why", box=None)
    for row in result["tasks"]:
        name = f"{row['index']} {row['label']}"
        table.add_row(row["model_id"][:10], name, row["verdict"] or "not tried", row["detail"])
    console.print(table)
    refused = sum(not row["may_serve"] for row in result["tasks"])
    if refused:
        console.print(f"{refused} of {len(result['tasks'])} tasks must not be served from here.")
    else:
        console.print("No stake would be lost.")


@_app.command()
def run(
    config: ConfigOption = _CONFIG,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Log JSON lines.")] = False,
) -> None:
    """Serve until Ctrl-C or SIGTERM. Logs go to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines() if as_json else logging.Formatter(_LOG_FORMAT))
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler])
    logging.getLogger("asyncio").setLevel(logging.WARNING)

    def work() -> dict[str, Any]:
        gc.collect()
        gc.freeze()  # 100,000 objects of imported modules: looking at them again stops every task
        event_loop.run(run_node(NodeConfig.load(config)))
        return {}

    _finish(work, lambda result, console: None, as_json=False)


_LOG_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at_ms": int(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _show_status(result: dict[str, Any], console: Console) -> None:
    chain, node = result["chain"], NodeStatus.from_dict(result["node"])
    table = Table(show_header=False, box=None)
    table.add_row("address", chain["address"])
    state = "active" if chain["active"] else "not registered"
    if chain["stake_micro_usdc"] and not chain["active"]:
        state = "leaving" if chain["unbonding_at_s"] else "inactive"
    table.add_row("stake", f"{format_usdc(chain['stake_micro_usdc'])} ({state})")
    if chain["unbonding_at_s"]:
        left_s = max(0, chain["unbonding_at_s"] - int(time.time()))
        table.add_row("unbonding", f"{left_s} s left" if left_s else "done")
    table.add_row("earned", format_usdc(chain["balance_micro_usdc"]))
    table.add_row("wallet", format_usdc(chain["wallet_micro_usdc"]))
    table.add_row("daemon", node.describe())
    for sentence in node.values.get("warnings", []):
        table.add_row("warning", sentence)
    if node.is_running:
        for name, text in node.list_rows(time.time()):
            table.add_row(name, Text(text))
    console.print(table)


def _with_account(
    path: Path, action: Callable[[Account], Coroutine[Any, Any, dict[str, Any]]]
) -> dict[str, Any]:
    async def act() -> dict[str, Any]:
        async with await Account.open(NodeConfig.load(path)) as account:
            return await action(account)

    return event_loop.run(act())


def _finish(
    work: Callable[[], dict[str, Any]],
    show: Callable[[dict[str, Any], Console], None],
    as_json: bool,
) -> dict[str, Any]:
    """Do the work, print and return its result; errors become a sentence and an exit code."""
    try:
        result = work()
    except SplitUpError as error:
        if as_json:
            print(json.dumps({"error": str(error)}))
        else:
            print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, InvalidInput) else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(result))
    else:
        show(result, Console())
    return result


def main() -> None:
    """Entry point of ``splitup-node``."""
    _app()
