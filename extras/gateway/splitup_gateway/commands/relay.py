"""``splitup relay``: let a phone on the local network reach a server on this machine."""

from __future__ import annotations

import asyncio
import io
import sys
from typing import Annotated

import typer

from splitup.cli.command import as_command
from splitup.cli.console import Output
from splitup.core.event_loop import catch_signals
from splitup.core.extras import require


@as_command(interrupted="stopped")
async def command(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where phones connect to.")
    ] = "0.0.0.0:9095",
    to: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The server that they reach.")
    ] = "127.0.0.1:8000",
    tls: Annotated[
        bool,
        typer.Option(
            "--tls", help="Speak TLS with a new certificate: browsers keep models only then."
        ),
    ] = False,
    connections: Annotated[int, typer.Option(metavar="N", min=1, help="Most at once.")] = 256,
    idle_s: Annotated[
        float,
        typer.Option("--idle", metavar="S", min=1.0, help="Silent for so long, one is closed."),
    ] = 600.0,
    *,
    output: Output,
) -> None:
    """Pass every TCP connection on to a server of this machine, until Ctrl-C.

    Whoever reaches the relay reaches the server, which takes it for a program of this machine: give
    the server API keys first (splitup keys new NAME).
    """
    require("segno")
    import segno

    from splitup_gateway.tcp_relay import HostPort, TcpRelay, find_local_address, make_certificate

    source, target = HostPort.parse(listen), HostPort.parse(to)
    host = find_local_address() if source.host in ("0.0.0.0", "::") else source.host
    context = None
    if tls:
        context, fingerprint = make_certificate([host, "localhost", "127.0.0.1"])
        output.say(f"certificate (SHA-256): {fingerprint}")
        output.say(
            "no authority signed it: browsers open the page, but install no app from it "
            "(docs/guides/private-inference.md)"
        )
    async with TcpRelay(
        source, target, connections=connections, idle_s=idle_s, tls=context
    ) as relay:
        scheme = "https" if tls else "http"
        url = f"{scheme}://{HostPort(host, relay.port)}/"
        picture = io.StringIO()
        segno.make(url, error="m").terminal(picture, compact=True)
        sys.stderr.write(picture.getvalue())
        output.say(f"{url} -> {target}")
        output.say(
            "whoever reaches this address can spend the server's account, unless the server has "
            "API keys: splitup keys new NAME"
        )
        output.hint("Ctrl-C: stop")
        stopped = asyncio.Event()
        with catch_signals(stopped):
            await stopped.wait()
