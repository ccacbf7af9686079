"""One committee member as a state machine: events in, commands out, no clock, no network.

It consists of three smaller machines, for snapshots, plans and settlements, that share a
``MemberContext``. ``handle`` raises PeerFault,
BadSignature or Unavailable for a peer's event before anything has changed. A fault that is found
later becomes a ``Fault`` command.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, assert_never

from splitup.core import tuning
from splitup.core.errors import InvalidInput, PeerFault, Unavailable
from splitup.crypto.keys import Identity
from splitup.crypto.signature_scheme import REAL, Scheme
from splitup.messages.plans import Request, SignedRequest
from splitup.messages.snapshots import Snapshot
from splitup.protocol.committee.certificates import CommitteeView
from splitup.protocol.committee.commands import AnnouncePlan, Command, Log
from splitup.protocol.committee.context import ContentStore, MemberContext, SigningGuard
from splitup.protocol.committee.equivocation import EquivocationDetector, make_plan_slot
from splitup.protocol.committee.events import (
    BlockSeen,
    ChainFact,
    EventReverted,
    ExecutionCommitted,
    ExecutionEnded,
    GossipReceived,
    HeartbeatReceived,
    KeyReady,
    LocalEvent,
    ManifestFetched,
    MemberEvent,
    MemberLost,
    NodesSeen,
    PeerEvent,
    PlanAccepted,
    PlanPushed,
    ReportReceived,
    RequestSeen,
    RttMeasured,
    SignedRequestReceived,
    SnapshotAccepted,
    SnapshotFetched,
    TaskRecomputed,
    Tick,
)
from splitup.protocol.committee.peer_messages import (
    Equivocation,
    PlanMessage,
    SettlementMessage,
    SnapshotMessage,
)
from splitup.protocol.planning.exposure import Economics
from splitup.protocol.planning.plan_agreement import PlanAgreement
from splitup.protocol.planning.signed_requests import SignedRequests, is_same
from splitup.protocol.settlement.settlement_agreement import SettlementAgreement, TokenReader
from splitup.protocol.snapshots.demand import Holdings, compute_demand
from splitup.protocol.snapshots.snapshot_agreement import SnapshotAgreement


class CommitteeMember:
    """One member. ``snapshots``, ``evidence`` and ``signed_requests`` are from its journal.

    ``read_token`` verifies a node's message of any age that another member holds.
    ``grace_s`` is the Market's time between an execution's deadline and its refund.
    ``signing_guard`` is the account's one guard, for all its configurations. An unopened signed
    request has expired when ``confirmations`` blocks are on top of the first one past its deadline.
    Its parts answer questions themselves: ``plans``, ``settlements``, ``nodes``, ``contents``.
    """

    def __init__(
        self,
        identity: Identity,
        view: CommitteeView,
        economics: Economics,
        read_token: TokenReader,
        *,
        grace_s: int,
        signing_guard: SigningGuard,
        confirmations: int = 0,
        snapshots: Sequence[Snapshot] = (),
        evidence: Sequence[Equivocation] = (),
        signed_requests: Sequence[SignedRequest] = (),
        scheme: Scheme = REAL,
        can_recompute: Callable[[str], bool] = lambda determinism: True,
    ) -> None:
        if identity.address not in {member.account for member in view.members}:
            raise InvalidInput(
                f"account {identity.address} is no member of committee configuration "
                f"{view.configuration}; use a member's keystore"
            )
        self.context = MemberContext(
            identity,
            view,
            scheme=scheme,
            signing_guard=signing_guard,
            contents=ContentStore(snapshots),
            can_recompute=can_recompute,
            grace_s=grace_s,
        )
        self._block_number = 0
        self.contents = self.context.contents
        self.detector = EquivocationDetector(self.context, evidence)
        self.snapshots = SnapshotAgreement(self.context, self.detector)
        self.nodes = self.snapshots.nodes
        self.plans = PlanAgreement(self.context, self.detector, economics)
        self.settlements = SettlementAgreement(
            self.context,
            economics,
            read_token,
            lambda: self.nodes.period_s + tuning.REPLACED_ANSWER_S,
        )
        self._signed_requests = SignedRequests(view.configuration, signed_requests, confirmations)
        for kept in signed_requests:  # these return no commands: the threshold key is not known yet
            self.settlements.process_request(kept.request)
            self.plans.process_request(kept.request, 0.0, kept.signature)

    # ---- questions --------------------------------------------------------------------------

    def is_resting(self, now: float) -> bool:
        """Return whether nothing is open and nothing has changed for a while."""
        return self.context.activity.is_resting(now)

    def get_next_s(self, now: float) -> float:
        """Return when the next tick has something to do, unless an event comes before."""
        return self.snapshots.get_next_s(now) if self.is_resting(now) else now

    def compute_demand(self, now: float, retired: Collection[str]) -> list[dict[str, Any]]:
        """Return the rows of a heartbeat's reply (``splitup.protocol.snapshots.demand``)."""
        nodes = self.nodes
        live, operators = nodes.get_live(now), nodes.get_operators()
        manifests, used = self.contents.manifests(), self.contents.used
        return compute_demand(manifests, live, operators, retired, used)

    def collect_holdings(self, now: float) -> Holdings:
        """Return what the live nodes hold and load."""
        return Holdings.collect(self.nodes.get_live(now))

    def get_status(self, now: float) -> dict[str, Any]:
        return {
            "account": self.context.account,
            "configuration": self.context.view.configuration,
            "group_key": self.context.view.group_key,
            "block": self._block_number,
            "executions_open": len(self.plans),
            **self.snapshots.get_status(now),
        }

    # ---- the machine ------------------------------------------------------------------------

    def handle(self, event: MemberEvent, now: float) -> list[Command]:
        """Process one event at monotonic time ``now`` (seconds); return commands in order."""
        commands = self._dispatch(event, now)
        if self._is_busy(event):
            self.context.activity.note(now)
        for command in list(commands):
            if isinstance(command, AnnouncePlan):
                if self.plans.find_refusal(command.execution_id):  # it will never be opened
                    commands += self._signed_requests.process_closed(command.execution_id)
                certificate = self.plans.find_certificate(command.execution_id)
                if certificate is not None:
                    commands += self.settlements.process_certificate(certificate, now)
                    manifest = self.contents.find_manifest(certificate.plan.request.model_id)
                    if manifest is not None:
                        self.nodes.process_plan(certificate.plan, manifest)
        return commands

    def _is_busy(self, event: MemberEvent) -> bool:
        """Return whether an event leaves something to do, here or for nodes."""
        if isinstance(event, ManifestFetched | KeyReady | ExecutionEnded | EventReverted):
            return True  # tasks to load, and what may follow the last end
        return bool(self.plans) or not self.snapshots.is_started

    def _dispatch(self, event: MemberEvent, now: float) -> list[Command]:
        if isinstance(event, ChainFact):
            return self._process_chain(event, now)
        if isinstance(event, PeerEvent):
            return self._process_peer(event, now)
        return self._process_local(event, now)

    def _process_chain(self, event: ChainFact, now: float) -> list[Command]:
        match event:
            case BlockSeen():
                return self._process_block(event, now)
            case NodesSeen():
                self.nodes.process_nodes(event.nodes)
                return []
            case RequestSeen():
                return self._process_request(event, now)
            case PlanAccepted():
                self.settlements.process_accepted(event.execution_id, is_planned=True)
                return self.plans.process_accepted(event.execution_id, event.plan_root)
            case ExecutionCommitted():
                self.nodes.process_committed(event.execution_id)
                return self.settlements.process_agreed(event, now)
            case ExecutionEnded():
                if certificate := self.plans.find_certificate(event.execution_id):
                    model_id = certificate.plan.request.model_id
                    self.contents.note_fee(model_id, event.fee_micro_usdc, now)
                return self._end(event.execution_id, event.evidence_root)
            case SnapshotAccepted():
                return self.snapshots.process_accepted(
                    event.configuration, event.sequence, event.root, now
                )
            case EventReverted():
                return self._revert(event, now)
            case _ as never:
                assert_never(never)

    def _process_peer(self, event: PeerEvent, now: float) -> list[Command]:
        match event:
            case GossipReceived():
                return self._process_gossip(event, now)
            case HeartbeatReceived():
                self.nodes.process_heartbeat(event.heartbeat, event.signing_key, now)
                return []
            case SignedRequestReceived():
                return self._process_signed(event, now)
            case ReportReceived():
                return self.settlements.process_report(
                    event.report, event.signing_key, event.token, now
                )
            case _ as never:
                assert_never(never)

    def _process_local(self, event: LocalEvent, now: float) -> list[Command]:
        match event:
            case Tick():
                return [
                    *self.snapshots.process_tick(now),
                    *self.plans.process_tick(now),
                    *self.settlements.process_tick(now),
                    *self.detector.process_tick(),
                ]
            case KeyReady():
                self.context.set_key(event.group, event.share)
                return [*self.plans.process_key(now), *self.settlements.process_key(now)]
            case RttMeasured():
                self.nodes.process_rtt(event.node, event.rtt_ms)
                return []
            case ManifestFetched():
                self.contents.add_manifest(event.manifest)
                return self.plans.process_contents(now)
            case SnapshotFetched():
                commands = self.contents.add_snapshot(event.snapshot)
                return commands + self.plans.process_contents(now)
            case TaskRecomputed():
                return self.settlements.process_rulings(event.execution_id, event.rulings, now)
            case PlanPushed():
                return self.plans.process_pushed(event.execution_id, event.unreached, now)
            case MemberLost():
                self.context.note_lost(event.account)
                return []
            case _ as never:
                assert_never(never)

    def _process_gossip(self, event: GossipReceived, now: float) -> list[Command]:
        message, sender = event.message, event.sender
        self.context.view.member_of(sender)  # raises PeerFault for non-members
        if sender == self.context.account:
            raise PeerFault("our own message came back to us", peer=sender)
        self.context.note_heard(sender, now)
        if isinstance(message, SnapshotMessage):
            return self.snapshots.process_gossip(sender, message, now)
        if isinstance(message, PlanMessage):
            return self.plans.process_gossip(sender, message, now)
        if isinstance(message, SettlementMessage):
            return self.settlements.process_gossip(sender, message, now)
        return self.detector.process_evidence(message)

    def _process_request(self, event: RequestSeen, now: float) -> list[Command]:
        request = event.request
        if self.context.timestamp_s > self.context.get_end_s(request):
            return []  # an old event, read again at start
        commands: list[Command] = []
        signature = ""
        signed = self._signed_requests.find(request.execution_id)
        if signed is not None:  # the chain holds it, or another with its nonce
            commands += self._signed_requests.process_closed(request.execution_id)
            if not is_same(signed.request, request):
                commands += self._end_unopened(signed.request)
            elif request.execution_id in self.plans:
                return commands
            else:  # it had given its place up here, and others planned it
                signature = signed.signature
        return commands + self._begin(request, now, signature, event.refusal)

    def _process_signed(self, event: SignedRequestReceived, now: float) -> list[Command]:
        """Plan a request that is not on chain; raise PeerFault, Unavailable if it is refused."""
        signed, execution_id = event.signed, event.signed.request.execution_id
        known = self.plans.find_request(execution_id)
        if known is not None:
            if is_same(known, signed.request):
                return []
            raise PeerFault(f"the nonce of request {execution_id} is used by another request")
        if (
            len(self.context.signing_guard) >= tuning.MAX_SIGNED // 2
        ):  # these cost the client no gas
            raise Unavailable("too many requests were signed here of late; ask the chain instead")
        self._signed_requests.check(event, self.context.timestamp_s)
        commands: list[Command] = []
        if self._signed_requests.lacks_place(signed.request.client):
            waiting = (r for r in self._signed_requests.list_live() if not self._has_signed(r))
            longest = next(waiting, None)
            if longest is None:
                raise Unavailable("too many signed requests wait here; ask the chain instead")
            commands += self._drop_unplanned(longest)
        commands += self._signed_requests.restore(signed)
        return commands + self._begin(signed.request, now, signed.signature)

    def _has_signed(self, request: Request) -> bool:
        """Return whether we have signed a plan of this request, in this run or an earlier one."""
        slot = make_plan_slot(request, self.context.view.configuration)
        return self.context.signing_guard.knows(slot)

    def _drop_unplanned(self, request: Request) -> list[Command]:
        """Forget a request that waits for its plan, so that another one gets its place.

        Its client may sign another one, unless we have signed a plan of this one.
        """
        execution_id = request.execution_id
        self.settlements.process_reverted_request(execution_id)
        commands = self.plans.process_dropped(execution_id, "gave its place up: it has no plan")
        if not self._has_signed(request):
            commands += self._signed_requests.process_closed(execution_id)
        return commands

    def _begin(
        self, request: Request, now: float, client_signature: str = "", refusal: str = ""
    ) -> list[Command]:
        commands: list[Command] = []
        if len(self.plans) >= tuning.MAX_OPEN_EXECUTIONS:
            unplanned = self.plans.find_unplanned(now)
            if unplanned is not None:
                commands += self._drop_unplanned(unplanned)
        self.settlements.process_request(request)
        commands += self.plans.process_request(request, now, client_signature, refusal)
        if self.plans.find_request(request.execution_id) is None:  # too many are open
            self.settlements.process_end(request.execution_id)
        return commands

    def _process_block(self, event: BlockSeen, now: float) -> list[Command]:
        self.nodes.heads.process_head(event.block_hash, now)
        self._block_number = max(self._block_number, event.number)
        self.context.timestamp_s = max(self.context.timestamp_s, event.timestamp_s)
        commands = self.context.signing_guard.forget_closed(self.context.timestamp_s)
        for request in self._signed_requests.list_expired(
            self.context.timestamp_s, self._block_number
        ):
            execution_id = request.execution_id
            commands.append(
                Log(f"the signed request {execution_id} was not opened before its deadline")
            )
            commands += self._signed_requests.process_closed(execution_id)
            commands += self._end_unopened(request)
        for execution_id in self.plans.list_expired(self.context.timestamp_s):
            commands.append(Log(f"execution {execution_id} expired without a settlement"))
            commands += self._end(execution_id)
        return commands

    def _revert(self, reverted: EventReverted, now: float) -> list[Command]:
        """Take back an event that the chain no longer holds; events of the new branch follow."""
        match reverted.event:
            case RequestSeen(request=request):
                signed = self.plans.find_signed(request.execution_id)
                if signed is not None:
                    return self._signed_requests.restore(signed)
                self.settlements.process_reverted_request(request.execution_id)
                self.nodes.process_end(request.execution_id)
                return self.plans.process_dropped(
                    request.execution_id, "was reverted by a chain reorganisation"
                )
            case PlanAccepted(execution_id=execution_id):
                self.settlements.process_accepted(execution_id, is_planned=False)
                return self.plans.process_reverted_plan(execution_id, now)
            case ExecutionCommitted() as agreed:
                self.settlements.process_reverted_agreement(agreed)
                return []
            case SnapshotAccepted(sequence=sequence):
                return self.snapshots.process_reverted(sequence)
            case ExecutionEnded(execution_id=execution_id):
                return [
                    Log(f"the end of {execution_id} was reverted; its transaction is sent again")
                ]
            case _ as never:
                assert_never(never)

    def _end(self, execution_id: str, evidence_root: str = "") -> list[Command]:
        self.settlements.process_end(execution_id, evidence_root)
        self.nodes.process_end(execution_id)
        return self.plans.process_end(execution_id)

    def _end_unopened(self, request: Request) -> list[Command]:
        """Drop a signed request that the chain can open no more; its plan's slot ends sooner."""
        slot = make_plan_slot(request, self.context.view.configuration)
        return [
            *self.context.signing_guard.shorten(slot, request.deadline),
            *self._end(request.execution_id),
        ]
