"""Which states stay on the device. Pure functions.

Every task of every execution that has begun holds a state. When another one does not fit, the
execution that was used least recently is failed, unless all were used just now: then the new one
fails, and its client chooses another node.
"""

from __future__ import annotations

from collections.abc import Iterable

from splitup.core import tuning
from splitup_node.execution.kept.executions import Execution


def compute_state_bytes(execution: Execution) -> int:
    """Return the bytes of an execution's states on the device."""
    return 0 if execution.life.is_over else sum(p.state_bytes for p in execution.parts.values())


def choose_idle(
    executions: Iterable[Execution], limit_bytes: int, newcomer: Execution, needed_bytes: int
) -> Execution | None:
    """Return the execution to fail, so that ``needed_bytes`` of ``newcomer`` fit.

    None when they fit already, or when all others ran within ``tuning.SESSION_SPARE_S``.
    """
    holding = [e for e in executions if compute_state_bytes(e)]
    if sum(map(compute_state_bytes, holding)) + needed_bytes <= limit_bytes:
        return None
    others = [
        e
        for e in holding
        if e is not newcomer and e.life.used_at_s + tuning.SESSION_SPARE_S < newcomer.life.used_at_s
    ]
    return min(others, key=lambda e: e.life.used_at_s, default=None)


def find_stale(executions: Iterable[Execution], now_s: float) -> list[Execution]:
    """Return the executions whose client has sent nothing for too long."""
    return [
        execution
        for execution in executions
        if execution.parts
        and not execution.life.is_over
        and not execution.life.ended_at_s
        and now_s > execution.life.used_at_s + tuning.SESSION_IDLE_S
    ]
