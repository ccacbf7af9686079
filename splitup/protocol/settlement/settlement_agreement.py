"""All open executions of one member between request and settlement.

This module takes events and messages in and stores them in the ``SettlementState`` of their
execution. Four others decide what follows: ``commitments`` brings the executors' commitments to the
chain, ``draws`` makes the randomness over them, ``verification_rounds`` verifies the drawn tasks,
``proposals`` agrees on the settlement. Evidence is only added, and a proposal carries all of it, so
members reach the same settlement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice, zip_longest
from typing import Protocol, TypeVar, assert_never

from splitup.core import limits, tuning
from splitup.core.errors import PeerFault, Unavailable
from splitup.core.latest import Latest
from splitup.messages import api
from splitup.messages.base import Message
from splitup.messages.completions import (
    Completion,
    ExecutorCommitment,
    SignedTakeover,
    Takeovers,
)
from splitup.messages.plans import PlanCertificate, Request
from splitup.messages.verification import (
    Evidence,
    Ruling,
    SignedAttestation,
    ValidatorCommitment,
    VerificationResult,
)
from splitup.protocol.committee.commands import Command, Fault, Gossip
from splitup.protocol.committee.context import MemberContext
from splitup.protocol.committee.events import ExecutionCommitted, NodeReport
from splitup.protocol.committee.peer_messages import (
    Attested,
    CommitmentsReply,
    CommitmentsRequest,
    CommitmentsShared,
    CommitmentsVote,
    DrawMessage,
    DrawPartial,
    PlanRequest,
    SettlementMessage,
    SettlementSignature,
)
from splitup.protocol.committee.settlement_proposals import SettlementProposal
from splitup.protocol.planning.exposure import Economics
from splitup.protocol.settlement import settlement_transitions as transitions
from splitup.protocol.settlement.attestations import Attestations, check_attestation
from splitup.protocol.settlement.chain_commitments import check_revealed
from splitup.protocol.settlement.commitments import CommitmentAgreement
from splitup.protocol.settlement.draws import DrawAgreement
from splitup.protocol.settlement.proposals import Proposals
from splitup.protocol.settlement.settlement_state import (
    Planned,
    Proposing,
    Requested,
    SettlementState,
)
from splitup.protocol.settlement.task_checks import ValidatorAnswer
from splitup.protocol.settlement.verification_rounds import VerificationRounds
from splitup.protocol.settlement.verification_state import PlanContext, Verification

M = TypeVar("M", bound=Message)


class TokenReader(Protocol):
    """Verifies a node's message of any age that another member holds."""

    def __call__(self, route: api.Route[M], token: str) -> tuple[M, str]:
        """Return message and signing key; raise PeerFault, BadSignature for a false one."""


