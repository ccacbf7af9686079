"""The client's verdicts, on a clock of the test's own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from functools import partial
from math import inf

from splitup.core import tuning
from splitup.messages.plans import Plan
from splitup.messages.progress import Progress, TaskProgress
from splitup.protocol.execution.failover import Command, Failover, GiveUp, Probe, Replace
from tests.builders import address, make_chain_manifest, make_request

MANIFEST = make_chain_manifest(3)
NODES = [address(n) for n in range(1, 5)]

DEADLINE_S = 300.0


def make_failover(*, connected: bool = True) -> Failover:
    """Tasks 0, 1, 2 on nodes 0, 1, 0; everybody else may take them over."""
    plan = Plan(
        request=make_request(100),
        seed="0x" + "77" * 32,
        tasks=(
            (NODES[0], NODES[2], NODES[3]),
            (NODES[1], NODES[2]),
            (NODES[0], NODES[3], NODES[1]),
        ),
        nodes=(),
    )
    failover = Failover(plan, MANIFEST, 0.0, DEADLINE_S)
    if connected:
        for node in NODES[:2]:
            failover.process_up(node, 0.0)
    return failover


def run_steps(failover: Failover, count: int, *, every_s: float = 0.01) -> float:
    """Let ``count`` steps come and go; return the time."""
    now = 0.0
    for step in range(count):
        failover.process_submitted(step, now)
        now += every_s
        failover.process_done(step, now)
    return now


def answer(node: int, *tasks: tuple[int, int, bool], loading: bool = False) -> Progress:
    return Progress(
        is_loading=loading,
        execution_id="0x" + "ee" * 32,
        node=NODES[node],
        tasks=tuple(TaskProgress(task=t, steps=steps, ready=ready) for t, steps, ready in tasks),
    )


def wait(failover: Failover) -> tuple[float, list[Command]]:
    """Go to the next time that something is due."""
    now = failover.next_time()
    assert now is not None
    return now, failover.tick(now)


def test_an_idle_or_busy_execution_blames_nobody() -> None:
    failover = make_failover()
    now = run_steps(failover, 20)
    assert failover.next_time() is None and failover.tick(now + 1000) == []
    assert failover.first_missing == 20


def test_f26_lost_connection_has_a_moment_to_come_back_then_all_its_tasks_move() -> None:
    failover = make_failover()
    now = run_steps(failover, 5)
    failover.process_down(NODES[0], now)
    failover.process_up(NODES[0], now)
    assert failover.next_time() is None
    failover.process_down(NODES[0], now)
    due, commands = wait(failover)
    assert due == now + tuning.RECONNECT_S
    assert [(c.task, c.candidate, c.first_step) for c in commands if isinstance(c, Replace)] == [
        (0, 1, 5),
        (2, 1, 5),
    ]
    assert failover.executors == (NODES[2], NODES[1], NODES[3])


def test_node_that_never_connects_is_replaced() -> None:
    failover = make_failover(connected=False)
    failover.process_up(NODES[0], 0.0)
    due, commands = wait(failover)
    assert due == tuning.CONNECT_S
    assert [c.task for c in commands if isinstance(c, Replace)] == [1]


def test_nodes_own_word_moves_its_tasks_and_the_replaced_are_never_asked_again() -> None:
    failover = make_failover()
    now = run_steps(failover, 3)
    first = failover.process_failure(NODES[1], "no memory", now)
    assert first == [Replace(1, 1, 3, "no memory")]
    assert failover.process_failure(NODES[1], "again", now) == []
    failover.process_failure(NODES[3], "not loaded", now)
    second = failover.process_failure(NODES[0], "gone", now)
    # task 2 passes over nodes 3 and 1, which failed before, and nobody is left
    assert second[-1] == GiveUp(2, NODES[0], "gone")
    assert failover.next_time() is None and failover.tick(now + 100) == []


class Network:
    """Nodes that answer after so many seconds, or never, on a clock of their own."""

    def __init__(self, failover: Failover, now: float, *answer_s: float) -> None:
        self.failover, self.now, self.answer_s = failover, now, list(answer_s)
        self.replaced: list[Replace] = []
        self._answers: list[tuple[float, int]] = []  # times, nodes

    def run(self, until: float, *, steps: tuple[int, int]) -> None:
        """Let answers and timers come until a time; each node has run so many steps."""
        while True:
            due = self.failover.next_time()
            times = [at for at, _ in self._answers] + ([] if due is None else [due])
            if min(times, default=until) >= until:
                self.now = until
                return
            assert min(times) >= self.now - tuning.MEASURE_S
            self.now = max(min(times), self.now)
            commands: list[Command] = []
            for at, node in [pair for pair in self._answers if pair[0] <= self.now]:
                self._answers.remove((at, node))
                tasks = ((0, steps[0], False), (2, steps[1], False))
                told = answer(node, *(tasks if node == 0 else ((1, steps[1], False),)))
                self.failover.process_progress(told, self.now)
            if due is not None and due <= self.now:
                commands += self.failover.tick(self.now)
                assert commands or (self.failover.next_time() or inf) > self.now  # it does not spin
            self.take(commands)

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Replace):
                self.replaced.append(command)
            if isinstance(command, Probe):
                asked = [NODES.index(node) for node in command.nodes]
                self._answers += [(self.now + self.answer_s[n], n) for n in asked]

    def run_steps(self, first: int, count: int, every_s: float) -> None:
        for step in range(first, first + count):
            self.failover.process_submitted(step, self.now)
            self.run(self.now + every_s, steps=(step + 1, step + 1))
            self.failover.process_done(step, self.now)


NEVER = 10_000.0


def start_network(*answer_s: float, every_s: float = 0.05) -> Network:
    """Return a network whose nodes have run 100 steps and wait for the outputs of the next."""
    network = Network(make_failover(), 0.0, *answer_s, 0.01, 0.01)
    network.run_steps(0, 100, every_s)
    network.failover.process_submitted(100, network.now)
    return network


def test_f04_silent_node_is_found_by_asking_within_a_second() -> None:
    network = start_network(0.01, 0.01)
    network.answer_s[1] = NEVER
    stopped_at = network.now
    network.run(stopped_at + tuning.ANSWER_S - 0.01, steps=(101, 100))
    assert not network.replaced
    network.run(stopped_at + 0.7, steps=(101, 100))
    assert [(c.task, c.reason) for c in network.replaced] == [(1, "it stopped answering")]


def test_f04_slow_machines_are_never_replaced() -> None:
    """Every answer takes three seconds, or those of one node; the steps are slow, or late."""
    for answer_s in ((3.0, 3.0), (0.01, 3.0)):
        network = start_network(*answer_s, every_s=1.0)
        network.run(network.now + 11.0, steps=(101, 100))
        assert not [c for c in network.replaced if c.reason == "it stopped answering"]


def test_f04_a_stopped_node_among_slow_ones_is_found_in_proportion() -> None:
    network = start_network(0.3, 0.3)
    network.answer_s[1] = NEVER
    at = network.now
    network.run(at + tuning.ANSWER_FACTOR * 0.3, steps=(101, 100))
    assert not network.replaced
    network.run(at + tuning.ANSWER_FACTOR * 0.3 + 2 * tuning.ASK_S, steps=(101, 100))
    assert [c.task for c in network.replaced] == [1]


def test_f04_a_node_cannot_buy_time_without_bound_by_slow_answers() -> None:
    network = start_network(0.01, 4.9, every_s=0.5)  # and 4.9 s are less than strangers get
    network.answer_s[1] = NEVER
    network.run(network.now + 5.0, steps=(101, 100))  # its answers that were under way
    network.run(network.now + tuning.HANG_RUN_S, steps=(101, 100))
    assert [c.task for c in network.replaced] == [1]


def test_f04_a_late_answer_gives_the_node_back_and_everybody_more_time() -> None:
    network = start_network(0.01, 0.01)
    network.answer_s[1] = 0.9  # it is busy once
    network.run(network.now + 1.5, steps=(101, 100))
    assert [c.task for c in network.replaced] == [1]
    network.failover.process_up(NODES[2], network.now)
    [*_, last] = network.failover.process_failure(NODES[0], "gone", network.now)
    assert isinstance(last, Replace)
    assert network.failover.executors == (NODES[2], NODES[2], NODES[3])
    [last] = network.failover.process_failure(NODES[3], "gone", network.now)
    assert network.failover.executors[2] == NODES[1]  # it may serve again


def test_f04_nobody_is_blamed_for_a_silence_of_all() -> None:
    """The client's own connection may have failed; they are given as long as strangers."""
    network = start_network(0.01, 0.01)
    network.answer_s[:] = [2.0, 2.0, 2.0, 2.0]
    network.run(network.now + 2.5, steps=(101, 100))
    assert not network.replaced


