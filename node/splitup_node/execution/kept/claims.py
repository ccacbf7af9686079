"""What a client ordered and acknowledged in an execution, and what this node commits to for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from splitup.core import limits
from splitup.graph.manifest import Manifest
from splitup.messages.completions import (
    UNSTATED,
    Completion,
    End,
    SignedEnd,
    SignedTakeover,
    TaskCommitment,
)
from splitup.messages.frames import Seal
from splitup.messages.plans import Plan
from splitup.protocol.execution.ends import make_count
from splitup.protocol.execution.takeovers import ExecutorMap
from splitup.protocol.settlement.edge_faults import find_input_faults
from splitup_node.execution.kept.parts import Part


class EarnedClaims:
    """The client's words in one execution beside what the node's parts have computed."""

    def __init__(
        self,
        plan: Plan,
        manifest: Manifest,
        node: str,
        executor_map: ExecutorMap,
        parts: Mapping[int, Part],  # by task; changes
    ) -> None:
        self._plan = plan
        self._manifest = manifest
        self._node = node
        self._executor_map = executor_map
        self._parts = parts
        # the client's final end; if that never comes, an interim one, or our own count of its
        # orders
        self.end: SignedEnd | None = None
        self.ordered = 0  # steps of which the client sent inputs to this node
        self.order: Seal | None = None  # under the last of them
        self._interim: deque[SignedEnd] = deque(maxlen=limits.INTERIM_ENDS)
        # tasks that the client gave to another node, or that failed: what was computed of them is
        # owed if no other node commits to them, as far as it is in the store
        self._lost: dict[int, Part] = {}
        self._stored: dict[int, int] = {}  # steps of lost tasks that nothing more is stored of

    @property
    def steps(self) -> int | None:
        """Return how many steps there are, None before the end."""
        return None if self.end is None else self.end.end.steps

    @property
    def has_work(self) -> bool:
        """Return whether this node has computed something that it may commit to."""
        return bool(self._parts or self._lost)

    def keep_lost(self, part: Part) -> None:
        """Keep what was computed of a task that this node does not run any more."""
        self._lost[part.task] = part

    def limit_lost(self, count_stored: Callable[[int], int]) -> None:
        """Claim no more of lost tasks than is stored now."""
        self._stored = {task: count_stored(task) for task in self._lost}

    @property
    def signed_steps(self) -> int:
        """Return how many steps the client has signed for, in whatever way."""
        return max(self.ordered, self.delivered, self.steps or 0)

    @property
    def acknowledged(self) -> SignedEnd | None:
        """Return the client's latest interim end."""
        return self._interim[-1] if self._interim else None

    @property
    def delivered(self) -> int:
        """Return how many steps the client has received, as it signed in its latest interim end."""
        return self._interim[-1].end.steps if self._interim else 0

    def conclude(self, signed: SignedEnd | None) -> None:
        """Take what the execution is settled by: the client's end, or what stands for it.

        None while there is none, as when the client's was refused.
        """
        self.end = signed

    def add_order(self, step: int, seal: Seal) -> None:
        """Keep the checked signature under the inputs of the highest step."""
        if step >= self.ordered:
            self.ordered, self.order = step + 1, seal

    def add_interim(self, signed: SignedEnd) -> None:
        """Keep a checked interim end, and forget digests that only earlier ones needed."""
        self._interim.append(signed)
        for part in self._parts.values():
            part.digests.forget(self._interim[0].end.steps)

    def find_substitute(self) -> SignedEnd | None:
        """Return what stands for an end that did not come, or None: nothing is paid then.

        That is the number of steps that this node computed for the client, if they are more than
        the client has acknowledged; else the latest interim end that this node can commit to.
        """
        ends = [*self._make_counts(0), *reversed(self._interim)]
        return next((signed for signed in ends if self.make(signed.end)), None)

    def _make_counts(self, steps: int) -> list[SignedEnd]:
        """Return this node's counts of steps, descending from what it computed.

        They are above ``steps``, and above what the client has acknowledged. Without tasks of its
        own it counts each task's: members may settle any of them.
        """
        parts = self._lost | dict(self._parts)
        able = {
            task: min(part.digests.steps, self._stored.get(task, limits.MAX_STEPS))
            for task, part in parts.items()
        }
        own, lowest = [able.get(task, 0) for task in self._list_own()], max(self.delivered, steps)
        numbers = {
            number
            for computed in ([min(own)] if own else able.values())
            for number in range(max(lowest, computed - limits.UNPAID_STEPS) + 1, computed + 1)
        }
        name = self._plan.request.execution_id
        return [make_count(name, number) for number in sorted(numbers, reverse=True)]

    def make(self, end: End) -> tuple[TaskCommitment, ...]:
        """Return what this node commits to for this end of the client.

        Those are its own tasks, and the ones that it lost or took over as far as it computed them:
        a client may give it a task, or take one away, so that it can commit to nothing else.

        () if it has not computed so many steps of its own, or a final end fewer than a state has
        seen or the client signed for, or the end misstates the inputs that it received.
        """
        if end.final and end.steps < max(self.ordered, self.delivered):
            return ()
        stored = self._stored
        lost = {t: part for t, part in self._lost.items() if end.steps <= stored.get(t, end.steps)}
        if end.final:  # a state that is gone is not asked for where the plan's node lost a task
            tasks, planned = self._manifest.tasks, self._plan.executors()
            lost = {
                task: part
                for task, part in lost.items()
                if planned[task] == self._node or not tasks[task].state_bytes
            }
        parts, own, claims = lost | dict(self._parts), self._list_own(), []
        for task in sorted(parts.keys() | own):
            claim = self._claim(parts[task], end, task in lost) if task in parts else None
            if claim is not None:
                claims.append(claim)
            elif task in own:
                return ()
        by_task = {claim.task: claim for claim in claims}
        return () if find_input_faults(self._manifest, by_task, [end]) else tuple(claims)

    def _list_own(self) -> set[int]:
        """Return the tasks that the plan gave to this node, and the client to nobody else."""
        pairs = zip(self._plan.executors(), self._executor_map.executors, strict=True)
        return {task for task, pair in enumerate(pairs) if set(pair) == {self._node}}

    def _claim(self, part: Part, end: End, is_lost: bool) -> TaskCommitment | None:
        found, state = part.digests.find(end.steps), part.digests.state
        if found is None:
            return None
        if self._manifest.tasks[part.task].state_bytes and (is_lost or not end.final):
            state = UNSTATED
        elif self._manifest.tasks[part.task].state_bytes and not part.digests.is_after(end.steps):
            return None  # another node led it beyond the end: the state is not that of the end
        return TaskCommitment(task=part.task, inputs=found[0], outputs=found[1], state=state)

    def make_completions(self, make_salt: Callable[[], bytes]) -> list[Completion]:
        """Return what this node commits to for the end, and for what may count instead.

        Those are the interim ends before it, and our counts of steps that the client ordered beyond
        its words. ``make_salt`` returns 32 random bytes.
        """
        assert self.end is not None
        steps = self.end.end.steps
        interim = [signed for signed in reversed(self._interim) if signed.end.steps < steps]
        if self.end.is_count:
            ends = [*self._make_counts(0), *interim]
        else:
            ends = [self.end, *interim, *self._make_counts(steps)]
        return [
            Completion(
                execution_id=self._plan.request.execution_id,
                node=self._node,
                tasks=claims,
                takeovers=self._list_takeovers({claim.task for claim in claims}),
                salt="0x" + make_salt().hex(),
                end=signed,
            )
            for signed in ends
            if signed.end.steps and (claims := self.make(signed.end))
        ]

    def _list_takeovers(self, covered: set[int]) -> tuple[SignedTakeover, ...]:
        """Return by which takeovers this node answers for tasks, and lost others.

        One that names this node says that it answers for the task: only of ``covered`` ones.
        """
        found = []
        for task, latest in sorted(self._executor_map.takeovers.items()):
            if self._node in self._plan.tasks[task]:
                own = self._executor_map.find_takeover(task, self._node)
                if own is not None and task in covered:
                    found.append(own)
                elif latest != own:
                    found.append(latest)
        return tuple(found)
