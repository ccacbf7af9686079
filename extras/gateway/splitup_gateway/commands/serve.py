"""``splitup serve``: models of the network behind the OpenAI API, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from splitup.cli.command import as_command
from splitup.cli.console import Output
from splitup.cli.options import ConfigFlag, VerifyFlag
from splitup.core.errors import ConfigurationError, InvalidInput, SplitUpError
from splitup.core.event_loop import catch_signals
from splitup.core.extras import require
from splitup_gateway.commands.keys import (
    IndexFlag,
    KeysFlag,
    find_database_url,
    find_keys_url,
    find_streams_folder,
)

if TYPE_CHECKING:
    from splitup.client.network import Network
    from splitup_gateway.access import Access
    from splitup_gateway.http_server import ApiServer

DEFAULT_PORT: Final = 8000


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Where to listen."""

    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Address to listen on; beyond this machine keys and TLS are needed.",
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65_535, help="0 takes a free one.")
    ] = DEFAULT_PORT
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate chain, PEM.")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key, PEM.")] = (
        None
    )
    metrics: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where Prometheus reads /metrics, such as 127.0.0.1:9467 (default: nowhere).",
        ),
    ] = ""

    def load_tls(self) -> ssl.SSLContext | None:
        """Return what speaks TLS, None without files; raise ConfigurationError for bad ones."""
        if self.tls_cert is None and self.tls_key is None:
            return None
        if self.tls_cert is None or self.tls_key is None:
            raise ConfigurationError("TLS needs both files: give --tls-cert and --tls-key")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"{self.tls_cert} and {self.tls_key} are no certificate and its key: {error}"
            ) from None
        return context


@dataclass(frozen=True, slots=True)
class ServingFlags:
    """How many executions are kept open, how texts are decoded, and what devices are served."""

    most: Annotated[
        int,
        typer.Option(
            "--leases", metavar="N", min=1, help="Requests of one model that run at once."
        ),
    ] = 8
    warm: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Executions kept open while nobody asks."),
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
            help="Most seconds that the money of an execution is locked; the network has a limit.",
        ),
    ] = 1_200.0
    verify: VerifyFlag = None
    speculate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL[=DRAFT]",
            help="Decode MODEL by drafts, in fewer steps: those of n-grams, and of DRAFT, a "
            "registered model that this machine runs; repeatable.",
        ),
    ] = None
    is_private: Annotated[
        bool,
        typer.Option(
            "--private",
            help="Serve models registered with --private K to browsers and devices that keep "
            "text and tokens to themselves.",
        ),
    ] = False
    sessions: Annotated[
        int,
        typer.Option(
            "--split-sessions", metavar="N", min=1, help="Texts of devices under way at once."
        ),
    ] = 32
    ttl_s: Annotated[
        float,
        typer.Option(
            "--split-ttl", metavar="S", min=1.0, help="Seconds until an unused one is forgotten."
        ),
    ] = 300.0
    adapter_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter-host",
            metavar="URL",
            help="A host of encrypted adapters that the page may ask from the user's browser; "
            "repeatable.",
        ),
    ] = None
    adapter_signers: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter-signer",
            metavar="KEY",
            help="A signing key that may have signed what these hosts offer; with it the page "
            "takes nothing else. Repeatable.",
        ),
    ] = None

    def find_drafts(self, models: list[str]) -> dict[str, str | None]:
        """Return what drafts for each model: a model, "" for n-grams alone, None for nothing.

        Raises InvalidInput for a model that is not served.
        """
        found: dict[str, str | None] = dict.fromkeys(models)
        for entry in self.speculate or []:
            model, _, draft = entry.partition("=")
            if model not in found:
                raise InvalidInput(f"--speculate names '{model}', which is not served")
            found[model] = draft
        return found


@as_command(hint="loading", interrupted="stopped before the server was ready")
async def command(
    listen: ListenOptions,
    serving: ServingFlags,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...",
            help="Names or ids of text models; by default all that nodes hold now, without "
            "executions kept open for them.",
        ),
    ] = None,
    keys: KeysFlag = None,
    index: IndexFlag = None,
    config: ConfigFlag = None,
    *,
    output: Output,
) -> None:
    """Offer models over HTTP to clients of the OpenAI API, paid from this account.

    At the same address is a page to chat and to look at the network. Requests need a key as soon
    as there is one, also while the server runs: splitup keys new NAME.
    """
    require("llguidance", "PIL", "sqlalchemy")
    from splitup.net.endpoints import is_loopback
    from splitup_gateway.access import Access
    from splitup_gateway.api_keys import ApiKeys

    with contextlib.closing(ApiKeys.open(find_keys_url(keys, config))) as table:
        tls, is_public = listen.load_tls(), not is_loopback(listen.host)
        if is_public and not (table.has_any() and tls):
            raise InvalidInput(
                f"--host {listen.host} is not a loopback address, and whoever reaches the server "
                "spends this account's money; create a key (splitup keys new NAME) and give "
                "--tls-cert and --tls-key"
            )
        access = Access(table, needs_keys=is_public)
        index_url = find_database_url(index, config, "explorer.sqlite")
        await _serve(output, config, models, listen, tls, serving, access, index_url)


