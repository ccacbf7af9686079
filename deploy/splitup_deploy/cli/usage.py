"""``splitup-deploy usage``: how much a model was used, and what was paid for it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from splitup.cli.command import JsonOutput, as_command
from splitup_deploy.cli.options import NetworkOptions
from splitup_deploy.cli.steps import open_network


@as_command(hint="asking the chain")
async def command(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A model's name, for all its versions, or an id."),
    ],
    network: NetworkOptions,
    *,
    output: JsonOutput,
) -> None:
    """Show a model's executions, steps and USDC, of all versions where a name is given.

    The figures are from the chain's events: what is settled counts, what is open is shown apart.
    """
    from splitup_deploy.publishing.model_usage import fetch_usage
    from splitup_deploy.showing.report import render_usage

    async with open_network(network.load()) as (chain, _):
        found = await fetch_usage(chain, model)
    output.give(
        {"models": [asdict(entry) for entry in found]},
        lambda: output.out.print(render_usage(found)),
    )
