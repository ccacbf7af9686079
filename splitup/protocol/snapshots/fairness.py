"""Deficit round robin over snapshots: a node that got less work than its share gains credit.

With every snapshot a node's credit loses an eighth, then gains the node's share of the work
assigned since the last snapshot, minus the work it got, in units of that share. The snapshot
carries the credit, so it is agreed before any seed whose selection it influences. It is bounded, so
a node that was idle for long is preferred for rounds, not for days.

Source: Shreedhar and Varghese, Efficient Fair Queuing using Deficit Round Robin, SIGCOMM 1995.
"""

from __future__ import annotations

from collections.abc import Mapping

from splitup.core import limits
from splitup.protocol.planning.sampling_clocks import MAX_STAKE_MILLI, STAKE_UNIT

_ROUND_MILLI = 1000  # one share
_FORGET = 8  # divisor: luck is forgotten after about eight snapshots


def compute_credits(
    stakes_micro_usdc: Mapping[str, int],
    credit_milli: Mapping[str, int],
    assigned_micro_usdc: Mapping[str, int],
) -> dict[str, int]:
    """Return the credit of every node of ``stakes_micro_usdc``, in thousandths of a share.

    ``credit_milli`` is that of the snapshot before (a newcomer has none), ``assigned_micro_usdc``
    the price of the work assigned since. When no work was, credits stay as they are.
    """
    weights = {
        node: max(1, min(stake // STAKE_UNIT, MAX_STAKE_MILLI))
        for node, stake in stakes_micro_usdc.items()
    }
    whole = sum(weights.values())
    total = sum(assigned_micro_usdc.get(node, 0) for node in weights)
    credits = {}
    for node, weight in weights.items():
        credit = credit_milli.get(node, 0)
        if total:
            # got / share = got · whole / (total · weight)
            got = _ROUND_MILLI * assigned_micro_usdc.get(node, 0) * whole // (total * weight)
            credit = _forget(credit) + _ROUND_MILLI - got
        credits[node] = max(-limits.MAX_CREDIT_MILLI, min(limits.MAX_CREDIT_MILLI, credit))
    return credits


def _forget(credit: int) -> int:
    # towards zero on both sides: // would round a debt away from it
    return credit - credit // _FORGET if credit >= 0 else credit + -credit // _FORGET
