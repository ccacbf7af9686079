"""``splitup receipt``: how the chain closed an execution, and what it cost."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from splitup.cli.console import Output, run_command
from splitup.cli.options import ConfigFlag, ExecutionArgument, JsonFlag
from splitup.client import defaults

if TYPE_CHECKING:
    from splitup.client.outcome import Receipt

_SILENT_S: Final = 2.0  # a longer wait is announced


def command(
    execution_id: ExecutionArgument, config: ConfigFlag = None, as_json: JsonFlag = False
) -> None:
    """Show what an execution cost and who was paid; wait until it is settled or refunded."""
    output = Output.open(as_json)

    def run() -> None:
        from splitup.core import event_loop

        receipt = event_loop.run(_fetch(output, config, execution_id))
        if output.as_json:
            output.print_json(asdict(receipt))
        else:
            _show(output, receipt)

    run_command(output, run)


async def _fetch(output: Output, config: ConfigFlag, execution_id: str) -> Receipt:
    from splitup.client.connection import SplitUp

    async with SplitUp.connect(config) as net:
        text = f"waiting until the execution is settled, at most {defaults.RECEIPT_TIMEOUT_S:g} s"
        announce = asyncio.get_running_loop().call_later(_SILENT_S, output.update, text)
        try:
            return await net.receipt(execution_id, timeout_s=defaults.RECEIPT_TIMEOUT_S)
        finally:
            announce.cancel()


def _show(output: Output, receipt: Receipt) -> None:
    from splitup.client.inputs import format_usdc

    output.out.print(f"{receipt.status} in block {receipt.block_number}")
    output.out.print(describe_cost(receipt))
    for payment in receipt.payments:
        source = " out of a slashed stake" if payment.from_slash else ""
        amount = format_usdc(payment.amount_micro_usdc)
        output.out.print(f"  {payment.account}  {amount}{source}")
    for node, slashed in receipt.slashes:
        output.out.print(f"  {node}  slashed {format_usdc(slashed)}")


def describe_cost(receipt: Receipt) -> str:
    """Return one line about what a closed execution cost."""
    from splitup.client.inputs import format_usdc

    cost = receipt.paid_micro_usdc + receipt.fee_micro_usdc
    if not cost:
        return f"cost: nothing; {format_usdc(receipt.refunded_micro_usdc)} came back"
    return (
        f"cost: {format_usdc(cost)} ({format_usdc(receipt.paid_micro_usdc)} to the nodes, "
        f"{format_usdc(receipt.fee_micro_usdc)} fee); "
        f"{format_usdc(receipt.refunded_micro_usdc)} came back"
    )
