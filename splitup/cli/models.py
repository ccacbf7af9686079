"""``splitup models``: what can be run on a network, and for how much."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from splitup.cli.console import Output, printable, run_command
from splitup.cli.options import ConfigFlag, JsonFlag

if TYPE_CHECKING:
    from splitup.client.market.offers import Offer


def command(config: ConfigFlag = None, as_json: JsonFlag = False) -> None:
    """List the models on the market: kind, context, price of a step, and whether nodes hold it."""
    output = Output.open(as_json)

    def run() -> None:
        from splitup.core import event_loop

        offers = event_loop.run(_fetch(config))
        if as_json:
            output.print_json({"models": [asdict(offer) for offer in offers]})
        elif offers:
            _show(output, offers)
        else:
            output.say("no model is registered; register one with: splitup-deploy register")

    run_command(output, run)


async def _fetch(config: ConfigFlag) -> list[Offer]:
    from splitup.client.connection import SplitUp

    async with SplitUp.connect(config) as net:
        return await net.list_offers()


def _show(output: Output, offers: list[Offer]) -> None:
    from rich.table import Table

    from splitup.client.inputs import format_usdc

    table = Table("model", "kind", "context", "a step costs", "state", box=None, pad_edge=False)
    for offer in offers:
        kind = "chat" if offer.has_chat else offer.kind
        context = str(offer.context or "")
        price = format_usdc(offer.price_micro_usdc)
        table.add_row(printable(offer.name), kind, context, price, printable(offer.state))
    output.out.print(table)
