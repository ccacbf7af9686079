"""``splitup models``: what can be run on a network, and for how much."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.console import Output, print_table
from splitup.cli.options import ConfigFlag
from splitup.core.printable import printable

if TYPE_CHECKING:
    from splitup.client.market.offers import Offer


@as_command(hint="asking the chain, the committee and the storage")
async def command(config: ConfigFlag = None, *, output: JsonOutput) -> None:
    """List the models on the market: kind, context, price of a step, and whether nodes hold it."""
    from splitup.client.connection import SplitUp

    async with SplitUp.connect(config) as net:
        offers = await net.list_offers()
    output.give({"models": [asdict(offer) for offer in offers]}, lambda: _show(output, offers))


def _show(output: Output, offers: list[Offer]) -> None:
    if not offers:
        output.say("no model is registered; register one with: splitup-deploy register")
        return
    from rich.table import Table

    from splitup.client.inputs import PER_MILLION_STEPS, format_price

    table = Table("model", "kind", "context", "price", "state", box=None, pad_edge=False)
    unit = f" USDC{PER_MILLION_STEPS}"
    for offer in offers:
        kind = "chat" if offer.has_chat else offer.kind
        context = str(offer.context or "")
        price = format_price(offer.price_nano_usdc).removesuffix(unit)
        table.add_row(printable(offer.name), kind, context, price, printable(offer.state))
    print_table(output.out, table)
    output.out.print(f"prices in{unit}", style="dim")
