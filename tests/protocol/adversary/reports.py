"""What nodes report about an execution: commitments, reveals, and what validators recompute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from splitup.core import tuning
from splitup.core.errors import PeerFault
from splitup.crypto.keys import Identity
from splitup.messages import api
from splitup.messages.base import CLIENT as CLIENT_TASK
from splitup.messages.base import Message
from splitup.messages.completions import (
    EMPTY_DIGEST,
    Completion,
    ExecutorCommitment,
    SignedTakeover,
    Takeovers,
)
from splitup.messages.verification import (
    Ruling,
    ValidatorCommitment,
    VerificationOrder,
    VerificationResult,
)
from splitup.protocol.committee import commands as cmd
from splitup.protocol.committee import events as ev
from splitup.protocol.committee.certificates import check_certificate, check_draw, check_plan
from splitup.protocol.execution.routes import get_sources
from splitup.protocol.planning.validators import check_validators
from splitup.protocol.settlement.proof_of_sampling import is_sampled
from tests.protocol.adversary.market import START_S
from tests.protocol.adversary.tensors import (
    BY_ADDRESS,
    LATE_S,
    LoggedTensors,
    RecomputedTensors,
    Run,
    Tensors,
    compute,
    digest,
    digest_all,
)
from tests.protocol.adversary.world import CHEAP, CLIENT, World
from tests.protocol.simulator import make_commitment_event, sign_token


class Reports:
    """All nodes, towards the members."""

    def __init__(self, world: World, runs: dict[str, Run]) -> None:
        self.world, self.runs = world, runs
        world.pushed = self._take_push
        world.recompute = self._recompute

    # ---- commitments and reveals ------------------------------------------------------------

    def commit(
        self,
        run: Run,
        node: str,
        completion: Completion,
        *earlier: Completion,
        order: str = "",
        shown: tuple[SignedTakeover, ...] | None = None,  # other takeovers than the completion's
        to: Sequence[str] | None = None,
    ) -> None:
        """Tell the members what the node commits to."""
        world, key = self.world, BY_ADDRESS[node].signing_key_hex
        takeovers = completion.takeovers if shown is None else shown
        if takeovers:
            told = Takeovers(execution_id=run.id, node=node, takeovers=takeovers)
            world.tell_members(node, told, lambda m: ev.ReportReceived(m, key), to)
        commitment = ExecutorCommitment(
            execution_id=run.id,
            node=node,
            root=completion.root(),
            end=completion.end,
            earlier=tuple(one.root() for one in earlier),
            order=order,
            takeovers=takeovers,
        )
        world.tell_members(node, commitment, lambda m: _sign_commitment(BY_ADDRESS[node], m), to)
        for one in (completion, *earlier):
            self._wait(run, node, one, None)

    def await_deadline(self, run: Run, node: str, stop: Callable[[], None]) -> None:
        """Call ``stop`` when a node waits no longer for the end of an execution."""
        stop_s = run.plan.request.deadline - START_S - tuning.STOP_MARGIN_S
        self.world.after(max(0.0, stop_s - self.world.now), stop)

    def _wait(self, run: Run, node: str, message: Message, own: ValidatorCommitment | None) -> None:
        """Reveal a message once 2f+1 members say that it is time."""
        run.waiting.append((node, message, own))
        if len(run.waiting) == 1:
            self.world.after(0.3, partial(self._poll, run))

    def _poll(self, run: Run) -> None:
        for member in self.world.members.values():
            signed = member.settlements.find_attestation(run.id)
            if signed is not None and not run.attestations.knows(signed):
                run.attestations.add(signed)
        left = []
        for node, message, own in run.waiting:
            fixed = own is None or (
                run.attestations.find_fixed(own.task, own.validator) == own.root
            )
            steps = run.attestations.find_due_steps()
            if fixed and steps:
                if not isinstance(message, Completion) or message.steps == steps:
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
            self.world.tell_members(node, message, lambda m: ev.ReportReceived(m, key))
            return
        assert isinstance(message, VerificationResult)
        self.world.tell_members(node, message, lambda m: _sign_result(BY_ADDRESS[node], m))

    def log(
        self,
        run: Run,
        author: str,
        task: int,
        tensors: Tensors,
        kind: type[LoggedTensors] = LoggedTensors,
    ) -> None:
        """Store a port's tensors; an object can be written once, by its author."""
        message = kind(execution_id=run.id, node=author, task=task, port=0, tensors=tensors)
        for delay_s, copy in self.world.adversary.send(author, message):
            assert isinstance(copy, LoggedTensors)
            if (copy.execution_id, copy.node, copy.port) == (run.id, author, 0):
                keep = partial(run.store.setdefault, (copy.task, author), copy.tensors)
                self.world.after(delay_s, keep)

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
        if self.world.setting.is_abroad and not error:
            self.log(run, node, order.task, outputs, RecomputedTensors)
            if run.store.get((order.task, node), outputs) != outputs:
                error = "as an executor that was replaced it stored others"
        result = VerificationResult(
            execution_id=run.id,
            task=order.task,
            validator=node,
            inputs=inputs,
            outputs=(digest_all(outputs),) if found is not None else (),
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
        self.world.tell_members(node, commitment, lambda m: ev.ReportReceived(m, key))
        self._wait(run, node, made, commitment)

    def _replay(
        self, run: Run, task: int, executors: Sequence[str], steps: int, reader: str
    ) -> tuple[tuple[str, ...], Tensors, str] | None:
        """Return digests of inputs and state and the outputs, None when the store lacks some."""
        read = []
        for source, _ in get_sources(self.world.manifest, task):
            tensors = self._fetch(run, source, executors, reader)
            if tensors is None or len(tensors) < steps:
                return None
            read.append(tensors[:steps])
        right = compute(task, tuple(read))
        return tuple(map(digest_all, read)), right, digest("state", right)

    def _fetch(
        self, run: Run, source: int, executors: Sequence[str], reader: str
    ) -> Tensors | None:
        author = CLIENT.address if source == CLIENT_TASK else executors[source]
        tensors = run.store.get((source, author))
        if tensors is None:
            return None
        message = LoggedTensors(
            execution_id=run.id, node=author, task=source, port=0, tensors=tensors
        )
        # A gateway is trusted by more than f members, or it could frame any producer.
        trusted = list(self.world.members)[(len(self.world.members) - 1) // 3 :]
        copies = self.world.adversary.send("", message, "" if reader in trusted else "gateway")
        found = [
            copy.tensors
            for delay_s, copy in copies
            if delay_s <= LATE_S and isinstance(copy, LoggedTensors)
        ]
        return found[0] if found else None

    def _recompute(self, command: cmd.RecomputeTask, member: str) -> tuple[Ruling, ...]:
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
            error = "no inputs"
            return (
                Ruling(task=order.task, inputs=(), outputs=(), state=EMPTY_DIGEST, error=error),
            )
        found = None if missing else self._replay(run, order.task, order.executors, steps, member)
        inputs, outputs, state = found or ((), (), EMPTY_DIGEST)
        ruling = Ruling(
            task=order.task,
            inputs=inputs,
            outputs=(digest_all(outputs),) if found is not None else (),
            state=state,
            error="",
            missing=tuple(missing),
        )
        if missing or not self.world.setting.is_abroad:
            return (ruling,)
        return self._compare(run, command, ruling, member)

    def _compare(
        self, run: Run, command: cmd.RecomputeTask, found: Ruling, member: str
    ) -> tuple[Ruling, ...]:
        """Return what a member of another class says about each claim, by what is stored."""
        order, rulings = command.order, []
        for claim in command.claims:
            validator = claim.validator if isinstance(claim, VerificationResult) else None
            authors = list(order.executors)
            authors[order.task] = validator or authors[order.task]
            tensors = (self._fetch(run, order.task, authors, member) or ())[: order.steps]
            if (digest_all(tensors),) != claim.outputs:
                told: dict[str, object] = {"outputs": (), "missing": (order.task,)}
            else:
                told = {"outputs": claim.outputs if claim.outputs == found.outputs else ()}
            told |= {"state": claim.state, "compared": True, "validator": validator}
            rulings.append(found.model_copy(update=told))
        return tuple(rulings)


def check_order(order: VerificationOrder, world: World, node: str) -> None:
    """Check an order as a node does (``splitup_node.settlement.verifier``)."""
    plan, draw = order.certificate.plan, order.draw
    check_plan(plan)
    if draw.execution_id != plan.request.execution_id or order.task >= len(plan.tasks):
        raise PeerFault("another execution, or no such task")
    if not plan.has_candidates(draw.executors):
        raise PeerFault("the draw names strangers")
    if not is_sampled(draw.seed, order.task, plan.request.verify_bps):
        raise PeerFault("the draw does not pick this task")
    task_id = world.manifest.tasks[order.task].task_id
    executor = order.executors[order.task]
    if node not in check_validators(order.snapshot, plan, executor, task_id):
        raise PeerFault("not among its validators")
    check_certificate(order.certificate, world.full_view, CHEAP)
    check_draw(draw, world.full_view, CHEAP)


def _sign_commitment(identity: Identity, commitment: Message) -> ev.ReportReceived:
    assert isinstance(commitment, ExecutorCommitment)
    return make_commitment_event(identity, commitment)


def _sign_result(identity: Identity, result: Message) -> ev.ReportReceived:
    assert isinstance(result, VerificationResult)
    token = sign_token(identity, api.VERIFICATION_RESULT, result)
    return ev.ReportReceived(result, identity.signing_key_hex, token)
