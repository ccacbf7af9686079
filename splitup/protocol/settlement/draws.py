"""The draw: threshold randomness over all commitments, once those on chain cover every task."""

from __future__ import annotations

from splitup.core import tuning
from splitup.core.codec import compute_digest
from splitup.messages.verification import Draw
from splitup.protocol.committee.certificates import check_draw
from splitup.protocol.committee.commands import Command, Fault, Gossip, Log
from splitup.protocol.committee.context import MemberContext
from splitup.protocol.committee.peer_messages import DrawMessage, DrawPartial
from splitup.protocol.settlement import settlement_transitions as transitions
from splitup.protocol.settlement.settlement_state import (
    Committing,
    Drawing,
    SettlementState,
)


class DrawAgreement:
    """One member's part in making draws."""

    def __init__(self, context: MemberContext) -> None:
        self._context = context

    def process_partial(
        self, state: SettlementState, sender: str, message: DrawPartial, now: float
    ) -> list[Command]:
        """Keep another member's share; answer one that comes after the draw with the draw."""
        verification = state.verification
        if verification is not None:
            late = now >= verification.late_from
            return [Gossip(sender, DrawMessage(draw=verification.draw))] if late else []
        index = self._context.index_of(sender)
        if isinstance(state.phase, Drawing):
            state.phase.collector.add(index, message.partial)
        else:
            state.early.draw_partials.setdefault(index, message.partial)
        return []

    def adopt(self, state: SettlementState, draw: Draw, now: float) -> None:
        """Take a draw from another member if it is over commitments on our chain.

        We may lack the takeovers behind it: 2f+1 members signed who answers for the tasks. Before
        snapshot and manifest are here it is ignored; whoever holds it answers our share with it.
        """
        if not isinstance(state.phase, Committing | Drawing) or not self._context.view.group_key:
            return
        if not state.rests_on_chain(draw):
            return
        check_draw(draw, self._context.view, self._context.scheme)
        self._finish(state, draw, now)

    def make(self, state: SettlementState, now: float) -> list[Command]:
        """Sign our share once commitments on chain cover every task; combine the shares."""
        commands: list[Command] = []
        if isinstance(state.phase, Committing):
            basis = state.find_basis()
            if basis is None:
                return []
            transitions.complete_commitments(state, basis)
            commands += self._sign(state)
        if not isinstance(state.phase, Drawing) or self._context.group is None:
            return commands
        drawing, execution_id = state.phase, state.request.execution_id
        if drawing.partial and now >= drawing.resend_at:
            drawing.resend_at = now + tuning.GOSSIP_RETRY_S
            message = DrawPartial(execution_id=execution_id, partial=drawing.partial)
            commands.append(Gossip(None, message))
        for index in drawing.collector.combine(self._context.group, self._context.scheme):
            liar = self._context.accounts()[index]
            commands.append(Fault(liar, f"sent a false share of the draw of {execution_id}"))
        if drawing.collector.seed:
            draw = Draw(
                execution_id=execution_id,
                block_hash=drawing.basis.block_hash,
                commitments=drawing.basis.commitments,
                executors=drawing.basis.executors,
                steps=drawing.basis.steps,
                signature=drawing.collector.signature,
                seed=drawing.collector.seed,
            )
            self._finish(state, draw, now)
        return commands

    def _sign(self, state: SettlementState) -> list[Command]:
        """Sign our share of the draw, unless an earlier life signed one over another basis."""
        drawing, execution_id = state.phase, state.request.execution_id
        assert isinstance(drawing, Drawing)
        digest = compute_digest(drawing.collector.alpha)
        claim = self._context.signing_guard.claim(
            f"draw/{execution_id}", digest, self._context.get_end_s(state.request)
        )
        if claim is None:
            return [Log(f"the commitments of {execution_id} changed after we signed; no new share")]
        drawing.partial = drawing.collector.sign(self._context)
        return claim

    def _finish(self, state: SettlementState, draw: Draw, now: float) -> None:
        place = self._context.get_place(draw.seed, now)
        transitions.take_draw(state, draw, place, now)
