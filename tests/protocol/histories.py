"""One seed, one history of a committee: crashes, liars, partitions, a chain that reorganises.

The machines are those of the processes, their signatures cheap (``cheap_scheme``). Every boundary
between persisting and sending is a place where a member can die. What happens, and what must hold,
is in ``scenarios``.

    python -m tests.protocol.histories 4711      # replays a history and prints what happened
"""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from splitup.core.errors import PeerFault, Unavailable
from splitup.crypto.quorum import SIGNATURE_BYTES, compute_quorum_size
from splitup.crypto.signature_scheme import REAL, Scheme
from splitup.graph.manifest import Manifest
from splitup.messages.base import Message
from splitup.messages.plans import Plan, Request
from splitup.messages.snapshots import Heartbeat, Snapshot
from splitup.protocol.committee import commands as cmd
from splitup.protocol.committee import events as ev
from splitup.protocol.committee.context import SIGNED, SNAPSHOT, SigningGuard
from splitup.protocol.committee.equivocation import EVIDENCE, compute_vote_hash
from splitup.protocol.committee.observations import ObservationShare, SnapshotProposal
from splitup.protocol.committee.peer_messages import (
    EpochTimeoutVote,
    Equivocation,
    PlanPartial,
    PlanVote,
    SnapshotVote,
)
from splitup.protocol.member import CommitteeMember
from splitup.protocol.planning import exposure, plan_agreement, selection
from splitup.protocol.planning.exposure import Economics
from splitup.protocol.snapshots.snapshot_rules import compute_snapshot
from tests.builders import COMMON_CLASS, make_chain_manifest
from tests.protocol.cheap_scheme import CheapScheme, make_cheap_keys
from tests.protocol.committees import CHAIN_ID, make_committee, make_identity, make_keys
from tests.protocol.scenarios import STABLE_S, Broken, Checker, Scenario, make_scenario
from tests.protocol.simulated_chain import CLIENT, MARKET
from tests.protocol.simulator import GRACE_S, read_token
from tests.protocol.virtual_time import VirtualTime

ECONOMICS = Economics(sampling_bps=0, reward_milli=1_200, slash_milli=100_000)
MANIFEST = make_chain_manifest(2)
NODES = tuple(make_identity(2000 + number) for number in range(3))
CHEAP = CheapScheme()
TICK_S = 0.5
_RECORDS = (cmd.Persist, cmd.Forget)
_VOTES = (SnapshotVote, PlanVote)
END_S = 300.0  # by then everything that can be decided must be: two turns of the longest back-off


# ---- the world -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Life:
    """A member's process: machine, journal, and whether it runs. Twins are two lives."""

    place: int
    account: str
    journal: dict[tuple[str, str], object]
    machine: CommitteeMember | None = None
    boundaries: int = 0
    crashes: int = 0


@dataclass(frozen=True, slots=True)
class _Mined:
    block: int
    event: ev.Event


