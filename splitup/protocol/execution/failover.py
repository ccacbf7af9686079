"""Failure detection by the client: which node stalls an execution, and which candidate replaces it.

No I/O, no clock. The client decides, because only the client is harmed by a stall. It observes lost
connections, failures that a node reports itself, and steps whose outputs do not come back. When
outputs are later than usual it asks all nodes for their progress: a node that does not answer has
failed; if all answer, the earliest task that has all its inputs and makes no progress is stuck.

Slow is not wrong. While steps flow the nodes are asked now and then, so that it is known how long
each takes to answer; only one that is silent for several times as long, while others answer, has
failed. Who answers after that was merely slow: it may take tasks again, and all get more time.

A node's word counts for its own tasks only, and as far as steps were sent. Where a producer says
that it sent what a reader says that it lacks, one of them lies or has lost it: the reader is
replaced, and when the next one lacks inputs, too, the producer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Final

from splitup.core import tuning
from splitup.graph.manifest import Manifest
from splitup.messages.base import CLIENT
from splitup.messages.plans import Plan
from splitup.messages.progress import Progress
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


@dataclass(frozen=True, slots=True)
class _Told:
    """What a task's own node said last."""

    steps: int
    ready: bool
    since: float  # when it first said so many steps
    at: float


class Failover:
    """Detects failed nodes of one execution. Times are seconds on any one clock.

    What a method returns is to be done. Call ``tick`` at ``next_time``.
    """

    def __init__(self, plan: Plan, manifest: Manifest, now: float, deadline: float) -> None:
        self._plan = plan
        self._candidates = list(plan.places or (0,) * len(plan.tasks))
        self.executors: tuple[str, ...] = ()  # who runs every task now
        self._tasks: dict[str, list[int]] = {}  # of each executor
        self._assign()
        self._inputs = tuple(get_sources(manifest, task) for task in range(len(plan.tasks)))
        # nodes that are not connected, and when that counts as a failure
        self._down = {node: now + tuning.CONNECT_S for node in plan.executors()}
        self._gone: dict[str, str] = {}  # replaced nodes, and why
        self._submitted = 0
        self._sent_at = now
        self._done: set[int] = set()  # above ``first_missing``
        self.first_missing = 0
        self._moved_at = now
        self._usual_s = 0.0  # mean time between two finished steps; 0 before the first
        self._asked_at = now  # all nodes that owed no answer
        self._asked: dict[str, float] = {}  # nodes that owe an answer, and since when
        self._check_at = inf  # when the patience with one of them may end
        self._connected_at: dict[str, float] = {}
        self._loading: dict[str, bool] = {}  # nodes that have answered since the last progress
        self._told: dict[int, _Told] = {}  # by task, since then
        self._lost: Counter[int] = Counter()  # how often a task's inputs were lost
        self._slowest_s: dict[str, float] = {}  # each node's slowest answer
        self._least_s = tuning.ANSWER_S  # that every node is given to answer
        self._patient_until = now + tuning.LOADING_SHARE * (deadline - now)
        self._over = False

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
        self._submitted, self._sent_at = max(self._submitted, step + 1), now

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
        self._check_at = now

    def process_up(self, node: str, now: float) -> list[Command]:
        """Record that a connection was established; ask again: the answer may have been lost."""
        self._down.pop(node, None)
        self._connected_at[node] = now
        self._check_at = now
        return [Probe((node,))] if node in self._asked and node in self._tasks else []

    def process_refused(self, node: str, now: float) -> list[Command]:
        """Replace a node at whose address, after a connection broke, no process listens."""
        return self._replace(node, "it lost the connection", now) if node in self._down else []

    def process_failure(self, node: str, reason: str, now: float) -> list[Command]:
        """Replace a node that reported its own failure, or that evidence shows to be faulty."""
        return self._replace(node, reason, now)

    def process_progress(self, progress: Progress, now: float) -> None:
        """Record a node's answer to a probe."""
        node = progress.node
        were_all_silent = self._tasks.keys() <= self._asked.keys()
        asked_at = self._asked.pop(node, None)
        if asked_at is None:
            return
        self._slowest_s[node] = max(self._slowest_s.get(node, 0.0), now - asked_at)
        if self._gone.get(node) == _SILENT:  # it was slow
            del self._gone[node]
            self._bear(now - asked_at)
            self._check_at = now  # it may follow others
        if were_all_silent:
            self._check_at = now
        if node in self._tasks and self._is_waiting:
            self._note(progress, now)

    def _note(self, progress: Progress, now: float) -> None:
        """Keep what a node says of its own tasks. It has run no more steps than were sent."""
        self._loading[progress.node] = progress.is_loading
        stated = {told.task: told for told in progress.tasks}
        for task in self._tasks[progress.node]:
            own, before = stated.get(task), self._told.pop(task, None)
            if own is not None:
                steps, since = min(own.steps, self._submitted), now
                if before is not None and steps <= before.steps:
                    steps, since = before.steps, before.since
                self._told[task] = _Told(steps, own.ready, since, now)

    def next_time(self) -> float | None:
        """Return when to call ``tick``, None while nothing can time out."""
        if self._over:
            return None
        times = []
        if self._down:
            times = [at for node, at in self._down.items() if node in self._tasks]
        if self._submitted > self.first_missing:
            times += [self._get_next_question()]
            if self._asked:
                times.append(self._check_at)
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
        if now >= self._check_at:
            commands += self._check_silent(now)
        if not commands and now >= self._get_next_question():
            if self._tasks.keys() <= self._loading.keys():  # all have answered
                commands += self._judge(now)
            commands += self._ask(now) if not commands else []
        return commands

    # ---- questions -----------------------------------------------------------------------------

    @property
    def _is_waiting(self) -> bool:
        return self._submitted > self.first_missing

    def _get_next_question(self) -> float:
        at = max(self._moved_at, self._asked_at) + self.stall_s
        return min(at, self._asked_at + tuning.MEASURE_S) if self._usual_s else at

    def _ask(self, now: float) -> list[Command]:
        self._asked_at = now
        nodes = tuple(sorted(self._tasks.keys() - self._asked.keys()))
        self._asked.update(dict.fromkeys(nodes, now))
        self._check_at = min(self._check_at, now + self._least_s)
        return [Probe(nodes)] if nodes else []

    def _bear(self, waited_s: float) -> None:
        """Give all nodes more time after a wait that ended well, up to what strangers get."""
        patience_s = min(tuning.ANSWER_FACTOR * waited_s, tuning.STALL_FIRST_S)
        self._least_s = max(self._least_s, patience_s)

    def _check_silent(self, now: float) -> list[Command]:
        """Replace the nodes that have owed an answer for too long."""
        # nobody of several answers: the fault may be on this side
        is_alone = len(self._tasks) > 1 and self._tasks.keys() <= self._asked.keys()
        least_s = max(self._least_s, tuning.STALL_FIRST_S if is_alone else 0.0)
        owing = sorted(self._asked.keys() & self._tasks.keys())
        ends = {node: self._get_end_of_patience(node, least_s) for node in owing}
        commands: list[Command] = []
        for node in [node for node, end in ends.items() if now >= end]:
            commands += self._replace(node, _SILENT, now)
            del ends[node]
        self._check_at = min(ends.values(), default=inf)
        return commands

    def _get_end_of_patience(self, node: str, least_s: float) -> float:
        """Return when a node that owes an answer has failed."""
        slowest_s = self._slowest_s.get(node)
        if slowest_s is None:  # its speed is unknown
            slowest_s, least_s = 0.0, max(least_s, tuning.STALL_FIRST_S)
        patience_s = max(least_s, min(tuning.ANSWER_FACTOR * slowest_s, tuning.HANG_RUN_S))
        # a new connection begins the time again, but who drops one after the other wins no more
        connected = self._down.get(node, self._connected_at.get(node, 0.0))
        connected = min(connected, self._asked[node] + tuning.STALL_FIRST_S)
        end = max(self._asked[node], self._moved_at, connected) + patience_s
        if not self._is_replaceable(node):
            end = max(end, self._patient_until)
        return max(end, self._moved_at + self.stall_s)

    # ---- verdicts ------------------------------------------------------------------------------

    def _judge(self, now: float) -> list[Command]:
        """Replace a node that loads for too long, or a stuck one."""
        loading = [node for node, is_loading in self._loading.items() if is_loading]
        if loading and now >= self._patient_until:
            return self._replace(loading[0], "it did not load its tasks in time", now)
        stuck = self._find_stuck(now)
        if stuck is None:
            return []
        return self._replace(self.executors[stuck], "it did not deliver in time", now)

    def _find_stuck(self, now: float) -> int | None:
        """Return the earliest task that has had all its inputs for too long."""
        moved_at = max([self._moved_at, *(told.since for told in self._told.values())])
        for task, node in enumerate(self.executors):
            own = self._told.get(task)
            if self._loading[node]:
                continue
            if own is None:  # it answers, but does not know that it runs this task
                if now >= moved_at + tuning.HANG_LOST_S:
                    return task
                continue
            longest_s = max(tuning.HANG_RUN_S, tuning.HANG_STEPS * self._usual_s)
            if own.ready and own.at - own.since >= longest_s:
                return task
            sources = [source for source, _ in self._inputs[task]]
            fed = all(self._get_steps(source) > own.steps for source in sources)
            fed_at = max(moved_at, self._sent_at) if CLIENT in sources else moved_at
            if not own.ready and fed and own.at >= fed_at + tuning.HANG_LOST_S:
                return self._choose_loser(task, sources)
        return None

    def _choose_loser(self, task: int, sources: Iterable[int]) -> int:
        """Return who has lost the inputs of ``task``: its node, then in turn who says it sent them.

        Nobody else can tell which of them it is.
        """
        suspects = [task, *dict.fromkeys(source for source in sources if source != CLIENT)]
        able = [one for one in suspects if self._is_replaceable(self.executors[one])] or [task]
        self._lost[task] += 1
        return able[(self._lost[task] - 1) % len(able)]

    def _get_steps(self, source: int) -> int:
        if source == CLIENT:
            return self._submitted
        told = self._told.get(source)
        return 0 if told is None else told.steps

    def _is_replaceable(self, node: str) -> bool:
        return all(self._find_next(task) is not None for task in self._tasks[node])

    def _replace(self, node: str, reason: str, now: float) -> list[Command]:
        """Give all tasks of a node to their next candidates."""
        self._down.pop(node, None)
        if self._over or node in self._gone:
            return []
        self._gone[node] = reason
        commands: list[Command] = []
        for task in self._tasks.get(node, ()):
            following = self._find_next(task)
            if following is None:
                self._over = True
                return [*commands, GiveUp(task, node, reason)]
            self._candidates[task] = following
            commands.append(Replace(task, following, self.first_missing, reason))
        self._assign()
        self._move(now)
        return commands

    def _find_next(self, task: int) -> int | None:
        nodes = self._plan.tasks[task]
        later = range(self._candidates[task] + 1, len(nodes))
        return next((index for index in later if nodes[index] not in self._gone), None)

    def _assign(self) -> None:
        pairs = zip(self._plan.tasks, self._candidates, strict=True)
        self.executors = tuple(nodes[candidate] for nodes, candidate in pairs)
        self._tasks = {}
        for task, node in enumerate(self.executors):
            self._tasks.setdefault(node, []).append(task)

    def process_opened(self, nodes: Iterable[str], now: float) -> None:
        """Record that connections to new nodes are being opened."""
        for node in nodes:
            self._down[node] = now + tuning.CONNECT_S

    def _move(self, now: float) -> None:
        self._moved_at = now
        self._loading.clear()
        self._told.clear()
