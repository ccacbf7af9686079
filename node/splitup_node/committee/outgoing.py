"""Whether this node can connect to the nodes that it would have to send tensors to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from splitup.chain.client import Chain
from splitup.client.market.member_answers import fetch_latest_snapshot
from splitup.core import tuning
from splitup.core.errors import ConfigurationError, SplitUpError
from splitup.net.endpoints import EndpointRefused, check_ip, is_loopback
from splitup.net.http import SignedClient
from splitup.protocol.committee.certificates import CommitteeView
from splitup_node.config import NodeConfig

_log = logging.getLogger("splitup.node.outgoing")
_TRIED: Final = 8  # nodes: one that accepts is enough


async def check_outgoing(
    config: NodeConfig, node: str, chain: Chain, http: SignedClient, committee: CommitteeView
) -> None:
    """Raise ConfigurationError when the node would refuse to connect to every other node.

    Looks at the latest snapshot, and at the members while no other node is in it. Such a node would
    break every execution that it takes part in. Logs a warning when no other node accepts a
    connection: a firewall may be the reason, but all of them may also be down.
    """
    peers = await _fetch_peers(node, chain, http, committee)
    if not config.allow_loopback:
        await _check_addresses(config, peers, [member.endpoint for member in committee.members])
    tried = peers[:_TRIED]
    if tried and not any(await asyncio.gather(*map(_accepts, tried))):
        _log.warning(
            "none of %d other nodes accepts a connection from this machine (%s, for example); "
            "they are down, or a firewall blocks outgoing connections",
            len(tried),
            tried[0],
        )


async def _check_addresses(
    config: NodeConfig, peers: Sequence[str], members: Sequence[str]
) -> None:
    """Raise ConfigurationError when all peers have addresses that this node never connects to."""
    refused = await find_refused(peers)
    if peers and len(refused) == len(peers):
        raise ConfigurationError(
            f"the network's {len(peers)} other nodes are all at loopback or private addresses "
            f"({refused[0]}, for example), to which this node does not connect; "
            f"set allow_loopback = true in {config.path}"
        )
    if refused:
        _log.warning(
            "%d of %d nodes are at loopback or private addresses, to which this node does not "
            "connect: %s",
            len(refused),
            len(peers),
            ", ".join(refused[:3]),
        )
    hosts = [urlsplit(endpoint).hostname or "" for endpoint in members]
    if not peers and hosts and all(map(is_loopback, hosts)):
        raise ConfigurationError(
            f"the network runs on this machine ({members[0]} is a committee member's endpoint), "
            f"and this node does not connect to loopback addresses; "
            f"set allow_loopback = true in {config.path}"
        )


async def _fetch_peers(
    node: str, chain: Chain, http: SignedClient, committee: CommitteeView
) -> list[str]:
    """Return the endpoints of the other nodes in the latest snapshot; none if no member has it."""
    try:
        snapshot = await fetch_latest_snapshot(chain, http, committee.members)
    except SplitUpError as error:
        _log.warning("the connections to other nodes are not checked: %s", error)
        return []
    entries = () if snapshot is None else snapshot.entries
    return [entry.endpoint for entry in entries if entry.node != node]


async def _accepts(endpoint: str) -> bool:
    """Return whether a TCP connection to an endpoint can be opened."""
    url = urlsplit(endpoint)
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        async with asyncio.timeout(tuning.HTTP_CONNECT_S):
            _, writer = await asyncio.open_connection(url.hostname, port)
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    return True


async def find_refused(endpoints: Sequence[str]) -> list[str]:
    """Return the endpoints that lead to loopback or private addresses only."""
    answers = await asyncio.gather(*(_is_refused(endpoint) for endpoint in endpoints))
    return [endpoint for endpoint, answer in zip(endpoints, answers, strict=True) if answer]


async def _is_refused(endpoint: str) -> bool:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(urlsplit(endpoint).hostname, None)
    except OSError:
        return False
    for entry in found:
        try:
            check_ip(str(entry[4][0]), allow_loopback=False)
        except EndpointRefused:
            continue
        return False
    return True
