"""``splitup-deploy usage``: how much a model was used, and what was paid for it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from splitup.cli.console import Output
from splitup_deploy.cli.options import JsonFlag, NetworkOptions
from splitup_deploy.cli.steps import run_on_network, run_quietly

if TYPE_CHECKING:
    from splitup.chain.client import Chain
    from splitup.storage.gateway_client import GatewayClient
    from splitup_deploy.publishing.model_usage import ModelUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageOptions:
    """Whose usage to show."""

    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A model's name, for all its versions, or an id."),
    ]
    network: NetworkOptions
    as_json: JsonFlag = False


def usage(options: UsageOptions) -> None:
    """Show a model's executions, steps and USDC, of all versions where a name is given.

    The figures are from the chain's events: what is settled counts, what is open is shown apart.
    """
    output = Output.open(options.as_json)
    run_quietly(output, lambda: _usage(options, output))


def _usage(options: UsageOptions, output: Output) -> None:
    from splitup_deploy.publishing.model_usage import fetch_usage
    from splitup_deploy.showing.report import render_usage

    async def fetch(chain: Chain, _client: GatewayClient) -> tuple[ModelUsage, ...]:
        return await fetch_usage(chain, options.model)

    found = run_on_network(options.network.load(), fetch)
    if output.as_json:
        output.print_json({"models": [asdict(entry) for entry in found]})
    else:
        output.out.print(render_usage(found), soft_wrap=True)
