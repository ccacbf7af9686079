"""``splitup-deploy list``: the registered models."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from splitup.cli.console import Output
from splitup_deploy.cli.options import JsonFlag, NetworkOptions
from splitup_deploy.cli.steps import run_on_network, run_quietly

if TYPE_CHECKING:
    from splitup.chain.client import Chain
    from splitup.chain.registered_models import RegisteredModel
    from splitup.storage.gateway_client import GatewayClient


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOptions:
    """Where to look."""

    network: NetworkOptions
    as_json: JsonFlag = False


def list_models(options: ListOptions) -> None:
    """List the registered models, and which version of each name is used."""
    output = Output.open(options.as_json)
    run_quietly(output, lambda: _list(options, output))


def _list(options: ListOptions, output: Output) -> None:
    from splitup.chain.registered_models import fetch_models
    from splitup_deploy.showing.report import render_models

    async def fetch(chain: Chain, _client: GatewayClient) -> tuple[RegisteredModel, ...]:
        return await fetch_models(chain)

    models = run_on_network(options.network.load(), fetch)
    if output.as_json:
        output.print_json({"models": [asdict(entry) for entry in models]})
    elif models:
        output.out.print(render_models(models), soft_wrap=True)
    else:
        output.say("no model is registered; register one with: splitup-deploy register")
