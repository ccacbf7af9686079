"""``splitup target-worker``: a model that verifies others' drafts, over gRPC."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from splitup.cli.console import Output, run_command
from splitup.cli.options import ConfigFlag, with_options
from splitup_speculation.flags import (
    MarketFlags,
    SettingsFlag,
    TlsFlags,
    WorkerFlags,
    make_context,
    run_worker,
)

CONTEXT = make_context("target-worker")


@with_options
def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Registered text model.")],
    worker: WorkerFlags,
    tls: TlsFlags,
    paid: MarketFlags,
    settings: SettingsFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Verify others' drafts with a model. Needs pip install 'splitup[workers]'.

    The model runs in a process on this machine, or, with --market, on the market's nodes.
    """
    output = Output.open()

    def run() -> None:
        from splitup.core import event_loop
        from splitup_speculation.rpc import check_host

        files = tls.read()
        check_host(worker.host, files, is_paying=paid.market)

        async def serve() -> None:
            from splitup.client.connection import SplitUp
            from splitup_speculation.servers import TargetWorker

            async with contextlib.AsyncExitStack() as stack:
                net = await stack.enter_async_context(SplitUp.connect(config))
                served, where = await paid.open(stack, net, model, worker.sessions)
                target = TargetWorker(served, worker.limits)
                await run_worker(output, target, worker, files, f"verifying with {model}{where}")

        event_loop.run(serve())

    run_command(output, run, interrupted="stopped before the worker was ready")