def test_f04_nobody_is_blamed_for_the_time_that_the_client_was_away() -> None:
    network = start_network(0.01, 0.01)
    network.answer_s[:2] = [0.01, 30.0]
    network.run(network.now + 0.3, steps=(101, 100))
    network.now += 30.0  # the client was stopped; the answer is there, but not read yet
    network.failover.process_down(NODES[0], network.now - 1.0)
    network.take(network.failover.tick(network.now, late_s=29.0))
    network.take(network.failover.process_up(NODES[0], network.now))
    network.run(network.now + 1.0, steps=(101, 100))
    assert not network.replaced


def test_f04_a_silent_node_that_nobody_can_follow_is_waited_for() -> None:
    """Nothing is gained by giving up early, but for half of the time there is."""
    network = start_network(0.01, 0.01)
    network.failover.process_failure(NODES[2], "gone", network.now)
    network.answer_s[1] = NEVER
    network.run(DEADLINE_S / 2 - 1.0, steps=(101, 100))
    assert not network.replaced and network.failover.next_time() is not None
    network.run(DEADLINE_S / 2 + 1.0, steps=(101, 100))
    assert network.failover.next_time() is None


def test_f26_a_node_whose_address_refuses_connections_is_replaced_at_once() -> None:
    failover = make_failover()
    now = run_steps(failover, 5)
    assert failover.process_refused(NODES[1], now) == []  # it is connected
    failover.process_down(NODES[1], now)
    assert failover.process_refused(NODES[1], now) == [Replace(1, 1, 5, "it lost the connection")]


