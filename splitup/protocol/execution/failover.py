"""Failure detection by the client: which node stalls an execution, and which candidate replaces it.

No I/O, no clock. The client decides, because only the client is harmed by a stall. It observes lost
connections, failures that a node reports itself, and steps whose outputs do not come back. When
outputs are later than usual it asks all nodes for their progress: a node that does not answer has
failed; if all answer, the earliest task that has all its inputs and makes no progress is stuck.

Slow is not wrong. While steps flow the nodes are asked now and then, so that it is known how long
each takes to answer; only one that is silent for several times as long, while others answer, has
failed. Who answers after that was merely slow: it may take tasks again, and all get more time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Final

from splitup.core import tuning
from splitup.graph.manifest import Manifest
from splitup.messages.base import CLIENT
from splitup.messages.plans import Plan
from splitup.messages.progress import Progress, TaskProgress
from splitup.protocol.execution.routes import get_sources


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask these nodes for their progress."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Replace:
    """Let the candidate ``candidate`` (an index into the plan's list) run ``task`` from now on.

    ``first_step`` is the first step whose outputs are missing.
    """

    task: int
    candidate: int
    first_step: int
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No candidate is left for ``task``; ``node`` was the last."""

    task: int
    node: str
    reason: str


Command = Probe | Replace | GiveUp

_SILENT: Final = "it stopped answering"


class Failover:
    """Detects failed nodes of one execution. Times are seconds on any one clock.

    Every method that takes ``now`` returns what to do; call ``tick`` at ``next_time``.
    """

    def __init__(self, plan: Plan, manifest: Manifest, now: float, deadline: float) -> None:
        self._plan = plan
        self._candidates = list(plan.places or (0,) * len(plan.tasks))
        self._inputs = tuple(get_sources(manifest, task) for task in range(len(plan.tasks)))
        # nodes that are not connected, and when that counts as a failure
        self._down = {node: now + tuning.CONNECT_S for node in plan.executors()}
        self._gone: dict[str, str] = {}  # replaced nodes, and why
        self._submitted = 0
        self._done: set[int] = set()  # above ``first_missing``
        self.first_missing = 0
        self._moved_at = now
        self._usual_s = 0.0  # mean time between two finished steps; 0 before the first
        self._asked_at = now  # all nodes that owed no answer
        self._asked: dict[str, float] = {}  # nodes that owe an answer, and since when
        self._answers: dict[str, Progress] = {}  # to the last question
        self._slowest_s: dict[str, float] = {}  # each node's slowest answer
        self._least_s = tuning.ANSWER_S  # that every node is given to answer
        self._still: dict[int, tuple[int, float]] = {}  # task -> steps, time of the last progress
        self._patient_until = now + tuning.LOADING_SHARE * (deadline - now)
        self._over = False

    @property
    def executors(self) -> tuple[str, ...]:
        """Return who runs every task now."""
        pairs = zip(self._plan.tasks, self._candidates, strict=True)
        return tuple(nodes[candidate] for nodes, candidate in pairs)

    @property
    def stall_s(self) -> float:
        """Return after how long without a finished step the nodes are asked for their progress."""
        if not self._usual_s:
            return tuning.STALL_FIRST_S
        return max(tuning.ASK_S, tuning.ASK_STEPS * self._usual_s)

    def find_silent(self) -> tuple[int, str] | None:
        """Return the first task whose node is not connected, and the node."""
        for task, node in enumerate(self.executors):
            if node in self._down:
                return task, node
        return None

    # ---- events --------------------------------------------------------------------------------

    def process_submitted(self, step: int, now: float) -> None:
        """Record a step that was sent."""
        if self.first_missing >= self._submitted:
            self._move(now)
        self._submitted = max(self._submitted, step + 1)

    def process_done(self, step: int, now: float) -> None:
        """Record a step whose outputs are all here."""
        took_s = now - self._moved_at
        if not self._usual_s:
            self._asked_at = now - tuning.MEASURE_S  # they are first asked, and measured, now
        self._usual_s = took_s if not self._usual_s else 0.8 * self._usual_s + 0.2 * took_s
        self._done.add(step)
        while self.first_missing in self._done:
            self._done.discard(self.first_missing)
            self.first_missing += 1
        self._move(now)

    def process_end(self) -> None:
        """Stop: the execution is over."""
        self._over = True

    def process_down(self, node: str, now: float) -> None:
        """Record that a connection broke; the node may reconnect for a short time."""
        self._down.setdefault(node, now + tuning.RECONNECT_S)

    def process_up(self, node: str) -> None:
        """Record that a connection was established; an answer on the one before may be lost."""
        self._down.pop(node, None)
        self._asked.pop(node, None)

    def process_refused(self, node: str, now: float) -> list[Command]:
        """Replace a node at whose address, after a connection broke, no process listens."""
        return self._replace(node, "it lost the connection", now) if node in self._down else []

    def process_failure(self, node: str, reason: str, now: float) -> list[Command]:
        """Replace a node that reported its own failure, or that evidence shows to be faulty."""
        return self._replace(node, reason, now)

    def process_progress(self, progress: Progress, now: float) -> list[Command]:
        """Record a node's answer to a probe; after the last one decide whether a task is stuck."""
        node = progress.node
        asked_at = self._asked.pop(node, None)
        if asked_at is None:
            return []
        self._slowest_s[node] = max(self._slowest_s.get(node, 0.0), now - asked_at)
        if self._gone.get(node) == _SILENT:  # it was slow
            del self._gone[node]
            self._bear(now - asked_at)
        if node not in self.executors or not self._is_waiting:
            return []
        self._answers[node] = progress
        return self._judge(now) if set(self.executors) <= self._answers.keys() else []

    def next_time(self) -> float | None:
        """Return when to call ``tick``, None while nothing can time out."""
        if self._over:
            return None
        times = []
        if self._down:
            executors = self.executors
            times = [at for node, at in self._down.items() if node in executors]
        if self._submitted > self.first_missing:
            times += [self._get_next_question()]
            if self._asked:
                times += map(self._get_end_of_patience, set(self.executors))
        return min(times, default=None)

    def tick(self, now: float, late_s: float = 0.0) -> list[Command]:
        """Process the timeouts that have passed. ``late_s``: how late the caller's own timer was.

        A caller that was stopped or busy has not read yet what came meanwhile.
        """
        if self._over:
            return []
        if late_s > self._least_s / tuning.ANSWER_FACTOR:
            self._bear(late_s)
            self._asked = dict.fromkeys(self._asked, now)
            self._down = {n: max(at, now + tuning.RECONNECT_S) for n, at in self._down.items()}
        commands: list[Command] = []
        for node in [node for node, at in self._down.items() if at <= now]:
            commands += self._replace(node, "it lost the connection", now)
        if not self._is_waiting or commands:
            return commands
        for node in sorted(set(self.executors)):
            if now >= self._get_end_of_patience(node):
                commands += self._replace(node, _SILENT, now)
        if not commands and now >= self._get_next_question():
            commands += self._ask(now)
        return commands

    # ---- questions -----------------------------------------------------------------------------

    @property
    def _is_waiting(self) -> bool:
        return self._submitted > self.first_missing

    def _get_next_question(self) -> float:
        at = max(self._moved_at, self._asked_at) + self.stall_s
        return min(at, self._asked_at + tuning.MEASURE_S) if self._usual_s else at

    def _ask(self, now: float) -> list[Command]:
        self._asked_at, self._answers = now, {}
        nodes = tuple(sorted(set(self.executors) - self._asked.keys()))
        self._asked.update(dict.fromkeys(nodes, now))
        return [Probe(nodes)] if nodes else []

    def _bear(self, waited_s: float) -> None:
        """Give all nodes more time after a wait that ended well, up to what strangers get."""
        patience_s = min(tuning.ANSWER_FACTOR * waited_s, tuning.STALL_FIRST_S)
        self._least_s = max(self._least_s, patience_s)

    def _get_end_of_patience(self, node: str) -> float:
        """Return when a node that owes an answer has failed."""
        if node not in self._asked or node in self._down:
            return inf
        executors = set(self.executors)
        slowest_s = self._slowest_s.get(node)
        own_s = min(tuning.ANSWER_FACTOR * (slowest_s or 0.0), tuning.HANG_RUN_S)
        patience_s = max(self._least_s, own_s)
        # whose speed is unknown; or nobody answers, and the fault may be on this side
        if slowest_s is None or (len(executors) > 1 and executors <= self._asked.keys()):
            patience_s = max(patience_s, tuning.STALL_FIRST_S)
        end = max(self._asked[node], self._moved_at) + patience_s
        tasks = [task for task, own in enumerate(self.executors) if own == node]
        if any(self._find_next(task) is None for task in tasks):  # nobody can take over
            end = max(end, self._patient_until)
        return max(end, self._moved_at + self.stall_s)

    # ---- verdicts ------------------------------------------------------------------------------

    def _judge(self, now: float) -> list[Command]:
        """Replace a node that loads for too long, or a stuck one."""
        loading = [node for node, answer in self._answers.items() if answer.is_loading]
        if loading and now >= self._patient_until:
            return self._replace(loading[0], "it did not load its tasks in time", now)
        tasks = {t.task: t for answer in self._answers.values() for t in answer.tasks}
        stuck = self._find_stuck(tasks, now)
        if stuck is None:
            return []
        return self._replace(self.executors[stuck], "it did not deliver in time", now)

    def _find_stuck(self, tasks: dict[int, TaskProgress], now: float) -> int | None:
        """Return the earliest task that has had all its inputs for too long."""
        for task, progress in tasks.items():
            if self._still.get(task, (-1, 0.0))[0] != progress.steps:
                self._still[task] = (progress.steps, now)
        moved_at = max((since for _, since in self._still.values()), default=now)
        for task, node in enumerate(self.executors):
            own = tasks.get(task)
            if self._answers[node].is_loading:
                continue
            if own is None:  # it answers, but does not know that it runs this task
                if now >= moved_at + tuning.HANG_LOST_S:
                    return task
                continue
            waits_s = now - self._still[task][1]
            if own.ready and waits_s >= max(tuning.HANG_RUN_S, tuning.HANG_STEPS * self._usual_s):
                return task
            fed = all(
                self._get_steps(tasks, source) > own.steps for source, _ in self._inputs[task]
            )
            if not own.ready and fed and now >= moved_at + tuning.HANG_LOST_S:
                return task
        return None

    def _get_steps(self, tasks: dict[int, TaskProgress], source: int) -> int:
        if source == CLIENT:
            return self._submitted
        known = tasks.get(source)
        return 0 if known is None else known.steps

    def _replace(self, node: str, reason: str, now: float) -> list[Command]:
        """Give all tasks of a node to their next candidates."""
        self._down.pop(node, None)
        if self._over or node in self._gone:
            return []
        self._gone[node] = reason
        commands: list[Command] = []
        for task in [task for task, own in enumerate(self.executors) if own == node]:
            following = self._find_next(task)
            if following is None:
                self._over = True
                return [*commands, GiveUp(task, node, reason)]
            self._candidates[task] = following
            self._still.pop(task, None)
            commands.append(Replace(task, following, self.first_missing, reason))
        self._move(now)
        return commands

    def _find_next(self, task: int) -> int | None:
        nodes = self._plan.tasks[task]
        later = range(self._candidates[task] + 1, len(nodes))
        return next((index for index in later if nodes[index] not in self._gone), None)

    def process_opened(self, nodes: Iterable[str], now: float) -> None:
        """Record that connections to new nodes are being opened."""
        for node in nodes:
            self._down[node] = now + tuning.CONNECT_S

    def _move(self, now: float) -> None:
        self._moved_at = now
        self._still.clear()
