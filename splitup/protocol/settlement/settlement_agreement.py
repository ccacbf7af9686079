"""From committed completions to money: the evidence of every execution, and where it comes in.

What follows from it is decided by four others: ``commitments`` brings the executors' commitments to
the chain, ``draws`` makes the randomness once all are there, ``verification_rounds`` verifies the
drawn tasks, ``proposals`` agrees on the settlement. All evidence only adds up, and a proposal
carries it, so that members converge.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from splitup.core import tuning
from splitup.core.errors import BadSignature, PeerFault, Unavailable
from splitup.graph.manifest import Manifest
from splitup.messages.base import Message
from splitup.messages.completions import Completion, ExecutorCommitment, Takeovers
from splitup.messages.plans import PlanCertificate, Request
from splitup.messages.verification import (
    Evidence,
    Ruling,
    SignedAttestation,
    ValidatorCommitment,
    VerificationResult,
)
from splitup.protocol.committee.context import ContentStore, MemberContext, SigningGuard
from splitup.protocol.committee.events import (
    Command,
    CompletionCommitted,
    ExecutionCommitted,
    Fault,
    Gossip,
)
from splitup.protocol.committee.peer_messages import (
    Attested,
    CommitmentsTold,
    CommitmentsVote,
    CommitmentsWanted,
    DrawMade,
    DrawPartial,
    PlanWanted,
    SettlementProposal,
    SettlementSignature,
)
from splitup.protocol.settlement.attestations import Attestations, check_attestation
from splitup.protocol.settlement.commitments import CommitmentAgreement
from splitup.protocol.settlement.draws import DrawAgreement
from splitup.protocol.settlement.proof_of_sampling import Economics
from splitup.protocol.settlement.proposals import Proposals
from splitup.protocol.settlement.settlement_state import (
    SettlementState,
    check_committed,
    check_revealed,
    make_evidence,
)
from splitup.protocol.settlement.task_checks import ValidatorAnswer
from splitup.protocol.settlement.verification_rounds import VerificationRounds

ResultReader = Callable[[str], tuple[VerificationResult, str]]  # token -> result, signing key


class SettlementAgreement:
    """One member's part in verification and settlement."""

    def __init__(
        self,
        context: MemberContext,
        signing_guard: SigningGuard,
        content_store: ContentStore,
        economics: Economics,
        read_result: ResultReader,
    ) -> None:
        self._context = context
        self._signing_guard = signing_guard
        self._content_store = content_store
        self._economics = economics
        self._read_result = read_result
        self._commitments = CommitmentAgreement(context)
        self._draws = DrawAgreement(context, signing_guard)
        self._verification_rounds = VerificationRounds(context, economics)
        self._proposals = Proposals(context, signing_guard, economics)
        self._states: dict[str, SettlementState] = {}
        # executions whose requests a reorganisation of the chain removed
        self._reverted: OrderedDict[str, SettlementState] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()  # a late node is no faulty node
        self._evidence: dict[str, Evidence] = {}  # of what was closed lately, oldest first

    def find_evidence(self, execution_id: str) -> Evidence | None:
        """Return what the settlement of a closed execution rested on, if it was lately."""
        return self._evidence.get(execution_id)

    def find_attestation(self, execution_id: str) -> SignedAttestation | None:
        """Return what we last said about the verification of an execution."""
        state = self._states.get(execution_id)
        return state.attested if state else None

    def is_over(self, execution_id: str) -> bool:
        """Return whether an execution was settled or refunded lately."""
        return execution_id in self._ended

    def __len__(self) -> int:
        return len(self._states)

    # ---- facts ------------------------------------------------------------------------------

    def process_request(self, request: Request) -> list[Command]:
        state = SettlementState(request, Attestations(self._context.view.quorum), self._economics)
        self._states.setdefault(request.execution_id, state)
        return []

    def process_certificate(self, certificate: PlanCertificate, now: float) -> list[Command]:
        """Note the plan of an execution; from here on its evidence can be judged."""
        state = self._states.get(certificate.plan.request.execution_id)
        if state is None or state.certificate:
            return []
        state.certificate = certificate
        self._recall(state, certificate)
        return self._advance(state, now)

    def process_committed(self, event: CompletionCommitted, now: float) -> list[Command]:
        """Note a commitment on chain; the last executor's opens the draw."""
        state = self._states.get(event.execution_id)
        return self._advance(state, now) if state is not None and state.add_own(event) else []

    def process_agreed(self, event: ExecutionCommitted, now: float) -> list[Command]:
        """Note that the chain holds one root over all executors' pledges; it opens the draw."""
        state = self._states.get(event.execution_id)
        if state is None or state.agreed is not None:
            return []
        state.agreed, state.vote_at = event, 0.0
        return self._advance(state, now)

    def process_accepted(self, execution_id: str, *, is_planned: bool) -> None:
        """Note whether the chain holds the plan, without which it takes no commitments."""
        state = self._states.get(execution_id)
        if state is not None:
            state.is_planned = is_planned

    def process_reverted_request(self, execution_id: str) -> None:
        """Drop an execution whose block is gone; its request will be in another one."""
        state = self._states.pop(execution_id, None)
        if state is not None and state.certificate is not None:
            self._reverted[execution_id] = state
            while len(self._reverted) > tuning.MAX_REVERTED:
                self._reverted.popitem(last=False)

    def process_reverted_commitment(self, event: CompletionCommitted) -> None:
        """Take back a commitment whose block is gone, and a draw that rested on it."""
        state = self._states.get(event.execution_id)
        if state is None or state.own.get(event.node) != event:
            return
        rested = state.get_commitments() is state.own
        del state.own[event.node]
        if rested:
            state.undo_draw()

    def process_reverted_agreement(self, event: ExecutionCommitted) -> None:
        """Take back the agreed root whose block is gone, and a draw that rested on it."""
        state = self._states.get(event.execution_id)
        if state is None or state.agreed != event:
            return
        rested = state.get_commitments() is state.bound
        state.unbind()
        if rested:
            state.undo_draw()

    def process_end(self, execution_id: str) -> list[Command]:
        """Forget an execution that is settled, refunded or expired, and what we signed for it."""
        state = self._states.pop(execution_id, None)
        self._reverted.pop(execution_id, None)
        if state is None:
            return []
        self._ended[execution_id] = None
        while len(self._ended) > tuning.MAX_OPEN_EXECUTIONS:
            self._ended.popitem(last=False)
        if state.draw is not None:
            self._evidence[execution_id] = make_evidence(state.draw, state.list_verdicts())
            while len(self._evidence) > tuning.MAX_KEPT_EVIDENCE:
                self._evidence.pop(next(iter(self._evidence)))
        commands: list[Command] = []
        for kind in ("request", "plan", "draw", "settlement"):
            commands += self._signing_guard.forget(f"{kind}/{execution_id}/")
        return commands

    def process_key(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for state in self._states.values():
            commands += self._advance(state, now)
        return commands

    # ---- nodes ------------------------------------------------------------------------------

    def process_completion(
        self, completion: Completion, signing_key: str, now: float
    ) -> list[Command]:
        """Keep what a node reveals until the draw is known; raise PeerFault if it differs."""
        state = self._find_state(completion.execution_id)
        if state is None:
            return []
        node = completion.node
        if state.certificate is None:
            raise Unavailable(
                f"execution {completion.execution_id} is not planned here yet; try again"
            )
        if state.certificate.plan.node_of(node).signing_key != signing_key:
            raise BadSignature(f"a completion of {node} is signed by another key", peer=node)
        if node in state.completions:
            return []
        if state.manifest and state.draw is not None:
            self._take_completion(state, completion, state.certificate, state.manifest)
        else:
            if node in (commitments := state.get_commitments()):
                check_committed(completion, commitments[node])
            state.unchecked[node] = completion
        return self._advance(state, now)

    def process_commitment(
        self, commitment: ExecutorCommitment, signing_key: str, now: float
    ) -> list[Command]:
        """Keep what a node commits to, the first; raise PeerFault for anybody else's."""
        state = self._find_state(commitment.execution_id)
        if state is None:
            return []
        self._commitments.process_commitment(state, commitment, signing_key)
        return self._advance(state, now)

    def process_takeovers(self, message: Takeovers, signing_key: str, now: float) -> list[Command]:
        """Note what made a node an executor; raise PeerFault for anybody else's, or false ones."""
        state = self._find_state(message.execution_id)
        if state is None:
            return []
        if state.certificate is None:
            raise Unavailable(
                f"execution {message.execution_id} is not planned here yet; try again"
            )
        plan, node = state.certificate.plan, message.node
        if plan.node_of(node).signing_key != signing_key:
            raise BadSignature(f"takeovers of {node} are signed by another key", peer=node)
        state.add_takeovers(message.takeovers)
        return self._advance(state, now)

    def process_validator_commitment(
        self, validator_commitment: ValidatorCommitment, signing_key: str, now: float
    ) -> list[Command]:
        """Keep a validator's commitment, the first; raise PeerFault for anybody else's."""
        state = self._find_state(validator_commitment.execution_id)
        if state is None:
            return []
        state.check_validator(validator_commitment, signing_key)
        state.add_validator_commitment(validator_commitment)
        return self._advance(state, now)

    def process_ruling(self, execution_id: str, ruling: Ruling, now: float) -> list[Command]:
        """Note what we recomputed ourselves."""
        state = self._states.get(execution_id)
        if state is None:
            return []
        self._verification_rounds.process_ruling(state, ruling)
        return self._advance(state, now)

    def process_result(
        self, result: VerificationResult, signing_key: str, token: str, now: float
    ) -> list[Command]:
        """Keep a validator's answer; one per task and validator. Raises PeerFault from others."""
        state = self._find_state(result.execution_id)
        if state is None:
            return []
        state.check_validator(result, signing_key)
        state.add_answer(ValidatorAnswer(result, token))
        return self._advance(state, now)

    # ---- members ----------------------------------------------------------------------------

    def process_gossip(self, sender: str, message: Message, now: float) -> list[Command]:
        state = self._states.get(_get_execution(message))
        if state is None:
            return []
        match message:
            case CommitmentsVote():
                self._commitments.process_vote(state, sender, message)
                return self._advance(state, now)
            case CommitmentsWanted():
                return self._commitments.process_wanted(state, sender)
            case CommitmentsTold():
                self._commitments.process_told(state, message)
                return self._advance(state, now)
            case DrawPartial():
                state.add_takeovers(message.takeovers)
                commands = self._draws.process_partial(state, sender, message, now)
                return commands + self._advance(state, now)
            case DrawMade():
                self._draws.adopt(state, message.draw, now)
                return self._advance(state, now)
            case Attested():
                if self._take_attestation(state, message.attestation):
                    return self._advance(state, now)
            case SettlementProposal():
                return self._process_proposal(state, sender, message, now)
            case SettlementSignature():
                return self._proposals.process_signature(state, sender, message)
        return []

    def _take_attestation(self, state: SettlementState, signed: SignedAttestation) -> bool:
        """Count an attestation; return whether it is news. Raises PeerFault, BadSignature."""
        if signed.attestation.execution_id != state.request.execution_id:
            raise PeerFault(f"an attestation is not about {state.request.execution_id}")
        if state.attestations.knows(signed):
            return False
        check_attestation(signed, self._context.view)
        state.attestations.add(signed)
        return True

    def _process_proposal(
        self, state: SettlementState, sender: str, proposal: SettlementProposal, now: float
    ) -> list[Command]:
        """Take over evidence we lack, then sign when our own settlement is the same."""
        if state.certificate is None:
            return [Gossip(sender, PlanWanted(execution_id=proposal.execution_id))]
        state.proposals[sender] = proposal
        return self._advance(state, now)

    def _take_evidence(
        self, state: SettlementState, sender: str, proposal: SettlementProposal, now: float
    ) -> list[Command]:
        """Take over what a proposal holds and we lack; name its sender when something is false.

        Runs again until the proposal is signed: our view of the chain may still be behind it.
        """
        commands: list[Command] = []
        certificate, manifest = state.certificate, state.manifest
        if certificate is None or manifest is None:
            return commands
        known = {answer.token for answer in state.get_answers()}
        try:
            self._draws.adopt(state, proposal.draw, now)
            for attestation in proposal.attestations:
                self._take_attestation(state, attestation)
            if state.draw is None:
                return commands  # our view of the chain is behind; once more when it is not
            for completion in proposal.completions:
                if completion.node not in state.completions:
                    self._take_completion(state, completion, certificate, manifest)
            for token in proposal.results:
                if token not in known:
                    result, signing_key = self._read_result(token)
                    state.check_validator(result, signing_key)
                    state.add_answer(ValidatorAnswer(result, token))
        except PeerFault as error:
            del state.proposals[sender]
            commands.append(Fault(sender, f"proposed a settlement with false evidence: {error}"))
        return commands

    # ---- time -------------------------------------------------------------------------------

    def process_tick(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for state in list(self._states.values()):
            if state.own or state.commitments or state.agreed:
                commands += self._advance(state, now)
        return commands

    # ---- the steps, in order ----------------------------------------------------------------

    def _advance(self, state: SettlementState, now: float) -> list[Command]:
        if state.certificate is None or self._context.group is None:
            return []
        request = state.request
        state.snapshot = state.snapshot or self._content_store.find_snapshot(request.snapshot_root)
        state.manifest = state.manifest or self._content_store.find_manifest(request.model_id)
        if state.snapshot is None or state.manifest is None:
            return self._content_store.ask(request.model_id, request.snapshot_root, now)
        commands = self._commitments.advance(state, now)
        for sender, proposal in list(state.proposals.items()):
            commands += self._take_evidence(state, sender, proposal, now)
        commands += self._draws.make(state, now)
        if state.draw is None:
            return commands
        commands += self._check_completions(state, state.certificate, state.manifest)
        commands += self._verification_rounds.advance(
            state, state.certificate, state.draw, state.snapshot, state.manifest, now
        )
        return commands + self._proposals.advance(state, now)

    def _check_completions(
        self, state: SettlementState, certificate: PlanCertificate, manifest: Manifest
    ) -> list[Command]:
        commands: list[Command] = []
        while state.unchecked:
            node, completion = state.unchecked.popitem()
            try:
                self._take_completion(state, completion, certificate, manifest)
            except PeerFault as error:
                commands.append(Fault(node, str(error)))
        return commands

    def _take_completion(
        self,
        state: SettlementState,
        completion: Completion,
        certificate: PlanCertificate,
        manifest: Manifest,
    ) -> None:
        """Keep what an executor reveals; raise PeerFault unless it committed to exactly that."""
        node, executors = completion.node, state.get_executors()
        if node in executors:  # of the others nobody wants to know
            committed = state.get_commitments()[node]
            check_revealed(completion, certificate, manifest, committed, executors)
            state.completions[node] = completion

    # ---- pieces -----------------------------------------------------------------------------

    def _recall(self, state: SettlementState, certificate: PlanCertificate) -> None:
        """Take what nodes said before a reorganisation moved the request: they say it once."""
        before = self._reverted.pop(state.request.execution_id, None)
        if before is None or before.certificate is None:
            return
        old, plan = before.certificate.plan, certificate.plan
        if (old.tasks, old.nodes) != (plan.tasks, plan.nodes):
            return
        state.add_takeovers(before.takeovers.values())
        state.commitments |= before.commitments
        state.unchecked |= before.unchecked | before.completions

    def _find_state(self, execution_id: str) -> SettlementState | None:
        """Return an open case, None for one that ended; raise Unavailable for an unknown one."""
        state = self._states.get(execution_id)
        if state is None and execution_id not in self._ended:
            raise Unavailable(f"execution {execution_id} has not been seen here yet; try again")
        return state


def _get_execution(message: Message) -> str:
    match message:
        case DrawMade():
            return message.draw.execution_id
        case Attested():
            return message.attestation.attestation.execution_id
        case (
            CommitmentsVote()
            | CommitmentsWanted()
            | CommitmentsTold()
            | DrawPartial()
            | SettlementProposal()
            | SettlementSignature()
        ):
            return message.execution_id
    return ""