class SettlementAgreement:
    """One member's part in verification and settlement."""

    def __init__(
        self,
        context: MemberContext,
        economics: Economics,
        read_token: TokenReader,
        get_answer_s: Callable[[], float],  # how long members wait for nodes that were replaced
    ) -> None:
        self._context = context
        self._economics = economics
        self._read_token = read_token
        self._commitments = CommitmentAgreement(context, get_answer_s)
        self._draws = DrawAgreement(context)
        self._verification_rounds = VerificationRounds(context)
        self._proposals = Proposals(context, economics)
        self._states: dict[str, SettlementState] = {}
        # executions whose requests a reorganisation removed, with what nodes sent about them
        self._reverted: Latest[str, SettlementState] = Latest(tuning.MAX_REVERTED)
        # recently ended executions: a message about one is late, not faulty
        self._ended: Latest[str, None] = Latest(tuning.MAX_OPEN_EXECUTIONS)
        # of recently ended executions
        self._evidence: Latest[str, Evidence] = Latest(tuning.MAX_KEPT_EVIDENCE)

    def find_evidence(self, execution_id: str) -> Evidence | None:
        """Return what the settlement of a recently ended execution rests on, or None."""
        return self._evidence.get(execution_id)

    def find_attestation(self, execution_id: str) -> SignedAttestation | None:
        """Return our latest attestation about the verification of an execution, or None."""
        state = self._states.get(execution_id)
        verification = state.verification if state else None
        return verification.attested if verification else None

    def list_replaced(self, node: str) -> Sequence[SignedTakeover]:
        """Return the takeovers by which a node was replaced in open executions, to be told to it.

        Not those about which it has told us for how many steps the client had signed. One of each
        execution comes first: a client cannot fill the answer with what its node has forgotten.
        """
        told = (
            state.collected.replaced[node].values()
            for state in self._states.values()
            if state.chain.agreed is None and node in state.collected.replaced
        )
        turns = (signed for turn in zip_longest(*told) for signed in turn if signed is not None)
        return list(islice(turns, limits.MAX_TOLD_TAKEOVERS))

    def is_over(self, execution_id: str) -> bool:
        """Return whether an execution was settled or refunded recently."""
        return execution_id in self._ended

    def __len__(self) -> int:
        return len(self._states)

    # ---- the chain and the plan -------------------------------------------------------------

    def process_request(self, request: Request) -> list[Command]:
        state = SettlementState(request, Attestations(self._context.view.quorum), self._economics)
        self._states.setdefault(request.execution_id, state)
        return []

    def process_certificate(self, certificate: PlanCertificate, now: float) -> list[Command]:
        """Record the plan of an execution; from here on its evidence can be checked."""
        state = self._states.get(certificate.plan.request.execution_id)
        if state is None or not isinstance(state.phase, Requested):
            return []
        transitions.certify_plan(state, certificate)
        self._restore_reverted(state, certificate)
        return self._advance(state, now)

    def process_agreed(self, event: ExecutionCommitted, now: float) -> list[Command]:
        """Record the agreed root over all executors' commitments; it opens the draw."""
        state = self._states.get(event.execution_id)
        if state is None or state.chain.agreed is not None:
            return []
        state.chain.agreed, state.collected.vote_at = event, 0.0
        return self._advance(state, now)

    def process_accepted(self, execution_id: str, *, is_planned: bool) -> None:
        """Record whether the chain holds the plan, without which it takes no agreed root."""
        state = self._states.get(execution_id)
        if state is not None:
            state.chain.is_planned = is_planned

    def process_reverted_request(self, execution_id: str) -> None:
        """Drop an execution whose block is gone; its request will be in another block."""
        state = self._states.pop(execution_id, None)
        if state is not None and not isinstance(state.phase, Requested):
            self._reverted[execution_id] = state

    def process_reverted_agreement(self, event: ExecutionCommitted) -> None:
        """Remove the agreed root whose block is gone, and a draw that rested on it."""
        state = self._states.get(event.execution_id)
        if state is not None and state.chain.agreed == event:
            state.chain.unbind()
            transitions.revert_commitments(state)

    def process_end(self, execution_id: str, evidence_root: str = "") -> None:
        """Drop an execution that is settled, refunded or expired; what we signed stays recorded.

        ``evidence_root`` is the chain's, "" unless the execution was settled.
        """
        state = self._states.pop(execution_id, None)
        self._reverted.pop(execution_id, None)
        if state is None:
            return
        self._ended[execution_id] = None
        evidence = state.find_evidence(evidence_root)
        if evidence is not None:
            self._evidence[execution_id] = evidence

    def process_key(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for state in self._states.values():
            commands += self._advance(state, now)
        return commands

    # ---- nodes ------------------------------------------------------------------------------

    def process_report(
        self, report: NodeReport, signing_key: str, token: str, now: float
    ) -> list[Command]:
        """Take what a node says; raise PeerFault, BadSignature if it is false or not its own.

        Completions, and what validators say, are taken from the draw on; Unavailable is raised
        before. Of a validator the first commitment counts.
        """
        state = self._find_state(report.execution_id)
        if state is None:
            return []
        match report:
            case ExecutorCommitment():
                self._commitments.process_commitment(state, report, signing_key, token)
            case Takeovers():
                state.check_node(report, signing_key)
                state.add_takeovers(report.takeovers)
                state.add_answer_of_replaced(report)
            case Completion():
                state.check_node(report, signing_key)
                verification = state.require_verification()
                if report.node in verification.completions:
                    return []
                _take_completion(state, verification, report)
            case ValidatorCommitment():
                state.check_validator(report, signing_key)
                state.require_verification().add_validator_commitment(report)
            case VerificationResult():
                state.check_validator(report, signing_key)
                state.require_verification().add_answer(ValidatorAnswer(report, token))
            case _ as never:
                assert_never(never)
        return self._take_steps_later(state, now)

    def process_rulings(
        self, execution_id: str, rulings: Sequence[Ruling], now: float
    ) -> list[Command]:
        """Record the results of a task that we recomputed ourselves."""
        state = self._states.get(execution_id)
        if state is None:
            return []
        if state.verification is not None:
            self._verification_rounds.process_rulings(state.verification, rulings, now)
        return self._take_steps_later(state, now)

    # ---- members ----------------------------------------------------------------------------

    def process_gossip(self, sender: str, message: SettlementMessage, now: float) -> list[Command]:
        """Take another member's message; raise PeerFault, BadSignature when it is wrong."""
        state = self._states.get(message.execution_id)
        if state is None:
            return []
        match message:
            case CommitmentsVote():
                self._commitments.process_vote(state, sender, message)
                return self._take_steps_later(state, now)
            case CommitmentsRequest():
                return self._commitments.process_content_request(state, sender)
            case CommitmentsReply():
                self._commitments.process_reply(state, message)
                return self._advance(state, now)
            case CommitmentsShared():
                return self._process_shared(state, sender, message, now)
            case DrawPartial():
                commands = self._draws.process_partial(state, sender, message, now)
                return commands + self._advance(state, now)
            case DrawMessage():
                self._draws.adopt(state, message.draw, now)
                return self._advance(state, now)
            case Attested():
                is_new = self._take_attestation(state, message.attestation)
                return self._take_steps_later(state, now) if is_new else []
            case SettlementProposal():
                return self._process_proposal(state, sender, message, now)
            case SettlementSignature():
                return self._proposals.process_signature(state, sender, message)
            case _ as never:
                assert_never(never)

    def _process_shared(
        self, state: SettlementState, sender: str, shared: CommitmentsShared, now: float
    ) -> list[Command]:
        """Take what another member holds before the draw; raise PeerFault for what is false."""
        if state.certificate is None:
            return [Gossip(sender, PlanRequest(execution_id=shared.execution_id))]
        for signed in shared.ends:
            state.add_end(signed)
        state.add_takeovers(shared.takeovers)
        known = set(state.collected.list_tokens())
        for token in shared.commitments:
            if token not in known:
                commitment, signing_key = self._read_token(api.EXECUTOR_COMMITMENT, token)
                if commitment.execution_id != shared.execution_id:
                    raise PeerFault(f"a commitment is not about {shared.execution_id}")
                self._commitments.process_commitment(state, commitment, signing_key, token)
        return self._take_steps_later(state, now)

    def _take_attestation(
        self, state: SettlementState, signed: SignedAttestation, *, may_replace: bool = False
    ) -> bool:
        """Count an attestation; return whether it is new. Raises PeerFault, BadSignature.

        Before the draw nothing says what it may be about. Members repeat theirs.
        """
        if signed.attestation.execution_id != state.request.execution_id:
            raise PeerFault(f"an attestation is not about {state.request.execution_id}")
        if state.verification is None or state.attestations.knows(signed):
            return False
        state.verification.check_attested(signed.attestation)
        check_attestation(signed, self._context.view)
        state.attestations.add(signed, may_replace=may_replace)
        return True

    def _process_proposal(
        self, state: SettlementState, sender: str, proposal: SettlementProposal, now: float
    ) -> list[Command]:
        """Take the evidence that we lack; sign if the same settlement follows from ours."""
        if state.certificate is None:
            return [Gossip(sender, PlanRequest(execution_id=proposal.execution_id))]
        if now < state.heard_until.get(sender, 0.0):
            return []  # all drawn tasks are looked at for each
        period_s = tuning.SETTLEMENT_STAGE_S * len(self._context.accounts())  # of honest members
        state.heard_until[sender] = now + period_s / 2
        state.proposals[sender] = proposal
        return self._advance(state, now)

    def _take_evidence(
        self, state: SettlementState, sender: str, proposal: SettlementProposal, now: float
    ) -> list[Command]:
        """Take the evidence of a proposal that we lack; blame its sender when something is false.

        Runs at every step until the proposal is judged: our view of the chain may be behind.
        """
        try:
            self._draws.adopt(state, proposal.draw, now)
            self._add_evidence(state, proposal)
        except PeerFault as error:
            return [_refuse_proposal(state, sender, error)]
        return []

    def _add_evidence(self, state: SettlementState, proposal: SettlementProposal) -> None:
        """Add what a proposal rests on; raise PeerFault, BadSignature for what is false."""
        verification = state.verification
        if verification is None:
            return  # our view of the chain is behind; tried again at the next step
        known = {answer.token for answer in verification.list_answers()}
        shown = Counter(signed.attestation.member for signed in proposal.attestations)
        if max(shown.values(), default=0) > limits.MAX_CONFLICTING:
            raise PeerFault("a settlement's proposal shows too many attestations of one member")
        for signed in proposal.attestations:
            self._take_attestation(state, signed, may_replace=True)
        for completion in proposal.completions:
            if completion.node not in verification.completions:
                _take_completion(state, verification, completion)
        for token in proposal.results:
            if token not in known:
                result, signing_key = self._read_token(api.VERIFICATION_RESULT, token)
                state.check_validator(result, signing_key)
                verification.add_answer(ValidatorAnswer(result, token))

    def _judge_apart(
        self, state: SettlementState, verification: Verification, now: float
    ) -> list[Command]:
        """Judge proposals that lack something of our evidence, by what we had when it was complete.

        What was taken of a proposal is not kept twice: a member may propose in every open
        execution.
        """
        commands: list[Command] = []
        phase, taken = state.phase, {"completions": (), "results": (), "attestations": ()}
        for sender, proposal in sorted(state.proposals.items()):
            if not (proposal.completions or proposal.results or proposal.attestations):
                continue
            state.proposals[sender] = proposal.model_copy(update=taken)
            if not isinstance(phase, Proposing):
                continue
            apart = state.fork(phase.basis)
            try:
                self._add_evidence(apart, proposal)
            except PeerFault as error:
                commands.append(_refuse_proposal(state, sender, error))
                continue
            found = apart.verification
            assert found is not None
            found.heard_rulings = verification.heard_rulings  # those are no news any more
            self._verification_rounds.advance(apart, found, now)  # what it asks for is not done
            commands += self._proposals.judge(state, phase, sender, found)
        return commands

    # ---- time -------------------------------------------------------------------------------

    def process_tick(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for state in list(self._states.values()):
            collected = state.collected
            if now >= state.look_at and (
                collected.by_node or collected.counts or state.chain.agreed
            ):
                found = self._advance(state, now)
                commands += found
                if not found:  # nothing is left to do but what time brings
                    state.look_at = now + tuning.SETTLEMENT_LOOK_S
                    if state.verification is not None:
                        state.look_at = min(state.look_at, state.verification.attest_at)
        return commands

    # ---- the steps, in order ----------------------------------------------------------------

    def _take_steps_later(self, state: SettlementState, now: float) -> list[Command]:
        """Take the steps that follow from evidence about a verification at the next tick.

        They look at every drawn task. Of a thousand that are drawn thousands of answers come, and
        looking at all for each of them would keep a member from hearing honest nodes in time. So
        would looking at all numbers of steps for each commitment near the deadline.
        """
        state.look_at = now
        is_later = state.verification is not None or state.is_late(self._context.timestamp_s)
        return [] if is_later else self._advance(state, now)

    def _advance(self, state: SettlementState, now: float) -> list[Command]:
        """Take every step that the evidence allows, in the order of the phases."""
        state.look_at = now
        if self._context.group is None or isinstance(state.phase, Requested):
            return []
        if isinstance(state.phase, Planned):
            commands = self._fetch_contents(state, state.phase, now)
            if commands is not None:
                return commands
        context = state.context
        assert context is not None
        commands = self._commitments.advance(state, context, now)
        for sender, proposal in list(state.proposals.items()):
            commands += self._take_evidence(state, sender, proposal, now)
        commands += self._draws.make(state, now)
        if state.verification is None:
            return commands
        commands += _check_early_completions(state, state.verification)
        commands += self._verification_rounds.advance(state, state.verification, now)
        commands += self._proposals.advance(state, now)
        return commands + self._judge_apart(state, state.verification, now)

    def _fetch_contents(
        self, state: SettlementState, phase: Planned, now: float
    ) -> list[Command] | None:
        """Return what fetches the plan's snapshot and manifest, or None when both are here."""
        root, model_id = state.request.snapshot_root, state.request.model_id
        phase.snapshot = phase.snapshot or self._context.contents.find_snapshot(root)
        phase.manifest = phase.manifest or self._context.contents.find_manifest(model_id)
        if phase.snapshot is None or phase.manifest is None:
            return self._context.contents.ask(model_id, root, now)
        context = PlanContext(phase.certificate, phase.snapshot, phase.manifest)
        transitions.add_contents(state, context)
        return None

    def _restore_reverted(self, state: SettlementState, certificate: PlanCertificate) -> None:
        """Take what nodes sent before a reorganisation moved the request: they send it once."""
        before = self._reverted.pop(state.request.execution_id, None)
        if before is None or before.certificate is None:
            return
        old, plan = before.certificate.plan, certificate.plan
        if (old.tasks, old.nodes) != (plan.tasks, plan.nodes):
            return
        state.collected.answered |= before.collected.answered
        state.add_takeovers(before.collected.takeovers.values())
        state.collected.by_node |= before.collected.by_node
        state.collected.counts |= before.collected.counts
        state.collected.ordered = before.collected.ordered
        state.collected.signed_steps = before.collected.signed_steps
        state.collected.order = before.collected.order
        state.collected.finals |= before.collected.finals
        state.early.completions |= before.early.completions
        if before.verification is not None:
            state.early.completions |= before.verification.completions

    def _find_state(self, execution_id: str) -> SettlementState | None:
        """Return an open execution, None for an ended one; raise Unavailable for an unknown one."""
        state = self._states.get(execution_id)
        if state is None and execution_id not in self._ended:
            raise Unavailable(f"execution {execution_id} has not been seen here yet; try again")
        return state


def _check_early_completions(state: SettlementState, verification: Verification) -> list[Command]:
    """Check the completions that came for an earlier draw; blame the nodes of false ones."""
    commands: list[Command] = []
    early = state.early.completions
    while early:
        node, completion = early.popitem()
        try:
            _take_completion(state, verification, completion)
        except PeerFault as error:
            commands.append(Fault(node, str(error)))
    return commands


def _refuse_proposal(state: SettlementState, sender: str, error: PeerFault) -> Fault:
    del state.proposals[sender]
    return Fault(sender, f"proposed a settlement with false evidence: {error}")


def _take_completion(
    state: SettlementState, verification: Verification, completion: Completion
) -> None:
    """Keep what an executor reveals; raise PeerFault unless it committed to exactly that."""
    node, basis = completion.node, state.find_basis()
    root = state.chain.bound.get(node)
    if basis is not None and root is not None:  # the others' completions are not needed
        context = verification.context
        check_revealed(completion, context.certificate, context.manifest, basis, root)
        verification.completions[node] = completion
