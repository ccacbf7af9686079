"""One committee member's shell: moves bytes between the machine, the chain, peers and the journal.

Every decision is the machine's (``splitup.protocol.committee.member``). What it wants persisted is
on disk before anything it sends leaves; what fails on the way out is said again by the machine.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from eth_hash.auto import keccak

from splitup.chain.bonds import make_report
from splitup.chain.client import Chain
from splitup.chain.committee_reader import fetch_node_key
from splitup.chain.market import exposures_to_abi, terms_to_abi
from splitup.core import limits, tuning
from splitup.core.codec import encode_canonical, parse_json
from splitup.core.errors import (
    BadSignature,
    ChainRejected,
    InvalidInput,
    PeerFault,
    Refused,
    SplitUpError,
    Unavailable,
)
from splitup.crypto import bls
from splitup.crypto.jws import verify_jws
from splitup.crypto.keys import Identity
from splitup.crypto.quorum import Domain
from splitup.graph.manifest import load_manifest
from splitup.messages.plans import PlanCertificate, Request, SignedRequest
from splitup.messages.snapshots import ReachRequest, Snapshot
from splitup.messages.verification import VerificationResult
from splitup.net.chunked_messages import ChunkedMessage, ChunkedMessages, fetch_chunked_message
from splitup.net.http import SignedClient
from splitup.protocol.committee.certificates import CommitteeMember as PeerView
from splitup.protocol.committee.certificates import CommitteeView
from splitup.protocol.committee.commands import (
    AnnouncePlan,
    Command,
    ConfirmGroupKey,
    Fault,
    FetchManifest,
    FetchSnapshot,
    Forget,
    Gossip,
    Log,
    Persist,
    PostComplaint,
    PostDealing,
    PushPlan,
    PushVerification,
    RecomputeTask,
    SubmitCommitments,
    SubmitEvidence,
    SubmitPlan,
    SubmitSettlement,
    SubmitSnapshot,
)
from splitup.protocol.committee.context import SIGNED, SNAPSHOT
from splitup.protocol.committee.equivocation import EVIDENCE
from splitup.protocol.committee.events import (
    ConfigurationSeen,
    Event,
    GossipReceived,
    ManifestFetched,
    MemberLost,
    PlanPushed,
    RequestSigned,
    RttMeasured,
    SnapshotFetched,
    TaskRecomputed,
)
from splitup.protocol.committee.member import CommitteeMember
from splitup.protocol.committee.membership import Membership
from splitup.protocol.committee.peer_messages import (
    DrawPartial,
    Equivocation,
    GossipMessage,
    PlanPartial,
    count_nodes,
    encode_gossip,
    parse_gossip,
)
from splitup.protocol.planning.signed_requests import OPENING, check_signed, request_to_abi
from splitup.protocol.settlement.proof_of_sampling import Economics
from splitup.storage.gateway_client import GatewayClient
from splitup.storage.journal import Journal
from splitup_oracle.member.recompute_capabilities import RecomputeCapabilities
from splitup_oracle.member.rulings import Rulings

HEARTBEAT_TYP: Final = "splitup-heartbeat"
GOSSIP_TYP: Final = "splitup-gossip"
COMPLETION_TYP: Final = "splitup-completion"
EXECUTOR_COMMITMENT_TYP: Final = "splitup-pledge"
TAKEOVERS_TYP: Final = "splitup-takeovers"
VALIDATOR_COMMITMENT_TYP: Final = "splitup-verification-commitment"
RESULT_TYP: Final = "splitup-verification-result"
REACH_TYP: Final = "splitup-reach"
CHUNKED_MESSAGE_KIND: Final = "parcel"  # of gossip that is too large for one request

_GOSSIP_TIMEOUT_S: Final = 3.0
_MAX_OUTSTANDING: Final = 256  # per peer: a hung one must not collect our memory
_VOTE_PERIOD_S: Final = 5.0  # a vote, or the others', may have been lost
_SECRET: Final = "secret"  # journal kind: what the secrets of our dealings are derived from
_OPENINGS: Final = 16  # signed requests for which the chain is asked at once

log = logging.getLogger("splitup.oracle")


@dataclass(slots=True)
class _Peer:
    """How it goes with another member."""

    account: str
    signing_key: str
    endpoint: str
    is_up: bool = True
    outstanding: int = 0
    is_sending: bool = False  # a parcel to us


@dataclass(slots=True)
class _Waiters:
    """Long-polls for one execution's plan."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    count: int = 0


