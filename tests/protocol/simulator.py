"""A committee of machines, a chain and nodes in virtual time: one seed, one history.

Messages are delayed, lost, repeated and reordered by a seeded generator. The chain accepts what the
contracts would, and remembers it; after each run ``check`` asserts what must hold in every history.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

from splitup.core import tuning
from splitup.core.errors import PeerFault, Unavailable
from splitup.crypto import bls, keys, quorum
from splitup.crypto.jws import sign_jws, verify_jws
from splitup.crypto.keys import Identity
from splitup.graph.manifest import Manifest, TaskSource
from splitup.messages import api
from splitup.messages.base import CLIENT as CLIENT_TASK
from splitup.messages.base import ZERO_BYTES32, Message
from splitup.messages.completions import (
    EMPTY_DIGEST,
    Completion,
    End,
    ExecutorCommitment,
    SignedEnd,
    SignedTakeover,
    Takeover,
    Takeovers,
    TaskCommitment,
)
from splitup.messages.plans import Plan, PlanCertificate, SignedRequest
from splitup.messages.snapshots import Heartbeat, Snapshot
from splitup.messages.verification import (
    Ruling,
    ValidatorCommitment,
    VerificationOrder,
    VerificationResult,
)
from splitup.protocol.committee import commands as cmd
from splitup.protocol.committee import events as ev
from splitup.protocol.committee.certificates import (
    CommitteeView,
    check_certificate,
    check_draw,
    compute_plan_hash,
)
from splitup.protocol.committee.context import SIGNED, SigningGuard
from splitup.protocol.committee.peer_messages import DrawPartial, Equivocation
from splitup.protocol.execution.ends import sign_end
from splitup.protocol.execution.routes import get_sources
from splitup.protocol.execution.takeovers import sign_takeover
from splitup.protocol.member import CommitteeMember
from splitup.protocol.planning.exposure import Economics
from splitup.protocol.planning.signed_requests import SIGNED_REQUEST
from splitup.protocol.settlement.attestations import Attestations, check_attestation
from tests.builders import FOREIGN_CLASS, make_chain_manifest
from tests.protocol.committees import COMMITTEE, make_committee, make_identity, make_keys
from tests.protocol.simulated_chain import CLIENT as CLIENT
from tests.protocol.simulated_chain import CLIENT_IDENTITY as CLIENT_IDENTITY
from tests.protocol.simulated_chain import Node as Node
from tests.protocol.simulated_chain import SimulatedChain

TICK_S = 0.05  # of members
M = TypeVar("M", bound=Message)

GRACE_S = 60
VERIFY_ALL = Economics(sampling_bps=10_000, reward_milli=1_200, slash_milli=100_000)
VERIFY_NONE = Economics(sampling_bps=0, reward_milli=1_200, slash_milli=100_000)


# Once for all members of a simulation: they are pure. What does not verify raises, and is not kept.
bls.verify_signature = lru_cache(1_024)(bls.verify_signature)
keys.verify_raw = lru_cache(4_096)(keys.verify_raw)
quorum.recover_signer = lru_cache(4_096)(quorum.recover_signer)


@dataclass(slots=True)
class Network:
    """How badly messages between parties travel."""

    loss: float = 0.0
    repeat: float = 0.0
    delay_ms: tuple[int, int] = (1, 5)


class Simulation(SimulatedChain):
    """n members, some nodes, one chain. ``run`` advances virtual time."""

    def __init__(
        self,
        seed: int = 0,
        *,
        size: int = 4,
        nodes: int = 6,
        tasks: int = 3,
        network: Network | None = None,
        economics: Economics | None = None,
        manifest: Manifest | None = None,
        held: int | None = None,
    ) -> None:
        """The nodes hold the first ``held`` tasks, by default all."""
        super().__init__(100.0)
        self.random = random.Random(seed)
        self.network = network or Network()
        self.economics = economics or Economics(800, 1200, 100_000)
        self.manifest: Manifest = manifest or make_chain_manifest(tasks)
        self.identities, self.view = make_committee(size)
        self.group, self.shares = make_keys(size)
        self.full_view = CommitteeView(
            1, self.view.members, self.view.quorum, self.group.public_key, self.view.domain
        )
        self.nodes = [Node(make_identity(2000 + i)) for i in range(nodes)]
        self.by_node = {node.address: node for node in self.nodes}
        self.down: set[str] = set()
        self.faults: list[cmd.Fault] = []
        self.logs: list[str] = []
        self.evidence: list[Equivocation] = []
        self.certificates: dict[str, dict[str, PlanCertificate]] = {}
        self.pushes: Counter[str] = Counter()
        self.orders: list[VerificationOrder] = []
        self.ordered: list[tuple[str, str]] = []  # execution, validator
        self.lies_at: set[tuple[str, int]] | None = None  # where liars lie: everywhere
        self.broken: Callable[[Plan], Collection[str]] = lambda plan: ()  # whom the client replaces
        self.client = "honest"  # or its end is false, two-faced, or hasty: without digests
        self.held = held
        self.told = size  # how many members hear of takeovers before the commitments
        self.paused: dict[str, float] = {}  # node -> until when it says nothing
        self.unable: set[str] = set()  # members that cannot recompute
        self.compared_classes = {FOREIGN_CLASS}  # in which members do not compute
        self.recomputed: Counter[tuple[str, int]] = Counter()
        self.journals: dict[str, dict[tuple[str, str], object]] = {
            m.address: {} for m in self.identities
        }
        self.tamper: dict[str, Callable[[Message], Message]] = {}  # member -> what it says instead
        self._chosen: tuple[Any, frozenset[str], tuple[str, ...]] = (None, frozenset(), ())
        self.members: dict[str, CommitteeMember] = {}
        for place in range(size):
            self.start_member(place)
        self.every(1.0, self._mine)
        self.every(TICK_S, self._tick)
        self.every(1.0, self._beat)
        self.every(5.0, self._read_registry)
        self._beat()

    # ---- time -------------------------------------------------------------------------------

    def skip(self, seconds: float) -> None:
        """Let time pass in which nothing happens: all that is due comes so much later."""
        self.now += seconds
        self._queue = [(at + seconds, count, action) for at, count, action in self._queue]

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        end = self.now + seconds
        self.advance(end, until)
        if until():
            return True
        self.now = end
        return until()

    # ---- members ----------------------------------------------------------------------------

    def start_member(self, place: int) -> None:
        """Start a member, or start it again from its journal and the chain's events."""
        identity = self.identities[place]
        journal = self.journals[identity.address]
        member = CommitteeMember(
            identity,
            self.view,
            self.economics,
            read_token,
            grace_s=GRACE_S,
            signing_guard=SigningGuard(
                {k: v for (kind, k), v in journal.items() if kind == SIGNED}  # type: ignore[misc]
            ),
            signed_requests=[
                SignedRequest.from_value(v)
                for (kind, _), v in journal.items()
                if kind == SIGNED_REQUEST
            ],
            snapshots=[
                Snapshot.from_value(v) for (kind, _), v in journal.items() if kind == "snapshot"
            ],
        )
        self.members[identity.address] = member
        self.down.discard(identity.address)
        feed = partial(self.feed, identity.address)
        feed(ev.SnapshotAccepted(1, self.chain.sequence, self.chain.root))
        feed(ev.NodesSeen(tuple(self._records())))
        feed(self._make_block())
        feed(ev.ManifestFetched(self.manifest))
        feed(ev.KeyReady(self.group, self.shares[place]))
        for event in list(self.chain.log):
            feed(event)

    def feed(self, account: str, event: ev.Event) -> None:
        if account in self.down:
            return
        try:
            commands = self.members[account].handle(event, self.now)
        except PeerFault as error:
            sender = event.sender if isinstance(event, ev.GossipReceived) else error.peer
            self.faults.append(cmd.Fault(sender, str(error)))
            return
        except Unavailable:
            return
        for command in commands:
            self._carry_out(account, command)
        for execution_id in list(self.chain.plans):
            self._note_certificate(account, execution_id)

    def _note_certificate(self, account: str, execution_id: str) -> None:
        certificate = self.members[account].plans.find_certificate(execution_id)
        if certificate is not None:
            self.certificates.setdefault(execution_id, {})[account] = certificate

    def _carry_out(self, account: str, command: cmd.Command) -> None:
        match command:
            case cmd.Gossip():
                others = [a for a in self.members if a != account]
                message = command.message
                if isinstance(message, DrawPartial):
                    known = message.execution_id in self.chain.agreed
                    assert known, "a share of a draw before the chain holds every commitment"
                if account in self.tamper:
                    message = self.tamper[account](message)
                for to in [command.to] if command.to else others:
                    event = ev.GossipReceived(account, message)
                    self._send(partial(self.feed, to, event))
            case cmd.Persist():
                self.journals[account][command.kind, command.key] = dict(command.value)
            case cmd.Forget():
                self.journals[account].pop((command.kind, command.key), None)
            case cmd.PushPlan():
                self._push(account, command)
            case cmd.PushVerification():
                self._order(command)
            case cmd.RecomputeTask():
                self.after(0.2, partial(self._recompute, account, command))
            case (
                cmd.SubmitSnapshot()
                | cmd.SubmitPlan()
                | cmd.SubmitCommitments()
                | cmd.SubmitSettlement()
            ):
                self._pending.append(partial(self._execute, command))
            case cmd.FetchSnapshot():
                self.after(0.01, partial(self._fetch_snapshot, account, command.root))
            case cmd.AnnouncePlan():
                self._note_certificate(account, command.execution_id)
            case cmd.Fault():
                self.faults.append(command)
            case cmd.Log():
                self.logs.append(command.message)
            case cmd.SubmitEvidence():
                self.evidence.append(command.evidence)
            case cmd.FetchManifest():
                raise AssertionError("every member has the manifest")

    def _send(self, deliver: Callable[[], None]) -> bool:
        """Send something; return whether it will arrive."""
        low, high = self.network.delay_ms
        copies = 2 if self.random.random() < self.network.repeat else 1
        arrives = False
        for _ in range(copies):
            if self.random.random() >= self.network.loss:
                self.after(self.random.uniform(low, high) / 1000, deliver)
                arrives = True
        return arrives

    def _fetch_snapshot(self, account: str, root: str) -> None:
        for other, member in self.members.items():
            snapshot = member.contents.find_snapshot(root)
            if other not in self.down and snapshot is not None:
                self.feed(account, ev.SnapshotFetched(snapshot))
                return

    def _tick(self) -> None:
        for account, member in self.members.items():
            if member.get_next_s(self.now) <= self.now:  # as its process does
                self.feed(account, ev.Tick())

    # ---- nodes ------------------------------------------------------------------------------

    def _beat(self) -> None:
        resident = tuple(sorted(task.task_id for task in self.manifest.tasks[: self.held]))
        for node in self.nodes:
            node.sequence += 1
            heartbeat = Heartbeat(
                node=node.address,
                boot_id="ab" * 32,
                sequence=node.sequence,
                sent_at_ms=int(self.now * 1000),
                block_hash=ZERO_BYTES32,
                queue_ms=0,
                resident=resident,
                vram_free_bytes=node.vram_free_bytes,
                determinism=node.determinism,
            )
            for account in self.members:
                self._send(partial(self._hear, account, node, heartbeat))
                rtt = ev.RttMeasured(node.address, self.random.randint(1, 3))
                self._send(partial(self.feed, account, rtt))

    def _hear(self, account: str, node: Node, beat: Heartbeat, again: bool = False) -> None:
        """A beat names the block that this member named last, and once more the one it names."""
        member = self.members[account]
        head = node.heads.get(account, member.nodes.heads.head)  # it was up before we look
        named = beat.model_copy(update={"block_hash": head})
        node.heads[account] = member.nodes.heads.head
        if again or member.nodes.may_name(head, self.now):
            self.feed(account, ev.HeartbeatReceived(named, node.identity.signing_key_hex))
        else:
            self._send(partial(self._hear, account, node, beat, again=True))

    def _push(self, account: str, command: cmd.PushPlan) -> None:
        """Post the plan to its nodes; a request or an answer that is lost ends in a timeout."""
        certificate, network = command.certificate, self.network
        execution_id = certificate.plan.request.execution_id
        self.pushes[execution_id] += 1
        answered = []
        for entry in command.nodes:
            arrived = self._send(partial(self._run_plan, self.by_node[entry.node], certificate))
            if arrived and self.random.random() >= network.loss:
                answered.append(entry.node)
        unreached = tuple(n.node for n in command.nodes if n.node not in answered)
        after_s = tuning.RTT_TIMEOUT_S if unreached else 2 * network.delay_ms[1] / 1000
        self.after(after_s, partial(self.feed, account, ev.PlanPushed(execution_id, unreached)))

    def _run_plan(self, node: Node, certificate: PlanCertificate) -> None:
        """Compute, pledge, see that a block holds it, then reveal to all members when it is due."""
        execution_id = certificate.plan.request.execution_id
        if execution_id in node.plans:
            return
        check_certificate(certificate, self.full_view)
        node.plans[execution_id] = certificate
        executors = self.find_executors(certificate.plan)
        entries = tuple(
            TaskCommitment(
                task=task,
                inputs=self._read_inputs(execution_id, certificate.plan, task)
                if not node.misstates_inputs
                else tuple(digest("nobody's", n) for n in self.manifest.tasks[task].inputs),
                outputs=self._claim(execution_id, certificate.plan, task),
                state=digest("corrupt" if node.corrupts_state else "state", execution_id, task),
            )
            for task, executor in enumerate(executors)
            if executor == node.address
        )
        if not entries:
            return
        takeovers = self._sign_takeovers(certificate.plan, [entry.task for entry in entries])
        completion = Completion(
            execution_id=execution_id,
            node=node.address,
            tasks=entries,
            takeovers=() if node.forgets_takeovers else takeovers,
            salt="0x" + digest("salt", execution_id, 0),
            end=self._sign_end(certificate.plan, entries[0].task),
        )
        if takeovers:
            told = Takeovers(execution_id=execution_id, node=node.address, takeovers=takeovers)
            event = ev.ReportReceived(told, node.identity.signing_key_hex)
            for account in list(self.members)[: self.told]:
                for attempt in range(5):
                    self.after(attempt, partial(self._send, partial(self.feed, account, event)))

        if not node.withholds_commitment:
            self._commitment(node, completion, takeovers)
        if not node.withholds_completion:
            reveal = ev.ReportReceived(completion, node.identity.signing_key_hex)
            self.after(0.05, partial(self._when_due, node, execution_id, None, reveal))

    def _commitment(
        self, node: Node, completion: Completion, takeovers: tuple[SignedTakeover, ...]
    ) -> None:
        """Tell all members, a few times, what the node commits to."""
        commitment = ExecutorCommitment(
            execution_id=completion.execution_id,
            node=node.address,
            root=completion.root(),
            end=completion.end,
            takeovers=takeovers,
        )
        for account in self.members:
            told = commitment
            if node.two_faced:
                told = told.model_copy(update={"root": "0x" + digest("face", account)})
            event = make_commitment_event(node.identity, told)
            for attempt in range(3):
                self.after(attempt, partial(self._send, partial(self.feed, account, event)))

    def find_executors(self, plan: Plan) -> tuple[str, ...]:
        """Return who runs every task: the first candidate that has not failed."""
        broken = frozenset(self.broken(plan))
        tasks, known, executors = self._chosen  # a chain of tasks asks again for each
        if tasks is not plan.tasks or known != broken:
            executors = tuple(
                next(node for node in candidates if node not in broken) for candidates in plan.tasks
            )
            self._chosen = plan.tasks, broken, executors
        return executors

    def _sign_end(self, plan: Plan, task: int) -> SignedEnd:
        """Return what the client tells the node that runs a task."""
        execution_id = plan.request.execution_id
        sent = digest("in", execution_id)
        said = {"two-faced": digest("in", task), "false": digest("in", "other")}
        inputs = () if self.client == "hasty" else (said.get(self.client, sent),)
        inputs *= len(self.manifest.inputs)
        return make_signed_end(execution_id, plan.request.steps, inputs=inputs)

    def _sign_takeovers(self, plan: Plan, tasks: Sequence[int]) -> tuple[SignedTakeover, ...]:
        executors, execution_id = self.find_executors(plan), plan.request.execution_id
        places = [(task, plan.tasks[task].index(executors[task])) for task in tasks]
        return tuple(
            sign_takeover(
                CLIENT_IDENTITY,
                Takeover(execution_id=execution_id, task=task, candidate=place, first_step=0),
            )
            for task, place in places
            if place
        )

    def _read_inputs(self, execution_id: str, plan: Plan, task: int) -> tuple[str, ...]:
        """Return the digests of what a task is given: what its producers say they computed."""
        return tuple(
            self._claim(execution_id, plan, entry.source.task)[0]
            if isinstance(entry.source, TaskSource)
            else digest("in", execution_id)
            for entry in self.manifest.tasks[task].inputs
        )

    def _find_hidden(self, plan: Plan, task: int) -> tuple[int, ...]:
        """Return the tasks whose outputs a task needs and nobody finds in the store."""
        executors = self.find_executors(plan)
        sources = {source for source, _ in get_sources(self.manifest, task)} - {CLIENT_TASK}
        return tuple(s for s in sorted(sources) if self.by_node[executors[s]].hides_outputs)

    def _read_store(self, execution_id: str, plan: Plan, task: int) -> tuple[str, ...]:
        """Return the digests of a task's inputs as they are in the store."""
        executors = self.find_executors(plan)
        return tuple(
            digest("other", source)
            if source[0] != CLIENT_TASK and self.by_node[executors[source[0]]].stores_others
            else read
            for source, read in zip(
                get_sources(self.manifest, task),
                self._read_inputs(execution_id, plan, task),
                strict=True,
            )
        )

    def _compute(self, execution_id: str, plan: Plan, task: int) -> tuple[str, ...]:
        """Return the right output for what a task is given."""
        return (digest("out", task, self._read_inputs(execution_id, plan, task)),)

    def _compute_on(self, node: Node, execution_id: str, plan: Plan, task: int) -> tuple[str, ...]:
        """Return what an honest node gets on its device."""
        right = self._compute(execution_id, plan, task)
        driver = "other GPU" if node.has_other_driver else "GPU"
        return tuple(digest(out, driver) for out in right) if node.is_foreign else right

    def _claim(self, execution_id: str, plan: Plan, task: int) -> tuple[str, ...]:
        """Return what its executor says that a task gave."""
        lies = self.by_node[self.find_executors(plan)[task]].lies
        if lies and (self.lies_at is None or (execution_id, task) in self.lies_at):
            return (digest("lie", execution_id, task),)
        executor = self.by_node[self.find_executors(plan)[task]]
        return self._compute_on(executor, execution_id, plan, task)

    def verified_by(self, execution_id: str) -> list[tuple[int, str]]:
        """Return (task, node) of all that recomputed a task of an execution."""
        return [
            (task, node.address)
            for node in self.nodes
            for execution, task in node.verified
            if execution == execution_id
        ]

    def pause(self, node: str, seconds: float) -> None:
        """Let a node say nothing for a while, as one that crashed and is started again."""
        self.paused[node] = self.now + seconds

    def find_outcomes(self, execution_id: str) -> dict[int, str]:
        """Return how the verification of every drawn task ended."""
        for member in self.members.values():
            evidence = member.settlements.find_evidence(execution_id)
            if evidence is not None:
                return {verdict.task: verdict.outcome for verdict in evidence.verdicts}
        raise AssertionError("no member has seen it settled")

    def _when_due(
        self,
        node: Node,
        execution_id: str,
        own: ValidatorCommitment | None,
        event: ev.Event,
    ) -> None:
        """Ask the members until 2f+1 say that reveals are due, then reveal to all."""
        attestations = Attestations(self.view.quorum)

        def ask() -> None:
            for account, member in self.members.items():
                lost = self.random.random() < self.network.loss
                signed = member.settlements.find_attestation(execution_id)
                if account not in self.down and not lost and signed is not None:
                    check_attestation(signed, self.view)
                    attestations.add(signed)
            awake = self.now >= self.paused.get(node.address, 0.0)
            fixed = own is None or attestations.find_fixed(own.task, own.validator) == own.root
            if not attestations.is_due() or not fixed or not awake:
                if execution_id not in self.chain.settlements:
                    self.after(0.5, ask)
                return
            for account in self.members:
                for attempt in range(5):
                    self.after(attempt, partial(self._send, partial(self.feed, account, event)))

        ask()

    def _recompute(self, account: str, command: cmd.RecomputeTask) -> None:
        order = command.order
        execution_id, task = order.draw.execution_id, order.task
        self.recomputed[execution_id, task] += 1
        plan, found = order.certificate.plan, account not in self.unable
        missing = self._find_hidden(plan, task) if found else ()
        able = found and not missing
        ruling = Ruling(
            task=task,
            inputs=self._read_store(execution_id, plan, task) if able else (),
            outputs=self._compute(execution_id, plan, task) if able else (),
            state=digest("state", execution_id, task) if able else EMPTY_DIGEST,
            error="" if found else "another determinism class",
            missing=missing,
        )
        rulings = (ruling,)
        if able and command.determinism in self.compared_classes:  # within a tolerance
            assert self.manifest.tasks[task].crosses_classes
            rulings = self._compare(ruling, command)
        self.feed(account, ev.TaskRecomputed(execution_id, rulings))

    def _compare(self, found: Ruling, command: cmd.RecomputeTask) -> tuple[Ruling, ...]:
        """Return the rulings on the executor's claim and on those of validators."""
        rulings = []
        for claim in command.claims:
            plan, validator = command.order.certificate.plan, None
            author = self.find_executors(plan)[found.task]
            if isinstance(claim, VerificationResult):
                author = validator = claim.validator
            hides = self.by_node[author].hides_outputs
            right = self._accepts(command, found, author, claim.outputs) and not hides
            rulings.append(
                found.model_copy(
                    update={
                        "outputs": claim.outputs if right else (),
                        "state": claim.state,
                        "compared": True,
                        "validator": validator,
                        "missing": (found.task,) if hides else (),
                    }
                )
            )
        return tuple(rulings)

    def _accepts(
        self, command: cmd.RecomputeTask, found: Ruling, author: str, outputs: tuple[str, ...]
    ) -> bool:
        """Return whether what a node of another class claims is near what a member found."""
        devices = ("GPU", "other GPU")
        return outputs in [tuple(digest(out, one) for out in found.outputs) for one in devices]

    def _order(self, command: cmd.PushVerification) -> None:
        self.ordered.append((command.order.draw.execution_id, command.node))
        self._send(partial(self._verify, self.by_node[command.node], command.order))

    def _verify(self, node: Node, order: VerificationOrder) -> None:
        execution_id = order.draw.execution_id
        if node.mute_validator or (execution_id, order.task) in node.verified:
            return
        check_draw(order.draw, self.full_view)
        node.verified.add((execution_id, order.task))
        self.orders.append(order)
        plan, right = order.certificate.plan, not node.false_accuser
        hidden = self._find_hidden(plan, order.task)
        result = VerificationResult(
            execution_id=execution_id,
            task=order.task,
            validator=node.address,
            inputs=() if hidden else self._read_store(execution_id, plan, order.task),
            outputs=self._compute_on(node, execution_id, plan, order.task)
            if right
            else ("0" * 64,),
            state=digest("state", execution_id, order.task),
            salt="0x" + digest("salt", execution_id, order.task, node.address),
            error="its inputs are not in the store" if hidden else "",
        )
        validator_commitment = ValidatorCommitment(
            execution_id=execution_id, task=order.task, validator=node.address, root=result.root()
        )
        token = sign_token(node.identity, api.VERIFICATION_RESULT, result)
        key = node.identity.signing_key_hex
        if hidden:  # an excuse is not committed to
            for account in self.members:
                self._send(partial(self.feed, account, ev.ReportReceived(result, key, token)))
            return
        for account in self.members:
            event = ev.ReportReceived(validator_commitment, key)
            for attempt in range(5):
                self.after(attempt, partial(self._send, partial(self.feed, account, event)))
        if not node.withholds_result:
            self._when_due(
                node,
                execution_id,
                validator_commitment,
                ev.ReportReceived(result, key, token),
            )

    def find_plan(self, execution_id: str) -> Plan:
        """Return the plan that members certified."""
        return next(iter(self.certificates[execution_id].values())).plan

    def get_paid(self, execution_id: str) -> dict[str, int]:
        """Return what each account got of the price, in micro-USDC."""
        payments = self.chain.settlements[execution_id].payments
        return {p.account: p.amount_micro_usdc for p in payments if not p.from_slash}

    # ---- what must hold -----------------------------------------------------------------------

    def is_settled(self, *execution_ids: str) -> bool:
        return all(execution_id in self.chain.settlements for execution_id in execution_ids)

    def check(self) -> None:
        """Assert the invariants of every history."""
        for certificates in self.certificates.values():
            assert len({c.plan.root() for c in certificates.values()}) == 1
            for certificate in certificates.values():
                check_certificate(certificate, self.full_view)
                assert compute_plan_hash(certificate.plan, self.view.configuration)
        for execution_id, settlement in self.chain.settlements.items():
            paid = sum(self.get_paid(execution_id).values())
            assert paid <= self.find_plan(execution_id).request.max_price_micro_usdc
            liars = {n.address for n in self.nodes if n.is_dishonest}
            assert {s.node for s in settlement.slashes} <= liars, "an honest node was slashed"


