from __future__ import annotations

import gc
import hashlib
import random
import weakref
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitup.core import tuning
from splitup.core.errors import PeerFault, Unavailable
from splitup.messages.base import CLIENT
from splitup.messages.frames import Seal
from splitup.protocol.execution.task_queue import EarlyFrames, LocalTask, PortId, TaskQueue, Tensor
from tests.builders import make_tensor_frame

FIRST, SECOND = "0x" + "01" * 32, "0x" + "02" * 32


def make_tensor(port: PortId, step: int, execution: str = FIRST) -> Tensor:
    data = f"{execution[-2:]}/{port}/{step}".encode()
    return Tensor(hashlib.sha256(data).digest(), data)


@st.composite
def local_tasks(draw: st.DrawFn) -> list[LocalTask]:
    """Some tasks of a DAG of ten; the others run elsewhere and send their output port 0."""
    mine = sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=5)))
    tasks = []
    for index in mine:
        sources = st.lists(st.integers(-1, index - 1), min_size=1, max_size=3, unique=True)
        inputs = tuple((CLIENT if s < 0 else s, 0) for s in draw(sources))
        tasks.append(LocalTask(index, inputs, 1, draw(st.integers(0, tuning.QUEUE_HEAD_START))))
    return tasks


def run_everything(
    tasks: list[LocalTask], steps: int, order: random.Random
) -> list[tuple[str, int, int]]:
    """Feed two executions in a random order with duplicates; return the runs as they came.

    Some runs take others with them.
    """
    mine = {task.index for task in tasks}
    outside = sorted({s for task in tasks for s in task.inputs if s[0] not in mine})
    queue = TaskQueue()
    for execution in (FIRST, SECOND):
        queue.assign(execution, tasks, steps)
        queue.assign(execution, tasks, steps)
    events = [
        (execution, port, step)
        for execution in (FIRST, SECOND)
        for port in outside
        for step in range(steps)
        for _ in range(2)
    ]
    order.shuffle(events)
    runs = []
    ended = False
    while True:
        run = queue.next() if order.random() < 0.7 or not events else None
        if run is not None:
            for one in (run, *queue.take_with(lambda other: order.random() < 0.3)):
                runs.append((one.execution_id, one.task, one.step))
                sources = next(t for t in tasks if t.index == one.task).inputs
                assert [t.data for t in one.inputs] == [
                    make_tensor(source, one.step, one.execution_id).data for source in sources
                ]
                queue.finish(one, [make_tensor((one.task, 0), one.step, one.execution_id)])
        elif events:
            execution, port, step = events.pop()
            queue.offer(execution, port, step, make_tensor(port, step, execution))
        elif ended:
            break
        else:
            ended = True
            for execution in (FIRST, SECOND):
                queue.end(execution, steps)
    assert queue.is_complete(FIRST) and queue.is_complete(SECOND)
    return runs


@settings(max_examples=100, deadline=None)
@given(tasks=local_tasks(), steps=st.integers(0, 6), seed=st.integers(0, 2**32))
def test_every_step_runs_once_and_in_order_whatever_order_tensors_come_in(
    tasks: list[LocalTask], steps: int, seed: int
) -> None:
    runs = run_everything(tasks, steps, random.Random(seed))
    for execution in (FIRST, SECOND):
        for task in tasks:
            done = [step for e, t, step in runs if (e, t) == (execution, task.index)]
            assert done == list(range(steps))


def test_buffers_are_empty_when_everything_has_run() -> None:
    tasks = [LocalTask(0, ((CLIENT, 0),), 1, 0), LocalTask(1, ((0, 0), (CLIENT, 0)), 1, 0)]
    queue = TaskQueue()
    queue.assign(FIRST, tasks, 2)
    for step in range(2):
        queue.offer(FIRST, (CLIENT, 0), step, make_tensor((CLIENT, 0), step))
    assert queue.buffered_bytes
    while (run := queue.next()) is not None:
        queue.finish(run, [make_tensor((run.task, 0), run.step)])
    assert queue.buffered_bytes == 0


