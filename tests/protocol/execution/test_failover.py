"""The client's verdicts, on a clock of the test's own."""

from __future__ import annotations

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
            failover.process_up(node)
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
    failover.process_up(NODES[0])
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
    failover.process_up(NODES[0])
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


def test_f04_silent_node_is_found_by_asking() -> None:
    failover = make_failover()
    now = run_steps(failover, 10)
    failover.process_submitted(10, now)
    due, commands = wait(failover)
    assert due == now + tuning.STALL_S
    assert commands == [Probe((NODES[0], NODES[1]))]
    assert failover.process_progress(answer(0, (0, 11, False), (2, 10, False)), due) == []
    due, commands = wait(failover)
    assert [(c.task, c.reason) for c in commands if isinstance(c, Replace)] == [
        (1, "it stopped answering")
    ]


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
            commands = [c for a in answers for c in failover.process_progress(a, now + 0.001)]
        for command in commands:
            if isinstance(command, Replace):
                return command


def test_f25_earliest_task_that_has_its_inputs_and_does_not_move_is_blamed() -> None:
    failover = make_failover()
    failover.process_submitted(10, run_steps(failover, 10))
    stuck = [answer(0, (0, 11, False), (2, 10, False)), answer(1, (1, 10, True))]
    command = answer_until_blamed(failover, stuck, tuning.HANG_RUN_S + 2 * tuning.STALL_S)
    assert (command.task, command.reason) == (1, "it did not deliver in time")


def test_task_that_lost_its_inputs_on_the_way_is_blamed() -> None:
    failover = make_failover()
    failover.process_submitted(10, run_steps(failover, 10))
    lost = [answer(0, (0, 11, False), (2, 10, False)), answer(1, (1, 10, False))]
    command = answer_until_blamed(failover, lost, tuning.HANG_LOST_S + 3 * tuning.STALL_S)
    assert command.task == 1


def test_slow_tasks_that_move_are_left_alone() -> None:
    failover = make_failover()
    now = run_steps(failover, 10)
    failover.process_submitted(10, now)
    for round_ in range(60):  # a replay of many steps: no output comes back for a minute
        now, commands = wait(failover)
        if commands:
            assert [type(c) for c in commands] == [Probe]
            for reply in (
                answer(0, (0, 11 + round_, True), (2, 10, False)),
                answer(1, (1, 10 + round_, True)),
            ):
                assert failover.process_progress(reply, now) == []
    assert now > 25


def test_patience_follows_the_usual_step() -> None:
    failover = make_failover()
    assert failover.stall_s == tuning.STALL_FIRST_S
    run_steps(failover, 30, every_s=2.0)
    assert 15 < failover.stall_s < 17
