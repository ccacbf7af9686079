"""Which epoch it is, hence who leads: a member that waits in vain wishes for the next one.

More than f equal or higher wishes pull a member along (one of them is honest), 2f+1 switch it. So
no f members can move an epoch, and none can hold it. A wish is repeated, and serves as the sign of
life by which members know who is silent.
"""

from __future__ import annotations

from collections.abc import Sequence

from splitup.core import limits
from splitup.protocol.committee.context import Seat
from splitup.protocol.committee.events import Command, Gossip
from splitup.protocol.committee.peer_messages import EpochWish


def compute_leader(accounts: Sequence[str], epoch: int) -> str:
    """Return who leads an epoch."""
    return accounts[epoch % len(accounts)]


class Pacemaker:
    """One member's view of the epoch. ``epoch`` is where an earlier life signed last."""

    def __init__(self, seat: Seat, epoch: int) -> None:
        self._seat = seat
        self.epoch = epoch
        self._wishes: dict[str, int] = {seat.account: epoch}
        self._failures = 0  # epochs in a row that brought no snapshot
        self._planned = -1  # the last epoch whose end was no failure
        self._say_at = 0.0

    @property
    def leader(self) -> str:
        return compute_leader(self._seat.accounts(), self.epoch)

    @property
    def leads(self) -> bool:
        return self.leader == self._seat.account

    @property
    def timeout_s(self) -> float:
        """How long this epoch may go without the snapshot that is due."""
        doublings = min(self._failures, limits.EPOCH_DOUBLINGS)
        return float(limits.EPOCH_TIMEOUT_S * 2**doublings)

    def note_progress(self) -> None:
        self._failures = 0

    def wish(self, now: float, *, planned: bool = False) -> list[Command]:
        """Ask for the next epoch; ``planned``: the leader's turn is over, nothing failed."""
        if planned:
            self._planned = self.epoch
        account = self._seat.account
        if self._wishes[account] <= self.epoch:
            self._wishes[account] = self.epoch + 1
            return [*self._say(now), *self._count(now)]
        return []

    def adopt(self, epoch: int) -> None:
        """Go to an epoch in which 2f+1 members provably are."""
        if epoch > self.epoch:
            account = self._seat.account
            self._wishes[account] = max(self._wishes[account], epoch)
            self._switch(epoch)

    def process_wish(self, sender: str, message: EpochWish, now: float) -> list[Command]:
        """Count another member's wish; an older one of it counts no more."""
        if message.configuration != self._seat.view.configuration:
            return []
        if message.epoch <= self._wishes.get(sender, -1):
            return []
        self._wishes[sender] = message.epoch
        return self._count(now)

    def process_tick(self, now: float) -> list[Command]:
        """Say our wish again, now and then: it may have been lost, and it says that we live."""
        return self._say(now) if now >= self._say_at else []

    def _count(self, now: float) -> list[Command]:
        """Follow more than f wishes, switch with 2f+1 of them."""
        commands: list[Command] = []
        account, tolerated = self._seat.account, self._seat.tolerated
        ranked = sorted(self._wishes.values(), reverse=True)
        if len(ranked) > tolerated and ranked[tolerated] > self._wishes[account]:
            self._wishes[account] = ranked[tolerated]
            commands = self._say(now)
            ranked = sorted(self._wishes.values(), reverse=True)
        quorum = self._seat.view.quorum
        if len(ranked) >= quorum and ranked[quorum - 1] > self.epoch:
            self._switch(ranked[quorum - 1])
        return commands

    def _switch(self, epoch: int) -> None:
        self._failures = 0 if self._planned == self.epoch else self._failures + 1
        self.epoch = epoch

    def _say(self, now: float) -> list[Command]:
        self._say_at = now + limits.MEMBER_BEAT_S
        wish = EpochWish(
            configuration=self._seat.view.configuration, epoch=self._wishes[self._seat.account]
        )
        return [Gossip(None, wish)]
