"""``splitup draft-worker``: a small model that drafts for others, over gRPC."""

from __future__ import annotations

from splitup.cli.command import as_command
from splitup.cli.console import Output
from splitup_speculation.flags import ServedFlags, make_context, serve_worker

CONTEXT = make_context("draft-worker")


@as_command(hint="loading", interrupted="stopped before the worker was ready")
async def command(flags: ServedFlags, *, output: Output) -> None:
    """Draft for others with a small model. Needs the extra [workers].

    The model runs in a process on this machine, or, with --market, on the market's nodes. Callers
    name the address to splitup speculate. Wrong drafts cost them time, never a token.
    """
    from splitup_speculation.servers import DraftWorker

    await serve_worker(DraftWorker, "drafting", flags, output)
