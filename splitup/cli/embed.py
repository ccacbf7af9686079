"""``splitup embed``: vectors of texts, as lines of JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from splitup.cli.console import Output, run_command
from splitup.cli.cost import Cost, wait_for_cost
from splitup.cli.options import ConfigFlag, JsonFlag, PaymentOptions, with_options

if TYPE_CHECKING:
    from splitup.client.text.encoding import Embeddings


@with_options
def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Name or id of a registered embedding model.")
    ],
    inputs: Annotated[
        list[str], typer.Option("--input", metavar="TEXT", help="A text. Repeatable.")
    ],
    payment: PaymentOptions,
    config: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Print the vector of every text, one JSON line each."""
    output = Output.open(as_json)

    def run() -> None:
        from splitup.core import event_loop

        found, cost = event_loop.run(_embed(output, config, model, inputs, payment))
        rows = [
            {"index": index, "embedding": [float(value) for value in vector]}
            for index, vector in enumerate(found.vectors)
        ]
        if output.as_json:
            whole = {"execution_id": found.execution_id, "tokens": found.tokens, "data": rows}
            output.print_json({**whole, **cost.to_dict()})
            return
        for row in rows:
            typer.echo(json.dumps(row))
        output.say(cost.text)

    run_command(output, run)


async def _embed(
    output: Output, config: ConfigFlag, model: str, texts: list[str], payment: PaymentOptions
) -> tuple[Embeddings, Cost]:
    from splitup.client.connection import SplitUp

    async with SplitUp.connect(config) as net:
        output.hint(f"running {model}")
        found = await net.embed(
            model,
            texts,
            max_price_usdc=payment.max_price,
            deadline_s=payment.deadline,
            verify=payment.verify,
        )
        locked = found.plan.request.max_price_micro_usdc
        return found, await wait_for_cost(output, net, found.execution_id, locked)
