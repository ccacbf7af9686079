"""``splitup embed``: vectors of texts, as lines of JSON."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.console import Output
from splitup.cli.cost import Cost, wait_for_cost
from splitup.cli.options import ConfigFlag, PaymentOptions, read_text


@as_command(hint="loading")
async def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Name or id of a registered embedding model.")
    ],
    inputs: Annotated[
        list[str],
        typer.Option(
            "--input",
            metavar="TEXT",
            help="A text; - reads one from each line of standard input. Repeatable.",
        ),
    ],
    payment: PaymentOptions,
    config: ConfigFlag = None,
    *,
    output: JsonOutput,
) -> None:
    """Print the vector of every text, one JSON line each."""
    from splitup.client.connection import SplitUp

    texts: list[str] = []
    for given in inputs:
        text = read_text(given)
        texts += text.removesuffix("\n").split("\n") if given == "-" else [text]
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
        cost = await wait_for_cost(output, net, found.execution_id, locked)
    rows = [
        {"index": index, "embedding": [float(value) for value in vector]}
        for index, vector in enumerate(found.vectors)
    ]
    whole = {"execution_id": found.execution_id, "tokens": found.tokens, "data": rows}
    output.give({**whole, **cost.to_dict()}, lambda: _show(output, rows, cost))


def _show(output: Output, rows: list[dict[str, Any]], cost: Cost) -> None:
    for row in rows:
        typer.echo(json.dumps(row))
    output.say(cost.text)
