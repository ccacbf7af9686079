"""What a node tells all committee members, and how it learns from them when to reveal."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from splitup import limits
from splitup.errors import PeerFault, Refused, SplitUpError
from splitup.net.http import SignedClient
from splitup.protocol.attestations import Attestations, check_attestation
from splitup.protocol.certificates import CommitteeMember, CommitteeView
from splitup.wire import (
    Completion,
    Pledge,
    SignedAttestation,
    Takeovers,
    VerificationCommitment,
    VerificationResult,
)

PROMISE_TYP: Final = "splitup-verification-commitment"
TAKEOVERS_TYP: Final = "splitup-takeovers"
_OVER: Final = 410  # the member's answer for an execution that was settled or refunded
_NO_DRAW: Final = 404  # for one that it knows no draw of

_log = logging.getLogger("splitup.node.heralds")


Said = Pledge | Takeovers | Completion | VerificationCommitment | VerificationResult
CommitteeSource = Callable[[str], Awaitable[CommitteeView]]  # of an execution


class Herald:
    """Speaks to every member; one that is down is told again."""

    def __init__(self, http: SignedClient, fetch_committee: CommitteeSource) -> None:
        self._http = http
        self._fetch_committee = fetch_committee

    async def tell(self, path: str, typ: str, message: Said, done: set[str]) -> bool:
        """Sign and send to the members that are not in ``done`` yet and add those that took it.

        Returns whether a quorum has it. One signature serves all members.
        """
        committee = await self._fetch_committee(message.execution_id)
        token = self._http.sign(typ, committee.domain.committee, message)
        missing = [m for m in committee.members if m.account not in done]
        answers = await asyncio.gather(
            *(
                self._http.post_token(f"{m.endpoint}{path}", token, timeout_s=limits.MEMBER_REPLY_S)
                for m in missing
            ),
            return_exceptions=True,
        )
        for member, answer in zip(missing, answers, strict=True):
            if not isinstance(answer, BaseException):
                done.add(member.account)
            elif isinstance(answer, SplitUpError):
                _log.info("member %s: %s", member.account, answer)
            else:
                raise answer
        return len(done) >= committee.quorum

    async def say(self, said: VerificationCommitment | Takeovers, done: set[str]) -> None:
        """Tell what members have to know before anything is revealed."""
        if isinstance(said, Takeovers):
            await self.tell("/v1/takeovers", TAKEOVERS_TYP, said, done)
        else:
            await self.tell("/v1/promise", PROMISE_TYP, said, done)

    async def has_all(self, execution_id: str, done: set[str]) -> bool:
        committee = await self._fetch_committee(execution_id)
        return done >= {member.account for member in committee.members}

    async def spread(self, path: str, typ: str, message: Said, give_up_s: float) -> bool:
        """Tell until a quorum has it, and for a while the others; return whether a quorum has."""
        done: set[str] = set()
        late_tries = 0
        pause_s = limits.REPORT_RETRY_S
        while time.time() < give_up_s:
            if await self.tell(path, typ, message, done):
                late_tries += 1
            if late_tries > limits.RPC_TRIES or await self.has_all(message.execution_id, done):
                return True
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, limits.RPC_BACKOFF_MAX_S)
        return late_tries > 0

    async def wait_until_due(
        self,
        execution_id: str,
        said: VerificationCommitment | Takeovers | None,
        give_up_s: float,
    ) -> bool:
        """Wait until 2f+1 members attest that it is time to reveal; False when it never is.

        What is ``said`` before is told to all members meanwhile: a validator's commitment, which
        has to be fixed before it reveals, or what made a node an executor.
        """
        attestations = Attestations((await self._fetch_committee(execution_id)).quorum)
        told: set[str] = set()
        pause_s = limits.REPORT_RETRY_S
        while time.time() < give_up_s:
            if said is not None and not await self.has_all(execution_id, told):
                await self.say(said, told)
            if await self._ask(execution_id, attestations, told):
                return False
            fixed = not isinstance(said, VerificationCommitment) or (
                attestations.find_fixed(said.task, said.validator) == said.root
            )
            if attestations.is_due() and fixed:
                return True
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, limits.ATTESTATION_POLL_MAX_S)
        return False

    async def _ask(self, execution_id: str, attestations: Attestations, told: set[str]) -> bool:
        """Collect attestations; return whether a quorum says that the execution is over.

        A member without a draw may have been restarted, and is taken out of ``told``.
        """
        committee = await self._fetch_committee(execution_id)
        answers = await asyncio.gather(
            *(self._fetch(execution_id, member, committee) for member in committee.members)
        )
        for member, answer in zip(committee.members, answers, strict=True):
            if isinstance(answer, SignedAttestation):
                attestations.add(answer)
            elif isinstance(answer, Refused) and answer.status == _NO_DRAW:
                told.discard(member.account)
        return _count_over(answers) >= committee.quorum

    async def _fetch(
        self, execution_id: str, member: CommitteeMember, committee: CommitteeView
    ) -> SignedAttestation | SplitUpError:
        try:
            value = await self._http.get_json(
                f"{member.endpoint}/v1/attestation/{execution_id}",
                timeout_s=limits.MEMBER_REPLY_S,
            )
            signed = SignedAttestation.from_value(value)
            if signed.attestation.execution_id != execution_id:
                raise PeerFault("the attestation is about another execution", peer=member.account)
            check_attestation(signed, committee)
        except SplitUpError as error:
            return error
        return signed


def _count_over(answers: Iterable[SignedAttestation | SplitUpError]) -> int:
    return sum(isinstance(a, Refused) and a.status == _OVER for a in answers)
