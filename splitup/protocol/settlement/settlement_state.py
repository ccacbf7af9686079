"""An execution between plan and settlement: what a member holds, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from splitup.core import limits
from splitup.core.codec import compute_digest, encode_canonical
from splitup.core.errors import PeerFault, Unavailable
from splitup.crypto import quorum
from splitup.graph.manifest import Manifest
from splitup.messages.completions import (
    Completion,
    ExecutorCommitment,
    SignedTakeover,
    TaskCommitment,
)
from splitup.messages.plans import PlanCertificate, Request
from splitup.messages.snapshots import Snapshot
from splitup.messages.verification import (
    Draw,
    Evidence,
    Ruling,
    SignedAttestation,
    TaskVerdict,
    ValidatorCommitment,
    VerificationResult,
)
from splitup.protocol.committee.context import ThresholdSignatureCollector
from splitup.protocol.committee.events import CompletionCommitted, ExecutionCommitted
from splitup.protocol.committee.peer_messages import CommitmentsVote, SettlementProposal
from splitup.protocol.execution.takeovers import check_takeover, find_executors
from splitup.protocol.settlement.attestations import Attestations
from splitup.protocol.settlement.edge_faults import find_misled, find_misread
from splitup.protocol.settlement.proof_of_sampling import (
    Economics,
    Outcome,
    SettlementTerms,
    Verdict,
    check_completion,
    compute_exposures,
)
from splitup.protocol.settlement.task_checks import TaskCheck, ValidatorAnswer


@dataclass(slots=True)
class Proposed:
    """Our proposal and the signatures under it."""

    round: int
    settlement: quorum.Settlement
    settlement_hash: str
    signatures: dict[str, bytes] = field(default_factory=dict)


class DrawBasis(NamedTuple):
    """What a draw is over. ``executors`` is empty when they are the plan's."""

    block_hash: str
    commitments: tuple[tuple[str, str], ...]
    executors: tuple[str, ...]


class AgreedCommitments(NamedTuple):
    """What members bring to the chain in one root. ``executors`` as in a basis."""

    commitments: tuple[ExecutorCommitment, ...]  # sorted by node
    executors: tuple[str, ...]


