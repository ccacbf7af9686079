"""What client and nodes do in an execution: tensors, logs, takeovers, commitments, verification.

Tensors are digests that depend on everything a task has read so far. All that a party sends goes
through the world, where the adversary may change it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Annotated, Final

from pydantic import Field

from splitup.core import limits, tuning
from splitup.core.errors import PeerFault
from splitup.core.tensors import NO_STEPS, extend_steps
from splitup.crypto import quorum
from splitup.crypto.jws import sign_jws
from splitup.crypto.keys import Identity
from splitup.messages import api
from splitup.messages.base import CLIENT as CLIENT_TASK
from splitup.messages.base import ZERO_BYTES32, AddressField, Bytes32Field, DigestField, Message
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
from splitup.messages.frames import Frame, FrameKind, Seal, make_delivery
from splitup.messages.plans import Plan, PlanCertificate, Request, SignedRequest
from splitup.messages.verification import (
    Ruling,
    ValidatorCommitment,
    VerificationOrder,
    VerificationResult,
)
from splitup.protocol.committee import commands as cmd
from splitup.protocol.committee import events as ev
from splitup.protocol.committee.certificates import check_certificate, check_draw
from splitup.protocol.execution.ends import check_end, sign_end
from splitup.protocol.execution.routes import get_sources
from splitup.protocol.execution.takeovers import ExecutorMap, sign_takeover
from splitup.protocol.planning.signed_requests import sign_request
from splitup.protocol.planning.validators import check_validators
from splitup.protocol.settlement.attestations import Attestations
from splitup.protocol.settlement.proof_of_sampling import compute_exposure, is_sampled
from tests.protocol.adversary.market import START_S
from tests.protocol.adversary.world import CHEAP, CLIENT, NODES, World
from tests.protocol.committees import CHAIN_ID, COMMITTEE
from tests.protocol.simulator import MARKET

LATE_S: Final = 1.0  # a tensor that comes later has been replaced by then
BY_ADDRESS: Final = {node.address: node for node in NODES}
Tensors = tuple[str, ...]  # of one port, one digest a step


class SentTensors(Message):
    """A port's tensors of all steps, as frames carry them from ``node`` to one reader."""

    execution_id: Bytes32Field
    node: AddressField
    task: Annotated[int, Field(ge=0, le=CLIENT_TASK)]
    port: int
    tensors: tuple[DigestField, ...] = Field(max_length=limits.MAX_STEPS)


class LoggedTensors(SentTensors):
    """A port's tensors of all steps, as the store holds them."""


class MadeTensors(SentTensors):
    """A port's tensors of all steps, as an executor says that it computed them."""


class OwnCommitment(Message):
    """An executor's own transaction."""

    execution_id: Bytes32Field
    steps: Annotated[int, Field(ge=1, le=limits.MAX_STEPS)]
    root: Bytes32Field
    exposure_micro_usdc: Annotated[int, Field(ge=0, lt=2**96)]


@dataclass(slots=True)
class Work:
    """What a node read and gave for a task; ``right`` is what follows from what it read."""

    inputs: tuple[Tensors, ...]
    outputs: Tensors
    right: Tensors


@dataclass(slots=True)
class Run:
    """One execution as its client and nodes know it."""

    certificate: PlanCertificate
    executors: ExecutorMap
    attestations: Attestations
    work: dict[tuple[int, str], Work] = field(default_factory=dict)  # by task and node
    store: dict[tuple[int, str], Tensors] = field(default_factory=dict)  # by task and author
    received: dict[int, Tensors] = field(default_factory=dict)  # by the client, by task
    sources: dict[tuple[int, str], tuple[str, ...]] = field(default_factory=dict)  # whose tensors
    takeovers: list[SignedTakeover] = field(default_factory=list)
    told: dict[str, SignedEnd] = field(default_factory=dict)  # by node
    completions: dict[str, Completion] = field(default_factory=dict)  # as committed to
    results: dict[tuple[int, str], VerificationResult] = field(default_factory=dict)
    ordered: dict[tuple[int, str], int] = field(default_factory=dict)  # steps, by task and node
    waiting: list[tuple[str, Message, ValidatorCommitment | None]] = field(default_factory=list)
    computed: bool = False  # by nodes

    @property
    def plan(self) -> Plan:
        return self.certificate.plan

    @property
    def id(self) -> str:
        return self.plan.request.execution_id


