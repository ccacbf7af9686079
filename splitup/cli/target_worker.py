"""``splitup target-worker``: a model that verifies others' drafts, over gRPC."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from splitup.cli.console import Output, run_command
from splitup.cli.options import ConfigFlag, with_options
from splitup.cli.workers import SettingsFlag, TlsFlags, WorkerFlags, make_context, run_worker

if TYPE_CHECKING:
    from splitup.client.network import Network
    from splitup.workers.servers import ServedModel

CONTEXT = make_context("target-worker")


@with_options
def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Registered text model.")],
    worker: WorkerFlags,
    tls: TlsFlags,
    market: Annotated[
        bool,
        typer.Option(
            "--market", help="Run it on the market's nodes, paid from this account, not here."
        ),
    ] = False,
    lease_steps: Annotated[
        int,
        typer.Option(
            "--lease-steps",
            metavar="N",
            min=1,
            help="Steps that an execution pays for ahead; with --market.",
        ),
    ] = 1_024,
    settings: SettingsFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Verify others' drafts with a model. Needs pip install 'splitup[workers]'.

    The model runs in a process on this machine, or, with --market, on the market's nodes.
    """
    output = Output.open()

    def run() -> None:
        from splitup.core import event_loop
        from splitup.workers.rpc import check_host

        files = tls.read()
        check_host(worker.host, files, is_paying=market)

        async def serve() -> None:
            from splitup.client.connection import SplitUp
            from splitup.client.inputs import format_usdc
            from splitup.workers.servers import TargetWorker

            async with contextlib.AsyncExitStack() as stack:
                net = await stack.enter_async_context(SplitUp.connect(config))
                what = f"verifying with {model}"
                if market:
                    served = await _open_market(stack, net, model, lease_steps, worker.sessions)
                    price = format_usdc(await net.quote(model, steps=lease_steps))
                    what += f" on the market, {lease_steps} steps for at most {price} each time"
                else:
                    served = await _open_here(net, model)
                target = TargetWorker(served, worker.limits)
                await run_worker(output, target, worker, files, what)

        event_loop.run(serve())

    run_command(output, run, interrupted="stopped before the worker was ready")


async def _open_here(net: Network, model: str) -> ServedModel:
    from splitup.workers.servers import OrderedModel, ServedModel

    local = await net.open_local(model)
    found = await net.fetch_model(model)
    return ServedModel(
        found.model_id, local.info, local.chunk, lambda: OrderedModel(local.open_text())
    )


async def _open_market(
    stack: contextlib.AsyncExitStack, net: Network, model: str, steps: int, sessions: int
) -> ServedModel:
    from splitup.serve.leases import LeaseOptions, LeasePool
    from splitup.workers.lease import LeasedModel
    from splitup.workers.servers import ServedModel

    found = await net.fetch_text_model(model)
    if found.manifest.client is not None:
        from splitup.core.errors import InvalidInput

        raise InvalidInput(f"model {model} is a private one; a worker would see its texts")
    pool = LeasePool(net, model, LeaseOptions(most=sessions, warm=0, steps=steps))
    pool.open()
    stack.push_async_callback(pool.close)
    identity = (await net.fetch_model(model)).model_id
    needed = max(steps // 4, 1)
    return ServedModel(
        identity, found.info, found.chunk, lambda: LeasedModel(pool, found.chunk, needed)
    )
