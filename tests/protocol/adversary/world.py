"""A committee, nodes, a client, a relay, a gateway and the Market in virtual time.

One seed is one world: what the client asks for, which node fails, who deviates and how. The
machines of the members are those of the processes; nodes and client are ``parties``.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Final

from splitup.core import limits
from splitup.core.errors import PeerFault, Unavailable
from splitup.crypto import keys, quorum
from splitup.graph.manifest import Manifest
from splitup.messages.base import Message
from splitup.messages.plans import PlanCertificate, SignedRequest
from splitup.messages.snapshots import UNRULED, Snapshot, SnapshotEntry
from splitup.messages.verification import Ruling
from splitup.protocol.committee import commands as cmd
from splitup.protocol.committee import events as ev
from splitup.protocol.committee.context import SigningGuard
from splitup.protocol.committee.equivocation import get_slot
from splitup.protocol.committee.peer_messages import DrawPartial, PlanCertificateMessage, PlanVote
from splitup.protocol.member import CommitteeMember
from splitup.protocol.planning.exposure import Economics
from tests.builders import make_manifest, make_tolerant
from tests.protocol.adversary.deviations import Adversary
from tests.protocol.adversary.market import GRACE_S, MAX_DEADLINE_S, MIN_DEADLINE_S, START_S, Market
from tests.protocol.cheap_scheme import CheapScheme, make_cheap_keys
from tests.protocol.committees import make_committee, make_identity
from tests.protocol.histories import compute_plan  # noqa: F401  shares plans among members
from tests.protocol.simulated_chain import MARKET
from tests.protocol.simulator import read_token
from tests.protocol.virtual_time import VirtualTime

CHEAP: Final = CheapScheme()
CLIENT: Final = make_identity(999)
NODES: Final = tuple(make_identity(2000 + number) for number in range(6))
STAKE_MICRO_USDC: Final = 10**9
SHORTEST_S: Final = MIN_DEADLINE_S + limits.SIGNED_REQUEST_MARGIN_S
SHAPES: Final = (  # which tasks each task reads; none: the client's input
    ([],),
    ([], [0]),
    ([], [0], [1]),
    ([], [], [0, 1]),
    ([], [0], [0], [1, 2]),
)
_LATE_S: Final = 15.0  # before the deadline nodes, and then members, act on what there is
# Once for all members of a world: they are pure.
keys.verify_raw = lru_cache(4_096)(keys.verify_raw)
quorum._hash_abi = lru_cache(4_096)(quorum._hash_abi)


@cache
def make_model(shape: int, is_abroad: bool = False) -> Manifest:
    model = make_manifest([list(read) for read in SHAPES[shape]])
    return make_tolerant(model) if is_abroad else model


@cache
def make_first_snapshot(shape: int, is_pool_small: bool, is_abroad: bool = False) -> Snapshot:
    """All nodes hold all tasks; in a small pool one holds nothing, and has most of the stake."""
    tasks = tuple(sorted(task.task_id for task in make_model(shape).tasks))
    idle = (make_identity(2999),) if is_pool_small else ()
    nodes = sorted((*NODES, *idle), key=lambda node: node.address)
    return Snapshot(
        configuration=1,
        sequence=1,
        epoch=1,
        entries=tuple(
            SnapshotEntry(
                node=node.address,
                signing_key=node.signing_key_hex,
                endpoint="http://127.0.0.1:9000",
                stake_micro_usdc=STAKE_MICRO_USDC * (20 if node in idle else 1),
                rtt_ms=10,
                queue_ms=0,
                resident=() if node in idle else tasks,
                determinism=UNRULED + "CUDA:PTX" if is_abroad else "CPU:X86",
            )
            for node in nodes
        ),
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """What a world is about, apart from the deviations."""

    members: int
    shape: int
    steps: int  # that the client pays for
    used: int  # that it sends
    is_signed: bool  # the request; else it is the client's own transaction
    deadline_s: int
    block_s: float
    first_block_s: float  # the chain may be slow just now
    sampling_bps: int
    fails: int | None  # the task whose executor never answers
    is_pool_small: bool  # the nodes that can check each other
    registered_low: bool  # a dishonest client registered the model below the manifest's price
    acknowledges: bool = False  # the client signs interim ends, after every step
    is_abroad: bool = False  # no member computes in the nodes' class: they compare numbers


def make_setting(seed: int, party: str) -> Setting:
    """Draw a setting. Mostly one member stands for all, as they hear the same: it is cheaper."""
    rng = random.Random(seed)
    shape, steps = rng.randrange(len(SHAPES)), rng.randint(1, 4)
    tasks, block_s = len(SHAPES[shape]), rng.choice((1.0, 1.0, 2.0, 12.0))
    return Setting(
        members=4 if party == "member" or rng.random() < 0.08 else 1,
        shape=shape,
        steps=steps,
        used=steps if rng.random() < 0.7 else rng.randint(1, steps),
        is_signed=rng.random() < 0.5,
        deadline_s=rng.choice((SHORTEST_S, SHORTEST_S, 30, 120)),
        block_s=block_s,
        first_block_s=rng.uniform(0.2, block_s if rng.random() < 0.7 else 3 * block_s + 12),
        sampling_bps=rng.choice((10_000, 10_000, 5_000, 0)),
        fails=rng.randrange(tasks) if rng.random() < 0.2 else None,
        is_pool_small=rng.random() < 0.2,
        registered_low=party == "client" and rng.random() < 0.1,
        is_abroad=rng.random() < 0.2,
        acknowledges=rng.random() < 0.5,
    )


class _Member(CommitteeMember):
    """Agrees on no further snapshots: the world has one."""

    def _process_local(self, event: ev.LocalEvent, now: float) -> list[cmd.Command]:
        if isinstance(event, ev.Tick):
            return [*self.plans.process_tick(now), *self.settlements.process_tick(now)]
        return super()._process_local(event, now)


class World(VirtualTime):
    """Time, messages, members and the chain."""

    def __init__(self, setting: Setting, adversary: Adversary, seed: int) -> None:
        super().__init__()
        self.setting, self.adversary = setting, adversary
        self.random = random.Random(seed ^ 0xF00D)
        self.manifest, self.snapshot = (
            make_model(setting.shape, setting.is_abroad),
            make_first_snapshot(setting.shape, setting.is_pool_small, setting.is_abroad),
        )
        self.economics = Economics(setting.sampling_bps, 1_200, 100_000)
        self.identities, self.view = make_committee(setting.members)
        self.group, self.shares = make_cheap_keys(setting.members)
        self.full_view = replace(self.view, group_key=self.group.public_key)
        self.market = Market(self.view, CHEAP, self.manifest, self.economics, self._emit)
        self.market.snapshots.add((1, self.snapshot.root()))
        self.market.stakes = {node.address: STAKE_MICRO_USDC for node in NODES}
        if setting.registered_low:
            self.market.price_per_step = 1
        self.pushed: Callable[[str, Message], None] = lambda node, message: None
        self.recompute: Callable[[cmd.RecomputeTask, str], Sequence[Ruling]]
        self.recompute = lambda command, by: ()
        self.certified: Callable[[PlanCertificate], None] = lambda certificate: None
        self.certificates: dict[str, PlanCertificate] = {}
        self.plan_votes: dict[tuple[str, str], set[str]] = defaultdict(set)
        self.accused: set[str] = set()
        self.drawn: set[str] = set()  # executions whose commitments were complete in time
        self.is_measured = seed % 8 == 0  # measuring memory is a tenth of the work
        self.relayed = {node.address for node in NODES[::2]}
        self.refused: Counter[str] = Counter()
        self._pending: list[Callable[[], None]] = []
        self._block = 1
        self.members = {
            identity.address: self._start(i) for i, identity in enumerate(self.identities)
        }
        self.after(setting.first_block_s, self._mine)
        self.after(0.5, self._tick)

    # ---- time -------------------------------------------------------------------------------

    def skip(self, until_s: float) -> None:
        """Let a long time pass at once: blocks, and what waits for them."""
        self.now = max(self.now, until_s)
        self._mine(again=False)
        self.advance(self.now + 1.0)

    def is_over(self) -> bool:
        """Return whether the chain has closed every execution, or will never open one."""
        records = self.market.records.values()
        if not records:
            return self.now > self.setting.deadline_s + 2 * self.setting.first_block_s
        return all(record.status in ("settled", "refunded") for record in records)

    def _tick(self) -> None:
        if not self.is_over():  # what is said later is answered without a clock
            for account in self.members:
                self.feed(account, ev.Tick())
        is_busy = self.now < 6 or 0 < self._get_late_s() < _LATE_S
        self.after(self._choose_pause(0.5 if is_busy else 2.5, 5.0), self._tick)

    def _get_late_s(self) -> float:
        """Return for how long nodes and members have acted on what there is, for the deadline."""
        return self.now - self.setting.deadline_s + _LATE_S

    def _choose_pause(self, usual_s: float, long_s: float) -> float:
        """Return a long pause when nobody is in a hurry, but none into the time that is late."""
        late_s = self._get_late_s()
        if self.is_over() or late_s > _LATE_S:
            return long_s if self.now > 40 or self.is_over() else usual_s
        return usual_s if self.now < 40 or late_s > 0 else max(usual_s, min(long_s, -late_s))

    # ---- messages ---------------------------------------------------------------------------

    def send(
        self,
        sender: str,
        message: Message,
        deliver: Callable[[Message], None],
        via: str = "",
        again: Callable[[float], Message] | None = None,
        to: str = "",
    ) -> None:
        """Carry a message, or what the adversary makes of it, to its receiver."""
        for delay_s, copy in self.adversary.send(sender, message, via, again, to):
            self.after(delay_s + self.random.uniform(0.001, 0.005), partial(deliver, copy))

    def via_relay(self, node: str) -> str:
        return "relay" if node in self.relayed else ""

    def tell_members(
        self,
        sender: str,
        message: Message,
        make_event: Callable[[Message], ev.Event],
        to: Sequence[str] | None = None,
    ) -> None:
        """Post a node's message to members, by default all; who is not ready is asked again."""
        for account in self.members if to is None else to:
            post = partial(self._post_made, account, make_event)
            self.send(sender, message, post, to=account)

    def _post_made(
        self, account: str, make_event: Callable[[Message], ev.Event], message: Message
    ) -> None:
        self._post(account, make_event(message), 12)

    def _post(self, account: str, event: ev.Event, tries: int) -> None:
        try:
            self._handle(account, event)
        except Unavailable:
            if tries:
                self.after(0.5, partial(self._post, account, event, tries - 1))

    # ---- members ----------------------------------------------------------------------------

    def _start(self, place: int) -> CommitteeMember:
        identity = self.identities[place]
        member = _Member(
            identity,
            self.view,
            self.economics,
            read_token,
            grace_s=GRACE_S,
            signing_guard=SigningGuard(),
            snapshots=[self.snapshot],
            scheme=CHEAP,
        )
        for event in (
            ev.SnapshotAccepted(1, 1, self.snapshot.root()),
            self._make_block(),
            ev.ManifestFetched(self.manifest),
            ev.KeyReady(self.group, self.shares[place]),
        ):
            member.handle(event, self.now)
        return member

    def feed(self, account: str, event: ev.Event) -> None:
        try:
            self._handle(account, event)
        except Unavailable:
            return

    def _handle(self, account: str, event: ev.Event) -> None:
        try:
            commands = self.members[account].handle(event, self.now)
        except PeerFault as error:
            self.refused[str(error)[:60]] += 1
            return
        for command in commands:
            self._carry_out(account, command)

    def _carry_out(self, account: str, command: cmd.Command) -> None:
        match command:
            case cmd.Gossip(to=to, message=message):
                self._note_votes(account, message)
                for other in [to] if to else [a for a in self.members if a != account]:
                    self.send(account, message, partial(self._gossip, account, other), to=other)
            case cmd.PushPlan():
                for entry in command.nodes:
                    deliver = partial(self.pushed, entry.node)
                    via = self.via_relay(entry.node)
                    self.send(account, command.certificate, deliver, via)
                execution_id = command.certificate.plan.request.execution_id
                self.after(0.01, partial(self.feed, account, ev.PlanPushed(execution_id, ())))
            case cmd.PushVerification():
                deliver = partial(self.pushed, command.node)
                self.send(account, command.order, deliver, self.via_relay(command.node))
            case cmd.RecomputeTask():
                self.after(0.2, partial(self._recompute, account, command))
            case cmd.SubmitPlan() | cmd.SubmitCommitments() | cmd.SubmitSettlement():
                self._pending.append(partial(self.market.submit, command))
            case cmd.AnnouncePlan():
                self._announce(account, command.execution_id)
            case cmd.SubmitEvidence():
                self.accused.add(command.evidence.first.member)

    def _gossip(self, sender: str, to: str, message: Message) -> None:
        self.feed(to, ev.GossipReceived(sender, message))

    def _recompute(self, account: str, command: cmd.RecomputeTask) -> None:
        made = [self.adversary.make(account, r) for r in self.recompute(command, account)]
        rulings = tuple(ruling for ruling in made if isinstance(ruling, Ruling))
        self.feed(account, ev.TaskRecomputed(command.order.draw.execution_id, rulings))

    def _announce(self, account: str, execution_id: str) -> None:
        certificate = self.members[account].plans.find_certificate(execution_id)
        if certificate is None:
            return
        self._note_certificate(certificate)
        if execution_id not in self.certificates:
            self.certificates[execution_id] = certificate
            self.after(0.01, partial(self.certified, certificate))

    def _note_votes(self, account: str, message: Message) -> None:
        """Remember under which plans members put their names: two for one slot cost the bond."""
        if isinstance(message, DrawPartial) and account not in self.adversary.accounts:
            record = self.market.records.get(message.execution_id)
            if record is not None and self.market.now_s < record.request.deadline:
                self.drawn.add(message.execution_id)
        if isinstance(message, PlanVote) and message.member == account:
            self.plan_votes[account, get_slot(message)].add(message.root)
        if isinstance(message, PlanCertificateMessage):
            self._note_certificate(message.certificate)

    def _note_certificate(self, certificate: PlanCertificate) -> None:
        plan = certificate.plan
        unsigned = PlanVote(
            configuration=self.view.configuration,
            execution_id=plan.request.execution_id,
            request_hash=plan.request.hash(),
            root=plan.root(),
            seed=plan.seed,
            executors=len(set(plan.executors())),
            member=certificate.signatures[0].member,
            signature=certificate.signatures[0].signature,
        )
        for entry in certificate.signatures:
            self.plan_votes[entry.member, get_slot(unsigned)].add(plan.root())

    # ---- the chain --------------------------------------------------------------------------

    def transact(self, transaction: Callable[[], None]) -> None:
        """Have the next block carry out a transaction."""
        self._pending.append(transaction)

    def _make_block(self) -> ev.BlockSeen:
        self.market.now_s = START_S + int(self.now)
        self.market.block_hash = f"0x{self._block:064x}"
        return ev.BlockSeen(self._block, self.market.now_s, self.market.block_hash)

    def _mine(self, again: bool = True) -> None:
        self._block += 1
        block = self._make_block()
        pending, self._pending = self._pending, []
        for transaction in pending:
            transaction()
        self.market.close()
        for account in self.members:
            self.after(self.random.uniform(0, 0.02), partial(self.feed, account, block))
        if again:
            block_s = self.setting.block_s
            self.after(self._choose_pause(block_s, 5 * block_s), self._mine)

    def _emit(self, event: ev.Event) -> None:
        for account in self.members:
            self.after(0.002, partial(self.feed, account, event))

    # ---- signed requests, as a member's shell checks them ----------------------------------

    def take_signed_request(self, account: str, signed: SignedRequest) -> None:
        """Check against the chain what the machine cannot, and hand the request on."""
        market, request = self.market, signed.request
        left_s = request.deadline - market.now_s
        least_s = MIN_DEADLINE_S + limits.SIGNED_REQUEST_MARGIN_S
        known = (request.snapshot_sequence, request.snapshot_root) in market.snapshots
        if (
            (request.chain_id, request.market) != (self.view.domain.chain_id, MARKET)
            or not least_s <= left_s <= MAX_DEADLINE_S
            or request.max_price_micro_usdc < market.quote(request.steps, left_s)
            or request.verify_bps < market.economics.sampling_bps
            or request.execution_id in market.records
            or not known
        ):
            self.refused["signed request"] += 1
            return
        balance, frozen = market.balances[request.client], market.frozen_until[request.client]
        self._post(account, ev.SignedRequestReceived(signed, balance, frozen), 1)
