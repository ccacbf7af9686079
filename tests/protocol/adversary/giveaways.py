"""A client that has its outputs, and then gives tasks away or makes one fail, so as not to pay.

Nodes decide by their real claims (``splitup_node.execution.kept.claims``). The client may have a
node of its own, which commits to whatever helps.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from splitup_node.execution.kept.claims import EarnedClaims
from splitup_node.execution.kept.parts import Part, make_part
from splitup_node.settlement.reports import group_counts

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.messages.base import CLIENT as CLIENT_TASK
from splitup.messages.completions import (
    UNSTATED,
    Completion,
    End,
    SignedEnd,
    SignedTakeover,
    Takeover,
    Takeovers,
    TaskCommitment,
)
from splitup.messages.frames import make_order
from splitup.net.signed_frames import seal_frame
from splitup.protocol.committee import events as ev
from splitup.protocol.execution.ends import check_end, check_interim, make_count, sign_end
from splitup.protocol.execution.routes import get_sources
from splitup.protocol.execution.takeovers import ExecutorMap, sign_takeover
from tests.builders import decode_frame, make_tensor_frame
from tests.protocol.adversary.market import START_S
from tests.protocol.adversary.reports import Reports
from tests.protocol.adversary.tensors import (
    BY_ADDRESS,
    Run,
    Tensors,
    Work,
    compute,
    digest,
    digest_all,
)
from tests.protocol.adversary.world import CLIENT, World

MakeEnd = Callable[..., End]
LAST_S: Final = 12.0  # before the deadline: when takeovers are late ones


class Holder:
    """One honest node's part in the execution."""

    def __init__(self, world: World, run: Run, reports: Reports, node: str) -> None:
        self.world, self.run, self.reports, self.node = world, run, reports, node
        self.executor_map = ExecutorMap(run.plan)
        for signed in run.takeovers:
            self.executor_map.apply(signed)
        self.parts: dict[int, Part] = {}
        self.outputs: dict[int, Tensors] = {}  # by task, also of those that it lost
        self.claims = EarnedClaims(run.plan, world.manifest, node, self.executor_map, self.parts)
        self.final: SignedEnd | None = None
        self.is_over = False  # it has committed, or failed
        self.has_failed = False
        self.was_asked = False  # near the deadline, when it commits to what it has
        self.sent: set[int] = set()  # numbers of steps
        # what it committed to in time, by number of steps: the tasks, and whether it is a count
        self.committed: dict[int, tuple[frozenset[int], bool]] = {}

    def add_part(self, task: int, inputs: Sequence[Tensors], outputs: Tensors) -> None:
        self.outputs[task] = outputs
        part = self.parts[task] = make_part(task, self.world.manifest.tasks[task], 1, ())
        for step, output in enumerate(outputs):
            read = [bytes.fromhex(tensors[step]) for tensors in inputs]
            part.digests.add(read, [bytes.fromhex(output)])
        part.digests.state = digest("state", outputs)

    def order(self, steps: int) -> None:
        """Have the client's signature under its inputs."""
        frame = make_tensor_frame(self.run.id, CLIENT_TASK, 0, steps - 1, b"0000")
        self.claims.add_order(steps - 1, decode_frame(seal_frame(CLIENT, frame))[1])

    def take_over(self, signed: SignedTakeover) -> bool:
        """Apply a takeover; return whether this node runs the task from now on."""
        task = signed.takeover.task
        if not self.executor_map.apply(signed):
            return False
        if self.node in self.run.plan.tasks[task][: signed.takeover.candidate]:
            self._show_signed_steps(signed)
        if self.is_over:
            return False
        if (part := self.parts.pop(task, None)) is not None:
            self.claims.keep_lost(part)
        return self.executor_map.get_author(task) == self.node

    def _show_signed_steps(self, *takeovers: SignedTakeover) -> None:
        """Show the members for how many steps the client had signed."""
        key, claims = BY_ADDRESS[self.node].signing_key_hex, self.claims
        told = Takeovers(
            execution_id=self.run.id,
            node=self.node,
            takeovers=takeovers,
            order="" if claims.order is None else make_order(claims.order),
            end=claims.acknowledged,
        )
        self.world.tell_members(self.node, told, lambda m: ev.ReportReceived(m, key))

    def take_interim(self, signed: SignedEnd) -> None:
        try:
            check_interim(signed, self.run.plan, self.world.manifest, self.claims.delivered)
        except PeerFault:
            return
        if signed.end.steps > self.claims.delivered and not self.is_over:
            self.claims.add_interim(signed)

    def take_end(self, signed: SignedEnd) -> None:
        try:
            check_end(signed, self.run.plan, self.world.manifest)
        except PeerFault:
            return
        self.final = self.final or signed
        self.check_complete()

    def check_complete(self) -> None:
        """Commit to the final end once all tasks here have run."""
        end = self.final.end if self.final is not None else None
        if self.is_over or not self.parts or end is None or not end.steps:
            return
        if all(p.digests.is_after(end.steps) for p in self.parts.values()) and self.claims.make(
            end
        ):
            self.claims.conclude(self.final)
            self._commit(is_late=False)

    def fail(self) -> None:
        """Fail: the client knows."""
        if not self.is_over:
            self.is_over = self.has_failed = True
            for part in self.parts.values():
                self.claims.keep_lost(part)
            self.parts.clear()
            self._show_signed_steps()

    def stop(self) -> None:
        """Commit to what may count instead of a final end: the deadline is near."""
        self.was_asked = True
        if self.claims.end is None:
            signed = self.claims.find_substitute() if self.claims.has_work else None
            if signed is None:
                return
            self.claims.conclude(signed)
        self._commit(is_late=True)

    def _commit(self, *, is_late: bool) -> None:
        self.is_over = True
        salt = bytes.fromhex(digest("salt", self.run.id, self.node))
        made = self.claims.make_completions(lambda: salt)
        first, *earlier = map(self._state, made)
        due = [first, *earlier] if is_late or not first.end.end.final else [first]
        due = [one for one in due if one.steps not in self.sent]
        self.sent.update(one.steps for one in due)
        for one in due:
            self.run.completions[self.node, one.root()] = one
            covered = frozenset(claim.task for claim in one.tasks)
            self.committed.setdefault(one.steps, (covered, one.end.is_count))
        for one in due:
            if not one.end.is_count:
                self.reports.commit(self.run, self.node, one)
        order = "" if self.claims.order is None else make_order(self.claims.order)
        for counted in group_counts(due):
            self.reports.commit(self.run, self.node, *counted, order=order)

    def _state(self, completion: Completion) -> Completion:
        """Add the states of tasks without any, which a world has as well."""
        manifest, steps = self.world.manifest, completion.steps
        tasks = [
            claim
            if manifest.tasks[claim.task].state_bytes
            else claim.model_copy(
                update={"state": digest("state", self.outputs[claim.task][:steps])}
            )
            for claim in completion.tasks
        ]
        return completion.model_copy(update={"tasks": tuple(tasks)})