def test_duplicate_is_ignored_and_a_different_tensor_is_a_fault_while_the_first_waits() -> None:
    queue = TaskQueue()
    queue.assign(FIRST, [LocalTask(0, ((CLIENT, 0),), 1, 0)], 4)
    tensor, other = make_tensor((CLIENT, 0), 0), make_tensor((CLIENT, 0), 1)
    assert queue.offer(FIRST, (CLIENT, 0), 0, tensor)
    assert not queue.offer(FIRST, (CLIENT, 0), 0, tensor)
    with pytest.raises(PeerFault, match="two different tensors for step 0"):
        queue.offer(FIRST, (CLIENT, 0), 0, other)
    run = queue.next()
    assert run is not None and queue.finish(run, [])
    for late in (tensor, other):
        assert not queue.offer(FIRST, (CLIENT, 0), 0, late)
    assert queue.get_progress(FIRST) == {0: 1}


def test_f04_another_producer_replaces_what_was_not_used_and_nothing_else() -> None:
    queue = TaskQueue()
    queue.assign(FIRST, [LocalTask(1, ((0, 0),), 1, 0)], 4)
    queue.offer(FIRST, (0, 0), 0, make_tensor((0, 0), 0))
    queue.offer(FIRST, (0, 0), 1, make_tensor((0, 0), 1))
    run = queue.next()
    assert run is not None and queue.finish(run, [])
    queue.renew(FIRST, 0)
    truth = make_tensor((0, 0), 3)
    assert not queue.offer(FIRST, (0, 0), 0, truth)
    assert queue.offer(FIRST, (0, 0), 1, truth)
    run = queue.next()
    assert run is not None and run.inputs == (truth,)
    assert queue.finish(run, []) and queue.buffered_bytes == 0


def test_f04_task_taken_away_or_added_in_the_middle_leaves_the_others_alone() -> None:
    queue = TaskQueue()
    tasks = [LocalTask(index, ((CLIENT, 0),), 1, 0) for index in range(3)]
    queue.assign(FIRST, tasks[:2], 4)
    for step in range(2):
        queue.offer(FIRST, (CLIENT, 0), step, make_tensor((CLIENT, 0), step))
    run = queue.next()
    assert run is not None and run.task == 0
    queue.drop_task(FIRST, 0)
    assert not queue.finish(run, [])
    queue.assign(FIRST, tasks[2:], 4)
    for step in range(2):  # replayed to the new task alone
        queue.offer(FIRST, (CLIENT, 0), step, make_tensor((CLIENT, 0), step), task=2)
    while (run := queue.next()) is not None:
        assert queue.finish(run, [])
    assert queue.get_progress(FIRST) == {1: 2, 2: 2} and queue.buffered_bytes == 0
    queue.drop_task(FIRST, 1)
    queue.drop_task(FIRST, 2)
    queue.assign(SECOND, tasks, 4)
    assert not queue.get_progress(FIRST)


def test_strangers_and_steps_beyond_the_paid_ones_are_faults() -> None:
    queue = TaskQueue()
    queue.assign(FIRST, [LocalTask(0, ((CLIENT, 0),), 1, 0)], 4)
    with pytest.raises(PeerFault, match="not assigned"):
        queue.offer(SECOND, (CLIENT, 0), 0, make_tensor((CLIENT, 0), 0))
    with pytest.raises(PeerFault, match="no task here reads port 1"):
        queue.offer(FIRST, (CLIENT, 1), 0, make_tensor((CLIENT, 1), 0))
    with pytest.raises(PeerFault, match="beyond its 4 steps"):
        queue.offer(FIRST, (CLIENT, 0), 4, make_tensor((CLIENT, 0), 4))
    queue.end(FIRST, 2)
    assert not queue.offer(FIRST, (CLIENT, 0), 2, make_tensor((CLIENT, 0), 2))
    assert queue.buffered_bytes == 0


def test_end_may_not_contradict_what_was_said_or_sent() -> None:
    queue = TaskQueue()
    queue.assign(FIRST, [LocalTask(0, ((CLIENT, 0),), 1, 0)], 4)
    queue.offer(FIRST, (CLIENT, 0), 1, make_tensor((CLIENT, 0), 1))
    for steps in (1, 5):
        with pytest.raises(PeerFault, match="cannot end"):
            queue.end(FIRST, steps)
    queue.end(FIRST, 2)
    queue.end(FIRST, 2)
    with pytest.raises(PeerFault, match="cannot end"):
        queue.end(FIRST, 3)