class History(VirtualTime):
    """Runs a scenario; ``run`` returns when every request is decided, or raises Broken."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        scheme: Scheme = CHEAP,
        member_type: type[CommitteeMember] = CommitteeMember,
        keeps_journal: bool = True,
        quorum: int | None = None,
        verbose: bool = False,
    ) -> None:
        super().__init__()
        self.scenario = scenario
        self.random = random.Random(scenario.seed ^ 0x5EED)
        self.scheme, self.member_type, self.keeps_journal = scheme, member_type, keeps_journal
        self.identities, view = make_committee(scenario.size)
        self.view = replace(view, quorum=quorum or view.quorum)
        self.group, self.shares = (make_keys if scheme is REAL else make_cheap_keys)(scenario.size)
        self.accounts = [identity.address for identity in self.identities]
        honest = frozenset(
            account for i, account in enumerate(self.accounts) if i not in scenario.faulty
        )
        self.checker = Checker(scenario.size, honest)
        self.block = 1
        self.trace = hashlib.sha256()
        self.notes: list[str] = []
        self.accused: set[str] = set()
        self.verbose = verbose  # keeps notes and their digest
        self._pending: list[Callable[[], None]] = []
        self._mined: list[_Mined] = [_Mined(0, ev.SnapshotAccepted(1, 0, "0x" + "00" * 32))]
        self._reorgs = scenario.reorgs
        self._sequence, self._root = 0, "0x" + "00" * 32
        self.plans: dict[str, str] = {}
        self.lives = [
            self._make_life(place) for place in range(scenario.size) for _ in self._copies(place)
        ]

        self.lives_at = [
            [life for life in self.lives if life.place == place] for place in range(scenario.size)
        ]

    # ---- running ----------------------------------------------------------------------------

    def run(self) -> History:
        for life in self.lives:
            if life.place not in self.scenario.mute:
                self._start(life)
        self.every(1.0, self._mine)
        self.every(TICK_S, self._tick)
        self.every(2.0, self._beat)
        self._beat()
        for number in range(self.scenario.requests):
            self.after(self.random.uniform(2, STABLE_S - 3), partial(self._request, number + 1))
        self.advance(math.inf, lambda: self.now >= END_S or self._is_decided())
        self._check_end()
        return self

    def note(self, text: str) -> None:
        if self.verbose:
            self.trace.update(f"{self.now:.6f} {text}\n".encode())
            self.notes.append(f"{self.now:9.3f} {text}")

    def _is_decided(self) -> bool:
        if self.now < STABLE_S or self._pending or self._reorgs:
            return False
        return len(self.plans) >= self.scenario.requests

    def _check_end(self) -> None:
        for life in self.lives:
            if life.machine is None or life.account not in self.checker.honest:
                continue
            for number in range(self.scenario.requests):
                certificate = life.machine.plans.find_certificate(f"0x{number + 1:064x}")
                if certificate is None:
                    continue
                execution_id = certificate.plan.request.execution_id
                signers = [entry.member for entry in certificate.signatures]
                self.checker.note_quorum(f"plan {execution_id}", signers, self.accounts)
                place = f"{execution_id} in {certificate.plan.request.block_hash}"
                self.checker.note_seed(place, certificate.plan.seed)
            for evidence in life.machine.detector.list_evidence():
                self.checker.note_accused(evidence.first.member)
        if self._sequence == 0:
            raise Broken(f"no snapshot after {self.now:.0f} s")
        if not self._is_decided():
            raise Broken(
                f"{len(self.plans)} of {self.scenario.requests} plans after {self.now:.0f} s"
            )

    # ---- members ----------------------------------------------------------------------------

    def _copies(self, place: int) -> range:
        return range(2 if place in self.scenario.twins else 1)

    def _make_life(self, place: int) -> Life:
        slot = f"snapshot/1/0/{self.scenario.first_epoch}"
        return Life(place, self.accounts[place], {(SIGNED, slot): {"digest": "", "until_s": 0}})

    def _start(self, life: Life) -> None:
        journal = life.journal if self.keeps_journal or not life.crashes else {}
        life.machine = self.member_type(
            self.identities[life.place],
            self.view,
            ECONOMICS,
            read_token,
            grace_s=GRACE_S,
            signing_guard=SigningGuard(
                {k: v for (kind, k), v in journal.items() if kind == SIGNED}  # type: ignore[misc]
            ),
            snapshots=[Snapshot.from_value(v) for (k, _), v in journal.items() if k == SNAPSHOT],
            evidence=[Equivocation.from_value(v) for (k, _), v in journal.items() if k == EVIDENCE],
            scheme=self.scheme,
        )
        records = tuple(
            ev.NodeRecord(n.address, n.signing_key_hex, "http://n", 10**9) for n in NODES
        )
        for event in (
            self._make_block(),
            ev.NodesSeen(records),
            ev.ManifestFetched(MANIFEST),
            ev.KeyReady(self.group, self.shares[life.place]),
            *(mined.event for mined in self._mined),
        ):
            self.feed(life, event)

    def feed(self, life: Life, event: ev.Event) -> None:
        if life.machine is None:
            return
        try:
            commands = life.machine.handle(event, self.now)
        except PeerFault as error:
            self.note(f"{life.place} refuses: {error}")
            return
        except Unavailable:
            return
        if commands:
            self._carry_out(life, commands)

    def _carry_out(self, life: Life, commands: Sequence[cmd.Command]) -> None:
        """As the process does: one transaction, then the sends; and it may die between any two."""
        records = [c for c in commands if isinstance(c, _RECORDS)]
        others = [one for c in commands for one in self._split(life, c)]
        last = self._find_death(life, bool(records), len(others))
        if last == -1:
            return self._crash(life, "before persisting")
        for record in records:
            if isinstance(record, cmd.Persist):
                life.journal[record.kind, record.key] = dict(record.value)
            else:
                life.journal.pop((record.kind, record.key), None)
        for command in others[:last]:
            self._send_out(life, command)
        if last is not None:
            self._crash(life, f"after {last} of {len(others)} sends")
        return None

    def _split(self, life: Life, command: cmd.Command) -> list[cmd.Command]:
        """A broadcast is one send to each member."""
        match command:
            case cmd.Persist() | cmd.Forget():
                return []
            case cmd.Gossip(to=None, message=message):
                others = [account for account in self.accounts if account != life.account]
                return [cmd.Gossip(account, message) for account in others]
        return [command]

    def _find_death(self, life: Life, persists: bool, sends: int) -> int | None:
        """Return how many sends are left to a member that dies now (−1: nothing was persisted)."""
        scenario = self.scenario
        first = -1 if persists else 0
        boundaries = sends - first + 1
        if scenario.crash_at is not None and scenario.crash_at[0] == life.place:
            at = scenario.crash_at[1] - life.boundaries
            life.boundaries += boundaries
            return first + at if 0 <= at < boundaries else None
        life.boundaries += boundaries
        if life.account in self.checker.honest and self.now < STABLE_S:
            if scenario.crash_rate and self.random.random() < scenario.crash_rate:
                return self.random.randint(first, sends)
        return None

    def _crash(self, life: Life, where: str) -> None:
        self.note(f"{life.place} dies {where}")
        life.machine = None
        life.crashes += 1
        self.after(self.random.uniform(0.05, 5), partial(self._start, life))

    def _send_out(self, life: Life, command: cmd.Command) -> None:
        match command:
            case cmd.Gossip():
                assert command.to is not None
                self._gossip(life, command.to, command.message)
            case cmd.PushPlan():
                execution_id = command.certificate.plan.request.execution_id
                self.after(0.01, partial(self.feed, life, ev.PlanPushed(execution_id, ())))
            case cmd.SubmitSnapshot() | cmd.SubmitPlan():
                self._pending.append(partial(self._execute, command))
            case cmd.SubmitEvidence():
                self.checker.note_accused(command.evidence.first.member)
                self.accused.add(command.evidence.first.member)
                self.note(f"{life.place} has evidence")
            case cmd.FetchSnapshot():
                self.after(0.02, partial(self._fetch, life, command.root))
            case cmd.Log() | cmd.Fault():
                self.note(f"{life.place}: {command.message}")

    # ---- messages ---------------------------------------------------------------------------

    def _gossip(self, life: Life, account: str, message: Message) -> None:
        if life.place in self.scenario.liars:
            twisted = self._twist(life, message)
            if twisted is None:
                return
            message = twisted
        if isinstance(message, _VOTES):
            self.checker.note_vote(message)
        scenario, rng = self.scenario, self.random
        to = self.accounts.index(account)
        event = ev.GossipReceived(life.account, message)
        lives = self.lives_at[to]
        if self.now >= STABLE_S:
            for other in lives:
                self.after(rng.uniform(0.001, 0.005), partial(self._deliver, other, event))
            return
        for p in scenario.partitions:
            if p.start_s <= self.now < p.end_s and (life.place in p.side) != (to in p.side):
                return
        low, high = scenario.delay_ms
        for other in lives:
            for _ in range(2 if rng.random() < scenario.repeat else 1):
                if rng.random() >= scenario.loss:
                    delay_s = rng.uniform(low, high) / 1000
                    self.after(delay_s, partial(self._deliver, other, event))

    def _deliver(self, life: Life, event: ev.GossipReceived) -> None:
        if self.verbose:  # the most frequent thing to happen
            kind = type(event.message).__name__
            self.note(f"{life.place} hears {kind} of {self.accounts.index(event.sender)}")
        self.feed(life, event)

    def _twist(self, life: Life, message: Message) -> Message | None:
        """Return what a liar says instead, another thing to everybody; None: nothing."""
        rng = self.random
        if rng.random() < 0.2:
            return None
        match message:
            case SnapshotVote() | PlanVote() if message.member == life.account:
                if rng.random() < 0.5:
                    return message
                change: dict[str, object] = {"root": f"0x{rng.randrange(3):064x}"}
                if isinstance(message, PlanVote) and rng.random() < 0.3:
                    change = {"executors": 999}
                other = message.model_copy(update=change)
                signature = self.scheme.sign_quorum(
                    self.identities[life.place], self.view.domain, compute_vote_hash(other)
                )
                return other.model_copy(update={"signature": "0x" + signature.hex()})
            case PlanPartial():
                false = message.partial[:20] + "ff" * 10 + message.partial[40:]
                return message.model_copy(update={"partial": rng.choice((message.partial, false))})
            case EpochTimeoutVote():
                epoch = message.epoch + rng.choice((0, 1, 7, 2**40))
                return message.model_copy(update={"epoch": epoch})
            case SnapshotProposal():
                return self._twist_proposal(message)
            case ObservationShare():
                return None if rng.random() < 0.5 else message
        return message

    def _twist_proposal(self, proposal: SnapshotProposal) -> SnapshotProposal:
        """Propose what follows from another quorum of the observations: every one is valid."""
        count = compute_quorum_size(self.scenario.size)
        chosen = sorted(
            self.random.sample(proposal.observations, count), key=lambda s: s.observation.member
        )
        life = next(life for life in self.lives if life.place in self.scenario.liars)
        assert life.machine is not None
        previous = next(
            (
                s.machine.contents.find_snapshot(self._root)
                for s in self.lives
                if s.machine and s.machine.contents.find_snapshot(self._root)
            ),
            None,
        )
        records = {
            n.address: ev.NodeRecord(n.address, n.signing_key_hex, "http://n", 10**9) for n in NODES
        }
        snapshot = compute_snapshot(
            [share.observation for share in chosen],
            records,
            previous,
            sequence=proposal.sequence,
            tolerated=(self.scenario.size - 1) // 3,
        )
        return proposal.model_copy(update={"root": snapshot.root(), "observations": tuple(chosen)})

    def _fetch(self, life: Life, root: str) -> None:
        for other in self.lives:
            snapshot = other.machine.contents.find_snapshot(root) if other.machine else None
            if snapshot is not None and other is not life:
                self.feed(life, ev.SnapshotFetched(snapshot))
                return

    # ---- time, nodes, chain -----------------------------------------------------------------

    def _tick(self) -> None:
        for life in self.lives:
            self.feed(life, ev.Tick())

    def _beat(self) -> None:
        resident = tuple(sorted(task.task_id for task in MANIFEST.tasks))
        for node in NODES:
            heartbeat = Heartbeat(
                node=node.address,
                boot_id="ab" * 32,
                sequence=self._count,
                sent_at_ms=int(self.now * 1000) + 1,
                block_hash=self._head(),
                queue_ms=self.random.randrange(200),
                resident=resident,
                vram_free_bytes=0,
                determinism=COMMON_CLASS,
            )
            event = ev.HeartbeatReceived(heartbeat, node.signing_key_hex)
            for life in self.lives:
                self.feed(life, event)
                rtt_ms = self.random.randint(1, 40)
                self.feed(life, ev.RttMeasured(node.address, rtt_ms))

    def _head(self) -> str:
        return f"0x{self._reorgs:032x}{self.block:032x}"  # another one after a reorganisation

    def _make_block(self) -> ev.BlockSeen:
        return ev.BlockSeen(self.block, self.block + 1_000_000, self._head())

    def _mine(self) -> None:
        self.block += 1
        pending, self._pending = self._pending, []
        for transaction in pending:
            transaction()
        if self._reorgs and self.block > 8 and self.random.random() < 0.2:
            self._reorganise()
        for life in self.lives:
            self.feed(life, self._make_block())

    def _emit(self, event: ev.Event) -> None:
        self._mined.append(_Mined(self.block, event))
        self.note(f"chain: {type(event).__name__}")
        for life in self.lives:
            self.after(self.random.uniform(0, 0.05), partial(self._tell, life, event))

    def _tell(self, life: Life, event: ev.Event) -> None:
        if any(mined.event is event for mined in self._mined):  # not undone in the meantime
            self.feed(life, event)

    def _reorganise(self) -> None:
        """Drop the last blocks; their transactions come again, requests in another block."""
        self._reorgs -= 1
        first = self.block - self.random.randint(0, 2)
        dropped = [mined for mined in self._mined if mined.block >= first]
        self._mined = [mined for mined in self._mined if mined.block < first]
        self.note(f"chain: {len(dropped)} events undone")
        for mined in reversed(dropped):
            event = mined.event
            match event:
                case ev.SnapshotAccepted():
                    accepted = [
                        m.event for m in self._mined if isinstance(m.event, ev.SnapshotAccepted)
                    ]
                    self._sequence, self._root = accepted[-1].sequence, accepted[-1].root
                case ev.PlanAccepted():
                    del self.plans[event.execution_id]
            for life in self.lives:
                self.feed(life, ev.EventReverted(event))  # type: ignore[arg-type]
        for mined in dropped:
            if isinstance(mined.event, ev.RequestSeen):
                number = int(mined.event.request.execution_id, 16)
                self._pending.append(partial(self._mine_request, number))

    def _request(self, number: int) -> None:
        self._pending.append(partial(self._mine_request, number))

    def _mine_request(self, number: int) -> None:
        if self._sequence == 0:  # nobody would ask before there are nodes
            self._pending.append(partial(self._mine_request, number))
            return
        self._emit(ev.RequestSeen(make_request(number, self.block, self._sequence, self._root)))

    def _execute(self, command: cmd.SubmitSnapshot | cmd.SubmitPlan) -> None:
        signers = [
            self.scheme.recover_signer(
                self.view.domain,
                _get_struct_hash(command, self.scheme),
                command.signatures[i:][:65],
            )
            for i in range(0, len(command.signatures), SIGNATURE_BYTES)
        ]
        if isinstance(command, cmd.SubmitSnapshot):
            if command.sequence != self._sequence + 1:
                return
            self.checker.note_quorum(f"snapshot {command.sequence}", signers, self.accounts)
            self._sequence, self._root = command.sequence, command.root
            self._emit(ev.SnapshotAccepted(1, command.sequence, command.root))
            return
        known = any(
            isinstance(m.event, ev.RequestSeen) and m.event.request.hash() == command.request.hash()
            for m in self._mined
        )
        if not known or command.execution_id in self.plans:
            return
        self.checker.note_quorum(f"plan {command.execution_id}", signers, self.accounts)
        self.plans[command.execution_id] = command.plan_root
        self._emit(ev.PlanAccepted(command.execution_id, command.plan_root))


_PLANS: OrderedDict[tuple[str, str, str], Plan] = OrderedDict()
_EXPOSED: OrderedDict[tuple[int, Economics], tuple[Plan, Plan]] = OrderedDict()


def compute_plan(request: Request, seed: str, snapshot: Snapshot, manifest: Manifest) -> Plan:
    """As ``selection.compute_plan``, once for all members: it is pure, and costly."""
    key = (request.once(_digest_request), seed, snapshot.root())
    if key not in _PLANS:
        _PLANS[key] = selection.compute_plan(request, seed, snapshot, manifest)
        while len(_PLANS) > 64:
            _PLANS.popitem(last=False)
    return _PLANS[key]


def add_exposures(plan: Plan, manifest: Manifest, snapshot: Snapshot, economics: Economics) -> Plan:
    """As ``exposure.add_exposures``, once for all members that hold the same plan."""
    key = (id(plan), economics)
    if key not in _EXPOSED:
        _EXPOSED[key] = (plan, exposure.add_exposures(plan, manifest, snapshot, economics))
        while len(_EXPOSED) > 64:
            _EXPOSED.popitem(last=False)
    return _EXPOSED[key][1]  # the plan is kept beside it, so that its id is nobody else's


def _digest_request(request: Request) -> str:
    return request.digest("request")


plan_agreement.compute_plan = compute_plan  # type: ignore[attr-defined]
plan_agreement.add_exposures = add_exposures  # type: ignore[attr-defined]


@cache
def make_request(number: int, block: int, sequence: int, root: str) -> Request:
    return Request(
        chain_id=CHAIN_ID,
        market=MARKET,
        execution_id=f"0x{number:064x}",
        model_id=MANIFEST.model_id,
        client=CLIENT,
        client_key="0x" + "cc" * 32,
        steps=4,
        max_price_micro_usdc=10**6,
        deadline=2_000_000,
        snapshot_sequence=sequence,
        snapshot_root=root,
        block_hash=f"0x{block:064x}",
        verify_bps=ECONOMICS.sampling_bps,
    )


def _get_struct_hash(command: cmd.SubmitSnapshot | cmd.SubmitPlan, scheme: Scheme) -> bytes:
    unsigned = {"member": CLIENT, "signature": "0x" + "00" * 65}
    if isinstance(command, cmd.SubmitPlan):
        return compute_vote_hash(
            PlanVote(
                configuration=1,
                execution_id=command.execution_id,
                request_hash=command.request.hash(),
                root=command.plan_root,
                seed=scheme.compute_seed(command.seed_signature),
                executors=command.executors,
                **unsigned,
            )
        )
    return compute_vote_hash(
        SnapshotVote(
            configuration=1,
            sequence=command.sequence,
            epoch=command.epoch,
            root=command.root,
            **unsigned,
        )
    )


def run_seed(seed: int) -> str:
    """Run one drawn history; return "" or how to replay the failure."""
    return run_scenario(make_scenario(seed), f"python -m tests.protocol.histories {seed}")


def run_scenario(scenario: Scenario, replay: str = "") -> str:
    """Run one history; return "" or how to replay the failure."""
    try:
        History(scenario).run()
    except Exception as error:
        return f"{replay or f'History({scenario}).run()'}   # {type(error).__name__}: {error}"
    return ""


def main() -> int:
    """Replay the seeds of the command line, one line per thing that happened."""
    failed = 0
    for seed in map(int, sys.argv[1:]):
        history = History(make_scenario(seed), verbose=True)
        print(history.scenario)
        try:
            history.run()
        except Exception as error:
            failed = 1
            history.notes.append(f"!!! {type(error).__name__}: {error}")
        print("\n".join(history.notes))
        print(f"history {seed}: {history.trace.hexdigest()}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
