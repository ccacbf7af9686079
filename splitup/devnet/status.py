"""The state of a devnet, as its chain, members, gateways and nodes report it."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from splitup.chain.client import Chain
from splitup.chain.committee_reader import fetch_committee
from splitup.client.market.member_answers import fetch_latest_snapshot
from splitup.config import NODE_STATUS_FILE
from splitup.core import tuning
from splitup.core.errors import Refused, SplitUpError
from splitup.crypto.keystore import read_address
from splitup.devnet.s3_server import read_endpoint
from splitup.devnet.state import GATEWAYS, OBJECTS, DevnetState, get_key_files, make_endpoint
from splitup.messages import api
from splitup.net.http import SignedClient

_PAGE: Final = 100
_SILENCE_S: Final = 2.0  # nobody else has answered for so long
_SLOWER: Final = 4  # and for so many times as long as the others took


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """A registered node; ``tasks`` are those it holds in the latest snapshot.

    ``own``: the devnet started it, it did not join. ``in_snapshot``: the snapshot lists it with
    its current endpoint.
    """

    address: str
    endpoint: str
    stake_micro_usdc: int
    own: bool
    answers: bool
    in_snapshot: bool
    tasks: tuple[str, ...]

    @property
    def is_live(self) -> bool:
        """Whether it answers and is in the snapshot, which may be an old one."""
        return self.in_snapshot and self.answers


@dataclass(frozen=True, slots=True)
class NetworkHealth:
    """A network at one moment. ``gateways`` and ``members`` list those that answer.

    ``silent_store`` is the URL of the object store when it does not answer, else "". ``silent``
    are the names of the devnet's processes that do not.
    """

    block: int
    has_group_key: bool
    gateways: tuple[str, ...]
    members: tuple[str, ...]
    nodes: tuple[NodeHealth, ...]
    wanted_nodes: int
    wanted_members: int
    silent_store: str = ""
    silent: tuple[str, ...] = ()

    @property
    def live_nodes(self) -> int:
        """The number of live nodes, those that joined included."""
        return sum(node.is_live for node in self.nodes)

    @property
    def own_nodes(self) -> int:
        """The number of live nodes that the devnet started."""
        return sum(node.is_live and node.own for node in self.nodes)

    def is_ready(self) -> bool:
        return (
            self.has_group_key
            and not self.silent_store
            and len(self.gateways) == GATEWAYS
            and len(self.members) == self.wanted_members
            and self.own_nodes >= self.wanted_nodes
        )

    def count_holders(self) -> Counter[str]:
        """Return how many live nodes hold each task."""
        return Counter(task for node in self.nodes if node.in_snapshot for task in node.tasks)

    def describe(self) -> str:
        """Return one line for a terminal."""
        parts = [
            f"{len(self.gateways)}/{GATEWAYS} gateways",
            f"{len(self.members)}/{self.wanted_members} committee members",
            "group key" if self.has_group_key else "no group key yet",
            f"{self.own_nodes}/{self.wanted_nodes} nodes",
        ]
        if joined := self.live_nodes - self.own_nodes:
            parts.append(f"{joined} more joined")
        if self.silent_store:
            parts.append(f"the object store at {self.silent_store} does not answer")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form of ``splitup status --json``."""
        return {
            "ready": self.is_ready(),
            "block": self.block,
            "group_key": self.has_group_key,
            "object_store": not self.silent_store,
            "gateways": list(self.gateways),
            "members": list(self.members),
            "silent": list(self.silent),
            "nodes": [asdict(node) | {"tasks": len(node.tasks)} for node in self.nodes],
        }


