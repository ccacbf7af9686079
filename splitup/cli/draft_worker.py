"""``splitup draft-worker``: a small model that drafts for others, over gRPC."""

from __future__ import annotations

from typing import Annotated

import typer

from splitup.cli.console import Output, run_command
from splitup.cli.options import ConfigFlag, with_options
from splitup.cli.workers import SettingsFlag, TlsFlags, WorkerFlags, make_context, run_worker

CONTEXT = make_context("draft-worker")


@with_options
def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Small registered text model.")],
    worker: WorkerFlags,
    tls: TlsFlags,
    settings: SettingsFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Draft for others with a model that this machine runs. Needs pip install 'splitup[workers]'.

    Callers name its address to splitup speculate. Wrong drafts cost them time, never a token.
    """
    output = Output.open()

    def run() -> None:
        from splitup.core import event_loop
        from splitup.workers.rpc import check_host

        files = tls.read()
        check_host(worker.host, files)

        async def serve() -> None:
            from splitup.client.connection import SplitUp
            from splitup.workers.servers import DraftWorker, ServedModel

            async with SplitUp.connect(config) as net:
                local = await net.open_local(model)
                found = await net.fetch_model(model)
                served = ServedModel(found.model_id, local.info, local.chunk, local.open_text)
                drafting = DraftWorker(served, worker.limits)
                await run_worker(output, drafting, worker, files, f"drafting with {model}")

        event_loop.run(serve())

    run_command(output, run, interrupted="stopped before the worker was ready")
