"""From committed completions to money: the evidence of every execution, and where it comes in.

What follows from it is decided by four others: ``pledges`` brings the executors' commitments to
the chain, ``draws`` makes the randomness once all are there, ``trials`` verifies the drawn tasks,
``proposals`` agrees on the settlement. All evidence only adds up, and a proposal carries it, so
that members converge.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from splitup.core import limits
from splitup.core.errors import BadSignature, PeerFault, Unavailable
from splitup.graph.manifest import Manifest
from splitup.messages.base import Message
from splitup.messages.completions import Completion, Pledge, Takeovers
from splitup.messages.plans import PlanCertificate, Request
from splitup.messages.verification import (
    Evidence,
    Ruling,
    SignedAttestation,
    VerificationCommitment,
    VerificationResult,
)
from splitup.protocol.committee.context import Ledger, Library, Seat
from splitup.protocol.committee.events import (
    Command,
    CompletionCommitted,
    ExecutionCommitted,
    Fault,
    Gossip,
)
from splitup.protocol.committee.peer_messages import (
    Attested,
    CommitmentsVote,
    DrawMade,
    DrawPartial,
    PlanWanted,
    PledgesTold,
    PledgesWanted,
    SettlementProposal,
    SettlementSignature,
)
from splitup.protocol.settlement.attestations import Attestations, check_attestation
from splitup.protocol.settlement.commitments import Pledges
from splitup.protocol.settlement.draws import Draws
from splitup.protocol.settlement.proof_of_sampling import Economics
from splitup.protocol.settlement.proposals import Proposals
from splitup.protocol.settlement.settlement_state import (
    Case,
    check_committed,
    check_revealed,
    make_evidence,
)
from splitup.protocol.settlement.task_checks import Answer
from splitup.protocol.settlement.verification_rounds import Trials

ResultReader = Callable[[str], tuple[VerificationResult, str]]  # token -> result, signing key


class Settlements:
    """One member's part in verification and settlement."""

    def __init__(
        self,
        seat: Seat,
        ledger: Ledger,
        library: Library,
        economics: Economics,
        read_result: ResultReader,
    ) -> None:
        self._seat = seat
        self._ledger = ledger
        self._library = library
        self._economics = economics
        self._read_result = read_result
        self._pledges = Pledges(seat)
        self._draws = Draws(seat, ledger)
        self._trials = Trials(seat, economics)
        self._proposals = Proposals(seat, ledger, economics)
        self._cases: dict[str, Case] = {}
        self._undone: OrderedDict[str, Case] = OrderedDict()  # a reorganisation took their requests
        self._ended: OrderedDict[str, None] = OrderedDict()  # a late node is no faulty node
        self._evidence: dict[str, Evidence] = {}  # of what was closed lately, oldest first

    def find_evidence(self, execution_id: str) -> Evidence | None:
        """Return what the settlement of a closed execution rested on, if it was lately."""
        return self._evidence.get(execution_id)

    def find_attestation(self, execution_id: str) -> SignedAttestation | None:
        """Return what we last said about the verification of an execution."""
        case = self._cases.get(execution_id)
        return case.attested if case else None

    def is_over(self, execution_id: str) -> bool:
        """Return whether an execution was settled or refunded lately."""
        return execution_id in self._ended

    def __len__(self) -> int:
        return len(self._cases)

    # ---- facts ------------------------------------------------------------------------------

    def process_request(self, request: Request) -> list[Command]:
        case = Case(request, Attestations(self._seat.view.quorum), self._economics)
        self._cases.setdefault(request.execution_id, case)
        return []

    def process_certificate(self, certificate: PlanCertificate, now: float) -> list[Command]:
        """Note the plan of an execution; from here on its evidence can be judged."""
        case = self._cases.get(certificate.plan.request.execution_id)
        if case is None or case.certificate:
            return []
        case.certificate = certificate
        self._recall(case, certificate)
        return self._advance(case, now)

    def process_committed(self, event: CompletionCommitted, now: float) -> list[Command]:
        """Note a commitment on chain; the last executor's opens the draw."""
        case = self._cases.get(event.execution_id)
        return self._advance(case, now) if case is not None and case.add_own(event) else []

    def process_agreed(self, event: ExecutionCommitted, now: float) -> list[Command]:
        """Note that the chain holds one root over all executors' pledges; it opens the draw."""
        case = self._cases.get(event.execution_id)
        if case is None or case.agreed is not None:
            return []
        case.agreed, case.vote_at = event, 0.0
        return self._advance(case, now)

    def process_accepted(self, execution_id: str, *, is_planned: bool) -> None:
        """Note whether the chain holds the plan, without which it takes no commitments."""
        case = self._cases.get(execution_id)
        if case is not None:
            case.is_planned = is_planned

    def process_undone_request(self, execution_id: str) -> None:
        """Drop an execution whose block is gone; its request will be in another one."""
        case = self._cases.pop(execution_id, None)
        if case is not None and case.certificate is not None:
            self._undone[execution_id] = case
            while len(self._undone) > limits.MAX_UNDONE:
                self._undone.popitem(last=False)

    def process_undone_commitment(self, event: CompletionCommitted) -> None:
        """Take back a commitment whose block is gone, and a draw that rested on it."""
        case = self._cases.get(event.execution_id)
        if case is None or case.own.get(event.node) != event:
            return
        rested = case.get_commitments() is case.own
        del case.own[event.node]
        if rested:
            case.undo_draw()

    def process_undone_agreement(self, event: ExecutionCommitted) -> None:
        """Take back the agreed root whose block is gone, and a draw that rested on it."""
        case = self._cases.get(event.execution_id)
        if case is None or case.agreed != event:
            return
        rested = case.get_commitments() is case.bound
        case.unbind()
        if rested:
            case.undo_draw()

    def process_end(self, execution_id: str) -> list[Command]:
        """Forget an execution that is settled, refunded or expired, and what we signed for it."""
        case = self._cases.pop(execution_id, None)
        self._undone.pop(execution_id, None)
        if case is None:
            return []
        self._ended[execution_id] = None
        while len(self._ended) > limits.MAX_OPEN_EXECUTIONS:
            self._ended.popitem(last=False)
        if case.draw is not None:
            self._evidence[execution_id] = make_evidence(case.draw, case.list_verdicts())
            while len(self._evidence) > limits.MAX_KEPT_EVIDENCE:
                self._evidence.pop(next(iter(self._evidence)))
        commands: list[Command] = []
        for kind in ("request", "plan", "draw", "settlement"):
            commands += self._ledger.forget(f"{kind}/{execution_id}/")
        return commands

    def process_key(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for case in self._cases.values():
            commands += self._advance(case, now)
        return commands

    # ---- nodes ------------------------------------------------------------------------------

    def process_completion(
        self, completion: Completion, signing_key: str, now: float
    ) -> list[Command]:
        """Keep what a node reveals until the draw is known; raise PeerFault if it differs."""
        case = self._find_case(completion.execution_id)
        if case is None:
            return []
        node = completion.node
        if case.certificate is None:
            raise Unavailable(
                f"execution {completion.execution_id} is not planned here yet; try again"
            )
        if case.certificate.plan.node_of(node).signing_key != signing_key:
            raise BadSignature(f"a completion of {node} is signed by another key", peer=node)
        if node in case.completions:
            return []
        if case.manifest and case.draw is not None:
            self._take_completion(case, completion, case.certificate, case.manifest)
        else:
            if node in (commitments := case.get_commitments()):
                check_committed(completion, commitments[node])
            case.unchecked[node] = completion
        return self._advance(case, now)

    def process_pledge(self, pledge: Pledge, signing_key: str, now: float) -> list[Command]:
        """Keep what a node commits to, the first; raise PeerFault for anybody else's."""
        case = self._find_case(pledge.execution_id)
        if case is None:
            return []
        self._pledges.process_pledge(case, pledge, signing_key)
        return self._advance(case, now)

    def process_takeovers(self, message: Takeovers, signing_key: str, now: float) -> list[Command]:
        """Note what made a node an executor; raise PeerFault for anybody else's, or false ones."""
        case = self._find_case(message.execution_id)
        if case is None:
            return []
        if case.certificate is None:
            raise Unavailable(
                f"execution {message.execution_id} is not planned here yet; try again"
            )
        plan, node = case.certificate.plan, message.node
        if plan.node_of(node).signing_key != signing_key:
            raise BadSignature(f"takeovers of {node} are signed by another key", peer=node)
        case.add_takeovers(message.takeovers)
        return self._advance(case, now)

    def process_promise(
        self, promise: VerificationCommitment, signing_key: str, now: float
    ) -> list[Command]:
        """Keep a validator's commitment, the first; raise PeerFault for anybody else's."""
        case = self._find_case(promise.execution_id)
        if case is None:
            return []
        case.check_validator(promise, signing_key)
        case.add_promise(promise)
        return self._advance(case, now)

    def process_ruling(self, execution_id: str, ruling: Ruling, now: float) -> list[Command]:
        """Note what we recomputed ourselves."""
        case = self._cases.get(execution_id)
        if case is None:
            return []
        self._trials.process_ruling(case, ruling)
        return self._advance(case, now)

    def process_result(
        self, result: VerificationResult, signing_key: str, token: str, now: float
    ) -> list[Command]:
        """Keep a validator's answer; one per task and validator. Raises PeerFault from others."""
        case = self._find_case(result.execution_id)
        if case is None:
            return []
        case.check_validator(result, signing_key)
        case.add_answer(Answer(result, token))
        return self._advance(case, now)

    # ---- members ----------------------------------------------------------------------------

    def process_gossip(self, sender: str, message: Message, now: float) -> list[Command]:
        case = self._cases.get(_get_execution(message))
        if case is None:
            return []
        match message:
            case CommitmentsVote():
                self._pledges.process_vote(case, sender, message)
                return self._advance(case, now)
            case PledgesWanted():
                return self._pledges.process_wanted(case, sender)
            case PledgesTold():
                self._pledges.process_told(case, message)
                return self._advance(case, now)
            case DrawPartial():
                case.add_takeovers(message.takeovers)
                commands = self._draws.process_partial(case, sender, message, now)
                return commands + self._advance(case, now)
            case DrawMade():
                self._draws.adopt(case, message.draw, now)
                return self._advance(case, now)
            case Attested():
                if self._take_attestation(case, message.attestation):
                    return self._advance(case, now)
            case SettlementProposal():
                return self._process_proposal(case, sender, message, now)
            case SettlementSignature():
                return self._proposals.process_signature(case, sender, message)
        return []

    def _take_attestation(self, case: Case, signed: SignedAttestation) -> bool:
        """Count an attestation; return whether it is news. Raises PeerFault, BadSignature."""
        if signed.attestation.execution_id != case.request.execution_id:
            raise PeerFault(f"an attestation is not about {case.request.execution_id}")
        if case.attestations.knows(signed):
            return False
        check_attestation(signed, self._seat.view)
        case.attestations.add(signed)
        return True

    def _process_proposal(
        self, case: Case, sender: str, proposal: SettlementProposal, now: float
    ) -> list[Command]:
        """Take over evidence we lack, then sign when our own settlement is the same."""
        if case.certificate is None:
            return [Gossip(sender, PlanWanted(execution_id=proposal.execution_id))]
        case.proposals[sender] = proposal
        return self._advance(case, now)

    def _take_evidence(
        self, case: Case, sender: str, proposal: SettlementProposal, now: float
    ) -> list[Command]:
        """Take over what a proposal holds and we lack; name its sender when something is false.

        Runs again until the proposal is signed: our view of the chain may still be behind it.
        """
        commands: list[Command] = []
        certificate, manifest = case.certificate, case.manifest
        if certificate is None or manifest is None:
            return commands
        known = {answer.token for answer in case.get_answers()}
        try:
            self._draws.adopt(case, proposal.draw, now)
            for attestation in proposal.attestations:
                self._take_attestation(case, attestation)
            if case.draw is None:
                return commands  # our view of the chain is behind; once more when it is not
            for completion in proposal.completions:
                if completion.node not in case.completions:
                    self._take_completion(case, completion, certificate, manifest)
            for token in proposal.results:
                if token not in known:
                    result, signing_key = self._read_result(token)
                    case.check_validator(result, signing_key)
                    case.add_answer(Answer(result, token))
        except PeerFault as error:
            del case.proposals[sender]
            commands.append(Fault(sender, f"proposed a settlement with false evidence: {error}"))
        return commands

    # ---- time -------------------------------------------------------------------------------

    def process_tick(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for case in list(self._cases.values()):
            if case.own or case.pledges or case.agreed:
                commands += self._advance(case, now)
        return commands

    # ---- the steps, in order ----------------------------------------------------------------

    def _advance(self, case: Case, now: float) -> list[Command]:
        if case.certificate is None or self._seat.group is None:
            return []
        request = case.request
        case.snapshot = case.snapshot or self._library.find_snapshot(request.snapshot_root)
        case.manifest = case.manifest or self._library.find_manifest(request.model_id)
        if case.snapshot is None or case.manifest is None:
            return self._library.ask(request.model_id, request.snapshot_root, now)
        commands = self._pledges.advance(case, now)
        for sender, proposal in list(case.proposals.items()):
            commands += self._take_evidence(case, sender, proposal, now)
        commands += self._draws.make(case, now)
        if case.draw is None:
            return commands
        commands += self._check_completions(case, case.certificate, case.manifest)
        commands += self._trials.advance(
            case, case.certificate, case.draw, case.snapshot, case.manifest, now
        )
        return commands + self._proposals.advance(case, now)

    def _check_completions(
        self, case: Case, certificate: PlanCertificate, manifest: Manifest
    ) -> list[Command]:
        commands: list[Command] = []
        while case.unchecked:
            node, completion = case.unchecked.popitem()
            try:
                self._take_completion(case, completion, certificate, manifest)
            except PeerFault as error:
                commands.append(Fault(node, str(error)))
        return commands

    def _take_completion(
        self, case: Case, completion: Completion, certificate: PlanCertificate, manifest: Manifest
    ) -> None:
        """Keep what an executor reveals; raise PeerFault unless it committed to exactly that."""
        node, executors = completion.node, case.get_executors()
        if node in executors:  # of the others nobody wants to know
            committed = case.get_commitments()[node]
            check_revealed(completion, certificate, manifest, committed, executors)
            case.completions[node] = completion

    # ---- pieces -----------------------------------------------------------------------------

    def _recall(self, case: Case, certificate: PlanCertificate) -> None:
        """Take what nodes said before a reorganisation moved the request: they say it once."""
        before = self._undone.pop(case.request.execution_id, None)
        if before is None or before.certificate is None:
            return
        old, plan = before.certificate.plan, certificate.plan
        if (old.tasks, old.nodes) != (plan.tasks, plan.nodes):
            return
        case.add_takeovers(before.takeovers.values())
        case.pledges |= before.pledges
        case.unchecked |= before.unchecked | before.completions

    def _find_case(self, execution_id: str) -> Case | None:
        """Return an open case, None for one that ended; raise Unavailable for an unknown one."""
        case = self._cases.get(execution_id)
        if case is None and execution_id not in self._ended:
            raise Unavailable(f"execution {execution_id} has not been seen here yet; try again")
        return case


def _get_execution(message: Message) -> str:
    match message:
        case DrawMade():
            return message.draw.execution_id
        case Attested():
            return message.attestation.attestation.execution_id
        case (
            CommitmentsVote()
            | PledgesWanted()
            | PledgesTold()
            | DrawPartial()
            | SettlementProposal()
            | SettlementSignature()
        ):
            return message.execution_id
    return ""