class GiveAway:
    """What the client does to one execution, and what its nodes make of it."""

    def __init__(self, world: World, run: Run, reports: Reports, sent: Tensors) -> None:
        self.world, self.run, self.reports, self.sent = world, run, reports, sent
        self.rng = random.Random(world.random.random())
        plan, rng = run.plan, self.rng
        self.done = len(sent)  # steps whose outputs the client has
        if rng.random() < 0.25:
            self.done = rng.randrange(len(sent) + 1)  # it does not wait for the last
        self.asked = len(sent)
        self.hides_inputs = rng.random() < 0.5
        candidates = sorted({node for nodes in plan.tasks for node in nodes})
        if rng.random() < 0.5:
            world.adversary.accounts.add(rng.choice(candidates))
        self.bad = world.adversary.accounts
        self.failing = rng.randrange(len(plan.tasks)) if rng.random() < 0.3 else None
        self.holders = {
            node: Holder(world, run, reports, node) for node in candidates if node not in self.bad
        }
        self.takeovers: list[SignedTakeover] = []
        self.claimed: list[Completion] = []  # by the client's node
        self.ended: set[int] = set()  # numbers of steps in ends that the client signed

    def start(self, make_end: MakeEnd) -> None:
        """Let nodes have computed, then harm them, and let the deadline come."""
        world, run, plan, rng = self.world, self.run, self.run.plan, self.rng
        if self.hides_inputs:
            run.store.pop((CLIENT_TASK, CLIENT.address), None)
        fails_at = self.failing if self.done == len(self.sent) else None
        upstream = self._list_upstream(fails_at)
        more = fails_at is not None and plan.request.steps > len(self.sent)
        self.asked += more
        outputs_of: dict[int, Tensors] = {}
        for task, node in enumerate(run.executors.executors):
            steps = self.done + (more and task in upstream)  # it has run the step that fails, too
            inputs = tuple(
                (*self.sent, digest("more"))[:steps]
                if source == CLIENT_TASK
                else outputs_of[source][:steps]
                for source, _ in get_sources(world.manifest, task)
            )
            outputs_of[task] = outputs = compute(task, inputs)
            run.work[task, node] = Work(inputs, outputs, outputs)
            if (holder := self.holders.get(node)) is None:
                continue
            holder.add_part(task, inputs, outputs)
            run.store[task, node] = outputs
            if any(source == CLIENT_TASK for source, _ in get_sources(world.manifest, task)):
                holder.order(self.asked)
        for signed in run.takeovers:  # who took over told the members so
            node = plan.tasks[signed.takeover.task][signed.takeover.candidate]
            if node in self.holders:
                self._announce(self.holders[node], signed)
        world.adversary.notes.append(
            f"has {self.done} of {self.asked} steps, hides inputs: {self.hides_inputs}, "
            f"own {sorted(self.bad - {CLIENT.address})}"
        )
        self._acknowledge(make_end)
        if fails_at is not None and (holder := self.holders.get(run.executors.executors[fails_at])):
            world.adversary.notes.append(f"makes task {fails_at} fail")
            holder.fail()
        left_s = plan.request.deadline - START_S - world.now
        if world.adversary.abandons:
            world.after(rng.uniform(0.0, 1.0), partial(self._abandon, make_end))
        for _ in range(
            rng.choice((0, 1, 1, 2, 3)) if fails_at is not None else rng.choice((1, 2, 3))
        ):
            late = rng.random() < 0.4
            low, high = (left_s - LAST_S, left_s) if late else (0.0, min(3.0, left_s))
            world.after(max(0.0, rng.uniform(low, high)), self._give)
        if rng.random() < 0.6:
            world.after(rng.uniform(0.0, min(6.0, max(left_s, 0.0))), partial(self._end, make_end))
        for place, holder in enumerate(self.holders.values()):
            self.reports.await_deadline(run, holder.node, holder.stop)
            world.after(0.1 * (place + 1), partial(self._beat, holder))
        for node in sorted(self.bad - {CLIENT.address}):
            for _ in range(rng.choice((0, 1, 1, 2))):
                late = rng.random() < 0.5
                world.after(
                    max(0.0, rng.uniform(left_s - 8.0 if late else 0.0, left_s - 1.0)),
                    partial(self._claim, node),
                )

    def _list_upstream(self, task: int | None) -> set[int]:
        """Return the tasks that run a step before ``task`` fails in it."""
        found: set[int] = set()
        waiting = [] if task is None else [task]
        while waiting:
            for source, _ in get_sources(self.world.manifest, waiting.pop()):
                if source != CLIENT_TASK and source not in found:
                    found.add(source)
                    waiting.append(source)
        return found

    def _tell(self, node: str, action: Callable[[Holder], object]) -> None:
        holder = self.holders.get(node)
        if holder is not None:
            self.world.after(self.rng.uniform(0.0, 0.05), partial(action, holder))

    def _acknowledge(self, make_end: MakeEnd) -> None:
        if self.world.setting.acknowledges:
            told = self.rng.sample(sorted(self.holders), self.rng.randint(0, len(self.holders)))
            for steps in range(1, self.done + 1):
                signed = sign_end(CLIENT, make_end(steps, final=False))
                for holder in self.holders.values():
                    if holder.node in told and holder.parts:
                        self.ended.add(steps)
                        holder.take_interim(signed)

    def _end(self, make_end: MakeEnd) -> None:
        """End it for some executors, as if all was well."""
        steps = self.done if self.rng.random() < 0.8 else self.rng.randint(0, self.done)
        if not steps:
            return
        signed = sign_end(CLIENT, make_end(steps))
        share = self.rng.choice((1.0, 1.0, 0.5))
        for node, holder in self.holders.items():
            if holder.parts and self.rng.random() < share:
                self.ended.add(steps)
                self._tell(node, lambda holder: holder.take_end(signed))

    def _give(self) -> None:
        """Sign takeovers of some tasks, and show them to some."""
        plan, rng, share = self.run.plan, self.rng, self.rng.choice((1.0, 1.0, 0.5))
        kind = rng.choice(("next", "last", "any", "own"))
        for task, candidates in enumerate(plan.tasks):
            first = plan.places[task] if plan.places else 0
            places = list(range(first + 1, len(candidates)))
            own = [place for place in places if candidates[place] in self.bad]
            if kind == "own" and own:
                places = own
            if not places or rng.random() > share:
                continue
            place = {"next": places[0], "last": places[-1]}.get(kind, rng.choice(places))
            takeover = Takeover(
                execution_id=self.run.id, task=task, candidate=place, first_step=self.done
            )
            signed = sign_takeover(CLIENT, takeover)
            self.takeovers.append(signed)
            hidden = rng.random() < 0.3
            for node in self.holders:
                if not hidden or rng.random() < 0.5:
                    self._tell(node, partial(self._take_over, signed))
            self.world.adversary.notes.append(
                f"{self.world.now:.1f}: {task} to {candidates[place]}"
            )

    def _abandon(self, make_end: MakeEnd) -> None:
        """Give all tasks to nodes that know of few steps, and end it for these after as few.

        The nodes before hear of nothing.
        """
        if self.done < 2:
            return  # an end after no steps pays nobody
        plan, steps = self.run.plan, self.rng.randint(1, self.done - 1)
        knows = {one.node for one in self.holders.values() if one.claims.ordered > steps}
        self.world.adversary.notes.append(f"{self.world.now:.1f}: abandons all at {steps} steps")
        named: set[str] = set()
        for task, candidates in enumerate(plan.tasks):
            places = range((plan.places[task] if plan.places else 0) + 1, len(candidates))
            fit = [place for place in places if candidates[place] not in knows]
            if not fit:
                return
            takeover = Takeover(
                execution_id=self.run.id,
                task=task,
                candidate=self.rng.choice(fit),
                first_step=self.rng.randint(0, steps),
            )
            signed = sign_takeover(CLIENT, takeover)
            self.takeovers.append(signed)
            named.add(node := candidates[takeover.candidate])
            self._tell(node, partial(self._take_over, signed, ordered=steps))
        signed_end = sign_end(CLIENT, make_end(steps))
        self.ended.add(steps)
        for node in named:
            self.world.after(
                0.1, partial(self._tell, node, lambda holder: holder.take_end(signed_end))
            )

    def _take_over(self, signed: SignedTakeover, holder: Holder, *, ordered: int = 0) -> None:
        if not holder.take_over(signed):
            return
        self._announce(holder, signed)
        holder.add_part(signed.takeover.task, (), ())  # until its inputs' logs are read
        if ordered:
            holder.order(ordered)
        elif self.rng.random() < 0.5:
            holder.order(self.rng.choice((self.asked, self.asked, 1)))
        self.world.after(
            self.rng.choice((0.2, 1.0, 5.0, 30.0)), partial(self._replay, holder, signed)
        )

    def _beat(self, holder: Holder) -> None:
        """Hear from the members, in their answers to a heartbeat, by whom a node was replaced."""
        for member in self.world.members.values():
            for signed in member.settlements.list_replaced(holder.node):
                holder.take_over(signed)
        if not holder.was_asked:
            self.world.after(limits.HEARTBEAT_PERIOD_S, partial(self._beat, holder))

    def _announce(self, holder: Holder, signed: SignedTakeover) -> None:
        """Tell the members, who wait for the node then, and look whether they have agreed."""
        key = BY_ADDRESS[holder.node].signing_key_hex
        told = Takeovers(execution_id=self.run.id, node=holder.node, takeovers=(signed,))
        self.world.tell_members(holder.node, told, lambda m: ev.ReportReceived(m, key))

    def _replay(self, holder: Holder, signed: SignedTakeover) -> None:
        """Compute a task again, out of the logs of its inputs."""
        task, run = signed.takeover.task, self.run
        if holder.was_asked:
            return
        record = self.world.market.records.get(run.id)
        if record is not None and record.agreed:
            holder.fail()
        if holder.is_over or task not in holder.parts:
            return
        inputs = []
        for source, _ in get_sources(self.world.manifest, task):
            author = CLIENT.address if source == CLIENT_TASK else ""
            authors = [author] if author else list(run.plan.tasks[source])
            inputs.append(max((run.store.get((source, a), ()) for a in authors), key=len))
            if source == CLIENT_TASK:  # nobody signs a log
                inputs[-1] = inputs[-1][: holder.claims.signed_steps]
        steps = min(map(len, inputs))
        if holder.final is not None:  # no node runs a step beyond it
            steps = min(steps, holder.final.end.steps)
        read = tuple(tensors[:steps] for tensors in inputs)
        outputs = compute(task, read)
        run.work[task, holder.node] = Work(read, outputs, outputs)
        run.store[task, holder.node] = outputs
        holder.add_part(task, read, outputs)
        holder.check_complete()

    # ---- the client's node --------------------------------------------------------------------

    def _claim(self, node: str) -> None:
        """Commit to whatever might keep others from their pay."""
        rng, plan = self.rng, self.run.plan
        steps = rng.choice((self.done, self.done, self.done, self.done - 1, self.asked + 1, 1))
        steps = min(max(steps, 1), plan.request.steps)
        named = [
            s for s in self.takeovers if plan.tasks[s.takeover.task][s.takeover.candidate] == node
        ]
        mine = {t for t, executor in enumerate(plan.executors()) if executor == node}
        mine |= {s.takeover.task for s in named}
        covered = {task for task in mine if rng.random() < 0.7} or mine
        if not covered:
            return
        is_final = rng.random() < 0.5
        end = make_count(self.run.id, steps)
        if is_final or rng.random() < 0.5:  # the client signs whatever its node needs
            inputs = (digest_all(self.sent[:steps]),) if rng.random() < 0.5 else ()
            told = End(execution_id=self.run.id, steps=steps, inputs=inputs, final=is_final)
            end = sign_end(CLIENT, told)
            self.ended.add(steps)
        is_copied = rng.random() < 0.7
        completion = Completion(
            execution_id=self.run.id,
            node=node,
            tasks=tuple(self._copy(task, steps, end, is_copied) for task in sorted(covered)),
            takeovers=self._show(),
            salt="0x" + digest("salt", node, self.world.now),
            end=end,
        )
        self.claimed.append(completion)
        self.run.completions[node, completion.root()] = completion
        shown = completion.takeovers if rng.random() < 0.5 else self._show()
        self.world.adversary.notes.append(
            f"{self.world.now:.1f}: own node commits to {steps} steps of {sorted(covered)}"
        )
        frame = make_tensor_frame(self.run.id, CLIENT_TASK, 0, self.asked - 1, b"0000")
        order = make_order(decode_frame(seal_frame(CLIENT, frame))[1])
        told_to = list(self.world.members)
        if rng.random() < 0.3:
            told_to = rng.sample(told_to, rng.randint(0, len(told_to)))
        self.reports.commit(
            self.run, node, completion, order=order if end.is_count else "", shown=shown, to=told_to
        )
        if rng.random() < 0.3:  # it never shows it
            self.run.waiting[:] = [w for w in self.run.waiting if w[1] is not completion]

    def _show(self) -> tuple[SignedTakeover, ...]:
        share = self.rng.choice((1.0, 1.0, 0.5, 0.0))
        return tuple(signed for signed in self.takeovers if self.rng.random() < share)

    def _copy(self, task: int, steps: int, end: SignedEnd, is_copied: bool) -> TaskCommitment:
        """Return what the executors before have stored, or something made up."""
        work = next((w for (t, _), w in self.run.work.items() if t == task), None)
        number = len(get_sources(self.world.manifest, task))
        made = tuple(digest("made", task, place) for place in range(number + 2))
        if work is None or not is_copied or len(work.outputs) < steps:
            return TaskCommitment(
                task=task, inputs=made[:number], outputs=made[-1:], state=made[-2]
            )
        is_stated = end.end.final or not self.world.manifest.tasks[task].state_bytes
        return TaskCommitment(
            task=task,
            inputs=tuple(digest_all(tensors[:steps]) for tensors in work.inputs),
            outputs=(digest_all(work.outputs[:steps]),),
            state=digest("state", work.outputs[:steps]) if is_stated else UNSTATED,
        )

    # ---- what is owed -------------------------------------------------------------------------

    def list_owed(self) -> Iterator[tuple[int, int]]:
        """Yield the numbers of steps that have to be settled, and what they pay honest nodes.

        Executors of more than half of the price committed to them; or anybody, to those that the
        client signed, which may come second.
        """
        manifest = self.world.manifest
        prices = [task.price_nano_usdc for task in manifest.tasks]
        shown = [one for one in self.holders.values() if one.committed]
        ordered = max((holder.claims.ordered for holder in shown), default=0)
        covered = self.list_covered()
        for steps, tasks in covered.items():
            worth = sum(prices[task] for task in tasks)
            is_signed = any(
                steps in holder.committed and not holder.committed[steps][1]
                for holder in self.holders.values()
            )
            results = {port.task for port in manifest.outputs}
            is_ordered = 2 * worth > sum(prices) and steps <= ordered and results <= tasks
            if worth and (is_signed or is_ordered):
                yield steps, worth * steps if 2 * worth > sum(prices) else 0

    def is_computed(self, steps: int, task: int) -> bool:
        """Return whether an honest node that did not fail has computed so many steps in time."""
        return any(
            len(holder.outputs.get(task, ())) >= steps
            and holder.was_asked
            and not holder.has_failed
            for holder in self.holders.values()
        )

    def is_done(self) -> bool:
        """Return whether honest nodes have done what the client has, and one shows its order."""
        tasks = range(len(self.run.plan.tasks))
        return (
            self.done > 0
            and not self.run.takeovers
            and all(self.is_computed(self.done, task) for task in tasks)
            and not self.bad & set(self.run.plan.executors())
        )

    def list_covered(self) -> dict[int, set[int]]:
        """Return by number of steps the tasks that honest nodes committed to."""
        found: dict[int, set[int]] = {}
        for holder in self.holders.values():
            for steps, (tasks, _) in holder.committed.items():
                found.setdefault(steps, set()).update(tasks)
        return found

    def find_coverers(self, steps: int, task: int) -> list[str]:
        """Return the honest nodes that committed to a task."""
        return [
            node
            for node, holder in self.holders.items()
            if task in holder.committed.get(steps, (frozenset(), False))[0]
        ]

    def list_due(self, steps: int, executors: Sequence[str]) -> Counter[str]:
        """Return what honest executors of tasks that they committed to earn."""
        due: Counter[str] = Counter()
        for task, node in enumerate(executors):
            if node in self.find_coverers(steps, task):
                due[node] += self.world.manifest.tasks[task].pay_micro_usdc(steps)
        return due