def test_a15_a_producer_cannot_keep_its_reader_from_the_end() -> None:
    """It sends tensors of steps that the client never asked for, before the client's end comes."""
    queue = TaskQueue()
    fed, unfed = LocalTask(1, ((0, 0), (CLIENT, 0)), 1, 0), LocalTask(2, ((0, 0),), 1, 0)
    queue.assign(FIRST, [fed, unfed], 4)
    for step in range(3):
        queue.offer(FIRST, (0, 0), step, make_tensor((0, 0), step))
    queue.offer(FIRST, (CLIENT, 0), 0, make_tensor((CLIENT, 0), 0))
    ran = []
    for _ in range(3):  # both tasks' first step, and one that the client did not ask for
        run = queue.next()
        assert run is not None
        queue.finish(run, [])
        ran.append((run.task, run.step))
    assert sorted(ran) == [(1, 0), (2, 0), (2, 1)]
    queue.end(FIRST, 1)
    assert queue.next() is None and queue.is_complete(FIRST) and queue.buffered_bytes == 0
    assert queue.take_with(lambda run: True) == []


def test_end_before_a_step_that_already_ran_is_a_fault() -> None:
    queue = TaskQueue()
    queue.assign(FIRST, [LocalTask(0, ((CLIENT, 0),), 1, 0)], 4)
    queue.offer(FIRST, (CLIENT, 0), 0, make_tensor((CLIENT, 0), 0))
    run = queue.next()
    assert run is not None
    queue.finish(run, [])
    with pytest.raises(PeerFault, match="cannot end"):
        queue.end(FIRST, 0)


def test_task_without_inputs_waits_for_the_number_of_steps() -> None:
    queue = TaskQueue()
    queue.assign(FIRST, [LocalTask(0, (), 1, 0)], 4)
    assert queue.next() is None
    queue.end(FIRST, 1)
    run = queue.next()
    assert run is not None and run.step == 0
    queue.finish(run, [])
    assert queue.next() is None and queue.is_complete(FIRST)


def test_critical_path_goes_first_and_overtakes_every_session_once() -> None:
    queue = TaskQueue()
    short = [LocalTask(0, ((CLIENT, 0),), 1, 0)]
    sessions = [f"0x{number:064x}" for number in range(4)]
    for session in sessions:
        queue.assign(session, short, 4)
    queue.assign(SECOND, [LocalTask(0, ((CLIENT, 0),), 1, tuning.QUEUE_HEAD_START)], 4)
    for session in (*sessions, SECOND):
        queue.offer(session, (CLIENT, 0), 0, make_tensor((CLIENT, 0), 0))
    order = []
    for step in range(3):
        for _ in range(5):
            run = queue.next()
            assert run is not None
            order.append(run.execution_id)
            queue.finish(run, [])
            queue.offer(run.execution_id, (CLIENT, 0), step + 1, make_tensor((CLIENT, 0), step + 1))
    assert [place for place, name in enumerate(order) if name == SECOND] == [0, 5, 10]


def test_32_sessions_share_a_node_and_none_falls_behind() -> None:
    """Every session sends its next step when the last is done; some tasks have a head start."""
    sessions = [f"0x{number:064x}" for number in range(32)]
    queue = TaskQueue()
    for number, session in enumerate(sessions):
        head_starts = (0, tuning.QUEUE_HEAD_START * (number % 2))
        tasks = [
            LocalTask(index, ((CLIENT, 0) if index == 0 else (0, 0),), 1, head_start)
            for index, head_start in enumerate(head_starts)
        ]
        queue.assign(session, tasks, 1_000)
        queue.offer(session, (CLIENT, 0), 0, make_tensor((CLIENT, 0), 0, session))
    done = dict.fromkeys(sessions, 0)
    spread = 0
    for _ in range(20_000):
        run = queue.next()
        assert run is not None
        output = make_tensor((run.task, 0), run.step, run.execution_id)
        assert queue.finish(run, [output])
        if run.task == 1:
            session = run.execution_id
            done[session] += 1
            step = done[session]
            queue.extend(session, step)
            queue.offer(session, (CLIENT, 0), step, make_tensor((CLIENT, 0), step, session))
            spread = max(spread, max(done.values()) - min(done.values()))
    assert min(done.values()) > 300 and spread <= 2
    assert queue.buffered_bytes < 32 * 200