async def _find_models(net: Network) -> list[str]:
    """Return the names of all models that read texts and that nodes hold; raise InvalidInput."""
    offers = [offer for offer in await net.list_offers() if offer.context and not offer.is_private]
    if ready := [offer.name for offer in offers if offer.is_ready]:
        return ready
    states = "; ".join(f"{offer.name}: {offer.state}" for offer in offers)
    raise InvalidInput(
        f"nodes hold no model that reads texts ({states or 'none is registered'}); name one to "
        "wait for it"
    )


async def add_models(
    api: ApiServer, drafts: dict[str, str | None], *, are_named: bool
) -> list[str]:
    """Serve the models, and return a sentence for each that cannot be, which leaves ``drafts``.

    Raises what is wrong with one that was named; models of strangers do not end a server.
    """
    said = []
    for model, draft in list(drafts.items()):
        try:
            await api.add_model(model, draft)
        except SplitUpError as error:
            if are_named:
                raise
            said.append(f"not served: {model}: {error}")
            del drafts[model]
    if not drafts:
        raise InvalidInput("; ".join(said))
    return said


async def list_waits(net: Network, models: Collection[str]) -> list[str]:
    """Return a sentence for each model that nodes do not hold yet, with how far they are."""
    from splitup.client.market.holders import describe_holders

    found = await asyncio.gather(*map(net.look, models))
    return [
        f"requests for {model} wait until nodes hold it: {describe_holders(holders)}"
        for model, holders in zip(models, found, strict=True)
        if holders is not None
    ]


async def _serve(
    output: Output,
    config: ConfigFlag,
    models: list[str] | None,
    listen: ListenOptions,
    tls: ssl.SSLContext | None,
    serving: ServingFlags,
    access: Access,
    index_url: str,
) -> None:
    from splitup.client.connection import SplitUp
    from splitup.client.leases import LeaseOptions
    from splitup.client.market.payments import check_deadline
    from splitup.net.http_server import serve_app
    from splitup.net.metrics import serve_metrics
    from splitup_gateway.explorer_routes import run_explorer
    from splitup_gateway.http_server import ApiServer
    from splitup_gateway.page_files import MARKET_PAGE, add_page
    from splitup_gateway.split.sessions import SessionOptions
    from splitup_gateway.timelines import Timelines

    warm = serving.warm if models else 0  # no money is locked for models that nobody asked for
    options = LeaseOptions(
        serving.most, warm, serving.steps, serving.seconds, verify=serving.verify
    )
    stopped = asyncio.Event()
    timelines = Timelines()
    async with contextlib.AsyncExitStack() as stack:
        net = await stack.enter_async_context(SplitUp.connect(config))
        await check_deadline(net.chain, serving.seconds, "--lease-seconds")
        drafts = serving.find_drafts(models or await _find_models(net))
        explorer = await stack.enter_async_context(run_explorer(net, index_url))
        hosts = tuple(serving.adapter_hosts or ())
        signers = tuple(serving.adapter_signers or ())
        sessions = SessionOptions(serving.sessions, serving.ttl_s, hosts, signers)
        offered = sessions if serving.is_private else None
        folder = find_streams_folder(config, listen.host, listen.port)
        api = ApiServer(net, options, access, timelines, offered, folder)
        try:
            for sentence in await add_models(api, drafts, are_named=bool(models)):
                output.say(sentence)
            if serving.is_private and not api.private_models:
                raise InvalidInput(
                    "no model here is private; register one with: splitup-deploy register "
                    "--private K, or leave out --private"
                )
            app = api.make_app()
            await api.resume()
            explorer.add_to(app, timelines, access)
            add_page(app, MARKET_PAGE, has_keys=access.has_keys, adapter_hosts=hosts)
            await stack.enter_async_context(serve_metrics(listen.metrics, api.list_readings))
            server = await serve_app(app, listen.host, listen.port, cancels_handlers=True, tls=tls)
            api.settle()
            names = ", ".join(drafts)
            needs = "API keys needed" if await access.has_keys() else "no key needed"
            output.say(f"serving {names} ({needs}); base URL: {server.url}/v1")
            for sentence in await list_waits(net, drafts):
                output.say(sentence)
            if api.private_models:
                found = ", ".join(api.private_models)
                output.say(f"for devices that keep the text: {found}; page: {server.url}/private")
            output.say(f"page: {server.url}")
            output.hint("Ctrl-C: stop")
            with catch_signals(stopped):
                await stopped.wait()
            output.say("stopping: running executions end, and what they did not use comes back")
            await server.close()
        finally:
            await api.close()
