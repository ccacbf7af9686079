"""``splitup target-worker``: a model that verifies others' drafts, over gRPC."""

from __future__ import annotations

from splitup.cli.command import as_command
from splitup.cli.console import Output
from splitup_speculation.flags import ServedFlags, make_context, serve_worker

CONTEXT = make_context("target-worker")


@as_command(hint="loading", interrupted="stopped before the worker was ready")
async def command(flags: ServedFlags, *, output: Output) -> None:
    """Verify others' drafts with a model. Needs the extra [workers].

    The model runs in a process on this machine, or, with --market, on the market's nodes.
    """
    from splitup_speculation.servers import TargetWorker

    await serve_worker(TargetWorker, "verifying", flags, output)