def test_runs_that_go_with_others_keep_nobody_waiting() -> None:
    """One session always goes with another's run; the others take their turns as if it did not."""
    sessions = [f"0x{number:064x}" for number in range(5)]
    rider, others = sessions[0], sessions[1:]
    queue = TaskQueue()
    for session in sessions:
        queue.assign(session, [LocalTask(0, ((CLIENT, 0),), 1, 0)], 1_000)
        queue.offer(session, (CLIENT, 0), 0, make_tensor((CLIENT, 0), 0, session))
    turns = dict.fromkeys(sessions, 0)
    for _ in range(400):
        run = queue.next()
        assert run is not None
        taken = queue.take_with(lambda other: other.execution_id == rider)
        assert len(taken) == (run.execution_id != rider)
        for one in (run, *taken):
            turns[one.execution_id] += 1
            step = turns[one.execution_id]
            assert queue.finish(one, [])
            queue.extend(one.execution_id, step)
            tensor = make_tensor((CLIENT, 0), step, one.execution_id)
            queue.offer(one.execution_id, (CLIENT, 0), step, tensor)
        waiting = [turns[session] for session in others]
        assert max(waiting) - min(waiting) <= 1
    assert turns[rider] >= 320 and min(turns[session] for session in others) >= 80


def test_steps_beyond_what_was_delivered_are_kept_and_wait() -> None:
    """A client that never says that it received anything gets no more of it."""
    queue = TaskQueue()
    queue.assign(FIRST, [LocalTask(0, ((CLIENT, 0),), 1, 0)], 1_000)
    ran = 0

    def run_all() -> int:
        count = 0
        while (run := queue.next()) is not None:
            queue.finish(run, [])
            count += 1
        return count

    for step in range(150):
        queue.offer(FIRST, (CLIENT, 0), step, make_tensor((CLIENT, 0), step))
    for delivered, done in ((0, 16), (16, 48), (32, 80), (48, 112), (64, 128)):
        queue.extend(FIRST, delivered)
        queue.extend(FIRST, 0)  # takes nothing back
        ran += run_all()
        assert ran == done
    queue.end(FIRST, 150)
    assert ran + run_all() == 150


def test_steps_that_run_together_are_finished_in_order() -> None:
    queue = TaskQueue()
    queue.assign(FIRST, [LocalTask(0, ((CLIENT, 0), (CLIENT, 1)), 1, 0)], 9)
    for port, steps in ((0, (0, 1, 2, 3, 5)), (1, (0, 1, 2, 3, 4, 5))):
        for step in steps:
            queue.offer(FIRST, (CLIENT, port), step, make_tensor((CLIENT, port), step))
    run = queue.next()
    assert run is not None
    assert [one.step for one in queue.take_following(run, lambda one: True)] == [1, 2, 3]
    following = queue.take_following(run, lambda one: one.step < 3)
    assert [one.step for one in following] == [1, 2] and queue.next() is None
    for one in (run, *following):
        assert queue.finish(one, [])
        assert not queue.finish(one, [])  # it is done
    left = queue.next()
    assert left is not None and left.step == 3 and queue.next() is None
    assert queue.take_following(left, lambda one: True) == []
    queue.end(FIRST, 6)
    queue.offer(FIRST, (CLIENT, 0), 4, make_tensor((CLIENT, 0), 4))
    following = queue.take_following(left, lambda one: True)
    assert [one.step for one in following] == [4, 5]
    for one in (left, *following):
        queue.finish(one, [])
    assert queue.is_complete(FIRST) and queue.buffered_bytes == 0 and queue.next() is None


def test_dropped_execution_runs_no_more_and_frees_its_buffers() -> None:
    queue = TaskQueue()
    queue.assign(FIRST, [LocalTask(0, ((CLIENT, 0),), 1, 0)], 4)
    queue.offer(FIRST, (CLIENT, 0), 0, make_tensor((CLIENT, 0), 0))
    queue.offer(FIRST, (CLIENT, 0), 1, make_tensor((CLIENT, 0), 1))
    run = queue.next()
    assert run is not None
    queue.drop(FIRST)
    queue.finish(run, [make_tensor((0, 0), 0)])
    assert queue.next() is None and queue.buffered_bytes == 0 and not queue.get_progress(FIRST)


def test_buffers_and_executions_are_bounded() -> None:
    queue = TaskQueue(max_bytes=20)
    queue.assign(FIRST, [LocalTask(0, ((CLIENT, 0),), 1, 0)], 4)
    queue.offer(FIRST, (CLIENT, 0), 0, Tensor(b"a" * 32, b"x" * 20))
    with pytest.raises(Unavailable, match="20 bytes of tensors are buffered"):
        queue.offer(FIRST, (CLIENT, 0), 1, Tensor(b"b" * 32, b"y"))
    for number in range(tuning.QUEUE_EXECUTIONS - 1):
        queue.assign(f"0x{number:064x}", [], 1)
    with pytest.raises(Unavailable, match="executions already"):
        queue.assign(SECOND, [], 1)