def test_a_node_that_loads_its_tasks_is_waited_for_but_not_for_ever() -> None:
    """How long loading takes nobody knows; others have the second half of the time for the task."""
    failover = make_failover()
    failover.process_submitted(0, 0.0)
    answers = [answer(0, (0, 1, False), (2, 0, False)), answer(1, loading=True)]
    command = answer_until_blamed(failover, answers, DEADLINE_S)
    assert (command.task, command.reason) == (1, "it did not load its tasks in time")
    now = failover.next_time()
    assert now is not None and DEADLINE_S / 2 < now < DEADLINE_S / 2 + 2 * tuning.STALL_FIRST_S


def answer_until_blamed(failover: Failover, answers: list[Progress], limit_s: float) -> Replace:
    began = failover.next_time()
    assert began is not None
    while True:
        now, commands = wait(failover)
        assert now < began + limit_s
        if any(isinstance(c, Probe) for c in commands):
            for told in answers:
                failover.process_progress(told, now + 0.001)
        for command in commands:
            if isinstance(command, Replace):
                return command


def test_f25_earliest_task_that_has_its_inputs_and_does_not_move_is_blamed() -> None:
    failover = make_failover()
    failover.process_submitted(10, run_steps(failover, 10))
    stuck = [answer(0, (0, 11, False), (2, 10, False)), answer(1, (1, 10, True))]
    command = answer_until_blamed(failover, stuck, tuning.HANG_RUN_S + 2 * tuning.ASK_S)
    assert (command.task, command.reason) == (1, "it did not deliver in time")


def test_task_that_lost_its_inputs_on_the_way_is_blamed() -> None:
    failover = make_failover()
    failover.process_submitted(10, run_steps(failover, 10))
    lost = [answer(0, (0, 11, False), (2, 10, False)), answer(1, (1, 10, False))]
    command = answer_until_blamed(failover, lost, tuning.HANG_LOST_S + 3 * tuning.ASK_S)
    assert command.task == 1


