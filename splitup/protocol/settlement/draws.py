"""The draw: randomness over all commitments, made once those on chain cover every task."""

from __future__ import annotations

from splitup.core import limits
from splitup.core.codec import compute_digest
from splitup.messages.verification import Draw
from splitup.protocol.committee.certificates import check_draw, draw_alpha
from splitup.protocol.committee.context import Beacon, Ledger, Seat
from splitup.protocol.committee.events import Command, Fault, Gossip, Log
from splitup.protocol.committee.peer_messages import DrawMade, DrawPartial
from splitup.protocol.settlement.settlement_state import Case


class Draws:
    """One member's part in making draws."""

    def __init__(self, seat: Seat, ledger: Ledger) -> None:
        self._seat = seat
        self._ledger = ledger

    def process_partial(
        self, case: Case, sender: str, message: DrawPartial, now: float
    ) -> list[Command]:
        """Keep a share; answer one that comes late with the draw itself."""
        if case.draw is not None:
            late = now >= case.resend_at
            return [Gossip(sender, DrawMade(draw=case.draw))] if late else []
        index = self._seat.index_of(sender)
        if case.beacon is None:
            case.early.setdefault(index, message.partial)
        else:
            case.beacon.add(index, message.partial)
        return []

    def adopt(self, case: Case, draw: Draw, now: float) -> None:
        """Take a draw from another member, once it is over commitments that we see too.

        Whose they are, 2f+1 members agree; we need not have seen the takeovers ourselves.
        """
        if case.draw is not None or not self._seat.view.group_key:
            return
        if not case.rests_on_chain(draw):
            return
        check_draw(draw, self._seat.view, self._seat.scheme)
        self._set(case, draw, now)

    def make(self, case: Case, now: float) -> list[Command]:
        """Sign our share when the basis is complete, and combine what came."""
        if case.draw is not None or self._seat.group is None:
            return []
        basis = case.basis or case.get_basis()
        if basis is None:
            return []
        execution_id = case.request.execution_id
        commands: list[Command] = []
        if case.beacon is None:
            case.basis = basis
            beacon = Beacon(draw_alpha(execution_id, *basis))
            claim = self._ledger.claim(f"draw/{execution_id}/", compute_digest(beacon.alpha))
            case.beacon = beacon
            if claim is None:
                commands.append(Log(f"the commitments of {execution_id} moved; not drawn again"))
            else:
                commands += claim
                case.partial = beacon.sign(self._seat)
            for index, partial in case.early.items():
                beacon.add(index, partial)
        if case.partial and now >= case.resend_at:
            case.resend_at = now + limits.GOSSIP_RETRY_S
            message = DrawPartial(
                execution_id=execution_id, partial=case.partial, takeovers=case.list_effective()
            )
            commands.append(Gossip(None, message))
        for index in case.beacon.combine(self._seat.group, self._seat.scheme):
            liar = self._seat.accounts()[index]
            commands.append(Fault(liar, f"sent a false share of the draw of {execution_id}"))
        if case.beacon.seed:
            draw = Draw(
                execution_id=execution_id,
                block_hash=basis.block_hash,
                commitments=basis.commitments,
                executors=basis.executors,
                signature=case.beacon.signature,
                seed=case.beacon.seed,
            )
            self._set(case, draw, now)
        return commands

    def _set(self, case: Case, draw: Draw, now: float) -> None:
        case.draw = draw
        case.resend_at = now + limits.GOSSIP_RETRY_S / 2
        case.place = self._seat.get_place(draw.seed, now)
