"""Where a node is reached: where it listens, or else at a relay that it keeps a connection to."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Callable

from splitup.chain.client import Chain
from splitup.core import tuning
from splitup.core.errors import PeerFault, SplitUpError, Unavailable
from splitup.messages import api
from splitup.messages.snapshots import ReachRequest
from splitup.net.http import SignedClient
from splitup.net.tunnel import Tunnel
from splitup.protocol.committee.certificates import CommitteeView

_log = logging.getLogger("splitup.node.reach")


class Reach:
    """Finds out how the node is reached and keeps it so. ``endpoint`` is "" until it is."""

    def __init__(
        self,
        node: str,
        tunnel: Tunnel,
        http: SignedClient,
        chain: Chain,
        get_committee: Callable[[], CommitteeView],
        *,
        mode: str,
        direct: str,
        listed: str,
    ) -> None:
        """``mode`` is ``NodeConfig.relay``; ``direct`` where the node is without a relay.

        ``listed`` is what the registry says.
        """
        self.endpoint = ""
        self.relay = ""  # the relay in use
        self.problem = ""  # why the node is not reached directly
        self._changed = asyncio.Event()
        self._node = node
        self._tunnel = tunnel
        self._http = http
        self._chain = chain
        self._get_committee = get_committee
        self._mode = mode
        self._direct = direct
        self._listed = listed

    async def settle(self) -> None:
        """Decide between direct and relayed; the relay's connection is ``run``'s business."""
        if self._mode == "auto":
            self.problem = await self._find_problem()
        elif self._mode != "off":
            self.problem = "the configuration names a relay"
        if not self.problem:
            self._move(self._direct, "")

    async def run(self) -> None:
        """Keep the node reached, for ever."""
        pause_s = tuning.LINK_RETRY_MIN_S
        while True:
            if not self.problem:
                await asyncio.sleep(tuning.REACH_PERIOD_S)
            else:
                for relay in self._list_relays():
                    if await self._keep(relay):
                        pause_s = tuning.LINK_RETRY_MIN_S
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, tuning.RPC_BACKOFF_MAX_S)
            await self.settle()

    async def list_endpoint(self) -> None:
        """Put the endpoint into the registry if it is another one."""
        if self.endpoint and self.endpoint != self._listed:
            endpoint = self.endpoint
            await self._chain.send("nodes", "setEndpoint", endpoint)
            self._listed = endpoint
            _log.info("the registry lists %s now", endpoint)

    async def follow(self) -> None:
        """Keep the registry up to date, for ever."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self.list_endpoint()
            except SplitUpError as error:
                _log.warning("the endpoint cannot be listed: %s", error)
                self._changed.set()
                await asyncio.sleep(tuning.RPC_BACKOFF_MAX_S)

    async def close(self) -> None:
        """Leave the relay."""
        await self._tunnel.close()

    def _move(self, endpoint: str, relay: str) -> None:
        if endpoint != self.endpoint:
            how = f"through the relay {relay}" if relay else "directly"
            _log.info("the node is reached %s, at %s", how, endpoint)
        self.endpoint, self.relay = endpoint, relay
        self._changed.set()

    # ---- is it reached? --------------------------------------------------------------------

    async def _find_problem(self) -> str:
        """Return why members do not reach the node, "" when f + 1 do or nobody can say.

        f + 1, or all who answer if those are fewer: at least one of them is honest.
        """
        committee = self._get_committee()
        body = ReachRequest(node=self._node, endpoint=self._direct)
        token = self._http.sign(api.REACH_REQUEST, committee.domain.committee, body)
        answers = await asyncio.gather(
            *(
                self._http.post_token(api.REACH_REQUEST, member.endpoint, token)
                for member in committee.members
            ),
            return_exceptions=True,
        )
        problems = []
        for answer in answers:
            if isinstance(answer, SplitUpError):
                _log.debug("reach: %s", answer)
            elif isinstance(answer, BaseException):
                raise answer
            elif isinstance(problem := answer.get("problem"), str):
                problems.append(problem[: tuning.MAX_ERROR_CHARS])
        reached = problems.count("")
        if not problems or reached >= min(
            len(committee.members) - committee.quorum + 1, len(problems)
        ):
            return ""
        return next(f"members say: {problem}" for problem in problems if problem)

    # ---- relays ----------------------------------------------------------------------------

    def _list_relays(self) -> list[str]:
        """Return the relays to try; nodes spread over the members by hash.

        The one that the registry lists comes first: it saves a transaction.
        """
        if self._mode != "auto":
            return [self._mode]
        members = sorted(
            self._get_committee().members,
            key=lambda m: hashlib.sha256(f"{self._node}{m.account}".encode()).digest(),
        )
        relays = [member.endpoint for member in members]
        return sorted(relays, key=lambda r: self._tunnel.make_endpoint(r) != self._listed)

    async def _keep(self, relay: str) -> bool:
        """Stay at a relay for as long as it serves; return whether it ever did.

        One that was lost gets ``tuning.RELAY_PATIENCE_S`` to come back: moving costs a
        transaction, and plans that name the old endpoint.
        """
        served = False

        async def on_up() -> None:
            nonlocal served
            served = True
            self._move(self._tunnel.make_endpoint(relay), relay)

        give_up_s = time.monotonic()
        while True:
            try:
                await self._tunnel.serve(relay, on_up)
                _log.warning("relay %s ended the connection", relay)
                give_up_s = time.monotonic() + tuning.RELAY_PATIENCE_S
            except (Unavailable, PeerFault) as error:
                _log.warning("%s", error)
            self.relay = ""
            if time.monotonic() >= give_up_s:
                return served
            await asyncio.sleep(tuning.LINK_RETRY_MIN_S * random.uniform(1.0, 2.0))