class Parties:
    """The client, and all nodes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.runs: dict[str, Run] = {}
        world.certified = self._begin
        world.pushed = self._take_push
        world.recompute = self._recompute

    # ---- the client's request ---------------------------------------------------------------

    def ask(self) -> None:
        """Request an execution, on chain or with a signature."""
        world, setting = self.world, self.world.setting
        market, steps = world.market, setting.steps
        world.market.balances[CLIENT.address] = 10**7
        world.market.frozen_until[CLIENT.address] = 2**50
        price = market.quote(steps) if setting.registered_low else market.quote(steps) + 5

        def make(later_s: float) -> Request:
            return Request(
                chain_id=CHAIN_ID,
                market=MARKET,
                execution_id=quorum.compute_execution_id(CHAIN_ID, MARKET, CLIENT.address, 7),
                model_id=world.manifest.model_id,
                client=CLIENT.address,
                client_key=CLIENT.signing_key_hex,
                steps=steps,
                max_price_micro_usdc=price,
                deadline=START_S + int(world.now + later_s) + setting.deadline_s,
                snapshot_sequence=1,
                snapshot_root=world.snapshot.root(),
                block_hash=ZERO_BYTES32,
                nonce=7,
            )

        if not setting.is_signed:
            world.send(CLIENT.address, make(0), self._open, again=make)
            return
        signed = sign_request(CLIENT, make(0))
        for account in world.members:
            world.send(
                CLIENT.address,
                signed,
                lambda m, a=account: self._sign_up(a, m),
                again=lambda later_s: sign_request(CLIENT, make(later_s)),
            )

    def _open(self, request: Message) -> None:
        assert isinstance(request, Request)
        place = request.nonce
        fixed = {
            "chain_id": CHAIN_ID,
            "market": MARKET,
            "client": CLIENT.address,
            "execution_id": quorum.compute_execution_id(CHAIN_ID, MARKET, CLIENT.address, place),
            "snapshot_sequence": 1,
            "snapshot_root": self.world.snapshot.root(),
        }  # the contract sets these itself
        request = request.model_copy(update=fixed)
        self.world.transact(partial(self.world.market.try_request, request))

    def _sign_up(self, account: str, signed: Message) -> None:
        assert isinstance(signed, SignedRequest)
        self.world.take_signed_request(account, signed)

    # ---- steps ------------------------------------------------------------------------------

    def _begin(self, certificate: PlanCertificate) -> None:
        """Run all steps of a certified execution, then end it."""
        world = self.world
        if certificate.plan.request.model_id != world.manifest.model_id:
            return
        attestations = Attestations(world.view.quorum)
        run = Run(certificate, ExecutorMap(certificate.plan), attestations)
        self.runs[run.id] = run
        self._control(run)
        used = min(world.setting.used, run.plan.request.steps)
        sent = tuple(digest("in", run.id, step) for step in range(used))
        self._log(run, CLIENT.address, CLIENT_TASK, sent)
        fails = world.setting.fails
        for task in range(len(world.manifest.tasks)):
            if task == fails and not self._replace(run, task):
                return
            if not self._deliver(run, task, sent, tries=4):
                return
        for task, node in enumerate(run.executors.executors):  # named late
            if (task, node) not in run.work and not self._deliver(run, task, sent, tries=4):
                return
        self._end(run, sent)

    def _control(self, run: Run) -> None:
        """Give the adversary the accounts of its part in this execution."""
        adversary, executors = self.world.adversary, run.plan.executors()
        if adversary.party == "executor" and not adversary.accounts:
            adversary.accounts.add(adversary.random.choice(executors))
        if adversary.party == "validator" and not adversary.accounts:
            others = sorted(BY_ADDRESS.keys() - set(executors))
            adversary.accounts.update(others[: adversary.random.choice((1, 2))])

    def _deliver(self, run: Run, task: int, sent: Tensors, tries: int) -> bool:
        """Have a task's executor compute all steps; replace producers that do not deliver."""
        manifest = self.world.manifest
        node = run.executors.executors[task]
        while True:
            inputs, producers = [], []
            short = None
            for source, _ in get_sources(manifest, task):
                author = CLIENT.address if source == CLIENT_TASK else run.executors.get_author(source)
                tensors = sent if source == CLIENT_TASK else self._get_outputs(run, source, author)
                got = self._send_tensors(run, author, source, tensors, node)
                producers.append(author)
                inputs.append(got[: run.plan.request.steps])
                if len(got) < len(sent):
                    short = source
            if short is None:
                break
            if short == CLIENT_TASK or not tries or not self._replace(run, short):
                return False
            tries -= 1
            if not self._deliver(run, short, sent, tries):
                return False
        steps = min(map(len, inputs))
        read = tuple(tensors[:steps] for tensors in inputs)
        right = compute(task, read)
        outputs = self._claim(run, node, task, right)
        run.work[task, node] = Work(read, outputs, right)
        run.sources[task, node] = tuple(producers)
        run.computed = True
        self._log(run, node, task, outputs)
        if any(port.task == task for port in manifest.outputs):
            got = self._send_tensors(run, node, task, outputs, CLIENT.address)
            if len(got) < len(sent):
                if not tries or not self._replace(run, task):
                    return False
                return self._deliver(run, task, sent, tries - 1)
            run.received[task] = got[: len(sent)]
        return True

    def _get_outputs(self, run: Run, task: int, node: str) -> Tensors:
        """Return what a task's executor has to send; nothing before it has computed it."""
        work = run.work.get((task, node))
        return () if work is None else work.outputs

    def _claim(self, run: Run, node: str, task: int, right: Tensors) -> Tensors:
        made = MadeTensors(execution_id=run.id, node=node, task=task, port=0, tensors=right)
        claimed = self.world.adversary.make(node, made)
        assert isinstance(claimed, MadeTensors)
        return claimed.tensors

    def _send_tensors(
        self, run: Run, author: str, task: int, tensors: Tensors, reader: str
    ) -> Tensors:
        """Return what the reader takes: of every step the first tensor that comes in time."""
        message = SentTensors(execution_id=run.id, node=author, task=task, port=0, tensors=tensors)
        via = self.world.via_relay(reader) if reader != CLIENT.address else ""
        got: Tensors = ()
        for delay_s, copy in sorted(
            self.world.adversary.send(author, message, via), key=lambda found: found[0]
        ):
            assert isinstance(copy, SentTensors)
            name = copy.execution_id, copy.node, copy.task, copy.port
            if delay_s <= LATE_S and name == (run.id, author, task, 0):
                got += copy.tensors[len(got) :]
        return got

    def _log(self, run: Run, author: str, task: int, tensors: Tensors) -> None:
        """Store a port's tensors; an object can be written once, by its author."""
        message = LoggedTensors(
            execution_id=run.id, node=author, task=task, port=0, tensors=tensors
        )
        for delay_s, copy in self.world.adversary.send(author, message):
            assert isinstance(copy, LoggedTensors)
            if (copy.execution_id, copy.node, copy.port) == (run.id, author, 0):
                self.world.after(
                    delay_s, partial(run.store.setdefault, (copy.task, author), copy.tensors)
                )

    def _replace(self, run: Run, task: int) -> bool:
        """Name the next candidate of a task as its executor; return False when none is left."""
        plan = run.plan
        place = plan.tasks[task].index(run.executors.executors[task]) + 1
        if place >= len(plan.tasks[task]):
            return False
        takeover = Takeover(execution_id=run.id, task=task, candidate=place, first_step=0)
        before = run.executors.executors
        for _, copy in self.world.adversary.send(CLIENT.address, sign_takeover(CLIENT, takeover)):
            assert isinstance(copy, SignedTakeover)
            try:
                if run.executors.apply(copy):
                    run.takeovers.append(copy)
            except PeerFault:
                self.world.refused["takeover"] += 1
        return run.executors.executors != before

    # ---- the end ----------------------------------------------------------------------------

    def _end(self, run: Run, sent: Tensors) -> None:
        """Tell every executor that no step follows, and what was sent."""
        end = self._make_end(run, sent)
        signed = sign_end(CLIENT, end)
        for node in sorted(set(run.executors.executors)):
            self.world.send(
                CLIENT.address,
                signed,
                lambda m, n=node: self._take_end(run, n, m),
                self.world.via_relay(node),
            )

    def _make_end(self, run: Run, sent: Tensors) -> End:
        """Return what was sent, and what was received under its producers' signatures.

        A producer that signs something else than it sends does not deliver: it is replaced.
        """
        deliveries = tuple(
            make_signed_delivery(
                BY_ADDRESS[run.executors.executors[port.task]],
                run.id,
                port.task,
                run.received[port.task],
            )
            for port in self.world.manifest.outputs
        )
        return End(
            execution_id=run.id,
            steps=len(sent),
            inputs=(digest_all(sent),),
            outputs=deliveries,
        )

    def _take_end(self, run: Run, node: str, signed: Message) -> None:
        """Commit to what was computed if the client's end fits it."""
        assert isinstance(signed, SignedEnd)
        if node in run.told:
            return
        try:
            check_end(signed, run.plan)
        except PeerFault:
            return
        own = [t for t, executor in enumerate(run.executors.executors) if executor == node]
        if any(len(run.work[task, node].outputs) != signed.end.steps for task in own):
            return  # an honest node has run other steps than these
        run.told[node] = signed
        takeovers = tuple(t for t in run.takeovers if t.takeover.task in own)
        completion = Completion(
            execution_id=run.id,
            node=node,
            tasks=tuple(self._commit_to(run, task, node) for task in own),
            takeovers=takeovers,
            salt="0x" + digest("salt", run.id, node),
            end=signed,
        )
        made = self.world.adversary.make(node, completion)
        assert isinstance(made, Completion)
        run.completions[node] = made
        if made.steps:
            self._commit(run, node, made)

    def _commit_to(self, run: Run, task: int, node: str) -> TaskCommitment:
        work = run.work[task, node]
        return TaskCommitment(
            task=task,
            inputs=tuple(map(digest_all, work.inputs)),
            outputs=(digest_all(work.outputs),),
            state=digest("state", work.right),
        )

    # ---- commitments and reveals ------------------------------------------------------------

    def _commit(self, run: Run, node: str, completion: Completion) -> None:
        """Tell the members what the node commits to; on chain by itself if they are slow."""
        world, key = self.world, BY_ADDRESS[node].signing_key_hex
        if completion.takeovers:
            told = Takeovers(execution_id=run.id, node=node, takeovers=completion.takeovers)
            world.tell_members(node, told, lambda m: ev.TakeoversReceived(m, key))
        commitment = ExecutorCommitment(
            execution_id=run.id,
            node=node,
            root=completion.root(),
            end=completion.end,
            takeovers=completion.takeovers,
        )
        world.tell_members(node, commitment, lambda m: ev.ExecutorCommitmentReceived(m, key))
        patience_s = tuning.COMMIT_PATIENCE_BLOCKS * world.setting.block_s
        margin_s = world.setting.deadline_s - tuning.COMMIT_MARGIN_S
        world.after(min(patience_s, margin_s), partial(self._commit_alone, run, node, completion))
        self._wait(run, node, completion, None)

    def _commit_alone(self, run: Run, node: str, completion: Completion) -> None:
        record = self.world.market.records.get(run.id)
        if record is None or record.agreed or record.status in ("settled", "refunded"):
            return
        own = [entry.task for entry in completion.tasks]
        own = [task for task in own if task < len(self.world.manifest.tasks)]
        paid = run.plan.request.steps
        message = OwnCommitment(
            execution_id=run.id,
            steps=completion.steps,
            root=completion.root(),
            exposure_micro_usdc=compute_exposure(
                own, self.world.manifest, paid, self.world.economics
            ),
        )
        self.world.send(node, message, lambda m: self.world.transact(lambda: self._take(node, m)))

    def _take(self, node: str, message: Message) -> None:
        assert isinstance(message, OwnCommitment)
        market = self.world.market
        event = ev.CompletionCommitted(
            message.execution_id,
            node,
            message.steps,
            message.root,
            market.block_hash,
            message.exposure_micro_usdc,
        )
        market.try_commit(event)

    def _wait(
        self, run: Run, node: str, message: Message, own: ValidatorCommitment | None
    ) -> None:
        """Reveal a message once 2f+1 members say that it is time."""
        run.waiting.append((node, message, own))
        if len(run.waiting) == 1:
            self.world.after(0.3, partial(self._poll, run))

    def _poll(self, run: Run) -> None:
        for member in self.world.members.values():
            signed = member.find_attestation(run.id)
            if signed is not None and not run.attestations.knows(signed):
                run.attestations.add(signed)
        left = []
        for node, message, own in run.waiting:
            fixed = own is None or (
                run.attestations.find_fixed(own.task, own.validator) == own.root
            )
            if fixed and run.attestations.is_due():
                self._reveal(node, message)
            else:
                left.append((node, message, own))
        run.waiting[:] = left
        record = self.world.market.records.get(run.id)
        if left and (record is None or record.status in ("requested", "planned")):
            self.world.after(0.3 if self.world.now < 15 else 3.0, partial(self._poll, run))

    def _reveal(self, node: str, message: Message) -> None:
        key = BY_ADDRESS[node].signing_key_hex
        if isinstance(message, Completion):
            self.world.tell_members(node, message, lambda m: ev.CompletionReceived(m, key))
            return
        assert isinstance(message, VerificationResult)
        self.world.tell_members(node, message, lambda m: _sign_result(BY_ADDRESS[node], m))

    # ---- validators -------------------------------------------------------------------------

    def _take_push(self, node: str, message: Message) -> None:
        """Take what members, or a relay in their name, post to a node."""
        if not isinstance(message, VerificationOrder):
            return
        try:
            self._verify(node, message)
        except PeerFault:
            self.world.refused["order"] += 1

    def _verify(self, node: str, order: VerificationOrder) -> None:
        """Check an order as nodes do, recompute the task, commit to the result."""
        run = self.runs.get(order.certificate.plan.request.execution_id)
        if run is None or (order.task, node) in run.ordered:
            return
        check_order(order, self.world, node)
        steps = order.steps
        run.ordered[order.task, node] = steps
        found = self._replay(run, order.task, order.executors, steps, node)
        error = "" if found is not None else "its inputs are not in the store"
        inputs, outputs, state = found or ((), (), EMPTY_DIGEST)
        result = VerificationResult(
            execution_id=run.id,
            task=order.task,
            validator=node,
            inputs=inputs,
            outputs=outputs,
            state=state,
            salt="0x" + digest("salt", run.id, order.task, node),
            error=error,
        )
        made = self.world.adversary.make(node, result)
        assert isinstance(made, VerificationResult)
        run.results[order.task, node] = made
        if made.error:
            self._reveal(node, made)
            return
        commitment = ValidatorCommitment(
            execution_id=run.id, task=made.task, validator=made.validator, root=made.root()
        )
        key = BY_ADDRESS[node].signing_key_hex
        self.world.tell_members(
            node, commitment, lambda m: ev.ValidatorCommitmentReceived(m, key)
        )
        self._wait(run, node, made, commitment)

    def _replay(
        self, run: Run, task: int, executors: Sequence[str], steps: int, reader: str
    ) -> tuple[tuple[str, ...], tuple[str, ...], str] | None:
        """Return digests of inputs, outputs and state from the store, None when it lacks some."""
        read = []
        for source, _ in get_sources(self.world.manifest, task):
            tensors = self._fetch(run, source, executors, reader)
            if tensors is None or len(tensors) < steps:
                return None
            read.append(tensors[:steps])
        right = compute(task, tuple(read))
        return tuple(map(digest_all, read)), (digest_all(right),), digest("state", right)

    def _fetch(self, run: Run, source: int, executors: Sequence[str], reader: str) -> Tensors | None:
        author = CLIENT.address if source == CLIENT_TASK else executors[source]
        tensors = run.store.get((source, author))
        if tensors is None:
            return None
        message = LoggedTensors(
            execution_id=run.id, node=author, task=source, port=0, tensors=tensors
        )
        # A gateway is trusted by more than f members, or it could frame any producer.
        trusted = list(self.world.members)[(len(self.world.members) - 1) // 3 :]
        copies = self.world.adversary.send(
            "", message, "" if reader in trusted else "gateway"
        )
        found = [copy.tensors for delay_s, copy in copies if delay_s <= LATE_S]
        return found[0] if found else None

    def _recompute(self, command: cmd.RecomputeTask, member: str) -> Ruling | None:
        """Return what a member gets for a disputed task."""
        order = command.order
        run = self.runs[order.draw.execution_id]
        steps, missing, short = order.steps, [], False
        for source, _ in get_sources(self.world.manifest, order.task):
            tensors = self._fetch(run, source, order.executors, member)
            if tensors is None or len(tensors) < steps:
                short = short or source == CLIENT_TASK
                missing.append(source)
        if short:
            return Ruling(
                task=order.task, inputs=(), outputs=(), state=EMPTY_DIGEST, error="no inputs"
            )
        found = None if missing else self._replay(run, order.task, order.executors, steps, member)
        inputs, outputs, state = found or ((), (), EMPTY_DIGEST)
        return Ruling(
            task=order.task,
            inputs=inputs,
            outputs=outputs,
            state=state,
            error="",
            missing=tuple(missing),
        )


def check_order(order: VerificationOrder, world: World, node: str) -> None:
    """Check an order as a node does (``splitup_node.settlement.verifier``)."""
    plan, draw = order.certificate.plan, order.draw
    if draw.execution_id != plan.request.execution_id or order.task >= len(plan.tasks):
        raise PeerFault("another execution, or no such task")
    if not plan.has_candidates(draw.executors):
        raise PeerFault("the draw names strangers")
    if not is_sampled(draw.seed, order.task, world.economics.sampling_bps):
        raise PeerFault("the draw does not pick this task")
    task_id = world.manifest.tasks[order.task].task_id
    executor = order.executors[order.task]
    if node not in check_validators(order.snapshot, plan, executor, task_id):
        raise PeerFault("not among its validators")
    check_certificate(order.certificate, world.full_view, CHEAP)
    check_draw(draw, world.full_view, CHEAP)


def _sign_result(identity: Identity, result: Message) -> ev.VerificationResultReceived:
    assert isinstance(result, VerificationResult)
    token = sign_jws(
        identity,
        typ=api.VERIFICATION_RESULT.typ,
        audience=COMMITTEE,
        body=result.model_dump(mode="json"),
        now_s=0,
    )
    return ev.VerificationResultReceived(result, identity.signing_key_hex, token)


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@lru_cache(4_096)
def digest_all(tensors: Tensors) -> str:
    """Return the digest of a port over all its steps."""
    return _extend(tensors).hex()


def _extend(tensors: Tensors) -> bytes:
    total = NO_STEPS
    for tensor in tensors:
        total = extend_steps(total, bytes.fromhex(tensor))
    return total


def make_signed_delivery(node: Identity, execution_id: str, task: int, sent: Tensors) -> str:
    """Return what a producer signs with the last output that it sends to the client."""
    frame = Frame(
        kind=FrameKind.TENSOR,
        execution_id=execution_id,
        task=task,
        port=0,
        step=len(sent) - 1,
        digest=bytes.fromhex(sent[-1]),
        length=4,
        payload=b"",
        before=_extend(sent[:-1]),
    )
    signed = frame.signed_bytes()
    return make_delivery(Seal(signed, node.sign_raw(signed)))


@lru_cache(4_096)
def compute(task: int, inputs: tuple[Tensors, ...]) -> Tensors:
    """Return a task's right outputs; each depends on all inputs up to its step."""
    outputs, state = [], ""
    for step in range(min(map(len, inputs))):
        state = digest(task, state, *(tensors[step] for tensors in inputs))
        outputs.append(state)
    return tuple(outputs)
