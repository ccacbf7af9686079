"""What a node's owner is told: one source for ``status``, ``top`` and the owner's page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitup.client.inputs import format_usdc
from splitup_node.config import NodeConfig
from splitup_node.obstacles import list_obstacles
from splitup_node.settlement.account import Account
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
        left_s = max(0, chain["unbonding_at_s"] - int(now_s))
        rows.append(("unbonding", f"{left_s} s left" if left_s else "done"))
    rows += [
        ("ready to withdraw", describe_money(chain)),
        ("wallet", format_usdc(chain["wallet_micro_usdc"])),
        ("daemon", node.describe(path)),
        *((("warning", node.problem),) if node.problem else ()),
        *(("warning", sentence) for sentence in node.values.get("warnings", [])),
        *(("no work", sentence) for sentence in facts["obstacles"]),
    ]
    return rows + (node.list_rows(now_s) if node.is_running else [])


def describe_money(money: Mapping[str, Any]) -> str:
    """Return what can be taken out, and where it is."""
    text = format_usdc(money["ready_to_withdraw_micro_usdc"])
    if settled := money["undistributed_micro_usdc"]:
        text += f", of which {format_usdc(settled)} are settled and distributed when you withdraw"
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
