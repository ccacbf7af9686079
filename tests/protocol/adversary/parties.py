"""What client and nodes do until an execution ends: tensors, logs, takeovers, the end.

All that a party sends goes through the world, where the adversary may change it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from splitup.core import limits, tuning
from splitup.core.errors import PeerFault
from splitup.crypto import quorum
from splitup.messages.base import CLIENT as CLIENT_TASK
from splitup.messages.base import ZERO_BYTES32, Message
from splitup.messages.completions import (
    UNSTATED,
    Completion,
    End,
    SignedEnd,
    SignedTakeover,
    Takeover,
    TaskCommitment,
)
from splitup.messages.frames import make_order
from splitup.messages.plans import PlanCertificate, Request, SignedRequest
from splitup.net.signed_frames import seal_frame
from splitup.protocol.execution.ends import check_end, check_interim, make_count, sign_end
from splitup.protocol.execution.routes import get_sources
from splitup.protocol.execution.takeovers import ExecutorMap, sign_takeover
from splitup.protocol.planning.signed_requests import sign_request
from splitup.protocol.settlement.attestations import Attestations
from splitup.protocol.settlement.edge_faults import find_input_faults
from tests.builders import decode_frame, make_tensor_frame
from tests.protocol.adversary.giveaways import GiveAway
from tests.protocol.adversary.market import START_S
from tests.protocol.adversary.reports import Reports
from tests.protocol.adversary.tensors import (
    BY_ADDRESS,
    LATE_S,
    MadeTensors,
    Run,
    SentTensors,
    Tensors,
    Work,
    compute,
    digest,
    digest_all,
    make_signed_delivery,
)
from tests.protocol.adversary.world import CLIENT, STAKE_MICRO_USDC, World
from tests.protocol.committees import CHAIN_ID
from tests.protocol.simulated_chain import MARKET

_SLOW_S: Final = 60  # by which the block that a deadline is counted from may be older than it


class Parties:
    """The client, and all nodes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.runs: dict[str, Run] = {}
        self.reports = Reports(world, self.runs)
        self.giveaways: dict[str, GiveAway] = {}  # by execution
        world.certified = self._begin

    # ---- the client's request ---------------------------------------------------------------

    def ask(self) -> None:
        """Request an execution, on chain or with a signature."""
        world, setting = self.world, self.world.setting
        market, steps = world.market, setting.steps
        world.market.balances[CLIENT.address] = 10**7
        world.market.frozen_until[CLIENT.address] = 2**50
        price = market.quote(steps, setting.deadline_s + _SLOW_S)
        price += 0 if setting.registered_low else 5

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
                verify_bps=setting.sampling_bps,
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
        self.reports.log(run, CLIENT.address, CLIENT_TASK, sent)
        fails = world.setting.fails
        for task in range(len(world.manifest.tasks)):
            if task == fails and not self._replace(run, task):
                return
            if not self._deliver(run, task, sent, tries=4):
                return
        for task, node in enumerate(run.executors.executors):  # named late
            if (task, node) not in run.work and not self._deliver(run, task, sent, tries=4):
                return
        if world.adversary.gives_away:
            self.giveaways[run.id] = GiveAway(world, run, self.reports, sent)
            self.giveaways[run.id].start(partial(self._make_end, run, sent))
            return
        for node in sorted(set(run.executors.executors)):
            self.reports.await_deadline(run, node, partial(self._stop, run, node))
        ends = [self._make_end(run, sent, len(sent))]
        if world.setting.acknowledges:
            steps = range(1, len(sent) + 1)
            ends[:0] = [self._make_end(run, sent, number, final=False) for number in steps]
        for place, end in enumerate(ends):  # one connection carries them, in order
            take = self._take_end if end.final else self._take_interim
            world.after(place * 0.01, partial(self._tell, run, end, take))

    def _control(self, run: Run) -> None:
        """Give the adversary the accounts of its part in this execution."""
        adversary, executors = self.world.adversary, run.plan.executors()
        if adversary.party == "executor" and not adversary.accounts:
            adversary.accounts.add(adversary.random.choice(executors))
            if adversary.fills_stake:
                self.world.market.locked.update(dict.fromkeys(adversary.accounts, STAKE_MICRO_USDC))
                adversary.notes.append("fills its own stake")
        if adversary.party == "validator" and not adversary.accounts:
            others = sorted(BY_ADDRESS.keys() - set(executors))
            adversary.accounts.update(others[: adversary.random.choice((1, 2))])
        if adversary.divides and len(adversary.accounts) == 1:
            adversary.accounts.update(sorted(BY_ADDRESS.keys() - set(executors)))

    def _deliver(self, run: Run, task: int, sent: Tensors, tries: int) -> bool:
        """Have a task's executor compute all steps; replace producers that do not deliver."""
        manifest = self.world.manifest
        node = run.executors.executors[task]
        while True:
            inputs, producers = [], []
            short = None
            for source, _ in get_sources(manifest, task):
                author = (
                    CLIENT.address if source == CLIENT_TASK else run.executors.get_author(source)
                )
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
        self.reports.log(run, node, task, outputs)
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

    def _tell(self, run: Run, end: End, take: Callable[[Run, str, Message], None]) -> None:
        """Send an end to every executor, signed."""
        signed = sign_end(CLIENT, end)
        for node in sorted(set(run.executors.executors)):
            self.world.send(
                CLIENT.address,
                signed,
                lambda m, n=node: take(run, n, m),
                self.world.via_relay(node),
            )

    def _make_end(self, run: Run, sent: Tensors, steps: int, *, final: bool = True) -> End:
        """Return what was sent, and what was received under its producers' signatures.

        A producer that signs something else than it sends does not deliver: it is replaced.
        """
        deliveries = tuple(
            make_signed_delivery(
                BY_ADDRESS[run.executors.executors[port.task]],
                run.id,
                port.task,
                run.received[port.task][:steps],
            )
            for port in self.world.manifest.outputs
        )
        return End(
            execution_id=run.id,
            steps=steps,
            inputs=(digest_all(sent[:steps]),),
            outputs=deliveries,
            final=final,
        )

    def _take_interim(self, run: Run, node: str, signed: Message) -> None:
        """Keep the latest interim ends, as nodes do."""
        assert isinstance(signed, SignedEnd)
        kept = run.interim.setdefault(node, deque(maxlen=limits.INTERIM_ENDS))
        before = kept[-1].end.steps if kept else 0
        try:
            check_interim(signed, run.plan, self.world.manifest, before)
        except PeerFault:
            return
        if signed.end.steps > before and node not in run.told:
            kept.append(signed)

    def _take_end(self, run: Run, node: str, signed: Message) -> None:
        """Commit to what was computed if the client's end fits it."""
        assert isinstance(signed, SignedEnd)
        too_late_s = run.plan.request.deadline - START_S - tuning.AGREE_MARGIN_S
        if node in run.told or self.world.now > too_late_s:
            return
        try:
            check_end(signed, run.plan, self.world.manifest)
        except PeerFault:
            return
        self._commit(run, node, signed)

    def _stop(self, run: Run, node: str) -> None:
        """Commit to what may count instead of a final end: the deadline is near.

        Others may lack the client's last end. What was computed beyond its words was ordered.
        """
        told = run.told[node].end.steps if node in run.told else 0
        interim = list(run.interim.get(node, ()))
        self._count(run, node, max([told, *(signed.end.steps for signed in interim)]))
        for signed in reversed(interim):
            if node not in run.told or signed.end.steps < run.told[node].end.steps:
                self._commit(run, node, signed)

    def _count(self, run: Run, node: str, steps: int) -> None:
        """Commit to each number of steps that the node computed above this one."""
        work = [run.work.get((task, node)) for task in self._list_own(run, node)]
        computed = min((len(one.outputs) if one else 0 for one in work), default=0)
        counts = [make_count(run.id, number) for number in range(computed, steps, -1)]
        done = list(filter(None, (self._complete(run, node, signed) for signed in counts)))
        if done:
            self.reports.commit(run, node, *done, order=self._make_order(run, node))

    def _make_order(self, run: Run, node: str) -> str:
        """Return the client's signature under the last input that it sent to a node."""
        received = [
            len(tensors)
            for task in self._list_own(run, node)
            for (source, _), tensors in zip(
                get_sources(self.world.manifest, task), run.work[task, node].inputs, strict=True
            )
            if source == CLIENT_TASK
        ]
        if not max(received, default=0):
            return ""
        frame = make_tensor_frame(run.id, CLIENT_TASK, 0, max(received) - 1, b"0000")
        return make_order(decode_frame(seal_frame(CLIENT, frame))[1])

    def _commit(self, run: Run, node: str, signed: SignedEnd) -> None:
        """Commit to an end of the client."""
        completion = self._complete(run, node, signed)
        if completion is not None and completion.steps:
            self.reports.commit(run, node, completion)

    def _complete(self, run: Run, node: str, signed: SignedEnd) -> Completion | None:
        """Return a completion, None if the end misstates the inputs that the node received."""
        own, end = self._list_own(run, node), signed.end
        if not own or any(len(run.work[task, node].outputs) < end.steps for task in own):
            return None  # more of them may have come from a neighbour
        claims = {task: self._commit_to(run, task, node, end) for task in own}
        if end.steps and find_input_faults(self.world.manifest, claims, [end]):
            return None
        run.told.setdefault(node, signed)
        candidate_for = {task for task, nodes in enumerate(run.plan.tasks) if node in nodes}
        latest = {t.takeover.task: t for t in run.takeovers if t.takeover.task in candidate_for}
        completion = Completion(
            execution_id=run.id,
            node=node,
            tasks=tuple(claims.values()),
            takeovers=tuple(latest.values()),
            salt="0x" + digest("salt", run.id, node, end.steps),
            end=signed,
        )
        made = self.world.adversary.make(node, completion)
        assert isinstance(made, Completion)
        run.completions[node, made.root()] = made
        return made

    def _list_own(self, run: Run, node: str) -> list[int]:
        return [t for t, executor in enumerate(run.executors.executors) if executor == node]

    def _commit_to(self, run: Run, task: int, node: str, end: End) -> TaskCommitment:
        work, steps = run.work[task, node], end.steps
        has_gone_on = not end.final and self.world.manifest.tasks[task].state_bytes
        return TaskCommitment(
            task=task,
            inputs=tuple(digest_all(tensors[:steps]) for tensors in work.inputs),
            outputs=(digest_all(work.outputs[:steps]),),
            state=UNSTATED if has_gone_on else digest("state", work.right[:steps]),
        )
