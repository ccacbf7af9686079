"""Why a node gets no work, and what would mend it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from splitup.client.inputs import format_usdc
from splitup.core import limits
from splitup_node.config import make_command
from splitup_node.status_file import NodeStatus


def list_obstacles(chain: Mapping[str, Any], node: NodeStatus, config: Path) -> list[str]:
    """Return one sentence for everything that keeps work away, the first to mend first.

    ``chain`` is what ``NodeAccount.fetch`` returned, ``config`` the node's file. What the daemon
    warns of itself is left out.
    """
    return [*_list_of_stake(chain, config), *_list_of_daemon(node, config)]


def _list_of_stake(chain: Mapping[str, Any], config: Path) -> Iterator[str]:
    stake, locked = chain["stake_micro_usdc"], chain["locked_micro_usdc"]
    if chain["unbonding_at_s"]:
        yield f"it is leaving; stay with: {make_command('unstake --cancel', config)}"
    elif not stake:
        yield f"it is not registered; do that with: {make_command('stake', config)}"
    elif not chain["active"]:
        yield describe_low_stake(stake, chain["least_stake_micro_usdc"], config)
    elif stake - locked - limits.VALIDATION_RESERVE_MICRO_USDC < limits.EXPOSURE_FLOOR_MICRO_USDC:
        yield (
            f"{format_usdc(locked)} of its stake are locked by executions, and "
            f"{format_usdc(limits.VALIDATION_RESERVE_MICRO_USDC)} are kept for verifications; they "
            "are free again when the executions are settled"
        )


def describe_low_stake(stake: int, least: int, config: Path) -> str:
    """Return why a node whose stake is below the least gets no work, and what mends it."""
    return (
        f"its stake of {format_usdc(stake)} is {format_usdc(least - stake)} below the least since "
        f"a slash; fill it up with: {make_command('stake', config)}"
    )


def _list_of_daemon(node: NodeStatus, config: Path) -> Iterator[str]:
    values = node.values
    if not node.is_running:
        yield f"it does not run; start it with: {make_command('run', config)}"
        return
    if "resident" not in values:
        return  # it could not write what it does
    if values["reach_problem"] and not values["relay"]:
        yield (
            "nobody can connect to it and no relay carries it; open the port of its endpoint, or "
            f'set relay = "auto" in {config}'
        )
    if not values["resident"]:
        yield (
            f"it is loading {values['loading']}; work comes once a task is in memory"
            if values["loading"]
            else f"it holds no task: {_describe_missing(values['not_loaded'])}"
        )


def _describe_missing(not_loaded: Sequence[Mapping[str, Any]]) -> str:
    """Return why a node has nothing in memory."""
    for problem in not_loaded:
        if not problem["is_refused"]:  # it is tried again
            return str(problem["reason"])
    return (
        "no model has one that fits into its memory and that too few nodes hold; offer more with "
        "vram, or wait for a new model"
    )
