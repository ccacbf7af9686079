"""From committed completions to money: draw, verification, and a settlement that 2f+1 members sign.

The draw's randomness is made only when every executor's commitment is on chain. When the evidence
is complete, members propose it in the order the draw gives them; a member signs what it computes
itself from the same evidence, and takes over whatever evidence it lacked.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

from splitup import limits
from splitup.codec import compute_digest
from splitup.crypto import quorum
from splitup.errors import BadSignature, PeerFault, Unavailable
from splitup.graph.manifest import Manifest
from splitup.protocol.cases import (
    Case,
    Proposed,
    check_revealed,
    compute_evidence_root,
    make_evidence,
    make_settlement,
)
from splitup.protocol.certificates import check_draw, draw_alpha
from splitup.protocol.checks import Answer, Check
from splitup.protocol.events import (
    Command,
    CompletionCommitted,
    Fault,
    Gossip,
    Log,
    PushVerification,
    SubmitSettlement,
)
from splitup.protocol.messages import (
    DrawMade,
    DrawPartial,
    PlanWanted,
    SettlementProposal,
    SettlementSignature,
)
from splitup.protocol.selection import rank_validators
from splitup.protocol.shared import Beacon, Ledger, Library, Seat, compute_member_order
from splitup.protocol.verification import (
    Economics,
    Verdict,
    compute_settlement,
    get_sampled_tasks,
)
from splitup.wire import (
    Completion,
    Draw,
    Evidence,
    Message,
    PlanCertificate,
    Request,
    Snapshot,
    VerificationOrder,
    VerificationResult,
)

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
        self._cases: dict[str, Case] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()  # a late node is no faulty node
        self._evidence: dict[str, Evidence] = {}  # of what was closed lately, oldest first

    def find_evidence(self, execution_id: str) -> Evidence | None:
        """Return what the settlement of a closed execution rested on, if it was lately."""
        return self._evidence.get(execution_id)

    def __len__(self) -> int:
        return len(self._cases)

    # ---- facts ------------------------------------------------------------------------------

    def process_request(self, request: Request) -> list[Command]:
        self._cases.setdefault(request.execution_id, Case(request))
        return []

    def process_certificate(self, certificate: PlanCertificate, now: float) -> list[Command]:
        """Note the plan of an execution; from here on its evidence can be judged."""
        case = self._cases.get(certificate.plan.request.execution_id)
        if case is None or case.certificate:
            return []
        case.certificate = certificate
        return self._advance(case, now)

    def process_committed(self, event: CompletionCommitted, now: float) -> list[Command]:
        """Note a commitment on chain; the last executor's opens the draw."""
        case = self._cases.get(event.execution_id)
        if case is None or event.node in case.commitments:
            return []
        if len(case.commitments) >= limits.MAX_TASKS:
            return []
        case.commitments[event.node] = event
        return self._advance(case, now)

    def process_end(self, execution_id: str) -> list[Command]:
        """Forget an execution that is settled, refunded or expired, and what we signed for it."""
        case = self._cases.pop(execution_id, None)
        if case is None:
            return []
        self._ended[execution_id] = None
        while len(self._ended) > limits.MAX_OPEN_EXECUTIONS:
            self._ended.popitem(last=False)
        if case.draw is not None:
            self._evidence[execution_id] = make_evidence(case.draw, case.verdicts)
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
        """Keep what a node reveals until its commitment is seen; raise PeerFault if it differs."""
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
        if case.manifest and node in case.commitments:
            check_revealed(completion, case.certificate, case.manifest, case.commitments[node])
            case.completions[node] = completion
        else:
            case.unchecked[node] = completion
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
        match message:
            case DrawPartial():
                return self._process_partial(sender, message, now)
            case DrawMade():
                case = self._cases.get(message.draw.execution_id)
                if case is not None:
                    return self._adopt_draw(case, message.draw, now) + self._advance(case, now)
            case SettlementProposal():
                return self._process_proposal(sender, message, now)
            case SettlementSignature():
                return self._process_signature(sender, message)
        return []

    def _process_partial(self, sender: str, message: DrawPartial, now: float) -> list[Command]:
        case = self._cases.get(message.execution_id)
        if case is None:
            return []
        if case.draw is not None:
            late = now >= case.resend_at
            return [Gossip(sender, DrawMade(draw=case.draw))] if late else []
        index = self._seat.index_of(sender)
        if case.beacon is None:
            case.early.setdefault(index, message.partial)
            return []
        case.beacon.add(index, message.partial)
        return self._advance(case, now)

    def _adopt_draw(self, case: Case, draw: Draw, now: float) -> list[Command]:
        """Take a draw from another member, once it is over the commitments that we see too."""
        if case.draw is not None or not self._seat.view.group_key:
            return []
        basis = case.get_basis()
        if basis is None or (draw.block_hash, draw.commitments) != basis:
            return []
        check_draw(draw, self._seat.view)
        self._set_draw(case, draw, now)
        return []

    def _process_proposal(
        self, sender: str, proposal: SettlementProposal, now: float
    ) -> list[Command]:
        """Take over evidence we lack, then sign when our own settlement is the same."""
        case = self._cases.get(proposal.execution_id)
        if case is None:
            return []
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
            for completion in proposal.completions:
                node = completion.node
                if node in case.commitments and node not in case.completions:
                    check_revealed(completion, certificate, manifest, case.commitments[node])
                    case.completions[node] = completion
            commands += self._adopt_draw(case, proposal.draw, now)
            for token in proposal.results:
                if token not in known:
                    result, signing_key = self._read_result(token)
                    case.check_validator(result, signing_key)
                    case.add_answer(Answer(result, token))
        except PeerFault as error:
            del case.proposals[sender]
            commands.append(Fault(sender, f"proposed a settlement with false evidence: {error}"))
        return commands

    def _process_signature(self, sender: str, message: SettlementSignature) -> list[Command]:
        case = self._cases.get(message.execution_id)
        mine = case.proposed if case else None
        if case is None or mine is None or message.round != mine.round:
            return []
        if message.settlement_hash != mine.settlement_hash:
            raise PeerFault(f"member {sender} signed another settlement than asked", peer=sender)
        struct_hash = quorum.settlement_struct_hash(message.execution_id, mine.settlement_hash)
        self._seat.check(sender, struct_hash, message.signature)
        if sender in mine.signatures:
            return []
        mine.signatures[sender] = bytes.fromhex(message.signature[2:])
        if len(mine.signatures) != self._seat.view.quorum:
            return []  # fewer: wait; more: it is on its way
        return [self._make_submission(case, mine)]

    # ---- time -------------------------------------------------------------------------------

    def process_tick(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for case in list(self._cases.values()):
            if case.commitments:
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
        commands = self._check_completions(case, case.certificate, case.manifest)
        for sender, proposal in list(case.proposals.items()):
            commands += self._take_evidence(case, sender, proposal, now)
        commands += self._make_draw(case, now)
        if case.draw is None:
            return commands
        commands += self._verify(
            case, case.certificate, case.draw, case.snapshot, case.manifest, now
        )
        return commands + self._settle(case, now)

    def _check_completions(
        self, case: Case, certificate: PlanCertificate, manifest: Manifest
    ) -> list[Command]:
        commands: list[Command] = []
        for node in [node for node in case.unchecked if node in case.commitments]:
            completion = case.unchecked.pop(node)
            try:
                check_revealed(completion, certificate, manifest, case.commitments[node])
            except PeerFault as error:
                commands.append(Fault(node, str(error)))
            else:
                case.completions[node] = completion
        return commands

    def _make_draw(self, case: Case, now: float) -> list[Command]:
        basis = case.get_basis()
        if case.draw is not None or basis is None or self._seat.group is None:
            return []
        execution_id = case.request.execution_id
        block_hash, commitments = basis
        commands: list[Command] = []
        if case.beacon is None:
            beacon = Beacon(draw_alpha(execution_id, block_hash, commitments))
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
            message = DrawPartial(execution_id=execution_id, partial=case.partial)
            commands.append(Gossip(None, message))
        for index in case.beacon.combine(self._seat.group):
            liar = self._seat.accounts()[index]
            commands.append(Fault(liar, f"sent a false share of the draw of {execution_id}"))
        if case.beacon.seed:
            draw = Draw(
                execution_id=execution_id,
                block_hash=block_hash,
                commitments=commitments,
                signature=case.beacon.signature,
                seed=case.beacon.seed,
            )
            self._set_draw(case, draw, now)
        return commands

    def _set_draw(self, case: Case, draw: Draw, now: float) -> None:
        case.draw = draw
        case.resend_at = now + limits.GOSSIP_RETRY_S / 2
        order = compute_member_order(draw.seed, self._seat.accounts())
        case.place = order.index(self._seat.account)

    def _verify(
        self,
        case: Case,
        certificate: PlanCertificate,
        draw: Draw,
        snapshot: Snapshot,
        manifest: Manifest,
        now: float,
    ) -> list[Command]:
        """Open a check for every sampled task, and send orders when it is our turn."""
        plan = certificate.plan
        executors = case.get_executors()
        if not executors:
            return []  # the draw came before the completions it is over
        if case.checks is None:
            case.checks = {}
            sampled = get_sampled_tasks(draw, len(manifest.tasks), self._economics.sampling_bps)
            for task in sampled:
                validators = rank_validators(draw.seed, task, plan, snapshot, manifest, executors)
                steps = case.commitments[executors[task]].steps
                case.checks[task] = Check(task, tuple(validators), steps, now)
            for answer in case.results.values():
                case.add_answer(answer)
            case.results.clear()
        commands: list[Command] = []
        for task, check in case.checks.items():
            executor = executors[task]
            completion = case.completions.get(executor)
            if completion is not None:
                commitment = next(entry for entry in completion.tasks if entry.task == task)
                verdict = check.advance(commitment, executor, now)
                if verdict is not None:
                    if case.verdicts.get(task) != verdict:  # late answers may still change it
                        case.verdicts[task] = verdict
                        commands.append(_describe(case.request.execution_id, verdict))
                    continue
            validator = check.find_next(now, case.place)
            entry = next((e for e in snapshot.entries if e.node == validator), None)
            if entry is not None:
                order = VerificationOrder(
                    certificate=certificate,
                    draw=draw,
                    snapshot=snapshot,
                    task=task,
                    steps=check.steps,
                    executors=() if executors == plan.executors() else executors,
                )
                commands.append(PushVerification(entry.node, entry.endpoint, order))
        return commands

    def _settle(self, case: Case, now: float) -> list[Command]:
        if case.certificate is None or case.manifest is None or case.draw is None:
            return []
        if case.checks is None or len(case.verdicts) < len(case.checks):
            return []
        if not case.get_executors():
            return []
        if case.propose_at == math.inf:
            case.propose_at = now + case.place * limits.SETTLEMENT_STAGE_S
        if now < case.propose_at and not case.proposals:
            return []
        settlement = self._compute(case, case.certificate, case.manifest, case.draw)
        settlement_hash = quorum.settlement_hash(settlement)
        commands: list[Command] = []
        for sender, proposal in sorted(case.proposals.items()):
            if proposal.settlement_hash == settlement_hash:
                commands += self._sign(case, sender, proposal.round, settlement_hash)
        case.proposals = {
            sender: proposal
            for sender, proposal in case.proposals.items()
            if proposal.settlement_hash != settlement_hash
        }
        if now < case.propose_at:
            return commands
        case.propose_at = now + limits.SETTLEMENT_STAGE_S * len(self._seat.accounts())
        return commands + self._propose(case, case.draw, settlement, settlement_hash)

    def _propose(
        self, case: Case, draw: Draw, settlement: quorum.Settlement, settlement_hash: str
    ) -> list[Command]:
        """Say it to all, again when unanswered, in a new round when the evidence has grown."""
        commands: list[Command] = []
        mine = case.proposed
        if mine is None or mine.settlement_hash != settlement_hash:
            if case.rounds >= limits.MAX_SETTLEMENT_ROUNDS:
                return []
            mine = case.proposed = Proposed(case.rounds, settlement, settlement_hash)
            case.rounds += 1
            commands += self._sign(case, self._seat.account, mine.round, settlement_hash)
        message = SettlementProposal(
            execution_id=case.request.execution_id,
            round=mine.round,
            draw=draw,
            completions=tuple(completion for _, completion in sorted(case.completions.items())),
            results=tuple(answer.token for answer in case.get_answers()),
            settlement_hash=settlement_hash,
        )
        commands.append(Gossip(None, message))
        if len(mine.signatures) >= self._seat.view.quorum:  # the chain has not taken it yet
            commands.append(self._make_submission(case, mine))
        return commands

    def _sign(self, case: Case, proposer: str, round_: int, settlement_hash: str) -> list[Command]:
        """Sign one settlement per proposer and round; the chain takes only the first."""
        execution_id = case.request.execution_id
        commands = self._ledger.claim(
            f"settlement/{execution_id}/{proposer}/{round_}", settlement_hash
        )
        if commands is None:
            return [Log(f"{proposer} proposed two settlements of {execution_id} in one round")]
        struct_hash = quorum.settlement_struct_hash(execution_id, settlement_hash)
        signature = self._seat.sign(struct_hash)
        if proposer == self._seat.account and case.proposed is not None:
            case.proposed.signatures[proposer] = bytes.fromhex(signature[2:])
            return commands
        message = SettlementSignature(
            execution_id=execution_id,
            round=round_,
            settlement_hash=settlement_hash,
            signature=signature,
        )
        return [*commands, Gossip(proposer, message)]

    def _make_submission(self, case: Case, mine: Proposed) -> SubmitSettlement:
        packed = quorum.pack_signatures(mine.signatures.items())
        return SubmitSettlement(case.request.execution_id, mine.settlement, packed)

    def _compute(
        self, case: Case, certificate: PlanCertificate, manifest: Manifest, draw: Draw
    ) -> quorum.Settlement:
        verdicts = [case.verdicts[task] for task in sorted(case.verdicts)]
        executors = case.get_executors()
        completions = {node: case.completions[node] for node in executors}
        terms = compute_settlement(
            certificate.plan, manifest, completions, verdicts, self._economics, executors
        )
        return make_settlement(terms, compute_evidence_root(draw, verdicts))

    # ---- pieces -----------------------------------------------------------------------------

    def _find_case(self, execution_id: str) -> Case | None:
        """Return an open case, None for one that ended; raise Unavailable for an unknown one."""
        case = self._cases.get(execution_id)
        if case is None and execution_id not in self._ended:
            raise Unavailable(f"execution {execution_id} has not been seen here yet; try again")
        return case


def _describe(execution_id: str, verdict: Verdict) -> Log:
    liars = f", liars: {', '.join(verdict.liars)}" if verdict.liars else ""
    return Log(
        f"task {verdict.task} of {execution_id} was verified: {verdict.outcome.value}{liars}"
    )
