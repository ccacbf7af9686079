from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitup.backend.compiler import schedule
from splitup.backend.compiler.schedule import Schedule, compile_graph
from splitup.backend.devices.device_choice import select_device
from splitup.backend.runtime import State, TaskProgram
from splitup.core import tuning
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.graph.ir import Graph, encode_float
from splitup.graph.rules import CheckedGraph, check_graph
from tests.graph.graphs import Builder, make_counter, make_running_sum


def compile_counter(size: int = 4) -> TaskProgram:
    b = make_counter(size)
    y = len(b.nodes) - 1
    return TaskProgram(b.graph({"y": y}, [y]).to_bytes(), b.safetensors())


def step(program: TaskProgram, state: State, value: float) -> np.ndarray:
    (result,) = program.run(state, [np.full(4, value, np.float32).tobytes()])
    return np.frombuffer(result, np.float32)


def test_state_starts_at_zero_and_is_kept() -> None:
    program = compile_counter()
    state, w = program.new_state(), np.arange(1, 5, dtype=np.float32)
    for count in range(1, 6):
        np.testing.assert_array_equal(step(program, state, 2.0), 2 * w * count)
    np.testing.assert_array_equal(step(program, program.new_state(), 1.0), w)


def test_state_digest_is_of_the_tensors_after_the_last_step_that_succeeded() -> None:
    program = compile_counter()
    state, same, w = program.new_state(), program.new_state(), np.arange(1, 5, dtype=np.float32)
    assert program.compute_state_digest(state) == hashlib.sha256(bytes(16)).hexdigest()
    for count in (1, 2, 3):
        step(program, state, 2.0)
        expected = hashlib.sha256((2 * w * count).tobytes()).hexdigest()
        assert program.compute_state_digest(state) == expected
    with pytest.raises(InvalidInput):
        program.run(state, [])
    assert program.compute_state_digest(state) == expected
    for value in (1.0, 1.0, 4.0):  # another way to the same state
        step(program, same, value)
    assert program.compute_state_digest(same) == expected


def test_interleaved_executions_do_not_touch_each_other() -> None:
    program = compile_counter()
    alone = []
    for value in (1.0, 5.0):
        state = program.new_state()
        alone.append([step(program, state, value + n).tobytes() for n in range(4)])
    first, second = program.new_state(), program.new_state()
    mixed: list[list[bytes]] = [[], []]
    for n in range(4):
        mixed[0].append(step(program, first, 1.0 + n).tobytes())
        mixed[1].append(step(program, second, 5.0 + n).tobytes())
    assert mixed == alone


def make_scaled(name: str, weight: float, factor: str = "2") -> tuple[Graph, bytes]:
    b = Builder()
    x = b.input(f"x{name}", "float32", 4)
    w = b.weight(f"w{name}", np.full(4, weight, np.float32))
    scaled = b.add("MUL", "float32", w, b.const("float32", encode_float(float(factor))))
    y = b.store("float32", b.add("MUL", "float32", x, scaled))
    return b.graph({f"y{name}": y}), b.weight_bytes[f"w{name}"]


def test_graphs_that_differ_in_names_alone_are_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = []

    def compile_and_count(graph: CheckedGraph, *args: Any, **options: Any) -> Schedule:
        compiled.append(graph)
        return compile_graph(graph, *args, **options)

    monkeypatch.setattr(schedule, "compile_graph", compile_and_count)
    monkeypatch.setattr(schedule, "_schedules", {})
    for case, result in (
        (make_scaled("a", 3), 6),
        (make_scaled("b", 5), 10),
        (make_scaled("a", 3, "4"), 12),
    ):
        program = TaskProgram.from_graph(check_graph(case[0]), lambda _, case=case: case[1])
        np.testing.assert_array_equal(step(program, program.new_state(), 1.0), [result] * 4)
    assert [graph.inputs[0].name for graph in compiled] == ["xa", "xa"]
    monkeypatch.setattr(schedule, "_MAX_SCHEDULES", 2)
    device = select_device().device
    for name, factor in (("c", "8"), ("d", "4"), ("e", "2")):  # the oldest of two is forgotten
        schedule.compile_once(check_graph(make_scaled(name, 1, factor)[0]), device)
    assert len(compiled) == 4 and len(schedule._schedules) == 2


def test_a_failed_step_leaves_the_state() -> None:
    program = compile_counter()
    state, other = program.new_state(), program.new_state()
    step(program, state, 1.0)
    step(program, other, 1.0)
    good = np.ones(4, np.float32).tobytes()
    for bad in ([], [good, good], [good[:-1]], [good + b"\0"]):
        with pytest.raises(InvalidInput):
            program.run(state, bad)
    launches = state._launches
    state._launches = ([*launches[0], _fail], [*launches[1], _fail])
    with pytest.raises(RuntimeError):
        step(program, state, 7.0)
    state._launches = launches
    np.testing.assert_array_equal(step(program, state, 1.0), step(program, other, 1.0))
    with pytest.raises(InvalidInput, match="another program"):
        compile_counter().run(state, [good])


