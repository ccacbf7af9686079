"""What a node's owner is told: one source for ``status``, ``top`` and the owner's page."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from splitup.client.inputs import format_usdc
from splitup.core import limits
from splitup_node.config import NodeConfig, make_command
from splitup_node.settlement.account import Account, describe_low_stake
from splitup_node.status_file import NodeStatus, read_status


async def fetch_facts(account: Account, path: Path) -> dict[str, Any]:
    """Return what the chain and the status file say, and what keeps work away.

    ``path`` is the node's configuration. Raises ChainUnavailable.
    """
    chain = await account.fetch()
    chain |= await account.fetch_money(chain["balance_micro_usdc"])
    node = read_status(NodeConfig.load(path).data_dir)
    return {"chain": chain, "node": node.to_dict(), "obstacles": list_obstacles(chain, node, path)}


def list_rows(facts: Mapping[str, Any], path: Path, now_s: float) -> list[tuple[str, str]]:
    """Return ``fetch_facts``' result as (name, text) for a person."""
    chain, node = facts["chain"], NodeStatus.from_dict(facts["node"])
    rows = [("address", chain["address"]), ("stake", _describe_stake(chain))]
    if chain["unbonding_at_s"]:
        rows.append(("unbonding", describe_unbonding(chain, path)))
    rows += [
        ("ready to withdraw", describe_money(chain)),
        ("wallet", format_usdc(chain["wallet_micro_usdc"])),
        ("daemon", node.describe(path)),
        *((("warning", node.problem),) if node.problem else ()),
        *(("warning", sentence) for sentence in node.values.get("warnings", []) if node.is_running),
        *(("no work", sentence) for sentence in facts["obstacles"]),
    ]
    return rows + (node.list_rows(now_s) if node.is_running else [])


def describe_unbonding(chain: Mapping[str, Any], path: Path) -> str:
    """Return when a stake that leaves is free, and how it is taken out."""
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(chain["unbonding_at_s"]))
    return f"free from {when}; take it then with: {make_command('withdraw --stake', path)}"


def describe_money(money: Mapping[str, Any]) -> str:
    """Return what can be taken out, and where it is."""
    ready, settled = money["ready_to_withdraw_micro_usdc"], money["undistributed_micro_usdc"]
    text = format_usdc(ready)
    if settled:
        part = "" if settled == ready else f"of which {format_usdc(settled)} are "
        text += f", {part}settled and distributed when you withdraw"
    if taken := money["withdrawn_micro_usdc"]:
        text += f"; withdrawn so far: {format_usdc(taken)}"
    return text


def _describe_stake(chain: Mapping[str, Any]) -> str:
    state = "active" if chain["active"] else "not registered"
    if chain["stake_micro_usdc"] and not chain["active"]:
        state = "leaving" if chain["unbonding_at_s"] else "inactive"
    locked = chain["locked_micro_usdc"]
    locks = f", {format_usdc(locked)} locked" if locked else ""
    return f"{format_usdc(chain['stake_micro_usdc'])} ({state}{locks})"


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
