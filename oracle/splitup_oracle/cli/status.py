"""``splitup-oracle status``: how each member of the committee sees the network."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from splitup.chain.client import Chain
from splitup.cli.console import print_table
from splitup.core.errors import SplitUpError
from splitup.messages import api
from splitup.messages.network import Deployment
from splitup.net.http import SignedClient
from splitup_oracle.config import OracleConfig

_TIMEOUT_S: Final = 5.0
_SHOWN: Final = {  # with their headings, which leave room for the endpoint
    "configuration": "config",
    "block": "block",
    "epoch": "epoch",
    "sequence": "snapshot",
    "nodes_live": "nodes",
    "peers_down": "peers down",
}


async def fetch_status(config: OracleConfig) -> dict[str, Any]:
    """Ask the chain for the members, and each of them for its status; raise ChainUnavailable."""
    deployment = Deployment.load(config.deployment)
    async with (
        await Chain.connect(config.rpc_url, deployment) as chain,
        SignedClient(allow_loopback=config.allow_loopback) as http,
    ):
        head, members, quorum, group_key = await asyncio.gather(
            chain.fetch_head(),
            chain.call("committee", "members"),
            chain.call("committee", "quorum"),
            chain.call("committee", "groupKey"),
        )
        answers = await asyncio.gather(*(_ask(http, member["endpoint"]) for member in members))
    rows = [
        {"account": member["account"], "endpoint": member["endpoint"], **answer}
        for member, answer in zip(members, answers, strict=True)
    ]
    answering = sum("problem" not in row for row in rows)
    return {
        "block": head.number,
        "group_key": bool(group_key),
        "quorum": quorum,
        "answering": answering,
        "works": bool(group_key) and bool(members) and answering >= quorum,
        "members": rows,
    }


def show_status(status: dict[str, Any], console: Console) -> None:
    """Print a status as a table."""
    table = Table(box=None, pad_edge=False)
    table.add_column("member")
    for heading in _SHOWN.values():
        table.add_column(heading)
    silent = []
    for row in status["members"]:
        member = row["endpoint"].removeprefix("http://")
        if "problem" in row:
            silent.append(f"{member} {row['problem']}")
        else:
            shown = {**row, "peers_down": len(row["peers_down"])}
            table.add_row(member, *(str(shown[name]) for name in _SHOWN))
    print_table(console, table)
    for sentence in silent:
        console.print(sentence)
    key = "with" if status["group_key"] else "without"
    console.print(
        f"{status['answering']}/{len(status['members'])} members answer, {status['quorum']} are a "
        f"quorum, {key} group key; the chain is at block {status['block']}",
    )


async def _ask(http: SignedClient, url: str) -> dict[str, Any]:
    try:
        answer = await http.get_json(api.STATUS.url(url), timeout_s=_TIMEOUT_S)
        return {name: answer[name] for name in _SHOWN}
    except (SplitUpError, KeyError, TypeError) as error:
        return {"problem": f"does not answer ({error})"}
