"""What the commands of draft and target workers share, and that of who drives them."""

from __future__ import annotations

import asyncio
import tomllib
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitup.cli.console import Output
from splitup.cli.options import ConfigFlag
from splitup.core.event_loop import catch_signals

if TYPE_CHECKING:
    from splitup.client.leases import LeaseOptions
    from splitup.client.network import Network
    from splitup_speculation.rpc import Tls
    from splitup_speculation.servers import DraftWorker, TargetWorker, WorkerModel
    from splitup_speculation.sessions import SessionLimits


def make_context(verb: str) -> dict[str, Any]:
    """Return the settings of a command whose flags may be SPLITUP_VERB_FLAG in the environment."""
    return {"auto_envvar_prefix": f"SPLITUP_{verb.replace('-', '_').upper()}"}


def _read_settings(context: typer.Context, path: Path | None) -> Path | None:
    """Take the values of a file as the flags' defaults."""
    if path is None:
        return None
    known = {parameter.name for parameter in context.command.params} - {"settings"}
    try:
        values = {
            name.replace("-", "_"): value
            for name, value in tomllib.loads(path.read_text("utf-8")).items()
        }
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from None
    unknown = sorted(set(values) - known)
    if unknown:
        raise typer.BadParameter(f"{path} sets '{unknown[0]}', which is no flag of this command")
    context.default_map = {**(context.default_map or {}), **values}
    return path


SettingsFlag = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        is_eager=True,
        callback=_read_settings,
        help="TOML file with values of these flags; flags and the environment override it.",
    ),
]


@dataclass(frozen=True, slots=True)
class TlsFlags:
    """Files for TLS."""

    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its own certificate chain, PEM.")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key, PEM.")] = (
        None
    )
    tls_ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Authorities that may sign the other side's, PEM."),
    ] = None

    def read(self) -> Tls:
        """Return the files; raise ConfigurationError."""
        from splitup_speculation.rpc import Tls

        return Tls(self.tls_cert, self.tls_key, self.tls_ca)


@dataclass(frozen=True, slots=True)
class WorkerFlags:
    """Where a worker listens, and what it keeps."""

    host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="Address to listen on; beyond this machine with TLS."),
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65_535, help="0 takes a free one.")
    ] = 0
    sessions: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Texts at once; one more ends the least recent."),
    ] = 8
    session_ttl: Annotated[
        float,
        typer.Option(metavar="S", min=1.0, help="Seconds until an unused one is forgotten."),
    ] = 300.0

    @property
    def limits(self) -> SessionLimits:
        """Return the limits of sessions."""
        from splitup_speculation.sessions import SessionLimits

        return SessionLimits(self.sessions, self.session_ttl)


@dataclass(frozen=True, slots=True)
class MarketFlags:
    """Where a worker's model runs."""

    market: Annotated[
        bool,
        typer.Option(
            "--market", help="Run it on the market's nodes, paid from this account, not here."
        ),
    ] = False
    lease_steps: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Steps that an execution pays for ahead; with --market."
        ),
    ] = 1_024

    async def open(
        self, stack: AsyncExitStack, net: Network, model: str, sessions: int
    ) -> tuple[WorkerModel, str]:
        """Return the model, and where it runs and what that costs, in words."""
        from splitup.client.inputs import format_usdc
        from splitup.client.leases import LeaseOptions

        if not self.market:
            return await _open_here(net, model), ""
        options = LeaseOptions(most=sessions, warm=0, steps=self.lease_steps)
        served = await _open_market(stack, net, model, options)
        quote = await net.quote(model, steps=options.steps, deadline_s=options.seconds)
        price = format_usdc(quote.locked_micro_usdc)
        return served, f" on the market, {self.lease_steps} steps for at most {price} each time"


async def _open_here(net: Network, model: str) -> WorkerModel:
    from splitup_speculation.servers import OrderedModel, WorkerModel

    local = await net.open_local(model)
    found = await net.fetch_model(model)
    return WorkerModel(
        found.model_id, local.info, local.chunk, lambda: OrderedModel(local.open_text())
    )


async def _open_market(
    stack: AsyncExitStack, net: Network, model: str, options: LeaseOptions
) -> WorkerModel:
    from splitup.client.leases import LeasePool
    from splitup.core.errors import InvalidInput
    from splitup_speculation.servers import LeasedModel, WorkerModel

    found = await net.fetch_text_model(model)
    if found.manifest.client is not None:
        raise InvalidInput(f"model {model} is a private one; a worker would see its texts")
    if found.info.images is not None:
        raise InvalidInput(f"model {model} takes images, and workers feed text only")
    pool = LeasePool(net, model, options)
    pool.open()
    stack.push_async_callback(pool.close)
    identity = (await net.fetch_model(model)).model_id
    needed = max(options.steps // 4, 1)
    return WorkerModel(
        identity, found.info, found.chunk, lambda: LeasedModel(pool, found.chunk, needed)
    )


@dataclass(frozen=True, slots=True)
class ServedFlags:
    """A worker's model, where it runs, and who may reach it."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help="Registered text model.")]
    worker: WorkerFlags
    paid: MarketFlags
    tls: TlsFlags
    settings: SettingsFlag = None
    config: ConfigFlag = None


async def serve_worker(
    make: type[DraftWorker | TargetWorker], what: str, flags: ServedFlags, output: Output
) -> None:
    """Serve a model, as ``make`` makes a worker of it, until the process is asked to end."""
    from splitup.client.connection import SplitUp
    from splitup_speculation.rpc import check_host, start_server

    stopped, listen, tls = asyncio.Event(), flags.worker, flags.tls.read()
    check_host(listen.host, tls, is_paying=flags.paid.market)
    async with AsyncExitStack() as stack:
        net = await stack.enter_async_context(SplitUp.connect(flags.config))
        served, where = await flags.paid.open(stack, net, flags.model, listen.sessions)
        worker = make(served, listen.limits)
        server, address = await start_server(
            worker.service, worker.handlers, listen.host, listen.port, tls
        )
        try:
            output.say(f"{what} with {flags.model}{where}; address: {address}")
            output.hint("Ctrl-C: stop")
            with catch_signals(stopped):
                await stopped.wait()
        finally:
            await server.stop(grace=1.0)
            await worker.close()
