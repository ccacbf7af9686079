"""``splitup-node top``: what ``status`` and ``earnings`` say, live in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, Group

from splitup.cli.command import as_command
from splitup.cli.console import Output
from splitup_node.cli.account import DEFAULT_CONFIG, ConfigOption, open_account
from splitup_node.cli.earnings import make_earnings_table
from splitup_node.cli.status import make_status_table

if TYPE_CHECKING:
    from splitup_node.settlement.account import Account

_PERIOD_S: Final = 1.0  # in which the daemon writes its status
_EARNINGS_S: Final = 30.0  # they take several requests to the chain
_DAYS: Final = 7


@as_command
def command(config: ConfigOption = DEFAULT_CONFIG, *, output: Output) -> None:
    """Show what status and earnings say, live, until Ctrl-C."""
    from splitup.core import event_loop
    from splitup.core.errors import InvalidInput

    if not output.out.is_terminal or output.out.is_dumb_terminal:
        raise InvalidInput(
            "top needs a terminal that it can redraw (TERM is not 'dumb'); elsewhere use: "
            "splitup-node status --json"
        )

    async def watch() -> None:
        async with open_account(config) as account:
            await _watch(account, config, output.out)

    with contextlib.suppress(KeyboardInterrupt):  # how one leaves it
        event_loop.run(watch())


async def _watch(account: Account, config: Path, console: Console) -> None:
    """Redraw without end; while the chain is silent what it said last stays."""
    from rich.live import Live
    from rich.text import Text

    from splitup.core.errors import Unavailable
    from splitup_node.owner_facts import fetch_facts

    facts: dict[str, Any] = {}
    days: list[dict[str, Any]] = []
    asked_s = -_EARNINGS_S
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            problem = ""
            try:
                facts = await fetch_facts(account, config)
                if time.monotonic() - asked_s >= _EARNINGS_S:
                    days = (await account.fetch_earnings(_DAYS, time.time()))["days"]
                    asked_s = time.monotonic()
            except Unavailable as error:
                problem = f"{error}; these figures are old"
            now = time.strftime("%H:%M:%S")
            head = Text(problem, "bold red") if problem else Text(f"{now}, Ctrl-C: leave", "dim")
            parts = [make_earnings_table(days)] if days else []
            parts += [make_status_table(config, facts)] if facts else []  # the longest, cut below
            live.update(Group(head, *parts), refresh=True)
            await asyncio.sleep(_PERIOD_S)
