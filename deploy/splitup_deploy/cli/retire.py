"""``splitup-deploy retire``: take a model off the market."""

from __future__ import annotations

from dataclasses import asdict

from splitup.cli.command import JsonOutput, as_command
from splitup_deploy.cli.options import KeyOptions, ModelArgument, NetworkOptions
from splitup_deploy.cli.steps import open_network


@as_command(hint="asking the chain")
async def command(
    model: ModelArgument, network: NetworkOptions, key: KeyOptions, *, output: JsonOutput
) -> None:
    """Take a model off the market, for good: no new executions start, running ones finish.

    Only its developer can do that. Of several versions of a name, one is retired; the name keeps
    pointing to the newest until another is registered.
    """
    from splitup.chain.registered_models import retire_model

    config = network.load(key)
    async with open_network(config, config.load_user()) as (chain, _):
        done = await retire_model(chain, model)
    said = f"retired {done.model_id} ({done.name}): it takes no new executions"
    output.give(asdict(done), lambda: output.out.print(said))