def _fail() -> None:
    raise RuntimeError("device lost")


def test_memory_stays_within_what_was_declared() -> None:
    program = compile_counter(1000)
    assert 0 < program.allocated_bytes <= program.vram_bytes
    assert program.state_bytes == 2 * 4096


def test_one_row_of_a_large_table_is_loaded_and_no_sum_over_all_rows() -> None:
    """tinygrad would divide a sum of so many rows before it sees that it is a load."""
    b, table = Builder(), np.arange(160_000, dtype=np.float32).reshape(40_000, 4)
    rows = b.add("LOOKUP", "float32", b.weight("table", table), b.input("at", "int32", 1))
    program = TaskProgram(b.graph({"y": b.store("float32", rows)}).to_bytes(), b.safetensors())
    (found,) = program.run(program.new_state(), [np.array([39_999], np.int32).tobytes()])
    np.testing.assert_array_equal(np.frombuffer(found, np.float32), table[-1])


def test_weights_come_from_a_file_or_from_memory(tmp_path: Path) -> None:
    b = make_counter()
    y = len(b.nodes) - 1
    data = b.graph({"y": y}, [y]).to_bytes()
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b.safetensors())
    results = []
    for weights in (path, b.safetensors()):
        program = TaskProgram(data, weights)
        assert program.task_id == hashlib.sha256(data).hexdigest()
        results.append(step(program, program.new_state(), 3.0).tobytes())
    assert results[0] == results[1]


def test_other_weights_are_refused() -> None:
    b = make_counter()
    y = len(b.nodes) - 1
    data = b.graph({"y": y}, [y]).to_bytes()
    weights = b.safetensors()
    with pytest.raises(InvalidModel, match="digest"):
        TaskProgram(data, weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(InvalidModel, match="no tensor 'w'"):
        TaskProgram(data, None)
    other = Builder()
    other.weight("w", np.zeros(5, np.float32))
    with pytest.raises(InvalidModel, match="20 bytes"):
        TaskProgram(data, other.safetensors())
    with pytest.raises(InvalidModel):
        TaskProgram(data[:-1], weights)


def test_a_bool_input_holds_only_zeros_and_ones() -> None:
    b = Builder()
    x = b.input("x", "bool", 3)
    y = b.store("float32", b.add("CAST", "float32", x))
    program = TaskProgram(b.graph({"y": y}).to_bytes(), None)
    (result,) = program.run(program.new_state(), [b"\0\1\1"])
    np.testing.assert_array_equal(np.frombuffer(result, np.float32), [0, 1, 1])
    with pytest.raises(InvalidInput, match="bool"):
        program.run(program.new_state(), [b"\0\1\2"])


def test_an_output_may_be_the_new_state_or_an_input() -> None:
    b = Builder()
    x, s = b.input("x", "int32", 2), b.state("s", "int32", 2)
    total = b.store("int32", b.add("ADD", "int32", x, s))
    copy = b.store("int32", x)
    program = TaskProgram(b.graph({"total": total, "copy": copy}, [total]).to_bytes(), None)
    state = program.new_state()
    for count in (1, 2, 3):
        results = program.run(state, [np.array([5, -1], np.int32).tobytes()])
        total_now, copied = (np.frombuffer(result, np.int32) for result in results)
        np.testing.assert_array_equal(total_now, [5 * count, -count])
        np.testing.assert_array_equal(copied, [5, -1])


@pytest.mark.parametrize("kept", [1, 256])
def test_what_is_prepared_for_a_step_is_right_for_the_next(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "PREPARED_STEPS", kept)
    graph, rng = make_running_sum(), np.random.default_rng(5)
    program, other = (
        TaskProgram.from_graph(check_graph(graph), lambda name: memoryview(b"")) for _ in "ab"
    )
    states = [program.new_state() for _ in range(2)]
    sums = np.zeros((2, 4), np.float32)
    for rows in (3, 1, 1, 8, 3):
        for state, total in zip(states, sums, strict=True):
            x = rng.integers(0, 9, (rows, 4)).astype(np.float32)
            with pytest.raises(InvalidInput, match="another program"):
                program.run(other.new_state(), [x.tobytes()])
            with pytest.raises(InvalidInput, match="bytes"):
                program.run(state, [x.tobytes()[1:]])
            (given,) = program.run(state, [x.tobytes()])
            np.testing.assert_array_equal(
                np.frombuffer(given, np.float32).reshape(rows, 4), x * x + total
            )
            total += (x * x).sum(0)
