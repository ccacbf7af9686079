"""Reading who is who: the Committee contract's members in one consistent view, a node's key."""

from __future__ import annotations

import asyncio

from splitup.chain.client import Chain
from splitup.crypto.bls import decode_public_key_eip2537
from splitup.crypto.quorum import Domain
from splitup.protocol.certificates import CommitteeMember, CommitteeView


async def fetch_node_key(chain: Chain, address: str) -> str:
    """Return an active node's signing key, "" for any other; raise ChainUnavailable."""
    entry = await chain.call("nodes", "nodeOf", address)
    return str(entry["signingKey"]) if entry["active"] else ""


async def fetch_committee(chain: Chain) -> CommitteeView:
    """Return members, quorum and group key as of one block; raise ChainUnavailable."""
    head = await chain.fetch_head()
    configuration, members, quorum, group_key = await asyncio.gather(
        chain.call("committee", "configuration", at=head),
        chain.call("committee", "members", at=head),
        chain.call("committee", "quorum", at=head),
        chain.call("committee", "groupKey", at=head),
    )
    return CommitteeView(
        configuration=configuration,
        members=tuple(
            CommitteeMember(
                account=member["account"],
                signing_key=member["signingKey"],
                endpoint=member["endpoint"],
            )
            for member in members
        ),
        quorum=quorum,
        group_key=decode_public_key_eip2537(group_key) if group_key else "",
        domain=Domain(
            chain_id=chain.deployment.chain_id, committee=chain.deployment.committee.lower()
        ),
    )
