"""``splitup-deploy retire``: take a model off the market."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from splitup.cli.console import Output
from splitup_deploy.cli.options import JsonFlag, KeyOptions, ModelArgument, NetworkOptions
from splitup_deploy.cli.steps import run_on_network, run_quietly

if TYPE_CHECKING:
    from splitup.chain.client import Chain
    from splitup.chain.registered_models import RegisteredModel
    from splitup.storage.gateway_client import GatewayClient


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireOptions:
    """Which model to retire, and as whom."""

    model: ModelArgument
    network: NetworkOptions
    key: KeyOptions
    as_json: JsonFlag = False


def retire(options: RetireOptions) -> None:
    """Take a model off the market, for good: no new executions start, running ones finish.

    Only its developer can do that. Of several versions of a name, one is retired; the name keeps
    pointing to the newest until another is registered.
    """
    output = Output.open(options.as_json)
    run_quietly(output, lambda: _retire(options, output))


def _retire(options: RetireOptions, output: Output) -> None:
    from splitup.chain.registered_models import retire_model

    network = options.network.load(options.key)

    async def act(chain: Chain, _client: GatewayClient) -> RegisteredModel:
        return await retire_model(chain, options.model)

    done = run_on_network(network, act, network.load_user())
    if output.as_json:
        output.print_json(asdict(done))
        return
    output.out.print(
        f"retired {done.model_id} ({done.name}): it takes no new executions",
        soft_wrap=True,
    )