@dataclass(slots=True)
class SettlementState:
    """One execution from its plan to its settlement."""

    request: Request
    attestations: Attestations
    economics: Economics
    certificate: PlanCertificate | None = None
    snapshot: Snapshot | None = None
    manifest: Manifest | None = None
    is_planned: bool = False  # the chain holds the plan
    commitments: dict[str, ExecutorCommitment] = field(default_factory=dict)
    votes: dict[str, CommitmentsVote] = field(default_factory=dict)  # each member's latest
    vote_at: float = 0.0
    commit_at: float = math.inf
    agreed: ExecutionCommitted | None = None
    agreement: AgreedCommitments | None = None  # what the agreed root is over
    bound: dict[str, CompletionCommitted] = field(default_factory=dict)  # by it
    own: dict[str, CompletionCommitted] = field(default_factory=dict)  # nodes' own, in chain order
    # takeovers that were checked, by task and candidate
    takeovers: dict[tuple[int, int], SignedTakeover] = field(default_factory=dict)
    basis: DrawBasis | None = None  # what we signed for
    collector: ThresholdSignatureCollector | None = None
    early: dict[int, str] = field(default_factory=dict)  # draw partials before our beacon
    partial: str = ""
    resend_at: float = 0.0
    draw: Draw | None = None
    place: int = 0  # ours in the order of proposers
    unchecked: dict[str, Completion] = field(default_factory=dict)  # commitment not seen yet
    completions: dict[str, Completion] = field(default_factory=dict)
    results: dict[tuple[int, str], ValidatorAnswer] = field(
        default_factory=dict
    )  # before the draw is known
    validator_commitments: dict[tuple[int, str], str] = field(
        default_factory=dict
    )  # roots, likewise
    checks: dict[int, TaskCheck] | None = None
    due_at: float | None = None  # since when we know that reveals are due
    rulings: dict[int, Ruling] = field(default_factory=dict)  # our own
    attested: SignedAttestation | None = None  # our own, the latest
    attest_at: float = 0.0
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    propose_at: float = math.inf
    proposed: Proposed | None = None
    rounds: int = 0
    proposals: dict[str, SettlementProposal] = field(default_factory=dict)  # not signed yet

    def get_executors(self) -> tuple[str, ...]:
        """Return who answers for each task; none before the draw, which fixes it."""
        if self.certificate is None or self.draw is None:
            return ()
        return self.draw.executors or self.certificate.plan.executors()

    def get_commitments(self) -> Mapping[str, CompletionCommitted]:
        """Return what binds the nodes on chain: the agreed root, or their own transactions."""
        if self.draw is not None:
            return self.bound if self._rests_on(self.draw, self.bound) else self.own
        return self.bound if self.bound and self._find_own_executors() is None else self.own

    def get_exposures(self, executors: Sequence[str]) -> tuple[tuple[str, int], ...]:
        """Return what these executors stand to lose, () before plan and manifest are known."""
        if self.certificate is None or self.manifest is None:
            return ()
        return compute_exposures(self.certificate.plan, self.manifest, executors, self.economics)

    def find_agreement(self) -> AgreedCommitments | None:
        """Return what to agree on, once pledges cover every task: the highest candidates count."""
        if self.certificate is None:
            return None
        plan = self.certificate.plan
        executors = find_executors(plan, self.takeovers, dict.fromkeys(self.commitments, 0))
        if executors is None:
            return None
        commitments = tuple(self.commitments[node] for node in sorted(set(executors)))
        return AgreedCommitments(commitments, () if executors == plan.executors() else executors)

    def add_own(self, event: CompletionCommitted) -> bool:
        """Note a node's own transaction; one that comes after the agreed root changes nothing."""
        if self.agreed is not None or event.node in self.own or len(self.own) >= limits.MAX_TASKS:
            return False
        self.own[event.node] = event
        return True

    def bind(self, agreement: AgreedCommitments | None) -> bool:
        """Take what the agreed root is over, if it is; return whether it is known now."""
        agreed, execution_id = self.agreed, self.request.execution_id
        if agreed is None or agreement is None or self.agreement is not None:
            return self.agreement is not None
        if compute_commitments_root(execution_id, agreement) != agreed.root:
            return False
        self.agreement = agreement
        self.bound = {
            commitment.node: CompletionCommitted(
                execution_id, commitment.node, commitment.steps, commitment.root, agreed.block_hash
            )
            for commitment in agreement.commitments
        }
        return True

    def unbind(self) -> None:
        """Take back the agreed root."""
        self.agreed = self.agreement = None
        self.bound.clear()

    def undo_draw(self) -> None:
        """Take back a draw whose basis is gone, and all that rested on it."""
        self.unchecked |= self.completions
        self.completions.clear()
        self.draw = self.basis = self.collector = self.checks = self.proposed = None
        self.attested = self.due_at = None
        self.attestations = self.attestations.renew()
        self.rulings.clear()
        self.partial, self.resend_at = "", 0.0
        self.verdicts.clear()
        self.proposals.clear()
        self.propose_at = self.commit_at = math.inf

    def find_commitment(self, task: int) -> TaskCommitment | None:
        """Return what the executor of a task revealed that it had committed to."""
        completion = self.completions.get(self.get_executors()[task])
        if completion is None:
            return None
        return next(entry for entry in completion.tasks if entry.task == task)

    def list_withheld(self) -> set[str]:
        """Return the executors that never revealed what they committed to, as 2f+1 members say."""
        missing = set(self.get_executors()) - self.completions.keys()
        return {node for node in missing if self.attestations.is_silent(node, None)}

    def list_verdicts(self) -> list[Verdict]:
        """Return how it ended for every drawn task, and for tasks that misled those after them."""
        verdicts = dict(self.verdicts)
        if self.certificate is None or self.manifest is None or self.draw is None:
            return []
        executors, planned = self.get_executors(), self.certificate.plan.executors()
        replaced = {task for task, node in enumerate(executors) if node != planned[task]}
        claims = {task: self.find_commitment(task) for task in range(len(executors))}
        rulings = {task: self.attestations.find_ruling(task) for task in self.checks or ()}
        shown = {n: c.end.end for n, c in self.completions.items() if c.end is not None}
        ends = {task: shown.get(node) for task, node in enumerate(executors)}
        misled = dict.fromkeys(find_misread(self.manifest, claims, ends), Outcome.CONTRADICTED)
        misled |= find_misled(self.manifest, claims, rulings, replaced)
        for task, outcome in misled.items():
            known = verdicts.get(task, Verdict(task, outcome, (), ()))
            if known.outcome is not Outcome.LIED:
                verdicts[task] = replace(known, outcome=outcome)
        return [verdicts[task] for task in sorted(verdicts)]

    def add_answer(self, answer: ValidatorAnswer) -> None:
        """Keep a validator's answer, before the draw for later."""
        result = answer.result
        if self.checks is not None:
            check = self.checks.get(result.task)
            if check is not None:
                check.add(answer)
        elif len(self.results) < limits.MAX_TASKS:
            self.results.setdefault((result.task, result.validator), answer)

    def add_validator_commitment(self, validator_commitment: ValidatorCommitment) -> None:
        """Keep a validator's commitment, before the draw for later."""
        if self.checks is not None:
            check = self.checks.get(validator_commitment.task)
            if check is not None:
                check.hold(validator_commitment.validator, validator_commitment.root)
        elif len(self.validator_commitments) < limits.MAX_TASKS:
            self.validator_commitments.setdefault(
                (validator_commitment.task, validator_commitment.validator),
                validator_commitment.root,
            )

    def open_checks(self, checks: dict[int, TaskCheck]) -> None:
        """Begin the verification of the drawn tasks with what was said before we knew of them."""
        self.checks = checks
        for (task, validator), root in self.validator_commitments.items():
            if task in checks:
                checks[task].hold(validator, root)
        for answer in self.results.values():
            self.add_answer(answer)
        self.validator_commitments.clear()
        self.results.clear()

    def get_answers(self) -> list[ValidatorAnswer]:
        """Return all answers, by task and rank."""
        answers = list(self.results.values())
        for _, check in sorted((self.checks or {}).items()):
            answers += [check.answers[v] for v in check.validators if v in check.answers]
        return answers

    def get_basis(self) -> DrawBasis | None:
        """Return what the draw is over, once commitments cover every task.

        The block hash of the last of them, (node, root) of each, sorted, and who answers for the
        tasks: () when they are the plan's. What comes first on chain counts: the agreed root, or
        the nodes' own commitments.
        """
        if self.certificate is None:
            return None
        plan, executors, events = self.certificate.plan, self._find_own_executors(), self.own
        if executors is None and self.agreement is not None:
            executors, events = self.agreement.executors or plan.executors(), self.bound
        if executors is None:
            return None
        found = _list_events(executors, events)
        return DrawBasis(
            found[-1].block_hash,
            tuple(sorted((event.node, event.root) for event in found)),
            () if executors == plan.executors() else executors,
        )

    def _find_own_executors(self) -> tuple[str, ...] | None:
        """Return who answers for the tasks by the nodes' own commitments, if they cover all.

        Only what locks enough stake is a commitment: who can be drawn must have it to lose.
        """
        if self.certificate is None or not self.own:
            return None
        places = {node: place for place, node in enumerate(self.own)}
        executors = find_executors(self.certificate.plan, self.takeovers, places)
        if executors is None:
            return None
        exposures = self.get_exposures(executors)
        covered = all(self.own[node].exposure_micro_usdc >= amount for node, amount in exposures)
        return executors if exposures and covered else None

    def rests_on_chain(self, draw: Draw) -> bool:
        """Return whether a draw is over commitments that we see, too, by candidates of the plan."""
        return self._rests_on(draw, self.bound) or self._rests_on(draw, self.own)

    def _rests_on(self, draw: Draw, commitments: Mapping[str, CompletionCommitted]) -> bool:
        if self.certificate is None or not self.certificate.plan.has_candidates(draw.executors):
            return False
        events = _list_events(draw.executors or self.certificate.plan.executors(), commitments)
        if tuple(sorted((event.node, event.root) for event in events)) != draw.commitments:
            return False
        return bool(events) and events[-1].block_hash == draw.block_hash

    def add_takeovers(self, takeovers: Iterable[SignedTakeover]) -> None:
        """Note who may answer for tasks; nothing changes once there is a draw.

        Raises PeerFault, BadSignature for what is not the client's word.
        """
        if self.certificate is None or self.draw is not None:
            return
        for signed in takeovers:
            name = signed.takeover.task, signed.takeover.candidate
            if name not in self.takeovers:
                check_takeover(signed, self.certificate.plan)
                self.takeovers[name] = signed

    def list_effective(self) -> tuple[SignedTakeover, ...]:
        """Return the takeovers that our basis rests on."""
        if self.certificate is None or self.basis is None:
            return ()
        plan, executors = self.certificate.plan, self.basis.executors
        return tuple(
            signed
            for (task, candidate), signed in sorted(self.takeovers.items())
            if executors and executors[task] == plan.tasks[task][candidate]
        )

    def check_validator(
        self, result: VerificationResult | ValidatorCommitment, signing_key: str
    ) -> None:
        """Raise PeerFault unless ``signing_key`` is the validator's in the plan's snapshot."""
        if self.snapshot is None:
            raise Unavailable(f"execution {result.execution_id} is not planned here yet; try again")
        for entry in self.snapshot.entries:
            if entry.node == result.validator and entry.signing_key == signing_key:
                return
        raise PeerFault(f"a result of {result.validator} is not signed by that node's key")