async def fetch_health(
    chain: Chain, http: SignedClient, state: DevnetState, directory: Path
) -> NetworkHealth:
    """Ask the chain, then all others at once; raise ChainUnavailable."""
    store = read_endpoint(directory / OBJECTS)
    member_urls = [make_endpoint(port) for port in state.member_ports]
    gateway_urls = [make_endpoint(port) for port in state.gateway_ports]
    head, group_key, registered, committee = await asyncio.gather(
        chain.fetch_head(),
        chain.call("committee", "groupKey"),
        _fetch_nodes(chain),
        fetch_committee(chain),
    )
    urls = {*gateway_urls, *member_urls, *(node["endpoint"] for node in registered)}
    urls |= {member.endpoint for member in committee.members}
    answering = await _find_answering(
        {store: _store_answers(http, store), **{url: _answers(http, url) for url in urls}}
    )
    members = [member for member in committee.members if member.endpoint in answering]
    snapshot = None
    with suppress(SplitUpError):  # there is none at first, or nobody shows it
        snapshot = await fetch_latest_snapshot(chain, http, members)
    owners = [("objects", store), *((n, make_endpoint(port)) for n, port in state.named_ports())]
    own = set()
    for number in range(state.nodes):
        with suppress(SplitUpError):  # a node whose key file is lost is nobody's here
            own.add(read_address(get_key_files(directory, f"node-{number}")[0]))
    leaving = sum(bool(node["unbondingAt"]) and node["account"] in own for node in registered)
    entries = {entry.node: entry for entry in snapshot.entries} if snapshot is not None else {}
    nodes = tuple(
        NodeHealth(
            address=node["account"],
            endpoint=node["endpoint"],
            stake_micro_usdc=node["stake"],
            own=node["account"] in own,
            answers=node["endpoint"] in answering,
            in_snapshot=entry is not None and entry.endpoint == node["endpoint"],
            tasks=entry.resident if entry is not None else (),
        )
        for node in registered
        for entry in [entries.get(node["account"])]
    )
    return NetworkHealth(
        block=head.number,
        has_group_key=bool(group_key),
        gateways=tuple(url for url in gateway_urls if url in answering),
        members=tuple(url for url in member_urls if url in answering),
        nodes=nodes,
        wanted_nodes=state.nodes - leaving,
        wanted_members=state.members,
        silent_store="" if store in answering else store,
        silent=tuple(n for n, url in owners if n != "chain" and url not in answering),
    )


def read_loading(directory: Path) -> dict[str, str]:
    """Return the ids of the tasks that running nodes of the devnet load now, by node."""
    values = [value for value in _read_node_status(directory) if value.get("running")]
    return {value["address"]: value["loading"] for value in values if value["loading"]}


def read_load_problems(directory: Path) -> dict[str, Counter[str]]:
    """Return why nodes of the devnet refuse tasks: by task, how many nodes give each reason."""
    found: dict[str, Counter[str]] = {}
    for value in _read_node_status(directory):
        for problem in value.get("not_loaded", []):
            if problem["is_refused"]:
                found.setdefault(problem["task_id"], Counter())[problem["reason"]] += 1
    return found


def _read_node_status(directory: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(directory.glob(f"node-*/{NODE_STATUS_FILE}")):
        with suppress(OSError, ValueError):  # the node has not written it yet
            yield json.loads(path.read_text())


async def _find_answering(answers: Mapping[str, Coroutine[Any, Any, bool]]) -> set[str]:
    """Return the URLs that answer; who is silent is waited for while others answer."""
    tasks = {asyncio.create_task(answer): url for url, answer in answers.items()}
    began = time.monotonic()
    done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    ended = done
    while ended and waiting:
        quiet_s = max(_SILENCE_S, _SLOWER * (time.monotonic() - began))
        ended, waiting = await asyncio.wait(
            waiting, timeout=quiet_s, return_when=asyncio.FIRST_COMPLETED
        )
        done |= ended
    for task in waiting:
        task.cancel()
    return {tasks[task] for task in done if task.result()}


async def _fetch_nodes(chain: Chain) -> list[dict[str, Any]]:
    count = await chain.call("nodes", "nodeCount")
    pages = [
        await chain.call("nodes", "nodesPage", start, _PAGE) for start in range(0, count, _PAGE)
    ]
    return [node for page in pages for node in page]


async def _store_answers(http: SignedClient, url: str) -> bool:
    try:
        await http.get_bytes(url, timeout_s=tuning.QUIET_S)
    except Refused:  # it refuses who does not sign, so it answers
        return True
    except SplitUpError:
        return False
    return True


async def _answers(http: SignedClient, url: str) -> bool:
    try:
        await http.get_json(api.PING.url(url))
    except SplitUpError:
        return False
    return True
