"""One execution between request and settlement, as one member sees it: its phase and its evidence.

A phase is a record of its own that holds what exists only in that phase. ``settlement_transitions``
holds all changes of phase.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from splitup.core import tuning
from splitup.core.errors import BadSignature, PeerFault, Unavailable
from splitup.crypto import quorum
from splitup.graph.manifest import Manifest
from splitup.messages.base import ZERO_BYTES32
from splitup.messages.completions import (
    Completion,
    ExecutorCommitment,
    SignedEnd,
    SignedTakeover,
    Takeovers,
)
from splitup.messages.plans import PlanCertificate, Request
from splitup.messages.snapshots import Snapshot
from splitup.messages.verification import Draw, Evidence, ValidatorCommitment, VerificationResult
from splitup.protocol.committee.context import ThresholdSignatureCollector
from splitup.protocol.committee.settlement_proposals import SettlementProposal
from splitup.protocol.execution.takeovers import check_takeover, find_executors
from splitup.protocol.planning.exposure import Economics, compute_exposures
from splitup.protocol.settlement.attestations import Attestations
from splitup.protocol.settlement.chain_commitments import (
    AgreedCommitments,
    ChainCommitments,
    DrawBasis,
)
from splitup.protocol.settlement.collected_commitments import CollectedCommitments, check_extent
from splitup.protocol.settlement.evidence import compute_evidence_root, make_evidence
from splitup.protocol.settlement.verification_state import PlanContext, Verification

# ---- phases ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Requested:
    """The execution was requested; its plan is not known."""


@dataclass(slots=True)
class Planned:
    """The plan is certified; the snapshot and manifest that it names are being fetched."""

    certificate: PlanCertificate
    snapshot: Snapshot | None = None
    manifest: Manifest | None = None


@dataclass(frozen=True, slots=True)
class Committing:
    """Nodes run the execution and commit to what they computed."""

    context: PlanContext


@dataclass(slots=True)
class Drawing:
    """Commitments on chain cover every task; members sign shares of the draw over them."""

    context: PlanContext
    basis: DrawBasis
    collector: ThresholdSignatureCollector
    partial: str = ""  # our share; empty when an earlier life signed another basis
    resend_at: float = 0.0


@dataclass(slots=True)
class Verifying:
    """The draw is known; executors reveal, validators recompute the drawn tasks."""

    verification: Verification


@dataclass(slots=True)
class OwnProposal:
    """Our proposed settlement and the signatures under it."""

    round: int
    settlement: quorum.Settlement
    settlement_hash: str
    signatures: dict[str, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class Proposing:
    """The evidence is complete; members propose and sign the settlement that follows from it.

    We propose with all that we learn. A proposal of others has to contain what follows from
    ``basis``, and may lack what came later: else whoever tells a member something new before each
    proposal would keep all from agreeing.
    """

    verification: Verification
    propose_at: float
    basis: Verification  # as it was when it was complete
    own: OwnProposal | None = None  # once it was our turn
    evidence: dict[str, Evidence] = field(default_factory=dict)  # by root: of what we signed


Phase = Requested | Planned | Committing | Drawing | Verifying | Proposing

# ---- what does not depend on the phase ---------------------------------------------------------


@dataclass(slots=True)
class EarlyEvidence:
    """Messages that may arrive before the phase that uses them."""

    draw_partials: dict[int, str] = field(default_factory=dict)  # by member's index, for Drawing
    # by node, for Verifying: they were checked over a draw that a reorganisation took back
    completions: dict[str, Completion] = field(default_factory=dict)


@dataclass(slots=True)
class SettlementState:
    """One execution from its request to its settlement."""

    request: Request
    attestations: Attestations
    economics: Economics
    phase: Phase = field(default_factory=Requested)
    chain: ChainCommitments = field(default_factory=ChainCommitments)
    collected: CollectedCommitments = field(default_factory=CollectedCommitments)
    early: EarlyEvidence = field(default_factory=EarlyEvidence)
    proposals: dict[str, SettlementProposal] = field(default_factory=dict)  # not signed yet
    # by sender of a proposal, when its next one is heard
    heard_until: dict[str, float] = field(default_factory=dict)
    rounds: int = 0  # of our own proposals; never reused, whatever is reverted
    look_at: float = 0.0  # ticks before this take no steps: nothing came since the last ones

    # ---- what the phase holds ---------------------------------------------------------------

    @property
    def certificate(self) -> PlanCertificate | None:
        match self.phase:
            case Requested():
                return None
            case Planned(certificate=certificate):
                return certificate
            case Committing() | Drawing():
                return self.phase.context.certificate
            case Verifying() | Proposing():
                return self.phase.verification.context.certificate
            case _ as never:
                assert_never(never)

    @property
    def context(self) -> PlanContext | None:
        match self.phase:
            case Requested() | Planned():
                return None
            case Committing() | Drawing():
                return self.phase.context
            case Verifying() | Proposing():
                return self.phase.verification.context
            case _ as never:
                assert_never(never)

    @property
    def verification(self) -> Verification | None:
        """The verification, once there is a draw."""
        return self.phase.verification if isinstance(self.phase, Verifying | Proposing) else None

    def fork(self, verification: Verification) -> SettlementState:
        """Return this execution with another verification, which may be added to."""
        phase = Verifying(verification.fork())
        return replace(self, phase=phase, attestations=phase.verification.attestations)

    def require_certificate(self) -> PlanCertificate:
        """Return the certified plan; raise Unavailable while it is not known."""
        certificate = self.certificate
        if certificate is None:
            raise Unavailable(
                f"execution {self.request.execution_id} is not planned here yet; try again"
            )
        return certificate

    def require_verification(self) -> Verification:
        """Return the verification; raise Unavailable before the draw.

        Until then nothing says who has to reveal what, and a node could fill the memory. Nodes
        send it again.
        """
        if self.verification is None:
            raise Unavailable(
                f"execution {self.request.execution_id} has no draw here yet; try again"
            )
        return self.verification

    def check_node(
        self, report: ExecutorCommitment | Takeovers | Completion, signing_key: str
    ) -> None:
        """Raise PeerFault, BadSignature unless a node of the plan signed what it says."""
        if self.require_certificate().plan.node_of(report.node).signing_key != signing_key:
            raise BadSignature(
                f"what {report.node} says is signed by another key", peer=report.node
            )

    def check_validator(
        self, result: VerificationResult | ValidatorCommitment, signing_key: str
    ) -> None:
        """Raise PeerFault unless ``signing_key`` is the validator's in the plan's snapshot."""
        context = self.context
        planned = self.phase.snapshot if isinstance(self.phase, Planned) else None
        snapshot = context.snapshot if context is not None else planned
        if snapshot is None:
            raise Unavailable(f"execution {result.execution_id} is not planned here yet; try again")
        for entry in snapshot.entries:
            if entry.node == result.validator and entry.signing_key == signing_key:
                return
        raise PeerFault(f"a result of {result.validator} is not signed by that node's key")

    # ---- commitments ------------------------------------------------------------------------

    def rests_on_chain(self, draw: Draw) -> bool:
        """Return whether a draw is over the commitments on our chain."""
        basis = self.find_basis()
        return basis is not None and basis == (
            draw.block_hash,
            draw.commitments,
            draw.executors,
            draw.steps,
        )

    def list_exposures(self, agreement: AgreedCommitments) -> tuple[tuple[str, int], ...]:
        """Return what the executors that committed stand to lose; those alone have agreed to it."""
        committed = dict(agreement.commitments)
        exposures = self.get_exposures(agreement.executors)
        return tuple((node, amount) for node, amount in exposures if node in committed)

    def get_exposures(self, executors: Sequence[str]) -> tuple[tuple[str, int], ...]:
        """Return what these executors stand to lose, () before plan and manifest are known."""
        context = self.context
        if context is None:
            return ()
        return compute_exposures(context.plan, context.manifest, executors, self.economics)

    def make_history(self) -> quorum.ExecutionHistory:
        """Return what the chain's record of the execution binds."""
        plan, chain = self.require_certificate().plan, self.chain
        agreed = chain.agreed
        return quorum.ExecutionHistory(
            execution_id=self.request.execution_id,
            request_hash=plan.request.hash(),
            plan_root=plan.root(),
            seed=plan.seed,
            commitments=agreed.root if agreed is not None else ZERO_BYTES32,
            exposures=quorum.pack_words(agreed.exposures if agreed is not None else ()),
        )

    def find_agreement(self, timestamp_s: int, now: float) -> AgreedCommitments | None:
        """Return what to agree on, once commitments to the final end cover every task, or None.

        Of several candidates of a task that committed, the highest one counts. Those that it
        replaced are waited for, to show whether the client had signed for more steps. Shortly
        before the deadline commitments need not cover every task any more (``_find_best``).
        ``timestamp_s`` is the latest block's.
        """
        if self.certificate is None:
            return None
        if self.is_late(timestamp_s):
            return self._find_best()
        steps = self.find_steps()
        if steps is None or (now < self.collected.answer_until and self.collected.replaced):
            return None
        commitments = self.collected.list_finals(steps)
        executors = self._find_executors(steps, commitments)
        return self._make_agreement(steps, commitments, executors) if executors else None

    def is_late(self, timestamp_s: int) -> bool:
        """Return whether the deadline is near: commitments of some executors are enough then."""
        return timestamp_s >= self.request.deadline - tuning.AGREE_MARGIN_S

    def _find_best(self) -> AgreedCommitments | None:
        """Return the commitments to the number of steps that pays executors most, or None.

        Numbers to which the executors of more than half of the price committed come first, so that
        no single party moves it: neither a client that says different things, or nothing at the
        end, nor an executor that commits to less. Without such a number the executors that did
        commit are paid all the same by one that the client signed: nobody withholds their pay by
        not committing. Tasks without a commitment are unpaid and take no stake.

        A number that no end of the client has is one that executors counted. The client has to have
        ordered so many steps, executors of more than half of the price have to have committed to
        them, and so have those of all graph outputs: of steps that failed half-way the client got
        nothing (ADR 21).
        """
        context, best = self.context, (False, 0, 0)
        if context is None:
            return None
        prices = [task.price_nano_usdc for task in context.manifest.tasks]
        whole = sum(prices)
        signed = {steps for roots in self.collected.by_node.values() for steps in roots}
        results = {port.task for port in context.manifest.outputs}
        for steps, covered, has_results in self.collected.sum_prices(context.plan, prices, results):
            is_majority = 2 * covered > whole
            is_counted = is_majority and steps <= self.collected.ordered and has_results
            if covered and (steps in signed or is_counted):
                best = max(best, (is_majority, covered * steps, steps))
        if not (steps := best[2]):
            return None
        commitments = self.collected.list_commitments(steps)
        executors = self._find_executors(steps, commitments, partial=True) or ()
        return self._make_agreement(steps, commitments, executors)

    def _find_executors(
        self, steps: int, commitments: Mapping[str, str], *, partial: bool = False
    ) -> tuple[str, ...] | None:
        assert self.certificate is not None
        plan, taken = self.certificate.plan, self.collected.list_taken(steps, commitments)
        places, known = dict.fromkeys(commitments, 0), self.collected.takeovers
        return find_executors(plan, taken, places, known=known, partial=partial)

    def _make_agreement(
        self, steps: int, commitments: Mapping[str, str], executors: tuple[str, ...]
    ) -> AgreedCommitments:
        assert self.certificate is not None
        named = sorted(set(executors) & commitments.keys())
        planned = self.certificate.plan.executors()
        return AgreedCommitments(
            tuple((node, commitments[node]) for node in named),
            () if executors == planned and set(named) == set(planned) else executors,
            steps,
        )

    def find_basis(self) -> DrawBasis | None:
        """Return what the draw is over, once the chain has a root whose content is known here."""
        certificate = self.certificate
        return self.chain.find_basis(certificate.plan.executors()) if certificate else None

    def find_evidence(self, root: str) -> Evidence | None:
        """Return the evidence of this root; None if we never held it."""
        if isinstance(self.phase, Proposing) and root in self.phase.evidence:
            return self.phase.evidence[root]
        if self.verification is None:
            return None
        evidence = make_evidence(self.verification.draw, self.verification.list_verdicts())
        return evidence if compute_evidence_root(evidence) == root else None

    def add_commitment(self, commitment: ExecutorCommitment, token: str) -> None:
        """Keep a node's commitment for a number of steps, which the client signed or ordered.

        ``token`` is the message as the node signed it; its takeovers say which tasks of others it
        answers for. Counts are ignored once there is a draw.
        Raises PeerFault, BadSignature for what the client did not sign, or without any step.
        """
        if self.certificate is not None:
            check_extent(commitment, self.certificate.plan)
        self.add_takeovers(commitment.takeovers)
        if not commitment.end.is_count:
            self.add_end(commitment.end)
            self.collected.add_for_end(commitment, token, self.require_certificate().plan)
        elif self.certificate is not None and self.verification is None:
            self.collected.add_counted(commitment, token, self.certificate.plan)

    def add_end(self, signed: SignedEnd) -> None:
        """Keep the client's number of steps; ignored once there is a draw, which fixes it.

        Raises PeerFault, BadSignature for what the client did not sign, or without any step.
        """
        if self.certificate is not None and self.verification is None:
            self.collected.add_end(signed, self.certificate.plan)

    def find_steps(self) -> int | None:
        """Return the client's number of steps; None while it is unknown, or if it signed several.

        A client that signs several, or an end below the steps that it has signed for, gets no draw
        before the deadline is near: nobody else can choose between them without taking somebody's
        pay (ADR 21).
        """
        finals = self.collected.finals
        if len(finals) != 1:
            return None
        steps = next(iter(finals))
        return steps if steps >= self.collected.signed_steps else None

    def add_answer_of_replaced(self, message: Takeovers) -> None:
        """Keep for how many steps the client signed, as a node that was replaced shows.

        Raises PeerFault, BadSignature for what the client did not sign.
        """
        if self.certificate is None or self.verification is not None:
            return
        plan = self.certificate.plan
        self.collected.add_order(message.order, plan)
        if message.end is not None:
            self.collected.add_end(message.end, plan)
        for named in (signed.takeover for signed in message.takeovers):
            if message.node in plan.tasks[named.task][: named.candidate]:
                self.collected.add_answer(named.task, message.node)

    def add_takeovers(self, takeovers: Iterable[SignedTakeover]) -> None:
        """Keep who may answer for tasks.

        Raises PeerFault, BadSignature for what the client did not sign.
        """
        if self.certificate is None:
            return
        for signed in takeovers:
            name = signed.takeover.task, signed.takeover.candidate
            known = self.collected.takeovers.get(name)
            if signed != known:  # also of a known name: what others are shown is signed
                check_takeover(signed, self.certificate.plan)
            if known is None:
                self.collected.add_takeover(signed, self.certificate.plan)
