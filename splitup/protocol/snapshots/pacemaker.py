"""The current epoch, which determines the leader, and votes to change it after a timeout.

A member that waits too long for a snapshot votes for the next epoch. It joins votes for a higher
epoch when more than f members cast them, since one of these is honest, and changes the epoch with
2f+1 votes. So f members can neither change the epoch nor prevent its change. Votes are repeated and
serve as the members' heartbeat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from splitup.core import limits
from splitup.protocol.committee.commands import Command, Gossip
from splitup.protocol.committee.context import MemberContext
from splitup.protocol.committee.peer_messages import EpochTimeoutVote


def compute_leader(accounts: Sequence[str], epoch: int) -> str:
    """Return the leader of an epoch."""
    return accounts[epoch % len(accounts)]


class Pacemaker:
    """One member's view of the epoch. It starts at ``epoch``, where it signed before a restart."""

    def __init__(self, context: MemberContext, epoch: int) -> None:
        self._context = context
        self.epoch = epoch
        self._timeout_votes: dict[str, int] = {context.account: epoch}
        self._failures = 0  # epochs in a row that brought no snapshot
        self._planned = -1  # the last epoch that ended by plan, not by a timeout
        self._sent_at = -math.inf

    @property
    def leader(self) -> str:
        return compute_leader(self._context.accounts(), self.epoch)

    @property
    def leads(self) -> bool:
        return self.leader == self._context.account

    @property
    def timeout_s(self) -> float:
        """How long a due snapshot may take in this epoch."""
        doublings = min(self._failures, limits.EPOCH_DOUBLINGS)
        return float(limits.EPOCH_TIMEOUT_S * 2**doublings)

    def note_progress(self) -> None:
        self._failures = 0

    def timeout_vote(self, now: float, *, planned: bool = False) -> list[Command]:
        """Vote for the next epoch; ``planned``: the leader's term is over, nothing failed."""
        if planned:
            self._planned = self.epoch
        account = self._context.account
        if self._timeout_votes[account] <= self.epoch:
            self._timeout_votes[account] = self.epoch + 1
            return [*self._send(now), *self._count(now)]
        return []

    def adopt(self, epoch: int) -> None:
        """Change to an epoch in which 2f+1 members provably are."""
        if epoch > self.epoch:
            account = self._context.account
            self._timeout_votes[account] = max(self._timeout_votes[account], epoch)
            self._switch(epoch)

    def process_timeout_vote(
        self, sender: str, message: EpochTimeoutVote, now: float
    ) -> list[Command]:
        """Count another member's vote unless it is older than its last one."""
        if message.configuration != self._context.view.configuration:
            return []
        if message.epoch <= self._timeout_votes.get(sender, -1):
            return []
        self._timeout_votes[sender] = message.epoch
        return self._count(now)

    def get_next_s(self, now: float) -> float:
        """Return when our vote is to be repeated."""
        resting = self._context.activity.is_resting(now)
        period_s = limits.REST_MEMBER_HEARTBEAT_S if resting else limits.MEMBER_HEARTBEAT_S
        return self._sent_at + period_s

    def process_tick(self, now: float) -> list[Command]:
        """Repeat our vote each period: it may have been lost, and it shows that we are up."""
        return self._send(now) if now >= self.get_next_s(now) else []

    def _count(self, now: float) -> list[Command]:
        """Join more than f votes; change the epoch with 2f+1 of them."""
        commands: list[Command] = []
        account, tolerated = self._context.account, self._context.tolerated
        ranked = sorted(self._timeout_votes.values(), reverse=True)
        if len(ranked) > tolerated and ranked[tolerated] > self._timeout_votes[account]:
            self._timeout_votes[account] = ranked[tolerated]
            commands = self._send(now)
            ranked = sorted(self._timeout_votes.values(), reverse=True)
        quorum = self._context.view.quorum
        if len(ranked) >= quorum and ranked[quorum - 1] > self.epoch:
            self._switch(ranked[quorum - 1])
        return commands

    def _switch(self, epoch: int) -> None:
        self._failures = 0 if self._planned == self.epoch else self._failures + 1
        self.epoch = epoch

    def _send(self, now: float) -> list[Command]:
        self._sent_at = now
        timeout_vote = EpochTimeoutVote(
            configuration=self._context.view.configuration,
            epoch=self._timeout_votes[self._context.account],
        )
        return [Gossip(None, timeout_vote)]