def test_slow_tasks_that_move_are_left_alone() -> None:
    failover = make_failover()
    now = run_steps(failover, 10)
    failover.process_submitted(99, now)
    for round_ in range(60):  # a replay of many steps: no output comes back for a minute
        now, commands = wait(failover)
        if commands:
            assert [type(c) for c in commands] == [Probe]
            for reply in (
                answer(0, (0, 11 + round_, True), (2, 10, False)),
                answer(1, (1, 10 + round_, True)),
            ):
                failover.process_progress(reply, now)
    assert now > tuning.HANG_RUN_S


def test_patience_follows_the_usual_step() -> None:
    failover = make_failover()
    assert failover.stall_s == tuning.STALL_FIRST_S
    run_steps(failover, 30, every_s=2.0)
    assert 3.9 < failover.stall_s < 4.1


class Liars:
    """Nodes that answer at once, the honest ones with what they have; a clock of the test's own."""

    def __init__(self, failover: Failover, now: float) -> None:
        self.failover, self.now = failover, now
        self.replaced: list[tuple[int, str]] = []
        self.lies: dict[str, Callable[[], Progress]] = {}

    def run(self, until: float, *, lacks: Callable[[int], bool] = lambda task: False) -> None:
        """Let time pass; honest nodes ran all tasks before the first that lacks its inputs."""
        while (due := self.failover.next_time()) is not None and due < until:
            self.now = max(self.now, due)
            for node in [n for n in NODES if n in self.failover._down]:
                self.failover.process_up(node, self.now)
            for command in self.failover.tick(self.now):
                if isinstance(command, Probe):
                    self.answer(command.nodes, lacks)
                elif isinstance(command, Replace):
                    self.replaced.append((command.task, command.reason))
                else:
                    return
        self.now = until

    def answer(self, nodes: Iterable[str], lacks: Callable[[int], bool]) -> None:
        for node in nodes:  # liars come last
            if node not in self.lies:
                self.failover.process_progress(self.tell(node, lacks), self.now)
        for node in nodes:
            if node in self.lies:
                self.failover.process_progress(self.lies[node](), self.now)

    def tell(self, node: str, lacks: Callable[[int], bool]) -> Progress:
        first = next((task for task in range(3) if lacks(task)), 3)
        own = [task for task in range(3) if self.failover.executors[task] == node]
        return answer(NODES.index(node), *((t, 100 + (t < first), False) for t in own))


def start_liars() -> Liars:
    failover = make_failover()
    now = run_steps(failover, 100, every_s=0.05)
    failover.process_submitted(100, now)
    return Liars(failover, now)


def test_s40_a_node_speaks_for_its_own_tasks_only() -> None:
    """Node 1 hangs, and says that task 0, which is another's, is stuck."""
    liars = start_liars()
    liars.lies[NODES[1]] = lambda: answer(1, (1, 100, True), (0, 100, True), (2, 100, True))
    liars.run(liars.now + tuning.HANG_RUN_S + 1.0)
    assert [task for task, _ in liars.replaced] == [1]


def test_s40_more_progress_than_steps_were_sent_is_none() -> None:
    liars = start_liars()
    steps = itertools.count(100)
    liars.lies[NODES[1]] = lambda: answer(1, (1, next(steps), True))
    liars.run(liars.now + tuning.HANG_RUN_S + 2.0)
    assert [task for task, _ in liars.replaced] == [1]


def test_s40_progress_that_goes_back_and_forth_is_none() -> None:
    liars = start_liars()
    steps = itertools.cycle((100, 99))
    liars.lies[NODES[1]] = lambda: answer(1, (1, next(steps), True))
    liars.run(liars.now + tuning.HANG_RUN_S + 2.0)
    assert [task for task, _ in liars.replaced] == [1]


def test_s40_a_node_that_tells_nothing_of_any_task_is_stuck() -> None:
    liars = start_liars()
    for node in (0, 1):
        liars.lies[NODES[node]] = partial(answer, node)
    liars.run(liars.now + tuning.HANG_LOST_S + 1.0)
    assert [task for task, _ in liars.replaced] == [0, 2]