def digest(*parts: object) -> str:
    import hashlib

    return hashlib.sha256(repr(parts).encode()).hexdigest()


def make_signed_end(
    execution_id: str, steps: int, client: Identity = CLIENT_IDENTITY, inputs: tuple[str, ...] = ()
) -> SignedEnd:
    return sign_end(client, End(execution_id=execution_id, steps=steps, inputs=inputs))


def sign_token(identity: Identity, route: api.Route[M], message: M) -> str:
    body = message.model_dump(mode="json")
    return sign_jws(identity, typ=route.typ, audience=COMMITTEE, body=body, now_s=0)


@lru_cache(4_096)
def read_token(route: api.Route[M], token: str) -> tuple[M, str]:
    claims = verify_jws(token, typ=route.typ, audience=COMMITTEE, now_s=None)
    return route.parse(claims.body), claims.issuer


def make_commitment_event(identity: Identity, commitment: ExecutorCommitment) -> ev.ReportReceived:
    token = sign_token(identity, api.EXECUTOR_COMMITMENT, commitment)
    return ev.ReportReceived(commitment, identity.signing_key_hex, token)


def start(seed: int = 1, **options: object) -> Simulation:
    """A simulation with its first snapshot on chain."""
    simulation = Simulation(seed, **options)  # type: ignore[arg-type]
    assert simulation.run(20, lambda: simulation.chain.sequence >= 1)
    return simulation


def settle(simulation: Simulation, *execution_ids: str, within_s: float = 60) -> None:
    assert simulation.run(within_s, lambda: simulation.is_settled(*execution_ids)), (
        simulation.logs[-5:],
        simulation.faults[-5:],
    )
    simulation.run(3)
    simulation.check()


def get_slashes(simulation: Simulation, execution_id: str) -> dict[str, int]:
    settlement = simulation.chain.settlements[execution_id]
    return {slash.node: slash.amount_micro_usdc for slash in settlement.slashes}