def check_revealed(
    completion: Completion,
    certificate: PlanCertificate,
    manifest: Manifest,
    committed: CompletionCommitted,
    executors: Sequence[str],
) -> None:
    """Raise PeerFault unless a completion is what its node committed to, steps included.

    It has to cover the tasks that its node answers for, with the takeovers that made it so.
    """
    check_committed(completion, committed)
    check_completion(completion, certificate.plan, manifest, committed.root, executors)


def check_committed(completion: Completion, committed: CompletionCommitted) -> None:
    """Raise PeerFault unless root and steps are those on chain, whatever the plan says."""
    node = completion.node
    if completion.root() != committed.root:
        raise PeerFault(f"completion of {node} does not match the root it committed", peer=node)
    if completion.steps != committed.steps:
        raise PeerFault(
            f"completion of {node} has {completion.steps} steps, {committed.steps} were committed",
            peer=node,
        )


def _list_events(
    executors: Sequence[str], commitments: Mapping[str, CompletionCommitted]
) -> list[CompletionCommitted]:
    named = set(executors)
    return [event for node, event in commitments.items() if node in named]


def compute_commitments_root(execution_id: str, agreement: AgreedCommitments) -> str:
    """Return the root over the pledges of all executors of an execution, and who they are."""
    value = {
        "execution_id": execution_id,
        "executors": list(agreement.executors),
        "pledges": [
            [commitment.node, commitment.steps, commitment.root]
            for commitment in agreement.commitments
        ],
    }
    return "0x" + compute_digest(b"splitup/pledges/v1\0" + encode_canonical(value))


