"""What an execution cost, as ``run`` and ``generate`` print it at their end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from splitup.cli.console import Output
from splitup.cli.receipt import describe_cost
from splitup.core.errors import Unavailable

if TYPE_CHECKING:
    from splitup.client.connection import SplitUp

PATIENCE_S: Final = 10.0  # most executions are settled within a few seconds of their end


async def wait_for_cost(
    output: Output,
    net: SplitUp,
    execution_id: str,
    locked_micro_usdc: int,
    *,
    patience_s: float = PATIENCE_S,
) -> str:
    """Wait for the settlement, at most ``patience_s``; return one line about the cost."""
    from splitup.client.inputs import format_usdc

    output.hint("waiting for the settlement, to print what it cost")
    try:
        await net.drain()  # nodes have to know that the execution ended
        return describe_cost(await net.receipt(execution_id, timeout_s=patience_s))
    except Unavailable:
        return (
            f"cost: at most {format_usdc(locked_micro_usdc)}, which is paid; what the nodes do not "
            f"earn comes back when it is settled: splitup receipt {execution_id}"
        )
