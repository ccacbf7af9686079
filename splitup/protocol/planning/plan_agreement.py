"""Agreement on a certified plan for a request, without a leader.

Members sign the request with their threshold shares. Any 2f+1 shares give the same seed, the seed
and the agreed snapshot give the same plan, and 2f+1 ECDSA signatures make it a certificate. The
seed also gives the order in which members deliver and submit the plan, each only if those before
did not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from splitup.core import limits, tuning
from splitup.core.errors import InvalidInput, PeerFault
from splitup.core.latest import Latest
from splitup.crypto.quorum import pack_signatures
from splitup.graph.manifest import Manifest
from splitup.messages.plans import MemberSignature, Plan, PlanCertificate, Request, SignedRequest
from splitup.protocol.committee.certificates import check_certificate, plan_alpha
from splitup.protocol.committee.commands import (
    AnnouncePlan,
    Command,
    Fault,
    Gossip,
    Log,
    PushPlan,
    SubmitPlan,
)
from splitup.protocol.committee.context import (
    MemberContext,
    ThresholdSignatureCollector,
)
from splitup.protocol.committee.equivocation import (
    EquivocationDetector,
    compute_vote_hash,
    make_plan_slot,
)
from splitup.protocol.committee.peer_messages import (
    PlanCertificateMessage,
    PlanDelivered,
    PlanMessage,
    PlanPartial,
    PlanRequest,
    PlanVote,
)
from splitup.protocol.planning.exposure import Economics, add_exposures
from splitup.protocol.planning.selection import compute_plan
from splitup.protocol.planning.signed_requests import is_same


@dataclass(slots=True)
class _Round:
    """One execution until its certificate is delivered and on chain."""

    request: Request
    collector: ThresholdSignatureCollector
    since: float
    client_signature: str = ""  # of a signed request, which the plan opens
    partial: str = ""  # ours
    plan: Plan | None = None
    root: str = ""  # of the plan; kept because a large plan takes long to hash
    refusal: str = ""
    own: PlanVote | None = None
    unchecked: dict[str, PlanVote] = field(default_factory=dict)
    votes: dict[str, PlanVote] = field(default_factory=dict)  # for our plan, checked
    certificate: PlanCertificate | None = None
    certified_at: float = 0.0
    resend_at: float = 0.0
    push_at: float = math.inf
    unreached: frozenset[str] | None = None  # nodes without the plan; None: unknown
    pushes: int = 0  # made by us
    submit_at: float = math.inf
    accepted: bool = False


class PlanAgreement:
    """One member's part in the plan layer."""

    def __init__(
        self, context: MemberContext, detector: EquivocationDetector, economics: Economics
    ) -> None:
        self._economics = economics
        self._context = context
        self._detector = detector
        self._rounds: dict[str, _Round] = {}
        self._finished: Latest[str, PlanCertificate] = Latest(limits.MAX_FINISHED_PLANS)
        self._early: dict[str, Latest[tuple[str, type], PlanPartial | PlanVote]] = {}

    # ---- questions --------------------------------------------------------------------------

    def find_certificate(self, execution_id: str) -> PlanCertificate | None:
        known = self._rounds.get(execution_id)
        return known.certificate if known else self._finished.get(execution_id)

    def find_refusal(self, execution_id: str) -> str:
        """Return why an execution cannot be planned, or ""."""
        known = self._rounds.get(execution_id)
        return known.refusal if known else ""

    def find_request(self, execution_id: str) -> Request | None:
        known = self._rounds.get(execution_id)
        return known.request if known else None

    def find_signed(self, execution_id: str) -> SignedRequest | None:
        """Return the signed request of an execution, None if its request was on chain first."""
        known = self._rounds.get(execution_id)
        if known is None or not known.client_signature:
            return None
        return SignedRequest(request=known.request, signature=known.client_signature)

    def find_unplanned(self, now: float) -> Request | None:
        """Return the request that waits longest for a plan, and gives its place up to another.

        It pays for no stake. One that the chain holds may wait for ``limits.MAX_PLAN_WAIT_S``; a
        signed one, which cost its client nothing, gives way until we have signed its plan.
        """
        before = now - limits.MAX_PLAN_WAIT_S
        for known in self._rounds.values():
            is_free = known.client_signature and known.own is None
            is_unplanned = known.certificate is None and not known.accepted
            if is_unplanned and (is_free or known.since <= before):
                return known.request
        return None

    def list_expired(self, timestamp_s: int) -> list[str]:
        """Return the executions whose price can be refunded at this time."""
        return [
            execution_id
            for execution_id, known in self._rounds.items()
            if timestamp_s > self._context.get_end_s(known.request)
        ]

    def __len__(self) -> int:
        return len(self._rounds)

    def __contains__(self, execution_id: str) -> bool:
        return execution_id in self._rounds

    # ---- the chain and the shell ------------------------------------------------------------

    def process_request(
        self, request: Request, now: float, client_signature: str = "", refusal: str = ""
    ) -> list[Command]:
        """Begin: send all our share of the request's seed.

        With a ``refusal`` the request is only remembered, and a client that asks for its plan is
        told the reason.
        """
        execution_id = request.execution_id
        if execution_id in self._rounds:
            return []
        if len(self._rounds) >= tuning.MAX_OPEN_EXECUTIONS:
            return [Log(f"too many open executions; {execution_id} will be refunded")]
        if len(self._context.signing_guard) >= tuning.MAX_SIGNED:
            return [Log(f"too many signatures to remember; {execution_id} will be refunded")]
        collector = ThresholdSignatureCollector(plan_alpha(request))
        known = _Round(request, collector, now, client_signature)
        self._rounds[execution_id] = known
        if refusal:
            known.refusal = refusal
            return [Log(f"no plan for {execution_id}: {refusal}"), AnnouncePlan(execution_id)]
        commands = self._begin(known, now)
        for member, messages in self._early.items():
            for kind in (PlanPartial, PlanVote):
                message = messages.pop((execution_id, kind), None)
                if message is not None:
                    commands += self.process_gossip(member, message, now)
        return commands

    def process_key(self, now: float) -> list[Command]:
        """Begin the executions that were requested before key generation ended."""
        commands: list[Command] = []
        for known in self._rounds.values():
            commands += self._begin(known, now)
        return commands

    def process_accepted(self, execution_id: str, plan_root: str) -> list[Command]:
        known = self._rounds.get(execution_id)
        if known is None:
            return []
        known.accepted, known.submit_at = True, math.inf
        if known.plan and known.plan.root() != plan_root:
            return [Log(f"the chain accepted another plan for {execution_id} than ours")]
        return []

    def process_pushed(
        self, execution_id: str, unreached: Sequence[str], now: float
    ) -> list[Command]:
        """Tell the others which nodes have the plan; try the unreached ones again later.

        The others may reach nodes that we do not, so they try those in their turn.
        """
        commands: list[Command] = []
        known = self._rounds.get(execution_id)
        if known is not None:
            missing = frozenset(unreached)
            known.unreached = missing if known.unreached is None else known.unreached & missing
            unreached = sorted(known.unreached)
            if unreached and known.pushes < tuning.PLAN_PUSHES:
                known.push_at = now + tuning.GOSSIP_RETRY_S * 2 ** (known.pushes - 1)
        if unreached:
            names = ", ".join(unreached)
            commands.append(Log(f"plan of {execution_id} could not be delivered to {names}"))
        delivered = PlanDelivered(execution_id=execution_id, unreached=tuple(unreached))
        return [*commands, Gossip(None, delivered)]

    def process_end(self, execution_id: str) -> list[Command]:
        """Drop a settled, refunded or expired execution, except its certificate."""
        known = self._rounds.pop(execution_id, None)
        if known is None:
            return []
        if known.certificate:
            self._finished[execution_id] = known.certificate
        return [AnnouncePlan(execution_id)]

    def process_dropped(self, execution_id: str, why: str) -> list[Command]:
        """Drop an execution that may come back; what we signed for it stays recorded."""
        if self._rounds.pop(execution_id, None) is None:
            return []
        return [Log(f"the request of {execution_id} {why}")]

    def process_reverted_plan(self, execution_id: str, now: float) -> list[Command]:
        """Submit a plan again whose block is gone."""
        known = self._rounds.get(execution_id)
        if known is not None and known.accepted:
            known.accepted = False
            if known.certificate is not None:
                place = self._context.get_place(known.certificate.plan.seed, now)
                known.submit_at = now + place * tuning.PLAN_SUBMIT_STAGE_S
        return []

    def process_contents(self, now: float) -> list[Command]:
        """Continue the executions that waited for a snapshot or a manifest."""
        commands: list[Command] = []
        for known in list(self._rounds.values()):
            if known.collector.seed and known.plan is None and not known.refusal:
                commands += self._advance(known, now)
        return commands

    def process_tick(self, now: float) -> list[Command]:
        """Repeat messages that may be lost; deliver and submit plans when it is our turn."""
        commands: list[Command] = []
        for known in self._rounds.values():
            if known.certificate is None:
                if known.refusal or now < known.resend_at:
                    continue
                known.resend_at = now + _get_pause_s(known, now)
                commands += self._repeat(known)
                if known.collector.seed:
                    commands += self._context.contents.ask(
                        known.request.model_id, known.request.snapshot_root, now
                    )
                continue
            if now >= known.push_at:
                commands += _push(known, known.certificate)
            if now >= known.submit_at and not known.accepted:
                known.submit_at = now + tuning.PLAN_SUBMIT_STAGE_S * len(self._context.accounts())
                commands.append(_make_submission(known, known.certificate))
        return commands

    # ---- gossip -----------------------------------------------------------------------------

    def process_gossip(self, sender: str, message: PlanMessage, now: float) -> list[Command]:
        """Take a member's message about a plan; raise PeerFault when it is wrong on its face."""
        match message:
            case PlanPartial() | PlanVote():
                return self._process_vote(sender, message, now)
            case PlanCertificateMessage():
                return self._process_certified(message.certificate, now)
            case PlanDelivered():
                known = self._rounds.get(message.execution_id)
                if known:
                    _note_delivered(known, message.unreached)
                return []
            case PlanRequest():
                certificate = self.find_certificate(message.execution_id)
                if certificate is None:
                    return []
                return [Gossip(sender, PlanCertificateMessage(certificate=certificate))]
            case _ as never:
                assert_never(never)

    def _process_vote(
        self, sender: str, message: PlanPartial | PlanVote, now: float
    ) -> list[Command]:
        if isinstance(message, PlanVote) and message.member != sender:
            return self._detector.process_vote(message)  # passed on by a member whose plan differs
        known = self._rounds.get(message.execution_id)
        if known is None:
            finished = self._finished.get(message.execution_id)
            is_same_request = finished and finished.plan.request.hash() == message.request_hash
            if finished and is_same_request and isinstance(message, PlanPartial):
                return [Gossip(sender, PlanCertificateMessage(certificate=finished))]
            waiting = self._early.setdefault(sender, Latest(tuning.MAX_EARLY_MESSAGES))
            waiting[message.execution_id, type(message)] = message
            return []
        if message.request_hash != known.request.hash():
            return []  # the client showed this member other words
        if known.certificate:
            # a share right after the certificate only crossed it; later its sender lacks the plan
            late = now - known.certified_at > tuning.GOSSIP_RETRY_S / 2
            if late and isinstance(message, PlanPartial):
                return [Gossip(sender, PlanCertificateMessage(certificate=known.certificate))]
            if isinstance(message, PlanVote) and message.root != known.certificate.plan.root():
                return [*self._detector.process_vote(message), Gossip(None, message)]
            return []
        if isinstance(message, PlanPartial):
            known.collector.add(self._context.index_of(sender), message.partial)
        else:
            known.unchecked[sender] = message
        return self._advance(known, now)

    def _process_certified(self, certificate: PlanCertificate, now: float) -> list[Command]:
        execution_id = certificate.plan.request.execution_id
        known = self._rounds.get(execution_id)
        if known is None or known.certificate or not self._context.view.group_key:
            return []
        if not is_same(certificate.plan.request, known.request):
            raise PeerFault(f"a certificate for {execution_id} states another request")
        check_certificate(certificate, self._context.view, self._context.scheme)
        known.plan = certificate.plan
        known.collector.signature = certificate.seed_signature
        known.collector.seed = certificate.plan.seed
        return self._finish(known, certificate, now)

    # ---- the steps, in order ----------------------------------------------------------------

    def _begin(self, known: _Round, now: float) -> list[Command]:
        if self._context.group is None or known.partial or known.refusal:
            return []
        known.partial = known.collector.sign(self._context)
        known.resend_at = now + tuning.GOSSIP_RETRY_S
        return [*self._repeat(known), *self._advance(known, now)]

    def _advance(self, known: _Round, now: float) -> list[Command]:
        commands: list[Command] = []
        if self._context.group is None or known.certificate or known.refusal:
            return commands
        if not known.collector.seed:
            for index in known.collector.combine(self._context.group, self._context.scheme):
                commands.append(
                    Fault(
                        self._context.accounts()[index],
                        f"sent a false share of the seed of {known.request.execution_id}",
                    )
                )
            if not known.collector.seed:
                return commands
        if known.plan is None:
            commands += self._assign(known, now)
        if known.plan is not None:
            commands += self._certify(known, known.plan, now)
        return commands

    def _assign(self, known: _Round, now: float) -> list[Command]:
        request = known.request
        snapshot = self._context.contents.find_snapshot(request.snapshot_root)
        manifest = self._context.contents.find_manifest(request.model_id)
        if snapshot is None or manifest is None:
            return self._context.contents.ask(request.model_id, request.snapshot_root, now)
        configuration = self._context.view.configuration
        slot = make_plan_slot(request, configuration)
        if self._context.timestamp_s > request.deadline and not self._context.signing_guard.knows(
            slot
        ):
            return []  # nobody computes any more; who has the certificate sends it
        try:
            _check_price(request, manifest)
            plan = compute_plan(request, known.collector.seed, snapshot, manifest)
            plan = add_exposures(plan, manifest, snapshot, self._economics)
        except InvalidInput as error:
            known.refusal = str(error)
            return [
                Log(f"no plan for {request.execution_id}: {error}"),
                AnnouncePlan(request.execution_id),
            ]
        root = plan.root()
        commands = self._context.signing_guard.claim(slot, root, self._context.get_end_s(request))
        if commands is None:
            known.refusal = f"another plan was signed for {request.execution_id} before"
            return [Log(known.refusal), AnnouncePlan(request.execution_id)]
        known.plan, known.root = plan, root
        self._context.contents.note_plan(request.model_id)
        unsigned = PlanVote(
            configuration=configuration,
            execution_id=request.execution_id,
            request_hash=request.hash(),
            root=root,
            seed=plan.seed,
            executors=len(set(plan.executors())),
            member=self._context.account,
            signature="0x" + "00" * 65,
        )
        signature = self._context.sign(compute_vote_hash(unsigned))
        known.own = unsigned.model_copy(update={"signature": signature})
        known.votes[self._context.account] = known.own
        return [*commands, Gossip(None, known.own)]

    def _certify(self, known: _Round, plan: Plan, now: float) -> list[Command]:
        commands: list[Command] = []
        for member, vote in sorted(known.unchecked.items()):
            try:
                commands += self._detector.check(vote)
            except PeerFault as error:
                commands.append(Fault(member, str(error)))
                continue
            if known.own is None or compute_vote_hash(vote) != compute_vote_hash(known.own):
                # a valid signature under another plan: a member with its other vote has evidence
                commands.append(
                    Fault(member, f"signed another plan for {plan.request.execution_id}")
                )
                commands.append(Gossip(None, vote))
            else:
                known.votes[member] = vote
        known.unchecked.clear()
        if len(known.votes) < self._context.view.quorum:
            return commands
        certificate = PlanCertificate(
            plan=plan,
            seed_signature=known.collector.signature,
            signatures=tuple(
                MemberSignature(member=member, signature=vote.signature)
                for member, vote in sorted(known.votes.items())
            ),
        )
        return commands + self._finish(known, certificate, now)

    def _finish(self, known: _Round, certificate: PlanCertificate, now: float) -> list[Command]:
        known.certificate, known.certified_at = certificate, now
        place = self._context.get_place(certificate.plan.seed, now)
        known.push_at = now + place * tuning.PLAN_PUSH_STAGE_S
        known.submit_at = now + place * tuning.PLAN_SUBMIT_STAGE_S
        commands: list[Command] = [AnnouncePlan(certificate.plan.request.execution_id)]
        if place == 0:
            commands += _push(known, certificate)
            if not known.accepted:
                known.submit_at += tuning.PLAN_SUBMIT_STAGE_S * len(self._context.accounts())
                commands.append(_make_submission(known, certificate))
        return commands

    def _repeat(self, known: _Round) -> list[Command]:
        commands: list[Command] = []
        if known.partial:
            message = PlanPartial(
                execution_id=known.request.execution_id,
                request_hash=known.request.hash(),
                partial=known.partial,
            )
            commands.append(Gossip(None, message))
        if known.own:
            commands.append(Gossip(None, known.own))
        return commands