def test_s38_the_execution_with_the_most_tensors_gives_way_to_others() -> None:
    queue, told = TaskQueue(max_bytes=20), []
    queue.tell_surplus = told.append
    for execution in (FIRST, SECOND):
        queue.assign(execution, [LocalTask(0, ((CLIENT, 0),), 1, 0)], 64)
    for step in range(5):
        queue.offer(FIRST, (CLIENT, 0), step, Tensor(b"a" * 32, b"1234"))
    with pytest.raises(Unavailable):
        queue.offer(FIRST, (CLIENT, 0), 5, Tensor(b"a" * 32, b"1234"))
    queue.offer(SECOND, (CLIENT, 0), 0, Tensor(b"a" * 32, b"1234"))
    assert told == [FIRST] and queue.buffered_bytes == 4
    run = queue.next()
    assert run is not None and run.execution_id == SECOND


def test_s38_tensors_of_an_execution_that_gave_way_are_freed_at_once() -> None:
    queue, data = TaskQueue(), memoryview(b"1234")
    queue.assign(FIRST, [LocalTask(0, ((CLIENT, 0),), 1, 0)], 64)
    queue.offer(FIRST, (CLIENT, 0), 1, Tensor(b"a" * 32, data))
    kept = weakref.ref(data)
    del data
    gc.disable()
    try:
        queue.drop(FIRST)
        assert kept() is None
    finally:
        gc.enable()


def test_s50_tensors_that_are_being_fetched_count_as_those_that_wait() -> None:
    queue = TaskQueue(max_bytes=20)
    for execution in (FIRST, SECOND):
        queue.assign(execution, [LocalTask(0, ((CLIENT, 0),), 1, 0)], 64)
    release = queue.reserve(FIRST, 0, 12)
    with pytest.raises(Unavailable):
        queue.reserve(FIRST, 1, 12)
    with pytest.raises(PeerFault, match="beyond its 64 steps"):
        queue.reserve(FIRST, 64, 1)
    queue.offer(SECOND, (CLIENT, 0), 0, Tensor(b"a" * 32, b"1234"))
    assert queue.buffered_bytes == 16
    queue.reserve(SECOND, 1, 6)  # the other one has more, and gives way
    assert queue.buffered_bytes == 10 and list(queue.executions) == [SECOND]
    release()
    assert queue.buffered_bytes == 10


def add_early(
    early: EarlyFrames, execution_id: str, sender: str, data: bytes, now_s: float = 0.0
) -> None:
    frame = make_tensor_frame(execution_id, CLIENT, 0, 0, data)
    part_of_a_buffer = memoryview(b"and more" + data)[8:]
    early.add(sender, replace(frame, payload=part_of_a_buffer), Seal(b"", bytes(64)), now_s)


def take_early(early: EarlyFrames, execution_id: str) -> list[tuple[str, object]]:
    return [(sender, frame.payload) for sender, frame, _ in early.take(execution_id)]


def test_early_frames_come_back_in_order_and_are_bounded() -> None:
    early = EarlyFrames()
    add_early(early, FIRST, "a", b"1")
    add_early(early, FIRST, "b", b"2")
    add_early(early, FIRST, "a", b"3")
    add_early(early, SECOND, "c", b"4")
    assert take_early(early, SECOND) == [("c", b"4")] and take_early(early, SECOND) == []
    assert take_early(early, FIRST) == [("a", b"1"), ("a", b"3"), ("b", b"2")]
    for number in range(tuning.MAX_EARLY_FRAMES):
        add_early(early, SECOND, "c", bytes([number % 256]))
    for data in (b"one too many", b"and another"):
        add_early(early, SECOND, "c", data)
    assert take_early(early, SECOND) == []  # never a part of them
    add_early(early, FIRST, "c", bytes(tuning.MAX_EARLY_BYTES + 1))
    add_early(early, FIRST, "c", b"behind it")
    assert take_early(early, FIRST) == []
    add_early(early, FIRST, "c", b"a new beginning")
    assert take_early(early, FIRST) == [("c", b"a new beginning")]


