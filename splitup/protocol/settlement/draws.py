"""The draw: randomness over all commitments, made once those on chain cover every task."""

from __future__ import annotations

from splitup.core import tuning
from splitup.core.codec import compute_digest
from splitup.messages.verification import Draw
from splitup.protocol.committee.certificates import check_draw, draw_alpha
from splitup.protocol.committee.context import (
    MemberContext,
    SigningGuard,
    ThresholdSignatureCollector,
)
from splitup.protocol.committee.events import Command, Fault, Gossip, Log
from splitup.protocol.committee.peer_messages import DrawMade, DrawPartial
from splitup.protocol.settlement.settlement_state import SettlementState


class DrawAgreement:
    """One member's part in making draws."""

    def __init__(self, context: MemberContext, signing_guard: SigningGuard) -> None:
        self._context = context
        self._signing_guard = signing_guard

    def process_partial(
        self, state: SettlementState, sender: str, message: DrawPartial, now: float
    ) -> list[Command]:
        """Keep a share; answer one that comes late with the draw itself."""
        if state.draw is not None:
            late = now >= state.resend_at
            return [Gossip(sender, DrawMade(draw=state.draw))] if late else []
        index = self._context.index_of(sender)
        if state.collector is None:
            state.early.setdefault(index, message.partial)
        else:
            state.collector.add(index, message.partial)
        return []

    def adopt(self, state: SettlementState, draw: Draw, now: float) -> None:
        """Take a draw from another member, once it is over commitments that we see too.

        Whose they are, 2f+1 members agree; we need not have seen the takeovers ourselves.
        """
        if state.draw is not None or not self._context.view.group_key:
            return
        if not state.rests_on_chain(draw):
            return
        check_draw(draw, self._context.view, self._context.scheme)
        self._set(state, draw, now)

    def make(self, state: SettlementState, now: float) -> list[Command]:
        """Sign our share when the basis is complete, and combine what came."""
        if state.draw is not None or self._context.group is None:
            return []
        basis = state.basis or state.get_basis()
        if basis is None:
            return []
        execution_id = state.request.execution_id
        commands: list[Command] = []
        if state.collector is None:
            state.basis = basis
            collector = ThresholdSignatureCollector(draw_alpha(execution_id, *basis))
            claim = self._signing_guard.claim(
                f"draw/{execution_id}/", compute_digest(collector.alpha)
            )
            state.collector = collector
            if claim is None:
                commands.append(Log(f"the commitments of {execution_id} moved; not drawn again"))
            else:
                commands += claim
                state.partial = collector.sign(self._context)
            for index, partial in state.early.items():
                collector.add(index, partial)
        if state.partial and now >= state.resend_at:
            state.resend_at = now + tuning.GOSSIP_RETRY_S
            message = DrawPartial(
                execution_id=execution_id, partial=state.partial, takeovers=state.list_effective()
            )
            commands.append(Gossip(None, message))
        for index in state.collector.combine(self._context.group, self._context.scheme):
            liar = self._context.accounts()[index]
            commands.append(Fault(liar, f"sent a false share of the draw of {execution_id}"))
        if state.collector.seed:
            draw = Draw(
                execution_id=execution_id,
                block_hash=basis.block_hash,
                commitments=basis.commitments,
                executors=basis.executors,
                signature=state.collector.signature,
                seed=state.collector.seed,
            )
            self._set(state, draw, now)
        return commands

    def _set(self, state: SettlementState, draw: Draw, now: float) -> None:
        state.draw = draw
        state.resend_at = now + tuning.GOSSIP_RETRY_S / 2
        state.place = self._context.get_place(draw.seed, now)
