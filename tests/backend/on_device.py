"""What has to hold on every device: ``backend/devices/test_stand_ins.py`` runs this on several.

Run it on one with ``DEV=CL pytest tests/backend/on_device.py``.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from tinygrad.device import Device

from splitup.backend.buffers import COPIED_APART_BYTES
from splitup.backend.devices.device_check import check_device
from splitup.backend.runtime import TaskProgram, describe_device, free_memory
from splitup.core.errors import InvalidModel
from splitup.core.tensors import ITEM_BYTES, get_numpy_dtype
from splitup.messages.determinism import describe_unknown
from tests.graph.graphs import Builder, make_counter

LACKING = {"WEBGPU": ("float64",)}  # by device


def get_kind() -> str:
    return describe_device().device.partition(":")[0]


def test_a_task_agrees_with_the_reference_and_the_class_is_known() -> None:
    report = check_device()
    assert not describe_unknown(report["determinism_class"])


@pytest.mark.parametrize("dtype", [name for name in ITEM_BYTES if name != "bfloat16"])
def test_every_dtype_is_computed_or_refused_by_name(dtype: str) -> None:
    b = Builder()
    x = b.input("x", dtype, 40)
    sum_ = x if dtype == "bool" else b.add("ADD", dtype, x, x)
    y = b.store(dtype, sum_)
    n = b.store("float32", b.add("CAST", "float32", y))
    graph = b.graph({"y": y, "n": n})
    if dtype in LACKING.get(get_kind(), ()):
        with pytest.raises(InvalidModel, match=f"does not compute {dtype}"):
            TaskProgram(graph.to_bytes(), None)
        return
    program = TaskProgram(graph.to_bytes(), None)
    numbers = np.arange(-20, 20) if dtype.startswith(("int", "float")) else np.arange(40)
    given = (numbers % 2 if dtype == "bool" else numbers).astype(get_numpy_dtype(dtype))
    wanted = given if dtype == "bool" else given + given
    results = program.run(program.new_state(), [given.tobytes()])
    assert results[0] == wanted.tobytes()
    assert results[1] == wanted.astype(np.float32).tobytes()


def test_every_float16_is_converted_exactly_both_ways() -> None:
    """Weights have many numbers below the normal range; tinygrad took them to be zero."""
    b = Builder()
    bits = np.arange(2**16, dtype=np.uint16)
    finite = bits.view(np.float16)[np.isfinite(bits.view(np.float16))]
    random = np.random.default_rng(0)
    exponents = random.uniform(-27, 16.5, 2**14).astype(np.float32)
    numbers = np.exp2(exponents) * random.choice(np.array([-1, 1], np.float32), 2**14)
    x, f = b.input("x", "float16", finite.size), b.input("f", "float32", numbers.size)
    y, z = (
        b.store("float32", b.add("CAST", "float32", x)),
        b.store("float16", b.add("CAST", "float16", f)),
    )
    program = TaskProgram(b.graph({"y": y, "z": z}).to_bytes(), None)
    widened, narrowed = program.run(program.new_state(), [finite.tobytes(), numbers.tobytes()])
    np.testing.assert_array_equal(
        np.frombuffer(widened, np.float32), finite.astype(np.float32), strict=True
    )
    with np.errstate(over="ignore"):
        expected = numbers.astype(np.float16)
    np.testing.assert_array_equal(np.frombuffer(narrowed, np.float16), expected, strict=True)


def test_a_large_tensor_goes_to_the_device_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little of it is in the host's memory twice, and other threads' steps come in between."""
    count = 600_000  # float32: 2.4 MB, two pieces and a part
    b = make_counter(count)
    y = len(b.nodes) - 1
    allocator = type(Device[describe_device().device].allocator)
    copied: list[int] = []
    copy = allocator._copyin

    def record(self: Any, target: Any, data: memoryview) -> None:
        copied.append(len(data))
        copy(self, target, data)

    monkeypatch.setattr(allocator, "_copyin", record)
    program = TaskProgram(b.graph({"y": y}, [y]).to_bytes(), b.safetensors())
    state, given = program.new_state(), (np.arange(count) % 3 > 0).astype(np.float32)
    expected = given * np.arange(1, count + 1, dtype=np.float32)  # by the weights
    for step in (1, 2):
        (result,) = program.run(state, [given.tobytes()])
        np.testing.assert_array_equal(np.frombuffer(result, np.float32), expected * step)
    assert max(copied) == COPIED_APART_BYTES and 4 * count % COPIED_APART_BYTES in copied


def test_a_task_is_loaded_on_a_thread_while_steps_run() -> None:
    """As in a worker. Drivers' queues and error scopes are not for several threads."""
    b = make_counter(1_000)
    y = len(b.nodes) - 1
    data, weights = b.graph({"y": y}, [y]).to_bytes(), b.safetensors()
    program = TaskProgram(data, weights)
    state, given = program.new_state(), [np.ones(1_000, np.float32).tobytes()] * 100
    given.append(bytes(len(given[0])))  # a GPU takes many steps meanwhile: sums stay exact
    loaded: list[TaskProgram] = []
    loader = threading.Thread(
        target=lambda: loaded.extend(TaskProgram(data, weights) for _ in range(3))
    )
    loader.start()
    steps = 0
    while loader.is_alive() or steps < 10:
        (result,) = program.run(state, [given[min(steps, 100)]])
        steps += 1
    expected = np.arange(1, 1_001, dtype=np.float32) * min(steps, 100)
    np.testing.assert_array_equal(np.frombuffer(result, np.float32), expected)
    assert len(loaded) == 3


def test_memory_is_what_was_predicted_and_comes_back() -> None:
    b = make_counter(100_000)
    y = len(b.nodes) - 1
    data, weights = b.graph({"y": y}, [y]).to_bytes(), b.safetensors()
    for _ in range(3):
        program = TaskProgram(data, weights)
        assert program.vram_bytes - 512 < program.allocated_bytes <= program.vram_bytes
        del program
        free_memory()


def test_a_task_that_does_not_fit_the_device_is_an_error_and_the_next_one_runs() -> None:
    if get_kind() == "CPU":
        pytest.skip("the machine's memory is compared before: test_cost.py")
    b = Builder()
    x = b.input("x", "float32", 2**20)
    rows = b.add("EXPAND", "float32", x, arg=(2**17,))
    grown = b.store("float32", rows)  # 512 GiB
    total = b.store("float32", b.add("REDUCE", "float32", grown, arg=("ADD", 1)))
    with pytest.raises((MemoryError, InvalidModel)):
        TaskProgram(b.graph({"y": total}).to_bytes(), None)
    check_device()
