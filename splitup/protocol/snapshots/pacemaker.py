"""Which epoch it is, hence who leads: a member that waits in vain wishes for the next one.

More than f equal or higher wishes pull a member along (one of them is honest), 2f+1 switch it. So
no f members can move an epoch, and none can hold it. A wish is repeated, and serves as the sign of
life by which members know who is silent.
"""

from __future__ import annotations

from collections.abc import Sequence

from splitup.core import limits
from splitup.protocol.committee.commands import Command, Gossip
from splitup.protocol.committee.context import MemberContext
from splitup.protocol.committee.peer_messages import EpochTimeoutVote


def compute_leader(accounts: Sequence[str], epoch: int) -> str:
    """Return who leads an epoch."""
    return accounts[epoch % len(accounts)]


class Pacemaker:
    """One member's view of the epoch. ``epoch`` is where an earlier life signed last."""

    def __init__(self, context: MemberContext, epoch: int) -> None:
        self._context = context
        self.epoch = epoch
        self._timeout_votes: dict[str, int] = {context.account: epoch}
        self._failures = 0  # epochs in a row that brought no snapshot
        self._planned = -1  # the last epoch whose end was no failure
        self._say_at = 0.0

    @property
    def leader(self) -> str:
        return compute_leader(self._context.accounts(), self.epoch)

    @property
    def leads(self) -> bool:
        return self.leader == self._context.account

    @property
    def timeout_s(self) -> float:
        """How long this epoch may go without the snapshot that is due."""
        doublings = min(self._failures, limits.EPOCH_DOUBLINGS)
        return float(limits.EPOCH_TIMEOUT_S * 2**doublings)

    def note_progress(self) -> None:
        self._failures = 0

    def timeout_vote(self, now: float, *, planned: bool = False) -> list[Command]:
        """Ask for the next epoch; ``planned``: the leader's turn is over, nothing failed."""
        if planned:
            self._planned = self.epoch
        account = self._context.account
        if self._timeout_votes[account] <= self.epoch:
            self._timeout_votes[account] = self.epoch + 1
            return [*self._say(now), *self._count(now)]
        return []

    def adopt(self, epoch: int) -> None:
        """Go to an epoch in which 2f+1 members provably are."""
        if epoch > self.epoch:
            account = self._context.account
            self._timeout_votes[account] = max(self._timeout_votes[account], epoch)
            self._switch(epoch)

    def process_timeout_vote(
        self, sender: str, message: EpochTimeoutVote, now: float
    ) -> list[Command]:
        """Count another member's wish; an older one of it counts no more."""
        if message.configuration != self._context.view.configuration:
            return []
        if message.epoch <= self._timeout_votes.get(sender, -1):
            return []
        self._timeout_votes[sender] = message.epoch
        return self._count(now)

    def process_tick(self, now: float) -> list[Command]:
        """Say our wish again, now and then: it may have been lost, and it says that we live."""
        return self._say(now) if now >= self._say_at else []

    def _count(self, now: float) -> list[Command]:
        """Follow more than f wishes, switch with 2f+1 of them."""
        commands: list[Command] = []
        account, tolerated = self._context.account, self._context.tolerated
        ranked = sorted(self._timeout_votes.values(), reverse=True)
        if len(ranked) > tolerated and ranked[tolerated] > self._timeout_votes[account]:
            self._timeout_votes[account] = ranked[tolerated]
            commands = self._say(now)
            ranked = sorted(self._timeout_votes.values(), reverse=True)
        quorum = self._context.view.quorum
        if len(ranked) >= quorum and ranked[quorum - 1] > self.epoch:
            self._switch(ranked[quorum - 1])
        return commands

    def _switch(self, epoch: int) -> None:
        self._failures = 0 if self._planned == self.epoch else self._failures + 1
        self.epoch = epoch

    def _say(self, now: float) -> list[Command]:
        self._say_at = now + limits.MEMBER_HEARTBEAT_S
        timeout_vote = EpochTimeoutVote(
            configuration=self._context.view.configuration,
            epoch=self._timeout_votes[self._context.account],
        )
        return [Gossip(None, timeout_vote)]
