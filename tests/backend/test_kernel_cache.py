from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest

from splitup.backend.devices import select_device
from splitup.backend.kernel_cache import KernelCache, decode_schedule, encode_schedule
from splitup.backend.native_code import find_native_code
from splitup.backend.runtime import TaskProgram
from splitup.backend.schedule import Schedule, compile_graph
from splitup.graph.rules import check_graph
from tests.builders import HANG_S
from tests.cpu.test_matmul_match import make_attention, make_layer

X = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)


def compute(cache: KernelCache, size: int = 64) -> tuple[bool, bytes]:
    b, graph = make_layer(2, size, size)
    program = TaskProgram(graph.to_bytes(), b.safetensors(), cache=cache)
    (result,) = program.run(program.new_state(), [X[:, :size].tobytes()])
    return program.is_from_cache, result


def make_schedule(size: int = 64) -> Schedule:
    return compile_graph(check_graph(make_layer(2, size, size)[1]), select_device().device)


def test_a_second_start_compiles_nothing_and_computes_the_same(tmp_path: Path) -> None:
    directory = tmp_path / "kernels"
    was_cached, cold = compute(KernelCache(directory))
    assert not was_cached
    assert compute(KernelCache(directory)) == (True, cold)
    (file,) = directory.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_schedule_survives_its_encoding() -> None:
    for schedule in (make_schedule(), compile_graph(check_graph(make_attention(16)), "CPU")):
        native = find_native_code("CPU")
        data = encode_schedule(schedule, native)
        assert data is not None and decode_schedule(data, native) == schedule


def test_f23_a_damaged_file_is_compiled_again(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    _, cold = compute(cache)
    (file,) = tmp_path.iterdir()
    good = file.read_bytes()
    for bad in (b"", good[:10], good[:-1], good[:50] + b"?" + good[51:], bytes(len(good))):
        file.write_bytes(bad)
        assert compute(cache) == (False, cold)
        assert file.read_bytes() == good  # and written again
    assert compute(cache) == (True, cold)


def test_another_class_task_or_device_is_another_file(tmp_path: Path) -> None:
    cache, schedule = KernelCache(tmp_path), make_schedule()
    cache.store("task", "class", "CPU", schedule)
    assert cache.load("task", "class", "CPU") == schedule
    for key in (("other", "class", "CPU"), ("task", "other", "CPU"), ("task", "class", "CUDA")):
        assert cache.load(*key) is None


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    schedule = make_schedule()
    size = len(encode_schedule(schedule, find_native_code("CPU")) or b"")
    cache = KernelCache(tmp_path, max_bytes=2 * size)
    for age, task in ((300, "a"), (200, "b")):
        cache.store(task, "class", "CPU", schedule)
        (new,) = (f for f in tmp_path.iterdir() if f.stat().st_mtime > 1e9)
        os.utime(new, (1e9 - age, 1e9 - age))
    assert cache.load("a", "class", "CPU") is not None  # used: now younger than b
    cache.store("c", "class", "CPU", schedule)
    assert [cache.load(task, "class", "CPU") is None for task in "abc"] == [False, True, False]
    KernelCache(tmp_path / "small", max_bytes=size - 1).store("a", "class", "CPU", schedule)
    assert not (tmp_path / "small").exists()


def test_f23_a_disk_that_takes_nothing_costs_only_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = KernelCache(tmp_path / "file" / "kernels")
    was_cached, result = compute(cache)
    assert not was_cached and compute(cache) == (False, result)
    assert "not kept" in caplog.text


def test_workers_that_share_a_cache_compile_a_task_once(tmp_path: Path) -> None:
    cache, entered = KernelCache(tmp_path), threading.Event()

    def wait() -> None:
        with KernelCache(tmp_path).reserve():
            entered.set()

    other = threading.Thread(target=wait)
    with cache.reserve():
        other.start()
        assert not entered.wait(0.1)
    assert entered.wait(HANG_S)
    other.join()
