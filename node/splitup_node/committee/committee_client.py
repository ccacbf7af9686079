"""What a node sends to all committee members, and how it learns from them when to reveal."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from splitup.core import limits, tuning
from splitup.core.background import cancel
from splitup.core.errors import PeerFault, Refused, SplitUpError, Unavailable
from splitup.messages import api
from splitup.messages.completions import Completion, ExecutorCommitment, Takeovers
from splitup.messages.verification import (
    DueNotice,
    Held,
    SignedDueNotice,
    ValidatorCommitment,
    VerificationResult,
)
from splitup.net.http import SignedClient
from splitup.protocol.committee.certificates import CommitteeView, MemberView
from splitup.protocol.settlement.attestations import DueNotices, check_notice

_NO_DRAW: Final = 404  # its answer for an execution that it has no verification draw of

T = TypeVar("T")

_log = logging.getLogger("splitup.node.committee")


ReportT = TypeVar(
    "ReportT", ExecutorCommitment, Takeovers, Completion, ValidatorCommitment, VerificationResult
)
CommitteeSource = Callable[[str], Awaitable[CommitteeView]]  # of an execution


@dataclass(eq=False, slots=True)
class _Hearing:
    """What members said of one execution to all on this node that wait for its reveal.

    A node may be an executor and the validator of several tasks: it asks for all of them at once.
    """

    notices: DueNotices
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    rounds: int = 0  # of questions that were answered
    undrawn: frozenset[str] = frozenset()  # members that knew no draw in the latest round
    is_over: bool = False  # so a quorum said in it
    waiting: int = 0


class CommitteeClient:
    """Sends to every member; those that are down get the message again later."""

    def __init__(
        self,
        http: SignedClient,
        fetch_committee: CommitteeSource,
        now_s: Callable[[], float] = time.time,  # the chain's time, which deadlines are in
    ) -> None:
        self._http = http
        self._fetch_committee = fetch_committee
        self._now_s = now_s
        self._hearings: dict[str, _Hearing] = {}  # by execution, while somebody waits

    async def send_once(
        self,
        route: api.Route[ReportT],
        message: ReportT,
        done: set[str],
        grace_s: float = tuning.REPORT_RETRY_S,
    ) -> bool:
        """Sign and send to the members that are not in ``done``, and add those that took it.

        Returns whether a quorum has it; the other members get ``grace_s`` more to answer. One
        signature serves all members.
        """
        committee = await self._fetch_committee(message.execution_id)
        token = self._http.sign(route, committee.domain.committee, message)
        missing = [m for m in committee.members if m.account not in done]
        answers = await _gather_quorum(
            (self._http.post_token(route, member.endpoint, token) for member in missing),
            committee.quorum - len(done),
            grace_s,
        )
        for member, answer in zip(missing, answers, strict=True):
            if isinstance(answer, SplitUpError):
                _log.info("member %s: %s", member.account, answer)
            else:
                done.add(member.account)
        return len(done) >= committee.quorum

    async def announce(self, announced: ValidatorCommitment | Takeovers, done: set[str]) -> None:
        """Send what members have to know before anything is revealed."""
        if isinstance(announced, Takeovers):
            await self.send_once(api.TAKEOVERS, announced, done)
        else:
            await self.send_once(api.VALIDATOR_COMMITMENT, announced, done)

    async def has_all(self, execution_id: str, done: set[str]) -> bool:
        """Return whether ``done`` holds all members."""
        committee = await self._fetch_committee(execution_id)
        return done >= {member.account for member in committee.members}

    async def spread(self, route: api.Route[ReportT], message: ReportT, give_up_s: float) -> bool:
        """Send until a quorum has it, and a while longer; return whether a quorum has it."""
        done: set[str] = set()
        late_tries = 0
        pause_s = tuning.REPORT_RETRY_S
        while self._now_s() < give_up_s:
            if await self.send_once(route, message, done, pause_s):
                late_tries += 1
            if late_tries > tuning.RPC_TRIES or await self.has_all(message.execution_id, done):
                return True
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, tuning.RPC_BACKOFF_MAX_S)
        return late_tries > 0

    async def wait_until_due(
        self,
        execution_id: str,
        announced: ValidatorCommitment | Takeovers | None,
        give_up_s: float,
    ) -> int:
        """Wait until 2f+1 members attest that it is time to reveal; 0 when it never is.

        Returns the number of steps that the draw is over. Meanwhile ``announced`` is sent to all
        members: a validator's commitment, which must be fixed before the validator reveals, or the
        takeovers that made this node an executor.
        """
        quorum = (await self._fetch_committee(execution_id)).quorum
        hearing = self._hearings.setdefault(execution_id, _Hearing(DueNotices(quorum)))
        if isinstance(announced, ValidatorCommitment):
            hearing.notices.own[announced.task] = Held(
                task=announced.task, validator=announced.validator, root=announced.root
            )
        hearing.waiting += 1
        try:
            return await self._wait(execution_id, hearing, announced, give_up_s)
        finally:
            hearing.waiting -= 1
            if not hearing.waiting:
                del self._hearings[execution_id]

    async def _wait(
        self,
        execution_id: str,
        hearing: _Hearing,
        announced: ValidatorCommitment | Takeovers | None,
        give_up_s: float,
    ) -> int:
        notices, heard = hearing.notices, hearing.rounds
        sent: set[str] = set()
        pause_s = tuning.REPORT_RETRY_S
        while self._now_s() < give_up_s:
            if announced is not None and not await self.has_all(execution_id, sent):
                await self.announce(announced, sent)
            async with hearing.asking:
                if hearing.rounds == heard:  # nobody has asked since our last look
                    await self._ask(execution_id, hearing, 2 * pause_s)
                heard = hearing.rounds
            if hearing.is_over:
                return 0
            sent -= hearing.undrawn  # they may have been restarted
            fixed = not isinstance(announced, ValidatorCommitment) or notices.is_fixed(
                announced.task
            )
            if fixed and (steps := notices.find_due_steps()):
                return steps
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, tuning.ATTESTATION_POLL_MAX_S)
        return 0

    async def _ask(self, execution_id: str, hearing: _Hearing, grace_s: float) -> None:
        """Ask f + 1 members in turn, one of whom is honest; all, once one has news."""
        committee = await self._fetch_committee(execution_id)
        members, quorum, notices = committee.members, committee.quorum, hearing.notices
        few = len(members) - quorum + 1
        first = hearing.rounds * few % len(members)
        turn = members[first:] + members[:first]
        undrawn, over = set(), 0
        for some, enough in ((turn[:few], 1), (turn[few:], quorum - few)):
            calls = (self._fetch(execution_id, member, committee, notices.own) for member in some)
            answers = await _gather_quorum(calls, enough, grace_s)
            for member, answer in zip(some, answers, strict=True):
                if isinstance(answer, DueNotice):
                    notices.add(answer)
                elif isinstance(answer, Refused):
                    over += answer.is_final
                    if answer.status == _NO_DRAW:
                        undrawn.add(member.account)
            if not over and not notices.says_anybody_due():
                break
        hearing.undrawn, hearing.is_over = frozenset(undrawn), over >= quorum
        hearing.rounds += 1

    async def _fetch(
        self,
        execution_id: str,
        member: MemberView,
        committee: CommitteeView,
        own: Mapping[int, Held],
    ) -> DueNotice:
        url = api.DUE_NOTICE.url(member.endpoint, execution_id=execution_id)
        if own:
            validator = next(iter(own.values())).validator
            url += f"?validator={validator}&tasks={','.join(map(str, own))}"
        value = await self._http.get_json(
            url,
            timeout_s=api.DUE_NOTICE.timeout_s,
            # as long as an honest one: many executions wait, and are asked about every second
            max_bytes=limits.DUE_NOTICE_BYTES + len(own) * limits.HELD_BYTES,
        )
        signed = SignedDueNotice.from_value(value)
        if signed.notice.execution_id != execution_id:
            raise PeerFault("the notice is about another execution", peer=member.account)
        check_notice(signed, committee)
        return signed.notice


async def _gather_quorum(
    calls: Iterable[Coroutine[Any, Any, T]], quorum: int, grace_s: float
) -> list[T | SplitUpError]:
    """Return what each call gave or raised, at most ``grace_s`` after a quorum has answered.

    Callers let ``grace_s`` grow from try to try, so that a slow member is heard at last. With a
    quorum of 0, which others have made up already, all calls are waited for.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    waiting = set(tasks)
    try:
        while waiting:
            answered = sum(
                task.done() and not isinstance(task.exception(), Unavailable) for task in tasks
            )
            enough = answered >= quorum > 0
            _, waiting = await asyncio.wait(
                waiting,
                timeout=grace_s if enough else None,
                return_when=asyncio.ALL_COMPLETED if enough else asyncio.FIRST_COMPLETED,
            )
            if enough:
                break
    finally:
        await cancel(*waiting)
    return [_get_outcome(task) for task in tasks]


def _get_outcome(task: asyncio.Future[Any]) -> Any:
    """Return what a call gave or its SplitUpError; raise any other error, which is a bug."""
    if task.cancelled():
        return Unavailable("the member did not answer in time; a quorum did")
    error = task.exception()
    if isinstance(error, SplitUpError):
        return error
    return task.result()
