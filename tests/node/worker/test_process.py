from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from splitup_node.worker.ipc import (
    LoadRequest,
    RunAnswer,
    RunRequest,
    decode_answers,
    encode_answers,
)
from splitup_node.worker.process import Worker
from splitup_node.worker.supervisor import Supervisor, TaskFailed, WorkerLost

from splitup.backend.compiler.compile_process import compile_to_bytes
from splitup.backend.devices.device_choice import select_device
from splitup.core import tuning
from splitup.core.errors import SplitUpError, Unavailable
from splitup.cpu.native_kernels import is_supported
from splitup.graph.ir import Graph
from splitup.graph.rules import load_graph
from tests.builders import HANG_S, KERNELS
from tests.cpu.test_cache_writes import make_cache
from tests.graph.graphs import Builder, make_running_sum
from tests.graph.hostile import make_shifts, make_swelling
from tests.node.fragile_worker import CORRUPT, CRASH, CRASHING_WEIGHTS, HANG, OVERFLOW, RAISE
from tests.node.graphs import make_accumulator, make_sum

FRAGILE = (sys.executable, str(Path(__file__).parents[1] / "fragile_worker.py"))
pytestmark = pytest.mark.asyncio(loop_scope="module")
Start = Callable[..., Coroutine[Any, Any, Supervisor]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def supervisor(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Supervisor]:
    """A worker that the tests share and leave alive."""
    directory = tmp_path_factory.mktemp("worker")
    running = Supervisor(
        directory,
        memory_bytes=10**8,
        device="CPU:X86",
        cache_directory=directory / "kernels",
        worker_argv=FRAGILE,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        await running.start()
    yield running
    await running.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fragile(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Supervisor]:
    """One whose worker tests end; ``broken`` gives it another one."""
    running = Supervisor(
        tmp_path_factory.mktemp("fragile"),
        memory_bytes=10**8,
        device="CPU:X86",
        cache_directory=KERNELS,
        worker_argv=FRAGILE,
    )
    await running.start()
    yield running
    await running.close()


@pytest_asyncio.fixture(loop_scope="module")
async def broken(fragile: Supervisor) -> Supervisor:
    if not fragile.is_running:
        await fragile.restart()
    fragile.drop([1, 2])
    return fragile


@pytest_asyncio.fixture(loop_scope="module")
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start supervisors with a worker that breaks on demand; all are closed at the end."""
    running: list[Supervisor] = []

    async def start_one(**options: Any) -> Supervisor:
        supervisor = Supervisor(
            tmp_path,
            memory_bytes=options.pop("memory_bytes", 10**8),
            device="CPU:X86",
            cache_directory=KERNELS,
            worker_argv=FRAGILE,
            **options,
        )
        running.append(supervisor)
        await supervisor.start()
        return supervisor

    yield start_one
    for supervisor in running:
        await supervisor.close()


async def load(supervisor: Supervisor, directory: Path, graph: Graph) -> dict[str, Any]:
    path = directory / "task.json"
    path.write_bytes(graph.to_bytes())
    return await supervisor.load(path, None)


async def run(
    supervisor: Supervisor, session: int, program: int, *inputs: list[float]
) -> RunAnswer | SplitUpError:
    answer: asyncio.Future[RunAnswer | SplitUpError] = asyncio.get_running_loop().create_future()
    data = [np.array(values, np.float32).tobytes() for values in inputs]
    supervisor.run_together(
        [RunRequest(session, program, data)], lambda one: answer.set_result(*one)
    )
    async with asyncio.timeout(HANG_S):
        return await answer


def values(answer: RunAnswer | SplitUpError) -> list[float]:
    assert isinstance(answer, RunAnswer), answer
    return np.frombuffer(answer.outputs[0], np.float32).tolist()


@pytest.mark.long  # in small: cpu/test_threads.py; one thread confined in every network
async def test_a_confined_worker_with_several_threads_gives_the_bytes_of_one(
    start: Start, tmp_path: Path
) -> None:
    b, size = Builder(), 1_536  # as much work as threads are woken for
    x = b.input("x", "float32", 1, size)
    weights = np.random.default_rng(1).standard_normal((size, size), np.float32)
    wide = b.add("EXPAND", "float32", b.add("RESHAPE", "float32", x, arg=(size,)), arg=(size,))
    product = b.add("MUL", "float32", wide, b.weight("w", weights))
    product = b.add("PERMUTE", "float32", product, arg=(1, 0))
    graph = b.graph({"y": b.store("float32", b.add("REDUCE", "float32", product, arg=("ADD", 1)))})
    (tmp_path / "task.json").write_bytes(graph.to_bytes())
    (tmp_path / "weights").write_bytes(b.safetensors())
    found = []
    for threads in (1, 3):
        supervisor = await start(threads=threads)
        loaded = await supervisor.load(tmp_path / "task.json", tmp_path / "weights")
        for _ in range(20):
            found.append(values(await run(supervisor, 1, loaded["program"], [0.5] * size)))
    assert all(one == found[0] for one in found) and any(found[0])


async def test_state_belongs_to_its_session_and_ends_with_it(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    loaded = await load(supervisor, tmp_path, make_accumulator(2))
    program = loaded["program"]
    assert values(await run(supervisor, 1, program, [1, 2])) == [1, 2]
    assert values(await run(supervisor, 2, program, [5, 5])) == [5, 5]
    answer = await run(supervisor, 1, program, [1, 2])
    assert values(answer) == [2, 4]
    assert isinstance(answer, RunAnswer) and answer.started_ns <= answer.ended_ns
    supervisor.drop([1, 77])
    assert values(await run(supervisor, 1, program, [1, 2])) == [1, 2]


async def test_a21_a_cache_that_was_tampered_with_at_one_step_shows_in_the_state(
    broken: Supervisor, tmp_path: Path
) -> None:
    """A replay of the same inputs from zero state gives another digest, outputs aside."""
    supervisor = broken
    program = (await load(supervisor, tmp_path, make_accumulator(2)))["program"]
    with pytest.raises(TaskFailed, match="holds no state"):
        await supervisor.digest_state(1)
    inputs = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
    for step in inputs:
        await run(supervisor, 1, program, step)
    for step in [*inputs[:3], [CORRUPT, 0.0], *inputs[3:]]:
        answer = await run(supervisor, 2, program, step)
    assert values(answer) == [16.0, 20.0], "what it sends is right"
    honest, corrupt = await supervisor.digest_state(1), await supervisor.digest_state(2)
    assert honest == hashlib.sha256(np.array([16, 20], np.float32).tobytes()).hexdigest()
    assert corrupt != honest
    await supervisor.unload(program)  # its caches are wrong


async def test_the_worker_survives_failed_requests(supervisor: Supervisor, tmp_path: Path) -> None:
    program = (await load(supervisor, tmp_path, make_accumulator(2)))["program"]
    assert values(await run(supervisor, 10, program, [1, 1])) == [1, 1]
    raised = await run(supervisor, 10, program, [RAISE, 0])
    assert isinstance(raised, TaskFailed) and "kernel went wrong" in str(raised)
    wrong = await run(supervisor, 10, program, [1, 1, 1])
    assert isinstance(wrong, TaskFailed) and "12 bytes" in str(wrong)
    assert values(await run(supervisor, 10, program, [1, 1])) == [2, 2]


async def test_a_file_that_is_no_task_is_refused(supervisor: Supervisor, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(b'{"format":"something"}')
    with pytest.raises(TaskFailed, match="graph"):
        await supervisor.load(path, None)


async def test_f25_crash_fails_the_run_and_another_worker_takes_over_when_there_is_memory(
    broken: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = broken
    program = (await load(supervisor, tmp_path, make_accumulator(2)))["program"]
    first_pid = supervisor.pid
    assert isinstance(await run(supervisor, 1, program, [CRASH, 0]), WorkerLost)
    async with asyncio.timeout(HANG_S):
        await supervisor.wait_lost()
    assert not supervisor.is_running
    assert isinstance(await run(supervisor, 1, program, [1, 1]), WorkerLost)

    async def fail(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", fail)
        with pytest.raises(WorkerLost, match="Cannot allocate memory"):
            await supervisor.restart()
    async with asyncio.timeout(HANG_S):
        await supervisor.wait_lost()  # the daemon tries again
    await supervisor.restart()
    assert supervisor.pid != first_pid and supervisor.is_running
    program = (await load(supervisor, tmp_path, make_accumulator(2)))["program"]
    assert values(await run(supervisor, 1, program, [1, 1])) == [1, 1]


async def test_f25_a_crash_while_loading_ends_only_the_worker(
    broken: Supervisor, tmp_path: Path
) -> None:
    supervisor = broken
    path, weights = tmp_path / "task.json", tmp_path / "weights"
    path.write_bytes(make_sum(2).to_bytes())
    weights.write_bytes(CRASHING_WEIGHTS)
    with pytest.raises(WorkerLost, match="crash in a kernel"):
        await supervisor.load(path, weights)
    async with asyncio.timeout(HANG_S):
        await supervisor.wait_lost()
    await supervisor.restart()
    program = (await load(supervisor, tmp_path, make_sum(2)))["program"]
    assert values(await run(supervisor, 1, program, [1, 2], [3, 4])) == [4, 6]


async def test_f25_the_worker_survives_a_step_without_memory(
    broken: Supervisor, tmp_path: Path
) -> None:
    supervisor = broken
    program = (await load(supervisor, tmp_path, make_sum(2)))["program"]
    failed = await run(supervisor, 1, program, [OVERFLOW, 0], [0, 0])
    assert isinstance(failed, TaskFailed) and "MemoryError" in str(failed)
    assert values(await run(supervisor, 1, program, [1, 2], [3, 4])) == [4, 6]


async def test_f25_a_worker_that_hangs_is_killed_after_the_time_limit(
    broken: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = broken
    monkeypatch.setattr(supervisor, "_run_timeout_s", 0.3)
    program = (await load(supervisor, tmp_path, make_sum(2)))["program"]
    lost = await run(supervisor, 1, program, [HANG, 0], [0, 0])
    assert isinstance(lost, WorkerLost) and "no answer to RUN within" in str(lost)


async def test_f25_a_stopped_worker_is_killed_at_once_and_replaced(
    broken: Supervisor, tmp_path: Path
) -> None:
    """No time limit is waited for: the kernel tells. The next worker is watched as well."""
    supervisor = broken
    for restarts in (supervisor.restarts + 1, supervisor.restarts + 2):
        program = (await load(supervisor, tmp_path, make_sum(2)))["program"]
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGSTOP)
        lost = await run(supervisor, 1, program, [1, 2], [3, 4])
        assert isinstance(lost, WorkerLost) and "stopped by a signal" in str(lost)
        await supervisor.restart()
        assert supervisor.restarts == restarts and supervisor.is_running


async def test_f25_a_worker_is_given_the_time_that_its_longest_step_takes_here(
    broken: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No machine is so slow that a worker which computes is killed for it."""
    supervisor = broken
    for program in list(supervisor._loaded):
        await supervisor.unload(program)
    monkeypatch.setattr(supervisor, "_run_timeout_s", 0.0)
    loaded = await load(supervisor, tmp_path, make_sum(2))
    assert loaded["longest_s"] > 0
    assert supervisor.limit_s == tuning.RUN_FACTOR * loaded["longest_s"]
    supervisor._loaded[loaded["program"]]["longest_s"] = HANG_S  # a slower machine
    supervisor._set_limit()
    assert values(await run(supervisor, 1, loaded["program"], [1, 2], [3, 4])) == [4, 6]
    await supervisor.unload(loaded["program"])
    assert supervisor.limit_s == 0.0
    monkeypatch.undo()
    supervisor._set_limit()


async def test_f25_a_load_is_given_up_only_without_progress(
    broken: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = broken
    path = tmp_path / "task.json"
    path.write_bytes(make_sum(2).to_bytes())
    monkeypatch.setattr(tuning, "LOAD_QUIET_S", 0.0)
    asked: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()

    def move(left: int) -> None:
        supervisor._load_moves += 1
        asyncio.get_running_loop().call_soon(
            *((move, left - 1) if left else (asked.set_result, memoryview(b'{"program":1}')))
        )

    move(20)
    assert await supervisor._await_load(asked, path) == {"program": 1}
    with pytest.raises(WorkerLost, match="while it loaded"):
        await supervisor._await_load(asyncio.get_running_loop().create_future(), path)
    assert not supervisor.is_running and "no progress" in supervisor.problem


async def test_a_load_that_nobody_waits_for_any_more_is_freed(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    kept = (await load(supervisor, tmp_path, make_sum(2)))["program"]
    unwanted = asyncio.create_task(load(supervisor, tmp_path, make_accumulator(2)))
    while not supervisor._loads:  # noqa: ASYNC110 - nobody is told
        await asyncio.sleep(0)
    unwanted.cancel()
    with pytest.raises(asyncio.CancelledError):
        await unwanted
    later = (await load(supervisor, tmp_path, make_sum(3)))["program"]  # behind the unwanted one
    for program in range(kept + 1, later):
        answer = await run(supervisor, 1, program, [1, 2])
        assert isinstance(answer, TaskFailed) and "not loaded" in str(answer)
    assert values(await run(supervisor, 30, kept, [1, 2], [3, 4])) == [4, 6]


@pytest.mark.skipif(not is_supported(), reason="states are written as a whole and not kept")
async def test_spare_states_are_freed_when_memory_is_short(
    tmp_path: Path,
) -> None:
    data = make_cache(64).to_bytes()
    kernels = compile_to_bytes(lambda: load_graph(data), select_device().device)
    wanted = LoadRequest(data, kernels, 10**8, None)
    measuring = Worker(10**8)
    loaded = measuring.add(measuring.load(wanted, None))
    fixed, state_bytes = loaded["vram_bytes"] - loaded["state_bytes"], loaded["state_bytes"]
    worker = Worker(2 * fixed + 3 * state_bytes)
    programs = [worker.add(worker.load(wanted, None))["program"] for _ in range(2)]

    def run(session: int, program: int) -> None:
        inputs = [bytes(spec.row_bytes) for spec in worker._programs[program].inputs]
        worker.run(RunRequest(session, program, inputs))

    def count_spare() -> list[int]:
        return [worker._programs[program].spare_bytes // state_bytes for program in programs]

    for session in range(3):
        run(session, programs[0])
    worker.drop(range(3))
    assert count_spare() == [3, 0]
    run(3, programs[0])  # one of them: they stay
    assert count_spare() == [2, 0]
    run(4, programs[1])  # a new one: they go
    assert count_spare() == [0, 0]
    run(5, programs[1])
    with pytest.raises(Unavailable, match="no memory for another state"):
        run(6, programs[1])


async def test_s04_steps_run_while_a_task_is_loading(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    program = (await load(supervisor, tmp_path, make_accumulator()))["program"]
    values(await run(supervisor, 700, program, [1.0] * 4))
    hostile = tmp_path / "hostile.json"
    hostile.write_bytes(make_shifts(5).to_bytes())  # legal, and takes a second
    loading = asyncio.create_task(supervisor.load(hostile, None))
    for step in range(2, 42):
        assert values(await run(supervisor, 700, program, [1.0] * 4)) == [float(step)] * 4
    assert not loading.done()
    assert (await loading)["program"] > program
    supervisor.drop([700])


async def test_s04_a_refused_task_costs_neither_memory_nor_steps(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    program = (await load(supervisor, tmp_path, make_accumulator()))["program"]
    status = Path(f"/proc/{supervisor.pid}/status")

    def get_peak_kib() -> int:
        return int(status.read_text().partition("VmHWM:")[2].split()[0])

    before_kib = get_peak_kib()
    refused = {"declared": make_swelling(600), "'compiling'": make_shifts(10)}
    for reason, graph in refused.items():
        path = tmp_path / "refused.json"
        path.write_bytes(graph.to_bytes())
        with pytest.raises(TaskFailed, match=reason):
            await supervisor.load(path, None, 10**6)
    assert get_peak_kib() - before_kib < 64 * 1024
    values(await run(supervisor, 701, program, [1.0] * 4))
    supervisor.drop([701])


async def test_s04_a_task_for_more_memory_than_the_worker_has_is_refused(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    path = tmp_path / "large.json"
    path.write_bytes(make_swelling(600).to_bytes())
    with pytest.raises(TaskFailed, match=f"{10**8} are declared"):
        await supervisor.load(path, None, 10**12)


async def test_large_tensors_cross_the_socket_whole(supervisor: Supervisor, tmp_path: Path) -> None:
    size = 1_500_000
    program = (await load(supervisor, tmp_path, make_sum(size)))["program"]
    x = np.arange(size, dtype=np.float32)
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    supervisor.run_together(
        [RunRequest(20, program, [x.tobytes(), x.tobytes()])],
        lambda found: answer.set_result(found[0]),
    )
    assert np.array_equal(np.frombuffer((await answer).outputs[0], np.float32), x + x)


async def test_environment_holds_no_secret_of_the_daemon(supervisor: Supervisor) -> None:
    environment = await asyncio.to_thread(Path(f"/proc/{supervisor.pid}/environ").read_bytes)
    assert b"DEV=CPU:X86" in environment and b"secret" not in environment


async def test_answer_survives_its_encoding() -> None:
    answers = [RunAnswer(1, 2, [b"", b"abc"]), ValueError("no"), RunAnswer(3, 4, [])]
    body = memoryview(b"".join(encode_answers(answers)))
    decoded = decode_answers(body, TaskFailed)
    assert decoded[::2] == answers[::2] and str(decoded[1]) == "ValueError: no"


async def test_runs_of_several_sessions_share_a_batch_and_fail_separately(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, memory_bytes=10**8, device="CPU:X86", cache_directory=KERNELS)
    try:
        await supervisor.start()
        loaded = await load(supervisor, tmp_path, make_running_sum(8))
        program = loaded["program"]
        assert supervisor.get_width(program) == loaded["width"] > 4

        async def run_all(rows: dict[int, int], bad: int = -1) -> list[RunAnswer | SplitUpError]:
            loop = asyncio.get_running_loop()
            answers = loop.create_future()
            requests = [
                RunRequest(session, program, [b"?" if session == bad else bytes(16 * count)])
                for session, count in rows.items()
            ]
            supervisor.run_together(requests, answers.set_result)
            async with asyncio.timeout(HANG_S):
                return list(await answers)

        answers = await run_all({session: 1 for session in range(1, 6)}, bad=3)
        assert sum(isinstance(answer, RunAnswer) for answer in answers) == 4
        assert isinstance(answers[2], TaskFailed) and "1 bytes" in str(answers[2])
        times = {answer.started_ns for answer in answers if isinstance(answer, RunAnswer)}
        assert len(times) == 1  # one pass for all
        answers = await run_all({1: 5, 2: 5, 4: 3})  # 13 rows: two passes
        times = [answer.started_ns for answer in answers if isinstance(answer, RunAnswer)]
        assert len(times) == 3 and times[0] < times[1] == times[2]

        async def run_in_order(session: int, steps: Sequence[bytes]) -> list[Any]:
            answers = asyncio.get_running_loop().create_future()
            requests = [RunRequest(session, program, [data]) for data in steps]
            supervisor.run_together(requests, answers.set_result)
            async with asyncio.timeout(HANG_S):
                return list(await answers)

        assert supervisor.merges(program)
        rows = [np.full((1, 4), number, np.float32).tobytes() for number in range(5)]
        answers = await run_in_order(10, rows)
        assert len({answer.started_ns for answer in answers}) == 1  # one pass for all
        squares = np.arange(5, dtype=np.float32) ** 2
        last = [np.frombuffer(answer.outputs[0], np.float32)[0] for answer in answers]
        assert last == np.cumsum(squares).tolist()
        answers = await run_in_order(11, [*rows[:3], b"?", *rows[3:]])
        assert all(isinstance(answer, RunAnswer) for answer in answers[:3])
        assert all(isinstance(answer, TaskFailed) for answer in answers[3:])
        assert all("1 bytes" in str(answer) for answer in answers[3:])
    finally:
        await supervisor.close()
