"""An execution between plan and settlement: what a member holds, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from splitup import limits
from splitup.codec import compute_digest, encode_canonical
from splitup.crypto import quorum
from splitup.errors import PeerFault, Unavailable
from splitup.graph.manifest import Manifest
from splitup.protocol.attestations import Attestations
from splitup.protocol.checks import Answer, Check
from splitup.protocol.events import CompletionCommitted, ExecutionCommitted
from splitup.protocol.messages import CommitmentsVote, SettlementProposal
from splitup.protocol.shared import Beacon
from splitup.protocol.verification import SettlementTerms, Verdict, check_completion
from splitup.wire import (
    Completion,
    Draw,
    Evidence,
    PlanCertificate,
    Pledge,
    Request,
    Ruling,
    SignedAttestation,
    Snapshot,
    TaskCommitment,
    TaskVerdict,
    VerificationCommitment,
    VerificationResult,
)


@dataclass(slots=True)
class Proposed:
    """Our proposal and the signatures under it."""

    round: int
    settlement: quorum.Settlement
    settlement_hash: str
    signatures: dict[str, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class Case:
    """One execution from its plan to its settlement."""

    request: Request
    attestations: Attestations
    certificate: PlanCertificate | None = None
    snapshot: Snapshot | None = None
    manifest: Manifest | None = None
    is_planned: bool = False  # the chain holds the plan
    pledges: dict[str, Pledge] = field(default_factory=dict)
    votes: dict[str, CommitmentsVote] = field(default_factory=dict)  # each member's latest
    vote_at: float = 0.0
    commit_at: float = math.inf
    agreed: ExecutionCommitted | None = None
    bound: dict[str, CompletionCommitted] = field(default_factory=dict)  # by the agreed root
    own: dict[str, CompletionCommitted] = field(default_factory=dict)  # nodes' own, in chain order
    beacon: Beacon | None = None
    early: dict[int, str] = field(default_factory=dict)  # draw partials before our beacon
    partial: str = ""
    resend_at: float = 0.0
    draw: Draw | None = None
    place: int = 0  # ours in the order of proposers
    unchecked: dict[str, Completion] = field(default_factory=dict)  # commitment not seen yet
    completions: dict[str, Completion] = field(default_factory=dict)
    results: dict[tuple[int, str], Answer] = field(default_factory=dict)  # before the draw is known
    promises: dict[tuple[int, str], str] = field(default_factory=dict)  # roots, likewise
    checks: dict[int, Check] | None = None
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
        """Return who answers for each task; none before the plan is known."""
        return self.certificate.plan.executors() if self.certificate else ()

    @property
    def commitments(self) -> Mapping[str, CompletionCommitted]:
        """What binds the nodes on chain: their own transactions, or the agreed root."""
        return self.bound or self.own

    def count_executors(self) -> int:
        """Return how many nodes the plan's exposures name, which is what the chain counts."""
        return len(set(self.certificate.plan.executors())) if self.certificate else 0

    def is_covered(self) -> bool:
        """Return whether what is on chain, and known here, binds every executor."""
        executors = set(self.get_executors())
        return bool(executors) and executors <= self.commitments.keys()

    def list_pledges(self) -> tuple[Pledge, ...]:
        """Return the pledges of all executors by node, none while one lacks."""
        executors = sorted(set(self.get_executors()))
        if not all(node in self.pledges for node in executors):
            return ()
        return tuple(self.pledges[node] for node in executors)

    def list_bound(self) -> tuple[Pledge, ...]:
        """Return what the agreed root is over."""
        return tuple(
            Pledge(execution_id=e.execution_id, node=node, steps=e.steps, root=e.root)
            for node, e in sorted(self.bound.items())
        )

    def add_own(self, event: CompletionCommitted) -> bool:
        """Note a node's own transaction; one that comes after the agreed root changes nothing."""
        if self.agreed is not None or event.node in self.own or len(self.own) >= limits.MAX_TASKS:
            return False
        self.own[event.node] = event
        return True

    def bind(self, pledges: Iterable[Pledge]) -> bool:
        """Take what the agreed root is over, if it is; return whether it is known now.

        Executors that had all committed on chain before stay bound by that.
        """
        if self.agreed is None or self.is_covered():
            return self.agreed is not None
        execution_id, agreed, found = self.request.execution_id, self.agreed, tuple(pledges)
        if compute_pledges_root(execution_id, found) != agreed.root:
            return False
        self.bound = {
            pledge.node: CompletionCommitted(
                execution_id, pledge.node, pledge.steps, pledge.root, agreed.block_hash
            )
            for pledge in found
        }
        return True

    def undo_draw(self) -> None:
        """Take back a draw whose basis is gone, and all that rested on it."""
        self.unchecked |= self.completions
        self.completions.clear()
        self.draw = self.beacon = self.checks = self.proposed = None
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

    def add_answer(self, answer: Answer) -> None:
        """Keep a validator's answer, before the draw for later."""
        result = answer.result
        if self.checks is not None:
            check = self.checks.get(result.task)
            if check is not None:
                check.add(answer)
        elif len(self.results) < limits.MAX_TASKS:
            self.results.setdefault((result.task, result.validator), answer)

    def add_promise(self, promise: VerificationCommitment) -> None:
        """Keep a validator's commitment, before the draw for later."""
        if self.checks is not None:
            check = self.checks.get(promise.task)
            if check is not None:
                check.hold(promise.validator, promise.root)
        elif len(self.promises) < limits.MAX_TASKS:
            self.promises.setdefault((promise.task, promise.validator), promise.root)

    def open_checks(self, checks: dict[int, Check]) -> None:
        """Begin the verification of the drawn tasks with what was said before we knew of them."""
        self.checks = checks
        for (task, validator), root in self.promises.items():
            if task in checks:
                checks[task].hold(validator, root)
        for answer in self.results.values():
            self.add_answer(answer)
        self.promises.clear()
        self.results.clear()

    def get_answers(self) -> list[Answer]:
        """Return all answers, by task and rank."""
        answers = list(self.results.values())
        for _, check in sorted((self.checks or {}).items()):
            answers += [check.answers[v] for v in check.validators if v in check.answers]
        return answers

    def get_basis(self) -> tuple[str, tuple[tuple[str, str], ...]] | None:
        """Return what the draw is over, once every executor has committed: block hash and roots."""
        if not self.is_covered():
            return None
        executors = set(self.get_executors())
        events = [event for node, event in self.commitments.items() if node in executors]
        return events[-1].block_hash, tuple(sorted((e.node, e.root) for e in events))

    def check_validator(
        self, result: VerificationResult | VerificationCommitment, signing_key: str
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
) -> None:
    """Raise PeerFault unless a completion is what its node committed to, steps included."""
    check_completion(completion, certificate.plan, manifest, committed.root)
    if completion.steps != committed.steps:
        raise PeerFault(
            f"completion of {completion.node} has {completion.steps} steps, "
            f"{committed.steps} were committed",
            peer=completion.node,
        )


def compute_pledges_root(execution_id: str, pledges: Iterable[Pledge]) -> str:
    """Return the root over the pledges of all executors of an execution, sorted by node."""
    value = {
        "execution_id": execution_id,
        "pledges": [[pledge.node, pledge.steps, pledge.root] for pledge in pledges],
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


def make_evidence(draw: Draw, verdicts: Mapping[int, Verdict]) -> Evidence:
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
            for _, verdict in sorted(verdicts.items())
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
