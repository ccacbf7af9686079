"""An execution between plan and settlement: what a member holds, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from splitup import limits
from splitup.codec import compute_digest, encode_canonical
from splitup.crypto import quorum
from splitup.errors import PeerFault, Unavailable
from splitup.graph.manifest import Manifest
from splitup.protocol.checks import Answer, Check
from splitup.protocol.events import CompletionCommitted
from splitup.protocol.messages import SettlementProposal
from splitup.protocol.shared import Beacon
from splitup.protocol.takeovers import compute_executors
from splitup.protocol.verification import SettlementTerms, Verdict, check_completion
from splitup.wire import (
    Completion,
    Draw,
    Evidence,
    PlanCertificate,
    Request,
    Snapshot,
    TaskVerdict,
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
    certificate: PlanCertificate | None = None
    snapshot: Snapshot | None = None
    manifest: Manifest | None = None
    commitments: dict[str, CompletionCommitted] = field(default_factory=dict)  # in chain order
    beacon: Beacon | None = None
    early: dict[int, str] = field(default_factory=dict)  # draw partials before our beacon
    partial: str = ""
    resend_at: float = 0.0
    draw: Draw | None = None
    place: int = 0  # ours in the order of proposers
    unchecked: dict[str, Completion] = field(default_factory=dict)  # commitment not seen yet
    completions: dict[str, Completion] = field(default_factory=dict)
    results: dict[tuple[int, str], Answer] = field(default_factory=dict)  # before the draw is known
    checks: dict[int, Check] | None = None
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    propose_at: float = math.inf
    proposed: Proposed | None = None
    rounds: int = 0
    proposals: dict[str, SettlementProposal] = field(default_factory=dict)  # not signed yet

    def add_answer(self, answer: Answer) -> None:
        """Keep a validator's answer, before the draw for later."""
        result = answer.result
        if self.checks is not None:
            check = self.checks.get(result.task)
            if check is not None:
                check.add(answer)
        elif len(self.results) < limits.MAX_TASKS:
            self.results.setdefault((result.task, result.validator), answer)

    def get_answers(self) -> list[Answer]:
        """Return all answers, by task and rank."""
        answers = list(self.results.values())
        for _, check in sorted((self.checks or {}).items()):
            answers += [check.answers[v] for v in check.validators if v in check.answers]
        return answers

    def get_basis(self) -> tuple[str, tuple[tuple[str, str], ...]] | None:
        """Return what the draw is over: the block of the last commitment, and their roots.

        None until every task is covered by a completion that is committed and revealed.
        """
        executors = self.get_executors()
        events = [event for node, event in self.commitments.items() if node in executors]
        if not events:
            return None
        return events[-1].block_hash, tuple(sorted((e.node, e.root) for e in events))

    def get_executors(self) -> tuple[str, ...]:
        """Return who ran every task in the end; () until that is known. The draw fixes it."""
        if self.certificate is None:
            return ()
        drawn = None if self.draw is None else {node for node, _ in self.draw.commitments}
        completions = {
            node: completion
            for node, completion in self.completions.items()
            if drawn is None or node in drawn
        }
        return compute_executors(self.certificate.plan, completions) or ()

    def check_validator(self, result: VerificationResult, signing_key: str) -> None:
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


def compute_evidence_root(draw: Draw, verdicts: Sequence[Verdict]) -> str:
    """Return what the chain keeps of the evidence: commitments, randomness, verdicts."""
    value = {
        "draw": draw.signature,
        "verdicts": [
            {
                "liars": list(verdict.liars),
                "outcome": verdict.outcome.value,
                "task": verdict.task,
                "validators": list(verdict.validators),
            }
            for verdict in verdicts
        ],
    }
    return "0x" + compute_digest(b"splitup/evidence/v1\0" + encode_canonical(value))


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
