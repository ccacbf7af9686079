"""The shell of one committee member: connects the state machine to chain, peers, nodes and journal.

The machine makes every decision (``splitup.protocol.member``). Its journal commands are
on disk before anything is sent. When a send fails, the machine repeats the message in time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, assert_never

from splitup.backend.compiler.kernel_cache import KernelCache
from splitup.chain.client import Chain
from splitup.chain.models import RecordedModels
from splitup.chain.rejections import explain_retirement
from splitup.client.market.member_answers import fetch_snapshot
from splitup.core import limits, tuning
from splitup.core.background import BackgroundTasks
from splitup.core.codec import encode_canonical
from splitup.core.errors import PeerFault, SplitUpError, Unavailable
from splitup.crypto.jws import verify_jws
from splitup.crypto.keys import Identity
from splitup.crypto.quorum import Domain
from splitup.messages import api
from splitup.messages.base import Message
from splitup.messages.plans import PlanCertificate, Request, SignedRequest
from splitup.messages.snapshots import ModelHolders, Snapshot
from splitup.net.http import SignedClient
from splitup.protocol.committee.certificates import CommitteeView
from splitup.protocol.committee.commands import (
    AnnouncePlan,
    ChainCommand,
    Command,
    Fault,
    FetchCommand,
    FetchManifest,
    FetchSnapshot,
    Gossip,
    JournalCommand,
    Log,
    NoticeCommand,
    PeerCommand,
    Persist,
    PushPlan,
    PushVerification,
    RecomputeTask,
)
from splitup.protocol.committee.context import SIGNED, SNAPSHOT, SigningGuard
from splitup.protocol.committee.equivocation import EVIDENCE
from splitup.protocol.committee.events import (
    ConfigurationSeen,
    Event,
    GossipReceived,
    ManifestFetched,
    RttMeasured,
    SignedRequestReceived,
    SnapshotFetched,
    TaskRecomputed,
)
from splitup.protocol.committee.peer_messages import (
    DrawPartial,
    Equivocation,
    PlanPartial,
)
from splitup.protocol.member import CommitteeMember
from splitup.protocol.membership import Membership
from splitup.protocol.planning.exposure import Economics
from splitup.protocol.planning.signed_requests import SIGNED_REQUEST, check_signed
from splitup.protocol.snapshots.demand import Holdings
from splitup.storage.gateway_client import GatewayClient
from splitup.storage.journal import Journal
from splitup.storage.task_cache import TaskCache
from splitup_oracle.member.gossip import GossipTransport
from splitup_oracle.member.node_requests import NodeRequests
from splitup_oracle.member.recomputation import RecomputeCapabilities, Recomputer
from splitup_oracle.member.rulings import Rulings
from splitup_oracle.member.transactions import TransactionSender

M = TypeVar("M", bound=Message)

_SECRET: Final = "secret"  # journal kind: the secret from which our dealings' are derived
_REQUEST_CHECKS: Final = 16  # signed requests that are checked on chain at once

log = logging.getLogger("splitup.oracle")


@dataclass(slots=True)
class _Waiters:
    """The requests that wait for one execution's plan."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    count: int = 0