def compute_evidence_root(draw: Draw, verdicts: Sequence[Verdict]) -> str:
    """Return what the chain keeps of the evidence: commitments, randomness, verdicts."""
    value = {
        "draw": draw.signature,
        "verdicts": [
            {
                "liars": list(verdict.liars),
                "outcome": verdict.outcome.value,
                "silent": list(verdict.silent),
                "task": verdict.task,
                "validators": list(verdict.validators),
            }
            for verdict in verdicts
        ],
    }
    return "0x" + compute_digest(b"splitup/evidence/v2\0" + encode_canonical(value))


def make_evidence(draw: Draw, verdicts: Sequence[Verdict]) -> Evidence:
    """Return draw and verdicts as members show them to anybody."""
    return Evidence(
        draw=draw,
        verdicts=tuple(
            TaskVerdict(
                task=verdict.task,
                outcome=verdict.outcome.value,
                validators=verdict.validators,
                liars=verdict.liars,
                silent=verdict.silent,
            )
            for verdict in verdicts
        ),
    )


def make_settlement(terms: SettlementTerms, evidence_root: str) -> quorum.Settlement:
    """Return the contract's form of a settlement."""
    return quorum.Settlement(
        steps=terms.steps,
        evidence_root=evidence_root,
        payments=tuple(
            quorum.Payment(p.to, p.amount_micro_usdc, p.from_slash) for p in terms.payments
        ),
        slashes=tuple(quorum.Slash(s.node, s.amount_micro_usdc) for s in terms.slashes),
    )
