"""Heartbeats to every member of the committee; a member that hangs delays no other.

Each member names in its answers how often it wants one, so a member that lies about that harms
nobody but itself. A node that it refuses, such as a slashed or exiting one, sends ever less often.

The heartbeat to a member names the block that this member named last. So members that are at
different blocks all know the block, and a node needs no chain to send heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable
from typing import Any, Final

from splitup.core import limits
from splitup.core.background import cancel
from splitup.core.errors import PeerFault, Refused, SplitUpError
from splitup.messages import api
from splitup.messages.base import ZERO_BYTES32
from splitup.messages.completions import SignedTakeover
from splitup.messages.snapshots import Heartbeat
from splitup.net.http import SignedClient
from splitup.protocol.committee.certificates import CommitteeView, MemberView
from splitup_node.tasks.placement import DemandEntry, parse_demand

_HASH: Final = re.compile(r"0x[0-9a-f]{64}")


_log = logging.getLogger("splitup.node.heartbeats")

Demand = tuple[DemandEntry, ...]


class HeartbeatSender:
    """Sends heartbeats and keeps the members' latest answers."""

    def __init__(self, http: SignedClient, on_replaced: Callable[[SignedTakeover], None]) -> None:
        self._http = http
        self._on_replaced = on_replaced  # another node runs a task of this one from now on
        self._heads: dict[str, str] = {}  # member -> the hash of the block that it named last
        self._calls: dict[str, asyncio.Task[None]] = {}  # by member, if unanswered
        self._outcomes: dict[str, Demand | SplitUpError] = {}
        # member -> seconds until it is due another one: after a ping, and without one
        self._periods: dict[str, tuple[float, float]] = {}
        self._sent_at: dict[str, float] = {}
        # the latest demand as it came and as it was read: most answers repeat it
        self._read: tuple[Any, Demand] = ([], ())

    async def send(
        self,
        beat: Heartbeat,
        committee: CommitteeView,
        *,
        only_due: bool = False,
        pinged_at: float = -math.inf,
    ) -> bool:
        """Send to all members; wait for their answers, ``HEARTBEAT_PERIOD_S`` at most.

        A member that has not answered an earlier heartbeat does not get this one; with ``only_due``
        neither does one whose period is not over. A member that rests names a long one, which
        ends when somebody has pinged this node since (``pinged_at``, monotonic). Returns whether
        any member got it.
        """
        self._reap()
        tokens: dict[str, str] = {}  # by block: one signature for all members that named it

        def sign(head: str) -> str:
            if head not in tokens:
                named = beat.model_copy(update={"block_hash": head})
                tokens[head] = self._http.sign(api.HEARTBEAT, committee.domain.committee, named)
            return tokens[head]

        members = {member.account for member in committee.members}
        for known in (self._heads, self._outcomes, self._periods, self._sent_at):
            for account in known.keys() - members:
                del known[account]
        now, is_sent = time.monotonic(), False
        for member in committee.members:
            account = member.account
            is_early = only_due and self._is_early(account, now, pinged_at)
            if account not in self._calls and not is_early:
                self._outcomes.pop(account, None)
                self._sent_at[account], is_sent = now, True
                self._calls[account] = asyncio.create_task(self._tell(member, sign))
        if is_sent:
            await asyncio.wait(self._calls.values(), timeout=limits.HEARTBEAT_PERIOD_S)
            self._reap()
        return is_sent

    def _is_early(self, account: str, now: float, pinged_at: float) -> bool:
        sent_at = self._sent_at.get(account, -math.inf)
        period_s, rest_s = self._periods.get(account, (0.0, 0.0))
        due_s = period_s if pinged_at >= sent_at else rest_s
        return now - sent_at < due_s - limits.HEARTBEAT_PERIOD_S / 2  # timers vary

    def get_demands(self) -> list[Demand]:
        """Return the demand in the latest answer of each member that answered."""
        return [demand for demand in self._outcomes.values() if isinstance(demand, tuple)]

    def list_failures(self, committee: CommitteeView) -> set[str]:
        """Return why no member takes this node's heartbeats, empty while one of them does."""
        outcomes = [self._outcomes.get(member.account) for member in committee.members]
        failures = [str(outcome) for outcome in outcomes if isinstance(outcome, SplitUpError)]
        return set(failures) if len(failures) == len(outcomes) else set()

    def is_refused(self, committee: CommitteeView) -> bool:
        """Return whether every member refuses this node itself, as one without a stake."""
        outcomes = [self._outcomes.get(member.account) for member in committee.members]
        return all(isinstance(found, Refused) and found.status == 400 for found in outcomes)

    async def close(self) -> None:
        """Cancel the calls that are not answered."""
        await cancel(*self._calls.values())
        self._calls.clear()

    def _reap(self) -> None:
        for account, call in list(self._calls.items()):
            if call.done():
                del self._calls[account]
                call.result()  # raises when the call ended with a bug of ours

    async def _tell(self, member: MemberView, sign: Callable[[str], str]) -> None:
        shortest_s = limits.HEARTBEAT_PERIOD_S
        self._periods[member.account] = (shortest_s, shortest_s)  # after a failure
        try:
            self._outcomes[member.account] = await self._fetch_demand(member, sign)
        except SplitUpError as error:  # the other members' answers still count
            self._outcomes[member.account] = error
            level = logging.WARNING if isinstance(error, PeerFault) else logging.DEBUG
            _log.log(level, "heartbeat: %s", error)

    async def _fetch_demand(self, member: MemberView, sign: Callable[[str], str]) -> Demand:
        """Send the heartbeat, and once more when the member names another block than it did."""
        head, named = "", ZERO_BYTES32
        for _ in range(2):
            head = self._heads.get(member.account, ZERO_BYTES32)
            answer = await self._http.post_token(api.HEARTBEAT, member.endpoint, sign(head))
            named = self._heads[member.account] = _read_block(answer)
            if "tasks" in answer:
                if answer["tasks"] != self._read[0]:
                    self._read = answer["tasks"], parse_demand(answer["tasks"])
                self._periods[member.account] = (
                    _read_period_s(answer, "period_ms"),
                    _read_period_s(answer, "rest_ms"),
                )
                for signed in _read_replaced(answer):
                    self._on_replaced(signed)
                return self._read[1]
            if named in (head, ZERO_BYTES32):
                break
        if named == ZERO_BYTES32:
            why = "has seen no block of the chain yet; try again later"
        else:
            why = f"does not know block {head}, although it named it; its operator has to look"
        raise Refused(f"member {member.account} {why}", status=409)


def _read_block(answer: dict[str, Any]) -> str:
    block = answer.get("block")
    if not isinstance(block, str) or not _HASH.fullmatch(block):
        raise PeerFault("a heartbeat's answer names no block")
    return block


def _read_replaced(answer: dict[str, Any]) -> list[SignedTakeover]:
    values = answer.get("replaced", [])
    if not isinstance(values, list) or len(values) > limits.MAX_TOLD_TAKEOVERS:
        raise PeerFault("a heartbeat's answer lists too many takeovers")
    return [SignedTakeover.from_value(value) for value in values]


def _read_period_s(answer: dict[str, Any], name: str) -> float:
    period_ms, longest_s = answer.get(name), limits.MAX_HEARTBEAT_PERIOD_S
    if type(period_ms) is not int or not 1 <= period_ms <= 1000 * longest_s:
        raise PeerFault(f"a heartbeat's answer names no {name} up to {longest_s:g} s, in ms")
    return period_ms / 1000
