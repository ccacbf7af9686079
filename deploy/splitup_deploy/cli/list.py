"""``splitup-deploy list``: the registered models."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.console import Output
from splitup_deploy.cli.options import NetworkOptions
from splitup_deploy.cli.steps import open_network

if TYPE_CHECKING:
    from splitup.chain.registered_models import RegisteredModel


@as_command(hint="asking the chain")
async def command(network: NetworkOptions, *, output: JsonOutput) -> None:
    """List the registered models, and which version of each name is used."""
    from splitup.chain.registered_models import fetch_models

    async with open_network(network.load()) as (chain, _):
        models = await fetch_models(chain)
    output.give({"models": [asdict(entry) for entry in models]}, lambda: _show(output, models))


def _show(output: Output, models: tuple[RegisteredModel, ...]) -> None:
    from splitup_deploy.showing.report import render_models

    if models:
        output.out.print(render_models(models))
    else:
        output.say("no model is registered; register one with: splitup-deploy register")
