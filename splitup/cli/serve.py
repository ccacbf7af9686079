"""``splitup serve``: models of the network behind the OpenAI API, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from splitup.cli.console import Output, run_command
from splitup.cli.options import ConfigFlag, with_options

DEFAULT_PORT: Final = 8000


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Where to listen."""

    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Loopback address to listen on.")
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", min=0, max=65_535, help="0 takes a free one.")
    ] = DEFAULT_PORT


@dataclass(frozen=True, slots=True)
class LeaseFlags:
    """How many executions are kept open, and how large they are."""

    most: Annotated[
        int,
        typer.Option(
            "--leases", metavar="N", min=1, help="Requests of one model that run at once."
        ),
    ] = 8
    warm: Annotated[
        int,
        typer.Option("--warm", metavar="N", min=0, help="Executions kept open while nobody asks."),
    ] = 1
    steps: Annotated[
        int,
        typer.Option(
            "--lease-steps",
            metavar="N",
            min=1,
            help="Steps that an execution pays for ahead; unused ones are given back.",
        ),
    ] = 4_096
    seconds: Annotated[
        float,
        typer.Option(
            "--lease-seconds",
            metavar="S",
            min=20.0,
            help="Most seconds that the money of an execution is locked.",
        ),
    ] = 1_200.0


@with_options
def command(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Names or ids of text models.")
    ],
    listen: ListenOptions,
    leases: LeaseFlags,
    config: ConfigFlag = None,
) -> None:
    """Offer models over HTTP to clients of the OpenAI API, paid from this account."""
    output = Output.open()

    def run() -> None:
        from splitup.core import event_loop
        from splitup.core.errors import InvalidInput

        if not _is_loopback(listen.host):
            raise InvalidInput(
                f"--host {listen.host} is not a loopback address, and whoever reaches the server "
                "spends this account's money; listen on 127.0.0.1 and let a proxy that checks keys "
                "and speaks TLS stand before it"
            )
        event_loop.run(_serve(output, config, models, listen, leases))

    run_command(output, run, interrupted="stopped before the server was ready")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _serve(
    output: Output,
    config: ConfigFlag,
    models: list[str],
    listen: ListenOptions,
    leases: LeaseFlags,
) -> None:
    from splitup.client.connection import SplitUp
    from splitup.net.http import serve_app
    from splitup.serve.http_server import ApiServer
    from splitup.serve.leases import LeaseOptions

    options = LeaseOptions(leases.most, leases.warm, leases.steps, leases.seconds)
    stopped = asyncio.Event()
    async with SplitUp.connect(config) as net:
        api = ApiServer(net, options)
        try:
            for model in dict.fromkeys(models):
                await api.add_model(model)
            server = await serve_app(
                api.make_app(), listen.host, listen.port, cancels_handlers=True
            )
            output.say(f"serving {', '.join(dict.fromkeys(models))}; base URL: {server.url}/v1")
            output.hint("Ctrl-C: stop")
            with _catch_signals(stopped):
                await stopped.wait()
            output.say("stopping: running executions end, and what they did not use comes back")
            await server.close()
        finally:
            await api.close()


@contextlib.contextmanager
def _catch_signals(stopped: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stopped.set)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