class Member:
    """The machine with its hands. Everything runs in one event loop; ``close`` ends its tasks."""

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
        grace_s: int,
    ) -> None:
        self.account = identity.address
        self.audience = chain.deployment.committee  # one token of a node serves all members
        self.chain = chain
        self.journal = journal
        self.http = http
        self._node_http = node_http  # endpoints that strangers chose
        self._signing_key = identity.signing_key_hex
        self._reaching = 0
        self._gateway = gateway
        self._manifests = data_dir / "manifests"
        self._rulings = Rulings(http, gateway, data_dir / "replays")
        self._recompute_capabilities = RecomputeCapabilities()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiters: dict[str, _Waiters] = {}
        self._peers: dict[str, _Peer] = {}
        self.chunked_messages = ChunkedMessages()
        self._packed: OrderedDict[int, tuple[GossipMessage, ChunkedMessage]] = (
            OrderedDict()
        )  # said lately
        self._fetched: OrderedDict[tuple[str, str], None] = OrderedDict()  # sender, digest
        self.heard = asyncio.Event()  # a node beat that has no round-trip time yet
        self.behind = asyncio.Event()  # another member has seen a block that we have not
        self._demand: tuple[float, bytes] = (0.0, b"")
        self._opening = asyncio.Semaphore(_OPENINGS)
        secret = journal.put_once(_SECRET, "", {"secret": secrets.token_bytes(32).hex()})

        def make_member(view: CommitteeView) -> CommitteeMember:
            return CommitteeMember(
                identity,
                view,
                economics,
                self.read_result,
                grace_s=grace_s,
                signed={key: value["digest"] for key, value in journal.items(SIGNED)},
                signed_requests=[
                    SignedRequest.from_value(value) for _, value in journal.items(OPENING)
                ],
                snapshots=[Snapshot.from_value(value) for _, value in journal.items(SNAPSHOT)],
                can_recompute=self._recompute_capabilities.can_recompute,
                evidence=[Equivocation.from_value(value) for _, value in journal.items(EVIDENCE)],
            )

        domain = Domain(chain.deployment.chain_id, chain.deployment.committee.lower())
        self.machine = Membership(identity, domain, bytes.fromhex(secret["secret"]), make_member)

    async def close(self) -> None:
        """Cancel what is under way; the machine says again what matters after a restart."""
        await self._recompute_capabilities.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- events in --------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Give the machine an event that is no peer's, and carry out what it wants."""
        commands = self.machine.handle(event, time.monotonic())
        if isinstance(event, ConfigurationSeen):
            self._meet_peers()
        self.carry_out(commands)

    def _meet_peers(self) -> None:
        """Take over whom we talk to from the configurations that we sit in."""
        old = self._peers
        self._peers = {}
        for peer in self.machine.list_peers():
            known = old.get(peer.account)
            if known is None or known.endpoint != peer.endpoint:
                known = _Peer(peer.account, peer.signing_key, peer.endpoint)
            self._peers[peer.account] = known

    def feed_peer(self, event: Event) -> None:
        """Give the machine what a peer sent; log and raise when it is faulty."""
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

    def read_result(self, token: str) -> tuple[VerificationResult, str]:
        """Verify a validator's token as evidence and return result and key; raise PeerFault."""
        claims = verify_jws(token, typ=RESULT_TYP, audience=self.audience, now_s=None)
        return VerificationResult.from_value(claims.body), claims.issuer

    def note_heartbeat(self, node: str) -> None:
        """Have a node probed at once when it is heard for the first time."""
        if self.machine.is_unprobed(node):
            self.heard.set()

    @property
    def endpoint(self) -> str:
        """Return where others reach this member, as the chain says."""
        own = self.machine.find_member(self._signing_key)
        return own.endpoint if own else ""

    async def open_signed(self, signed: SignedRequest) -> None:
        """Have a request planned that its client only signed.

        Raises PeerFault, BadSignature for what the chain would refuse, Unavailable while the chain
        cannot be asked, or another request of this client is open.
        """
        request = signed.request
        if self.machine.is_open(request.execution_id):
            return
        check_signed(signed)  # before the chain is asked: nobody else may make us
        async with self._opening:
            balance, frozen_until = await self._check_openable(request)
        self.feed_peer(RequestSigned(signed, balance, frozen_until))

    async def _check_openable(self, request: Request) -> tuple[int, int]:
        """Return the client's balance and until when it is frozen; raise PeerFault."""
        deployment, call = self.chain.deployment, self.chain.call
        if (request.chain_id, request.market) != (deployment.chain_id, deployment.market.lower()):
            raise PeerFault("the request is for another chain or market")
        head, parameters, price, paused, root, known, balance, frozen = await asyncio.gather(
            self.chain.fetch_head(),
            call("market", "parameters"),
            call("market", "quote", request.model_id, request.steps),
            call("market", "paused"),
            call("committee", "snapshotRootOf", request.snapshot_sequence),
            call("market", "executionOf", request.execution_id),
            call("market", "balanceOf", request.client),
            call("market", "frozenUntil", request.client),
        )
        left_s = request.deadline - head.timestamp
        least_s = parameters["minDeadlineS"] + limits.SIGNED_REQUEST_MARGIN_S
        if not least_s <= left_s <= parameters["maxDeadlineS"]:
            raise PeerFault(
                f"the deadline is {left_s} s away, and signed requests need {least_s} to "
                f"{parameters['maxDeadlineS']} s"
            )
        if request.max_price_micro_usdc < max(price, parameters["minPrice"]):
            raise PeerFault(f"the price is {max(price, parameters['minPrice'])} micro-USDC by now")
        if paused:
            raise PeerFault("the market takes no requests now")
        if root != request.snapshot_root or not request.snapshot_sequence:
            raise PeerFault("the request names no snapshot that the chain remembers")
        if known["status"]:
            raise PeerFault(f"the client has used number {request.nonce} already")
        return int(balance), int(frozen)

    # ---- questions --------------------------------------------------------------------------

    def get_status(self) -> dict[str, Any]:
        status = self.machine.get_status(time.monotonic())
        down = sorted(peer.account for peer in self._peers.values() if not peer.is_up)
        return {**status, "peers_down": down}

    def get_demand(self) -> bytes:
        """Return the reply to a heartbeat, as JSON; at most ``tuning.DEMAND_AGE_S`` old."""
        now = time.monotonic()
        if now - self._demand[0] > tuning.DEMAND_AGE_S:
            reply = {"block": self.machine.get_head(), "tasks": self.machine.compute_demand(now)}
            self._demand = (now, encode_canonical(reply))
        return self._demand[1]

    async def wait_for_plan(
        self, execution_id: str, wait_s: float
    ) -> tuple[PlanCertificate | None, str]:
        """Return certificate or refusal as soon as there is one, or neither after ``wait_s``."""
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
        """Persist first, all in one transaction; then start everything else."""
        records = [c for c in commands if isinstance(c, Persist | Forget)]
        if records:
            with self.journal.transaction():
                for record in records:
                    if isinstance(record, Persist):
                        self.journal.put(record.kind, record.key, record.value)
                    else:
                        self.journal.delete(record.kind, record.key)
        for command in commands:
            self._start(command)

    def _start(self, command: Command) -> None:
        match command:
            case Gossip():
                self._gossip(command)
            case PushPlan():
                self._spawn(self._push_plan(command))
            case PushVerification():
                self._spawn(self._push_verification(command))
            case RecomputeTask():
                self._spawn(self._recompute(command))
            case SubmitSnapshot():
                self._spawn(
                    self._submit(
                        f"snapshot {command.sequence}",
                        "committee",
                        "submitSnapshot",
                        command.sequence,
                        command.epoch,
                        command.root,
                        command.signatures,
                    )
                )
            case SubmitPlan():
                own = [command.client_signature] if command.client_signature else []
                self._spawn(
                    self._submit(
                        f"the plan of {command.execution_id}",
                        "market",
                        "openExecution" if own else "submitCompletePlan",
                        request_to_abi(command.request),
                        *own,
                        terms_to_abi(command.plan_root, command.seed_signature, command.executors),
                        command.signatures,
                    )
                )
            case SubmitCommitments():
                self._spawn(
                    self._submit(
                        f"the commitments of {command.execution_id}",
                        "market",
                        "commitExecution",
                        command.execution_id,
                        command.root,
                        exposures_to_abi(command.exposures),
                        command.signatures,
                    )
                )
            case SubmitSettlement():
                self._spawn(
                    self._submit(
                        f"the settlement of {command.execution_id}",
                        "market",
                        "settle",
                        command.execution_id,
                        command.settlement.to_abi(),
                        command.signatures,
                    )
                )
            case SubmitEvidence():
                self._spawn(self._report(command.evidence))
            case PostDealing():
                self._spawn(
                    self._submit("our dealing", "committee", "postDealing", command.dealing)
                )
            case PostComplaint():
                self._spawn(
                    self._submit(
                        f"a complaint about {command.dealer}",
                        "committee",
                        "postComplaint",
                        command.dealer,
                        command.evidence,
                    )
                )
            case ConfirmGroupKey():
                self._spawn(self._confirm_group_key(command.configuration, command.public_key))
            case FetchManifest():
                self._spawn(self._fetch_manifest(command.model_id))
            case FetchSnapshot():
                self._spawn(self._fetch_snapshot(command.root))
            case AnnouncePlan():
                waiters = self._waiters.get(command.execution_id)
                if waiters is not None:
                    waiters.changed.set()
            case Log():
                log.info("%s", command.message)
            case Fault():
                log.warning("fault of %s: %s", command.peer, command.message)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of this member failed", exc_info=error)

    # ---- to peers ---------------------------------------------------------------------------

    def _gossip(self, command: Gossip) -> None:
        if count_nodes(command.message) > limits.CHUNKED_MESSAGE_NODES:
            self._spawn(self._gossip_chunked_message(command))
        else:
            self._say(command, encode_gossip(command.message, command.configuration))

    async def _gossip_chunked_message(self, command: Gossip) -> None:
        """Announce a large message; what is said again is packed once."""
        message = command.message
        known = self._packed.get(id(message))
        if known is None:
            body = encode_gossip(message, command.configuration)
            data = await asyncio.to_thread(encode_canonical, body)
            known = (message, await asyncio.to_thread(self.chunked_messages.offer, data))
            self._packed[id(message)] = known
            while len(self._packed) > tuning.MAX_CHUNKED_MESSAGES:
                self._packed.popitem(last=False)
        chunked_message = known[1].model_dump(mode="json")
        body = {
            "configuration": command.configuration,
            "kind": CHUNKED_MESSAGE_KIND,
            "message": chunked_message,
        }
        self._say(command, body)

    def receive_chunked_message(self, sender: PeerView, chunked_message: ChunkedMessage) -> None:
        """Fetch what another member announces; one at a time of each, and nothing twice."""
        peer, key = self._peers.get(sender.account), (sender.account, chunked_message.packed_digest)
        if peer is None or peer.is_sending or key in self._fetched:
            return
        peer.is_sending = True
        self._spawn(self._fetch_gossip(peer, chunked_message))

    async def _fetch_gossip(self, peer: _Peer, chunked_message: ChunkedMessage) -> None:
        try:
            data = await fetch_chunked_message(self.http, peer.endpoint, chunked_message)
            message, configuration = await asyncio.to_thread(_parse_chunked_message, data)
            self._fetched[peer.account, chunked_message.packed_digest] = None
            while len(self._fetched) > limits.MAX_COMMITTEE * tuning.MAX_CHUNKED_MESSAGES:
                self._fetched.popitem(last=False)
            self.feed_peer(GossipReceived(peer.account, message, configuration))
        except (PeerFault, Unavailable) as error:
            log.warning("what member %s announced was not taken: %s", peer.account, error)
        finally:
            peer.is_sending = False

    def _say(self, command: Gossip, body: dict[str, Any]) -> None:
        targets = [command.to] if command.to else self.machine.list_accounts(command.configuration)
        for account in targets:
            peer = self._peers.get(account)
            if peer and peer.outstanding < _MAX_OUTSTANDING:
                peer.outstanding += 1
                self._spawn(self._send_gossip(peer, body))

    async def _send_gossip(self, peer: _Peer, body: dict[str, Any]) -> None:
        try:
            await self.http.post_signed(
                f"{peer.endpoint}/v1/gossip",
                GOSSIP_TYP,
                peer.account,
                body,
                timeout_s=_GOSSIP_TIMEOUT_S,
            )
        except Unavailable as error:
            if peer.is_up:
                peer.is_up = False
                log.warning("member %s is down: %s", peer.account, error)
            self.feed(MemberLost(peer.account))
        except PeerFault as error:
            log.warning("member %s refused our %s: %s", peer.account, body["kind"], error)
        else:
            if not peer.is_up:
                peer.is_up = True
                log.info("member %s is back", peer.account)
        finally:
            peer.outstanding -= 1

    async def _push_plan(self, command: PushPlan) -> None:
        nodes, certificate = command.nodes, command.certificate
        data = certificate.model_dump(mode="json")
        sent = await asyncio.gather(
            *(self._post(f"{node.endpoint}/v1/plan", data, tuning.RTT_TIMEOUT_S) for node in nodes)
        )
        unreached = tuple(node.node for node, ok in zip(nodes, sent, strict=True) if not ok)
        self.feed(PlanPushed(certificate.plan.request.execution_id, unreached))

    async def _push_verification(self, command: PushVerification) -> None:
        data = command.order.model_dump(mode="json")
        execution_id = command.order.draw.execution_id
        log.info(
            "node %s is to verify task %d of %s", command.node, command.order.task, execution_id
        )
        await self._post(f"{command.endpoint}/v1/verify", data, tuning.HTTP_TIMEOUT_S)

    async def _recompute(self, command: RecomputeTask) -> None:
        request = command.order.certificate.plan.request
        manifest = self.machine.find_manifest(request.model_id)
        if manifest is not None:  # there was an order, so there is
            ruling = await self._rulings.recompute(command, manifest)
            self.feed(TaskRecomputed(request.execution_id, ruling))

    async def _post(self, url: str, data: dict[str, Any], timeout_s: float) -> bool:
        try:
            await self._node_http.post_json(url, data, timeout_s=timeout_s)
        except (Unavailable, PeerFault) as error:
            log.warning("%s was not accepted: %s", url, error)
            return False
        return True

    async def probe(self, node: str, endpoint: str) -> None:
        """Measure a node's round trip, on a connection that is open already."""
        url = f"{endpoint}/v1/ping"
        try:
            await self._ping(url)
            started = time.perf_counter()
            await self._ping(url)
            rtt_ms: int | None = max(1, round((time.perf_counter() - started) * 1000))
        except (Unavailable, PeerFault) as error:
            log.info("node %s is not reachable: %s", node, error)
            rtt_ms = None
        self.feed(RttMeasured(node, rtt_ms))

    async def _ping(self, url: str) -> dict[str, Any]:
        return await self._node_http.get_json(
            url, timeout_s=tuning.RTT_TIMEOUT_S, max_bytes=limits.KIB
        )

    async def try_reach(self, request: ReachRequest, key: str) -> str:
        """Return why nobody reaches a node where it says, "" when we do.

        Raises BadSignature unless the node itself asks, Unavailable.
        """
        if self._reaching >= tuning.REACH_CHECKS:
            raise Unavailable("too many nodes ask whether they are reached; ask again")
        self._reaching += 1
        try:
            if await fetch_node_key(self.chain, request.node) != key:
                raise BadSignature(f"{key} is not the key of an active node {request.node}")
            try:
                answer = await self._ping(f"{request.endpoint}/v1/ping")
            except (Unavailable, PeerFault) as error:
                return str(error)[: tuning.MAX_ERROR_CHARS]
        finally:
            self._reaching -= 1
        if answer.get("node") != request.node:  # a router hands its port to one of several
            return f"another host than the node answers at {request.endpoint}"
        return ""

    # ---- to the chain -----------------------------------------------------------------------

    async def _submit(self, what: str, contract: Any, function: str, *arguments: Any) -> None:
        try:
            receipt = await self.chain.send(contract, function, *arguments)
        except ChainRejected as error:
            # another member's transaction was first, or the state moved on: the events say which
            log.info("the chain did not take %s: %s", what, error)
        except Unavailable as error:
            log.warning("%s could not be sent: %s", what, error)
        else:
            log.info("%s is in block %s (%s gas)", what, receipt.block_number, receipt.gas_used)

    async def _report(self, evidence: Equivocation) -> None:
        """Say loudly that a member broke its one promise, and take its bond if it has one."""
        member = evidence.first.member
        log.error("member %s signed two different things: %s", member, evidence)
        function, votes = make_report(evidence)
        await self._submit(f"the report about {member}", "bonds", function, *votes)

    async def _confirm_group_key(self, configuration: int, public_key: str) -> None:
        """Vote for the group key until the chain holds one."""
        raw = bls.encode_public_key_eip2537(public_key)
        what, key_hash = "our vote for the group key", "0x" + keccak(raw).hex()
        while True:
            try:
                agreed = await self.chain.call("committee", "groupKeyOf", configuration)
            except Unavailable:
                agreed = None
            if agreed:
                break
            await self._submit(what, "committee", "confirmGroupKey", key_hash, raw)
            await asyncio.sleep(_VOTE_PERIOD_S)
        if bytes(agreed) != raw:
            log.error("the chain holds another group key than the posted dealings give")

    # ---- contents by digest -----------------------------------------------------------------

    async def _fetch_manifest(self, model_id: str) -> None:
        path = self._manifests / f"{model_id[2:]}.json"
        try:
            if path.exists():
                data = await asyncio.to_thread(path.read_bytes)
            else:
                data = await self._gateway.fetch_manifest(model_id)
            manifest = load_manifest(data)
            if manifest.model_id != model_id:
                path.unlink(missing_ok=True)
                raise InvalidInput(f"the manifest kept as {path} is another one")
        except SplitUpError as error:
            log.warning("no manifest of model %s: %s", model_id, error)
            return
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".new")
            await asyncio.to_thread(temporary.write_bytes, data)
            temporary.replace(path)
        self.feed(ManifestFetched(manifest))

    async def _fetch_snapshot(self, root: str) -> None:
        for peer in self._peers.values():
            try:
                value = await self.http.get_json(
                    f"{peer.endpoint}/v1/snapshot/{root}", max_bytes=limits.MAX_SNAPSHOT_BYTES
                )
                snapshot = await asyncio.to_thread(Snapshot.from_value, value)
            except Refused:
                continue  # it lacks it too
            except (Unavailable, PeerFault) as error:
                log.info("member %s did not send snapshot %s: %s", peer.account, root, error)
                continue
            if snapshot.root() == root:
                self.feed(SnapshotFetched(snapshot))
                return
            log.warning("fault of %s: sent another snapshot than %s", peer.account, root)


def _parse_chunked_message(data: bytes) -> tuple[GossipMessage, int]:
    """Parse what a parcel holds: a gossip body of a message that grows with the nodes."""
    try:
        body = parse_json(data)
    except (ValueError, RecursionError):
        raise PeerFault("a parcel holds no JSON") from None
    if not isinstance(body, dict):
        raise PeerFault("a parcel holds no gossip")
    return parse_gossip(body)
