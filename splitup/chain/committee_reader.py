"""Reading the committee's configurations and the nodes' keys from the contracts.

An execution keeps the configuration that was in force at its request, whatever follows.
"""

from __future__ import annotations

import asyncio
import math
import time

from splitup.chain.client import Chain
from splitup.core import tuning
from splitup.core.errors import ChainUnavailable, PeerFault
from splitup.core.latest import Latest
from splitup.crypto.bls import decode_public_key_eip2537
from splitup.crypto.quorum import Domain
from splitup.messages.plans import PlanCertificate
from splitup.messages.verification import Draw
from splitup.protocol.committee.certificates import (
    CommitteeView,
    MemberView,
    check_certificate,
    check_draw,
)


async def fetch_node_key(chain: Chain, address: str) -> str:
    """Return an active node's signing key, "" for any other; raise ChainUnavailable."""
    entry = await chain.call("nodes", "nodeOf", address)
    return str(entry["signingKey"]) if entry["active"] else ""


async def fetch_committee(chain: Chain, configuration: int | None = None) -> CommitteeView:
    """Return members, quorum and group key of one configuration, by default the current one.

    Raises ChainUnavailable.
    """
    if configuration is None:
        configuration = int(await chain.call("committee", "configuration"))
    members, quorum, group_key = await asyncio.gather(
        chain.call("committee", "membersOf", configuration),
        chain.call("committee", "quorumOf", configuration),
        chain.call("committee", "groupKeyOf", configuration),
    )
    return CommitteeView(
        configuration=configuration,
        members=tuple(
            MemberView(
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


class Committees:
    """The current committee and those of running executions, with bounded caches.

    While the chain does not answer, the last known state is used: executions go on, and only
    payments wait.
    """

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._current: CommitteeView | None = None
        self._looked_s = -math.inf  # monotonic
        # with their keys: final
        self._views: Latest[int, CommitteeView] = Latest(tuning.MAX_CHANGES)
        self._configurations: Latest[str, int] = Latest(tuning.MAX_OPEN_EXECUTIONS)  # of executions
        self._gate = asyncio.Semaphore(tuning.COMMITTEE_LOOKUPS)
        # what was checked, by digest
        self._signed: Latest[str, CommitteeView] = Latest(tuning.MAX_CACHED_CERTIFICATES)

    async def fetch_current(self, *, max_age_s: float = tuning.COMMITTEE_CACHE_S) -> CommitteeView:
        """Return the committee as it was at most ``max_age_s`` ago.

        Raises ChainUnavailable when it was never read.
        """
        if self._current is None or time.monotonic() - self._looked_s > max_age_s:
            try:
                number = int(await self._chain.call("committee", "configuration"))
                self._current = await self._fetch(number)
            except ChainUnavailable:
                if self._current is None:
                    raise
            self._looked_s = time.monotonic()
        return self._current

    async def fetch_of(
        self, execution_id: str, *, max_age_s: float = tuning.COMMITTEE_CACHE_S
    ) -> CommitteeView:
        """Return the committee in force at an execution's request; the current one until then."""
        current = await self.fetch_current(max_age_s=max_age_s)
        try:
            number = self._configurations.get(execution_id)
            if number is None:
                async with self._gate:
                    found = await self._chain.call("market", "executionOf", execution_id)
                number = int(found["configuration"])
                if not number:
                    return current
                self._configurations[execution_id] = number
            return current if number == current.configuration else await self._fetch(number)
        except ChainUnavailable:
            return current

    async def check_certificate(self, certificate: PlanCertificate) -> CommitteeView:
        """Check a certificate against the committee of its execution, and return that.

        The chain is asked only when the check fails with the cached committee, and nothing is
        checked twice. Raises PeerFault, BadSignature, ChainUnavailable.
        """
        digest = certificate.digest("splitup/certificate/v1")
        if (checked := self._signed.get(digest)) is not None:
            return checked
        execution_id = certificate.plan.request.execution_id
        known = self._views.get(self._configurations.get(execution_id, 0))
        view = known or await self.fetch_current()
        try:
            await asyncio.to_thread(check_certificate, certificate, view)
        except PeerFault:
            other = await self.fetch_of(execution_id, max_age_s=tuning.COMMITTEE_REFRESH_S)
            if other == view:
                raise
            view = other
            await asyncio.to_thread(check_certificate, certificate, view)
        self._configurations[execution_id] = view.configuration
        self._signed[digest] = view
        return view

    async def check_draw(self, draw: Draw, committee: CommitteeView) -> None:
        """Check a draw of an execution of this committee once; raise PeerFault, BadSignature."""
        digest = draw.digest("splitup/draw/v1")
        if self._signed.get(digest) != committee:
            await asyncio.to_thread(check_draw, draw, committee)
            self._signed[digest] = committee

    async def _fetch(self, configuration: int) -> CommitteeView:
        view = self._views.get(configuration)
        if view is None:
            view = await fetch_committee(self._chain, configuration)
            if view.group_key:
                self._views[configuration] = view
        return view