class Member:
    """The machine with its I/O, all in one event loop; ``close`` ends its tasks."""

    def __init__(
        self,
        identity: Identity,
        economics: Economics,
        chain: Chain,
        journal: Journal,
        http: SignedClient,
        node_http: SignedClient,
        gateway: GatewayClient,
        *,
        data_dir: Path,
        kernel_cache: Path | None,
        grace_s: int,
    ) -> None:
        self.account = identity.address
        self.audience = chain.deployment.committee  # so a node's token is valid for all members
        self.chain = chain
        self.journal = journal
        self.http = http
        self._signing_key = identity.signing_key_hex
        self._background = BackgroundTasks()
        self.gossip = GossipTransport(http, self._background, self.feed, self.feed_peer)
        self.nodes = NodeRequests(node_http, chain)
        self._transactions = TransactionSender(chain)
        self._recorded = RecordedModels(chain)
        self._manifests = TaskCache(
            data_dir / "manifests", gateway, http.session, self._recorded.check
        )
        self._recomputer = Recomputer(KernelCache(kernel_cache or data_dir / "kernels"))
        self._rulings = Rulings(
            http, gateway, self._recomputer, data_dir / "replays", now_s=chain.clock.now_s
        )
        self._recompute_capabilities = RecomputeCapabilities(self._recomputer)
        self._waiters: dict[str, _Waiters] = {}
        self.heard = asyncio.Event()  # an unprobed node sent a heartbeat, or all are to be probed
        self.woken = False  # a rest has ended since nodes were last probed
        self.stirred = asyncio.Event()  # the machine's next tick has something to do
        self.behind = asyncio.Event()  # the chain may have a block that we lack
        self._asked_at = -math.inf  # when somebody last asked for a plan that we do not know
        self._demand: tuple[float, bytes] = (0.0, b"")
        self._holdings: tuple[float, Holdings] = (0.0, Holdings.collect(()))
        self.retired: set[str] = set()  # models
        self._request_checks = asyncio.Semaphore(_REQUEST_CHECKS)
        secret = journal.put_once(_SECRET, "", {"secret": secrets.token_bytes(32).hex()})

        def make_member(view: CommitteeView, signing_guard: SigningGuard) -> CommitteeMember:
            return CommitteeMember(
                identity,
                view,
                economics,
                self.read_token,
                grace_s=grace_s,
                signing_guard=signing_guard,
                confirmations=chain.deployment.confirmations,
                signed_requests=[
                    SignedRequest.from_value(value)
                    for key, value in journal.items(SIGNED_REQUEST)
                    if key.startswith(f"{view.configuration}/")
                ],
                snapshots=[Snapshot.from_value(value) for _, value in journal.items(SNAPSHOT)],
                can_recompute=self._recompute_capabilities.can_recompute,
                evidence=[Equivocation.from_value(value) for _, value in journal.items(EVIDENCE)],
            )

        domain = Domain(chain.deployment.chain_id, chain.deployment.committee.lower())
        self.machine = Membership(
            identity,
            domain,
            bytes.fromhex(secret["secret"]),
            make_member,
            SigningGuard(dict(journal.items(SIGNED))),
            chain.deployment.confirmations,
        )

    async def close(self) -> None:
        """Cancel all tasks; after a restart the machine repeats what is needed."""
        await self._recompute_capabilities.close()
        await self._background.close()
        self._recomputer.close()

    # ---- events in --------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Give the machine an event that is not a peer's, and carry out its commands."""
        now = time.monotonic()
        rested = self.machine.is_resting(now)
        commands = self.machine.handle(event, now)
        if isinstance(event, ConfigurationSeen):
            self.gossip.set_peers(self.machine.list_peers())
        if rested and not self.machine.is_resting(now):
            self._wake()
        if self.machine.get_next_s(now) <= now:
            self.stirred.set()
        self.carry_out(commands)

    def _wake(self) -> None:
        """Look at the chain and probe all nodes: that has them send heartbeats."""
        self._demand = (0.0, b"")  # it names the period of a member that rests
        self.woken = True
        self.heard.set()
        self.behind.set()

    def feed_peer(self, event: Event) -> None:
        """Give the machine a peer's event; log and raise a PeerFault."""
        if isinstance(event, GossipReceived):
            match event.message:
                case DrawPartial():
                    self.behind.set()
                case PlanPartial(execution_id=execution_id):
                    if not self.machine.is_open(execution_id):
                        self.behind.set()
        try:
            self.feed(event)
        except PeerFault as error:
            log.warning("fault of %s: %s", error.peer or "a peer", error)
            raise

    def read_token(self, route: api.Route[M], token: str) -> tuple[M, str]:
        """Verify a node's message of any age as evidence; return it and the key that signed it."""
        claims = verify_jws(token, typ=route.typ, audience=self.audience, now_s=None)
        return route.parse(claims.body), claims.issuer

    def note_heartbeat(self, node: str) -> None:
        """Have a node probed at once after its first heartbeat."""
        if self.machine.is_unprobed(node):
            self.heard.set()

    @property
    def endpoint(self) -> str:
        """Return this member's endpoint as on chain."""
        own = self.machine.find_member(self._signing_key)
        return own.endpoint if own else ""

    async def open_signed(self, signed: SignedRequest) -> None:
        """Have a request planned that its client signed and that is not on chain.

        Raises PeerFault, BadSignature for a request that the chain would refuse, Unavailable while
        the chain cannot be reached or another request of this client is open.
        """
        request = signed.request
        if self.machine.is_open(request.execution_id):
            return
        check_signed(signed)  # before the chain is asked: only the client may cause calls
        async with self._request_checks:
            balance, frozen_until = await self._check_openable(request)
        self.feed_peer(SignedRequestReceived(signed, balance, frozen_until))

    async def _check_openable(self, request: Request) -> tuple[int, int]:
        """Return the client's balance and until when it is frozen; raise PeerFault."""
        deployment, call = self.chain.deployment, self.chain.call
        if (request.chain_id, request.market) != (deployment.chain_id, deployment.market.lower()):
            raise PeerFault("the request is for another chain or market")
        head, parameters = await asyncio.gather(
            self.chain.fetch_head(), call("market", "parameters")
        )
        left_s = request.deadline - head.timestamp
        margin_s = max(
            limits.SIGNED_REQUEST_MARGIN_S,
            math.ceil(limits.SIGNED_REQUEST_MARGIN_BLOCKS * self.chain.clock.block_time_s),
        )
        least_s = parameters["minDeadlineS"] + margin_s
        if not least_s <= left_s <= parameters["maxDeadlineS"]:
            raise PeerFault(
                f"the deadline is {left_s} s away, and signed requests need {least_s} to "
                f"{parameters['maxDeadlineS']} s"
            )
        (
            parts,
            paused,
            root,
            latest,
            known,
            balance,
            frozen,
            retired,
        ) = await asyncio.gather(
            call("market", "quoteParts", request.model_id, request.steps, left_s),
            call("market", "paused"),
            call("committee", "snapshotRootOf", request.snapshot_sequence),
            call("committee", "latestSnapshot"),
            call("market", "executionOf", request.execution_id),
            call("market", "balanceOf", request.client),
            call("market", "frozenUntil", request.client),
            call("models", "isRetired", request.model_id),
        )
        price = parts["executors"] + parts["verification"] + parts["fee"]
        if request.max_price_micro_usdc < price:
            raise PeerFault(f"the price is {price} micro-USDC now")
        if request.verify_bps < parameters["samplingBps"]:
            raise PeerFault(
                f"the request has {request.verify_bps} of 10,000 tasks verified, and the network's "
                f"least share is {parameters['samplingBps']}"
            )
        if paused:
            raise PeerFault("the market is paused and takes no requests")
        if retired:
            raise PeerFault(explain_retirement(request.model_id))
        check_snapshot(request, root, latest["sequence"])
        if known["status"]:
            raise PeerFault(f"the client has used nonce {request.nonce} already")
        return int(balance), int(frozen)

    def get_poll_s(self) -> float:
        """Return the least pause between two looks at the chain."""
        now = time.monotonic()
        rests = self.machine.is_resting(now) and now - self._asked_at >= tuning.PLAN_ASKED_S
        return tuning.REST_POLL_S if rests else 0.0

    def note_asked(self, execution_id: str) -> None:
        """Look at the chain for a request whose plan a client asks for."""
        if not self.machine.is_open(execution_id):
            if self.get_poll_s():
                self.behind.set()
            self._asked_at = time.monotonic()

    # ---- questions --------------------------------------------------------------------------

    def get_status(self) -> dict[str, Any]:
        status = self.machine.get_status(time.monotonic())
        down = sorted(peer.account for peer in self.gossip.peers if not peer.is_up)
        return {**status, "peers_down": down, "chain_requests": self.chain.count_requests()}

    def get_demand(self, node: str) -> bytes:
        """Return the reply to a node's heartbeat, as JSON.

        It is the same for all, and at most ``tuning.DEMAND_AGE_S`` old, but for the takeovers by
        which the node was replaced.
        """
        now = time.monotonic()
        if now - self._demand[0] > tuning.DEMAND_AGE_S:
            reply = {
                "block": self.machine.get_head(),
                "period_ms": round(1000 * self.machine.get_heartbeat_period_s()),
                "rest_ms": round(1000 * self.machine.get_heartbeat_rest_s(now)),
                "tasks": self.machine.compute_demand(now, self.retired),
            }
            self._demand = (now, encode_canonical(reply))
        told = [signed.model_dump(mode="json") for signed in self.machine.list_replaced(node)]
        if not told:
            return self._demand[1]
        return self._demand[1][:-1] + b',"replaced":' + encode_canonical(told) + b"}"

    def describe_holders(self, model_id: str) -> ModelHolders:
        """Return how far nodes have loaded a model; it has no tasks while it is unknown here."""
        now = time.monotonic()
        if now - self._holdings[0] > tuning.DEMAND_AGE_S:
            self._holdings = (now, self.machine.collect_holdings(now))
        manifest = self.machine.find_manifest(model_id)
        return self._holdings[1].describe(model_id, manifest, self.machine.find_current_snapshot())

    async def wait_for_plan(
        self, execution_id: str, wait_s: float
    ) -> tuple[PlanCertificate | None, str]:
        """Return certificate or refusal as soon as there is one, or neither after ``wait_s``."""
        self.note_asked(execution_id)
        waiters = self._waiters.setdefault(execution_id, _Waiters())
        waiters.count += 1
        try:
            async with asyncio.timeout(wait_s):
                while self._find_answer(execution_id) == (None, ""):
                    waiters.changed.clear()
                    await waiters.changed.wait()
        except TimeoutError:
            pass
        finally:
            waiters.count -= 1
            if not waiters.count:
                self._waiters.pop(execution_id, None)
        return self._find_answer(execution_id)

    def _find_answer(self, execution_id: str) -> tuple[PlanCertificate | None, str]:
        machine = self.machine
        return machine.find_certificate(execution_id), machine.find_refusal(execution_id)

    # ---- commands out -----------------------------------------------------------------------

    def carry_out(self, commands: Sequence[Command]) -> None:
        """Write to the journal first, all in one transaction; then start everything else."""
        records = [c for c in commands if isinstance(c, JournalCommand)]
        if records:
            with self.journal.transaction():
                for record in records:
                    if isinstance(record, Persist):
                        self.journal.put(record.kind, record.key, record.value)
                    else:
                        self.journal.delete(record.kind, record.key)
        for command in commands:
            if isinstance(command, ChainCommand):
                self._background.start(self._transactions.send(command))
            elif not isinstance(command, JournalCommand):
                self._start(command)

    def _start(self, command: PeerCommand | FetchCommand | NoticeCommand) -> None:
        spawn = self._background.start
        match command:
            case Gossip():
                others = self.machine.list_accounts(command.configuration)
                self.gossip.send(command, [command.to] if command.to else others)
            case PushPlan():
                spawn(self._push_plan(command))
            case PushVerification():
                spawn(self.nodes.push_verification(command))
            case RecomputeTask():
                spawn(self._recompute(command))
            case FetchManifest():
                spawn(self._fetch_manifest(command.model_id))
            case FetchSnapshot():
                spawn(self._fetch_snapshot(command.root))
            case AnnouncePlan():
                waiters = self._waiters.get(command.execution_id)
                if waiters is not None:
                    waiters.changed.set()
            case Log():
                log.info("%s", command.message)
            case Fault():
                log.warning("fault of %s: %s", command.peer, command.message)
            case _ as never:
                assert_never(never)

    async def _push_plan(self, command: PushPlan) -> None:
        self.feed(await self.nodes.push_plan(command))

    async def _recompute(self, command: RecomputeTask) -> None:
        request = command.order.certificate.plan.request
        manifest = self.machine.find_manifest(request.model_id)
        if manifest is not None:  # the machine made the order with it
            rulings = await self._rulings.recompute(command, manifest)
            self.feed(TaskRecomputed(request.execution_id, rulings))

    async def _fetch_manifest(self, model_id: str) -> None:
        if self._recorded.is_refused(model_id):
            return  # do not download it again each time that an execution asks for it
        try:
            manifest = await self._manifests.fetch_manifest(model_id)
        except SplitUpError as error:
            log.warning("no manifest of model %s: %s", model_id, error)
        else:
            self.feed(ManifestFetched(manifest))

    async def _fetch_snapshot(self, root: str) -> None:
        try:
            snapshot = await fetch_snapshot(self.http, self.machine.list_peers(), root)
        except Unavailable as error:
            log.info("%s", error)
        else:
            self.feed(SnapshotFetched(snapshot))

    async def probe(self, node: str, endpoint: str) -> None:
        """Measure a node's round trip and tell the machine."""
        self.feed(RttMeasured(node, await self.nodes.measure_rtt(node, endpoint)))


def check_snapshot(request: Request, root: str, latest: int) -> None:
    """Raise PeerFault unless a request names a recent snapshot, which has this root on chain."""
    if root != request.snapshot_root or not request.snapshot_sequence:
        raise PeerFault("the request names a snapshot that the chain does not hold")
    if latest - request.snapshot_sequence > limits.SNAPSHOTS_BACK:
        raise PeerFault("the request names an old snapshot; ask for the latest one")