def _get_pause_s(known: _Round, now: float) -> float:
    """Return when to repeat our messages: a signed request that waits costs its client nothing."""
    if not known.client_signature or known.accepted:
        return tuning.GOSSIP_RETRY_S
    return min(limits.MAX_PLAN_WAIT_S, max(tuning.GOSSIP_RETRY_S, (now - known.since) / 2))


def _check_price(request: Request, manifest: Manifest) -> None:
    """Refuse a request that does not cover executors and verification, whatever the chain took.

    Verification is budgeted like the execution itself (``Market.quoteParts``).
    """
    price = 2 * manifest.cost_micro_usdc(request.steps)
    if request.max_price_micro_usdc < price:
        raise InvalidInput(
            f"{request.steps} steps of model {request.model_id} cost at least {price} micro-USDC, "
            f"and the request pays at most {request.max_price_micro_usdc}"
        )


def _push(known: _Round, certificate: PlanCertificate) -> list[Command]:
    """Push the plan to the nodes that may lack it."""
    known.push_at = math.inf
    lacking = known.unreached
    nodes = tuple(n for n in certificate.plan.nodes if lacking is None or n.node in lacking)
    if not nodes:
        return []
    known.pushes += 1
    return [PushPlan(certificate, nodes)]


def _note_delivered(known: _Round, unreached: Sequence[str]) -> None:
    """Trust another member about who has the plan: the client delivers it to its nodes, too."""
    missing = frozenset(unreached)
    known.unreached = missing if known.unreached is None else known.unreached & missing
    if not known.unreached:
        known.push_at = math.inf


def _make_submission(known: _Round, certificate: PlanCertificate) -> SubmitPlan:
    plan = certificate.plan
    return SubmitPlan(
        execution_id=plan.request.execution_id,
        request=plan.request,
        plan_root=plan.root(),
        seed_signature=certificate.seed_signature,
        executors=len(set(plan.executors())),
        signatures=pack_signatures(
            (entry.member, bytes.fromhex(entry.signature[2:])) for entry in certificate.signatures
        ),
        client_signature=known.client_signature,
    )