def test_early_frames_are_dropped_when_their_plan_does_not_come() -> None:
    early = EarlyFrames(max_streams=1)
    add_early(early, FIRST, "a", b"1", now_s=100.0)
    early.expire(100.0 + tuning.EARLY_S)
    add_early(early, SECOND, "b", b"2", now_s=100.0)
    assert take_early(early, SECOND) == []  # no room
    early.expire(100.1 + tuning.EARLY_S, {FIRST})  # its tasks are being loaded
    assert take_early(early, SECOND) == []
    early.expire(100.1 + tuning.EARLY_S)
    add_early(early, SECOND, "b", b"2", now_s=100.0)
    assert take_early(early, FIRST) == [] and take_early(early, SECOND) == [("b", b"2")]


def test_s11_early_frames_of_one_peer_push_out_no_frames_of_another() -> None:
    """Neither with executions that do not exist, nor with the same execution."""
    early = EarlyFrames(max_streams=4)
    add_early(early, FIRST, "genuine", b"1")
    for _ in range(tuning.MAX_EARLY_FRAMES + 1):
        add_early(early, FIRST, "flooding", b"x")
    for number in range(3, 8):
        add_early(early, f"0x{number:064x}", "flooding", b"x")
    add_early(early, FIRST, "genuine", b"2")
    add_early(early, SECOND, "genuine", b"3")  # takes a place that the flood had
    kept = [entry for entry in take_early(early, FIRST) if entry[0] == "genuine"]
    assert kept == [("genuine", b"1"), ("genuine", b"2")]
    assert take_early(early, SECOND) == [("genuine", b"3")]


GATED = LocalTask(2, ((0, 0), (0, 1), (1, 0)), 1, 0, gate=(0, 1))


def test_a_zero_gate_is_all_that_a_step_needs() -> None:
    queue = TaskQueue()
    queue.assign(FIRST, [GATED], 3)
    zero = Tensor(hashlib.sha256(bytes(4)).digest(), bytes(4))
    one = make_tensor((0, 1), 1)
    queue.offer(FIRST, (1, 0), 0, make_tensor((1, 0), 0))  # from who does not know the gate
    assert queue.next() is None
    queue.offer(FIRST, (0, 1), 1, one)  # out of order
    queue.offer(FIRST, (0, 1), 0, zero)
    assert queue.is_ready(FIRST, 2)
    run = queue.next()
    assert run is not None and (run.step, run.inputs, run.gate) == (0, (), zero)
    assert queue.finish(run, [zero])
    assert not queue.offer(FIRST, (0, 0), 0, make_tensor((0, 0), 0))  # late, and not needed
    assert queue.next() is None  # the next step's gate is open: it needs the rest
    queue.offer(FIRST, (0, 0), 1, one)
    assert queue.next() is None
    queue.offer(FIRST, (1, 0), 1, one)
    run = queue.next()
    assert run is not None and (run.step, run.inputs, run.gate) == (1, (one, one, one), None)
    assert queue.finish(run, [one]) and queue.buffered_bytes == 0


def test_a_gate_that_a_successor_opens_again_makes_the_step_wait_for_the_rest() -> None:
    queue, one = TaskQueue(), make_tensor((0, 1), 1)
    queue.assign(FIRST, [GATED], 3)
    queue.offer(FIRST, (0, 1), 0, Tensor(hashlib.sha256(bytes(4)).digest(), bytes(4)))
    assert len(queue.ready) == 1
    queue.renew(FIRST, 0)  # another node produces the gate, and sends other bytes
    queue.offer(FIRST, (0, 1), 0, one)
    assert queue.next() is None
    queue.offer(FIRST, (0, 0), 0, one)
    queue.offer(FIRST, (1, 0), 0, one)
    run = queue.next()
    assert run is not None and run.inputs == (one, one, one)


def test_steps_that_are_not_run_take_nothing_from_an_execution_s_share() -> None:
    queue = TaskQueue()
    queue.assign(FIRST, [GATED, LocalTask(3, ((2, 0),), 1, 0)], 4)
    queue.assign(SECOND, [LocalTask(0, ((CLIENT, 0),), 1, 0)], 4)
    zero = Tensor(hashlib.sha256(bytes(4)).digest(), bytes(4))
    order = []
    for step in range(4):
        queue.offer(FIRST, (0, 1), step, zero)
        queue.offer(SECOND, (CLIENT, 0), step, make_tensor((CLIENT, 0), step))
    while (run := queue.next()) is not None:
        queue.finish(run, [zero])
        if run.gate is None:
            order.append(run.execution_id)
    assert order.count(FIRST) == order.count(SECOND) == 4
    assert SECOND in order[:3] and FIRST in order[:3]
