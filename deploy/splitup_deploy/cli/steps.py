"""What several commands do: compile a model as their options say, and talk to the network."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from splitup.cli.console import Output
from splitup.core.errors import InvalidModel
from splitup_deploy.cli.options import CutOptions

if TYPE_CHECKING:
    from splitup.chain.client import Chain
    from splitup.config import NetworkConfig
    from splitup.crypto.keys import Identity
    from splitup.storage.gateway_client import GatewayClient
    from splitup_deploy.cutting.build import CompiledModel


def compile_model(
    output: Output,
    model: str,
    target_vram: str,
    cut: CutOptions,
    *,
    refuses_waste: bool = False,
) -> CompiledModel:
    """Compile a model, with progress and notes on stderr. Raises InvalidInput, InvalidModel.

    A cut that is not worth computing gets a note, or is refused with ``refuses_waste``.
    """
    from splitup_deploy.cutting.advice import describe_waste, is_wasteful
    from splitup_deploy.cutting.build import build, parse_dims, parse_sizes
    from splitup_deploy.frontends import Sizes
    from splitup_deploy.frontends.weight_sources import watch_hashing
    from splitup_deploy.showing.progress import HashBar

    targets = parse_sizes(target_vram)
    sizes = Sizes(
        cut.context,
        cut.chunk,
        parse_dims(cut.dims or []),
        cut.adapter,
        cut.vision,
        cut.images,
        cut.without,
        cut.cache,
    )
    cutting = partial(
        build, model, balance=cut.balance, max_tasks=cut.max_tasks, private=cut.private
    )
    with HashBar(output.log, model) as progress, watch_hashing(progress):
        compiled = cutting(targets, sizes=sizes)
    text, notes = compiled.manifest.text, compiled.notes
    if is_wasteful(compiled.manifest):
        output.update("looking for a better cut")
        problem = describe_waste(
            compiled.manifest,
            targets,
            lambda larger, context: (
                cutting(larger, sizes=replace(sizes, context=context), reads_weights=False).manifest
            ),
        )
        if refuses_waste:
            raise InvalidModel(problem)
        notes += (problem,)
    if compiled.manifest.kind == "text-generation" and text is not None and text.chat is None:
        notes += ("it has no chat template: it completes texts, and refuses chats",)
    for note in notes:
        output.say(f"note: {note}")
    return compiled


@contextlib.asynccontextmanager
async def open_network(
    network: NetworkConfig, identity: Identity | None = None
) -> AsyncIterator[tuple[Chain, GatewayClient]]:
    """Connect to chain and gateway. Transactions need an identity."""
    from splitup.chain.client import Chain
    from splitup.messages.network import Deployment
    from splitup.storage.gateway_client import GatewayClient

    deployment = Deployment.load(network.deployment)
    key = None if identity is None else identity.private_key
    async with (
        await Chain.connect(network.rpc_url, deployment, private_key=key) as chain,
        GatewayClient(network.gateway_urls, identity) as client,
    ):
        yield chain, client