def test_s40_a_producer_that_says_it_sent_what_two_readers_lack_is_replaced() -> None:
    """Node 0 keeps the outputs of task 0 from every reader, and blames them."""
    liars = start_liars()

    def lacks(task: int) -> bool:
        return task == 1 and liars.failover.executors[0] == NODES[0]

    liars.run(liars.now + 3 * tuning.HANG_LOST_S, lacks=lacks)
    assert [task for task, _ in liars.replaced][:3] == [1, 0, 2]
    assert NODES[0] not in liars.failover.executors
    assert liars.failover.next_time() is not None


def test_s40_who_drops_connections_one_after_the_other_is_silent() -> None:
    network = start_network(0.01, 0.01)
    network.answer_s[1] = NEVER
    until = network.now + tuning.STALL_FIRST_S + 1.0
    while network.now < until and not network.replaced:
        network.run(network.now + 0.3, steps=(101, 100))
        network.failover.process_down(NODES[1], network.now)
        network.take(network.failover.process_up(NODES[1], network.now))
    assert [(c.task, c.reason) for c in network.replaced] == [(1, "it stopped answering")]


def test_s40_a_new_connection_begins_the_time_for_an_answer_again() -> None:
    """Of one that was lost on the connection before: it is asked again."""
    network = start_network(0.01, 0.01)
    network.answer_s[1] = NEVER
    network.run(network.now + 0.3, steps=(101, 100))
    network.failover.process_down(NODES[1], network.now)
    network.run(network.now + 0.4, steps=(101, 100))
    network.answer_s[1] = 0.3
    commands = network.failover.process_up(NODES[1], network.now)
    assert commands == [Probe((NODES[1],))]
    network.take(commands)
    network.run(network.now + 1.0, steps=(101, 100))
    assert not network.replaced


def test_s40_nodes_that_never_answer_in_the_same_round_are_judged() -> None:
    """Each answers when the other one has just been asked again."""
    failover = make_failover()
    now = run_steps(failover, 100, every_s=0.05)
    failover.process_submitted(100, now)
    until, rounds, replaced = now + tuning.HANG_RUN_S + 2.0, 0, 0
    tasks: tuple[tuple[tuple[int, int, bool], ...], ...]
    tasks = (((0, 101, False), (2, 100, False)), ((1, 100, True),))
    while now < until and not replaced:
        now, commands = wait(failover)
        rounds += any(isinstance(c, Probe) for c in commands)
        failover.process_progress(answer(rounds % 2, *tasks[rounds % 2]), now + 0.1)
        replaced += sum(isinstance(c, Replace) for c in commands)
    assert replaced == 1 and failover.executors[1] == NODES[2]


def test_s40_answers_of_many_nodes_cost_what_they_are_many() -> None:
    """Each one's costs do not grow with the number of nodes, as they once did by its square."""
    few, many = 60, 480
    assert measure_answers(many) < 4 * many / few * measure_answers(few)


def measure_answers(count: int) -> float:
    """Return the processor time that the answers of so many nodes to one question take."""
    nodes = [address(n + 1) for n in range(count + 2)]
    lists = tuple((node, *nodes[count:]) for node in nodes[:count])
    plan = Plan(request=make_request(100), seed="0x" + "77" * 32, tasks=lists, nodes=())
    failover = Failover(plan, make_chain_manifest(count), 0.0, DEADLINE_S)
    for node in nodes[:count]:
        failover.process_up(node, 0.0)
    now, best_s = run_steps(failover, 3), inf
    failover.process_submitted(3, now)
    for _ in range(5):
        now, commands = wait(failover)
        asked = [node for c in commands if isinstance(c, Probe) for node in c.nodes]
        told = [
            Progress(
                execution_id="0x" + "ee" * 32,
                node=node,
                tasks=(TaskProgress(task=nodes.index(node), steps=3, ready=True),),
            )
            for node in asked
        ]
        began_s = time.process_time()
        for progress in told:
            failover.process_progress(progress, now + 0.01)
            failover.next_time()
        best_s = min(best_s, time.process_time() - began_s if len(told) == count else inf)
    assert best_s < inf
    return best_s
