"""What an execution cost, as ``run``, ``embed`` and ``generate`` say it at their end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from splitup.cli.commands.receipt import describe_cost
from splitup.cli.console import Output
from splitup.core.errors import Unavailable

if TYPE_CHECKING:
    from splitup.client.connection import SplitUp

PATIENCE_S: Final = 10.0  # most executions are settled within a few seconds of their end


@dataclass(frozen=True, slots=True)
class Cost:
    """What an execution cost: ``micro_usdc`` with the fee, None while it is not settled."""

    locked_micro_usdc: int  # the most it can be
    micro_usdc: int | None
    text: str

    def to_dict(self) -> dict[str, int | None]:
        """Return fields of a JSON object."""
        return {"cost_micro_usdc": self.micro_usdc, "locked_micro_usdc": self.locked_micro_usdc}


async def wait_for_cost(
    output: Output,
    net: SplitUp,
    execution_id: str,
    locked_micro_usdc: int,
    *,
    patience_s: float = PATIENCE_S,
) -> Cost:
    """Wait for the settlement, at most ``patience_s``; return what is known then."""
    from splitup.client.inputs import format_usdc

    output.hint("waiting for the settlement, to print what it cost")
    try:
        await net.drain()  # nodes have to know that the execution ended
        receipt = await net.receipt(execution_id, timeout_s=patience_s)
        paid = receipt.paid_micro_usdc + receipt.fee_micro_usdc
        return Cost(locked_micro_usdc, paid, describe_cost(receipt))
    except Unavailable:
        text = (
            f"cost: at most {format_usdc(locked_micro_usdc)}, which is paid; what the nodes do not "
            f"earn comes back when it is settled: splitup receipt {execution_id}"
        )
        return Cost(locked_micro_usdc, None, text)
