"""Which states may stay on the device. Pure functions.

Every task of every execution that has begun holds a state. When another does not fit, the session
that was used least recently goes, unless all were used just now: then the newcomer has to go
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

from splitup.core import tuning
from splitup_node.execution.executions import Execution


def compute_state_bytes(execution: Execution) -> int:
    """Return what an execution holds on the device."""
    return 0 if execution.is_over else sum(p.state_bytes for p in execution.parts.values())


def choose_idle(
    executions: Iterable[Execution], limit_bytes: int, newcomer: Execution, needed_bytes: int
) -> Execution | None:
    """Return the execution to drop for ``needed_bytes`` of ``newcomer``; None when nothing has to.

    Or when nothing may: what ran within ``tuning.SESSION_SPARE_S`` stays.
    """
    holding = [e for e in executions if compute_state_bytes(e)]
    if sum(map(compute_state_bytes, holding)) + needed_bytes <= limit_bytes:
        return None
    others = [
        e
        for e in holding
        if e is not newcomer and e.used_at_s + tuning.SESSION_SPARE_S < newcomer.used_at_s
    ]
    return min(others, key=lambda e: e.used_at_s, default=None)


def find_stale(executions: Iterable[Execution], now_s: float) -> list[Execution]:
    """Return the executions whose client let them lie for too long."""
    return [
        execution
        for execution in executions
        if execution.parts
        and not execution.is_over
        and not execution.ended_at_s
        and now_s > execution.used_at_s + tuning.SESSION_IDLE_S
    ]
