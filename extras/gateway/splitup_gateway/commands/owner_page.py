"""``splitup-node page``: what ``status`` and ``earnings`` say, as a page for a browser here."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from splitup_node.cli.account import DEFAULT_CONFIG, ConfigOption, open_account

from splitup.cli.command import as_command
from splitup.cli.console import Output
from splitup.core.errors import InvalidInput, SplitUpError
from splitup.core.event_loop import catch_signals

if TYPE_CHECKING:
    from aiohttp import web
    from splitup_node.settlement.account import Account

_DEFAULT_PORT: Final = 7790
_DAYS: Final = 14
_KEPT_S: Final = 2.0  # that an answer serves all tabs that ask


@as_command(interrupted="stopped")
async def command(
    config: ConfigOption = DEFAULT_CONFIG,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="A loopback address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65_535)] = _DEFAULT_PORT,
    *,
    output: Output,
) -> None:
    """Show what status and earnings say on a page in the browser of this machine."""
    from splitup.net.endpoints import is_loopback
    from splitup.net.http_server import serve_app

    if not is_loopback(host):
        raise InvalidInput(
            f"--host {host} is not a loopback address, and the page asks for no key; look at "
            "it from elsewhere through ssh -L"
        )
    async with open_account(config) as account:
        server = await serve_app(make_owner_app(account, config), host, port)
        output.say(f"the node's page: {server.url}")
        output.hint("Ctrl-C: stop")
        stopped = asyncio.Event()
        with catch_signals(stopped):
            await stopped.wait()
        await server.close()


def make_owner_app(account: Account, config: Path) -> web.Application:
    """Return the application that serves the page of one node, and its figures."""
    from aiohttp import web

    from splitup.net.http_server import make_app
    from splitup_gateway.errors import ApiError, translate
    from splitup_gateway.page_files import OWNER_PAGE, add_page

    lock, asked_s = asyncio.Lock(), -math.inf
    view: dict[str, Any] = {}

    async def show(_: web.Request) -> web.Response:
        nonlocal view, asked_s
        async with lock:
            if time.monotonic() - asked_s >= _KEPT_S:
                view = await fetch_view(account, config)
                asked_s = time.monotonic()
        return web.json_response(view, headers={"Cache-Control": "no-store"})

    @web.middleware
    async def answer_errors(request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            found: web.StreamResponse = await handler(request)
        except SplitUpError as error:
            described = ApiError(str(error), status=translate(error).status)
            return web.json_response(described.describe(), status=described.status)
        return found

    app = make_app(errors=answer_errors)
    app.router.add_get("/node/v1/view", show)
    add_page(app, OWNER_PAGE)
    return app


async def fetch_view(account: Account, config: Path) -> dict[str, Any]:
    """Return the facts of ``status`` with its rows, and the days of ``earnings``."""
    from splitup_node.owner_facts import fetch_facts, list_rows

    facts = await fetch_facts(account, config)
    earnings = await account.fetch_earnings(_DAYS, time.time())
    return {**facts, "rows": list_rows(facts, config, time.time()), "earnings": earnings}
