"""``splitup adapter-host``: apply LoRA adapters to hidden states that only clients can decrypt."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitup.cli.command import as_command
from splitup.cli.console import Output
from splitup.cli.options import ConfigFlag
from splitup.core.event_loop import catch_signals

if TYPE_CHECKING:
    from splitup_private.adapters.host import AdapterHost


@dataclass(frozen=True, slots=True)
class SessionFlags:
    """How many clients a host serves at once; each takes 75 MB."""

    sessions: Annotated[int, typer.Option(metavar="N", min=1, help="Most sessions at once.")] = 16
    idle_s: Annotated[
        float,
        typer.Option(
            "--idle-seconds", metavar="S", min=1.0, help="A session ends when idle this long."
        ),
    ] = 300.0
    origins: Annotated[
        list[str] | None,
        typer.Option(
            "--origin",
            metavar="URL",
            help="Pages of this origin, such as https://host:8000, may ask. Repeatable.",
        ),
    ] = None


@as_command(interrupted="stopped before the host was ready")
async def command(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...", help="Adapters in PEFT's form; a folder's name is the adapter's."
        ),
    ],
    flags: SessionFlags,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="0: any free one.")
    ] = 8470,
    signs: Annotated[
        bool, typer.Option("--sign", help="Sign with this account what the host offers.")
    ] = False,
    config: ConfigFlag = None,
    *,
    output: Output,
) -> None:
    """Apply adapters to hidden states that clients encrypt. Needs the extra [adapters].

    The host never holds a secret key. Run it where no node of the same executions runs.
    """
    from splitup.config import NetworkConfig
    from splitup_private.adapters.host import AdapterHost, HostOptions
    from splitup_private.adapters.weights import load_adapter

    adapters = [load_adapter(folder) for folder in folders]
    options = HostOptions(flags.sessions, flags.idle_s, origins=tuple(flags.origins or ()))
    identity = NetworkConfig.load(config).load_user() if signs else None
    if identity is not None:
        output.say(f"signing key: {identity.signing_key_hex}")
    await _serve(output, AdapterHost(adapters, options, identity), host, port)


async def _serve(output: Output, adapters: AdapterHost, host: str, port: int) -> None:
    from splitup.net.http_server import serve_app

    stopped = asyncio.Event()
    server = await serve_app(adapters.make_app(), host, port)
    try:
        for info in adapters.infos:
            output.say(f"adapter {info.name}: {info.adapter}")
        output.say(f"adapter host: {server.url}")
        output.hint("Ctrl-C: stop")
        with catch_signals(stopped):
            await stopped.wait()
    finally:
        await server.close()
        adapters.close()
