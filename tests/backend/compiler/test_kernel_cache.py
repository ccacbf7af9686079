from __future__ import annotations

import asyncio
import os
import signal
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitup.backend.compiler.compile_server import MODULE, CompileServer
from splitup.backend.compiler.kernel_cache import KernelCache
from splitup.backend.compiler.schedule import compile_graph
from splitup.backend.compiler.schedule_bytes import decode_schedule, encode_schedule
from splitup.backend.runtime import TaskProgram
from splitup.core import tuning
from splitup.core.errors import InvalidModel, TooSlow, Unavailable
from splitup.graph.rules import check_graph
from splitup.sandbox.warm_child import WarmChild
from tests.builders import HANG_S
from tests.cpu.test_matmul_match import make_attention, make_layer

X = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
KEY = ("task", "class", "CPU")


async def test_a_second_start_compiles_nothing_and_computes_the_same(tmp_path: Path) -> None:
    b, graph = make_layer(2, 64, 64)
    plain = TaskProgram(graph.to_bytes(), b.safetensors())
    with closing(CompileServer(WarmChild(MODULE, "CPU:X86"), 0, KernelCache(tmp_path))) as server:
        made = await server.compile(graph.to_bytes(), 10**9, None)
        with pytest.raises(InvalidModel, match=r"needs .* bytes of memory"):
            await server.compile(graph.to_bytes(), 10, None)
        with pytest.raises(InvalidModel, match="gate"):
            await server.compile(graph.to_bytes(), 10**9, 0)
    KernelCache(tmp_path / "kernels").store(*KEY, made)
    kept = KernelCache(tmp_path / "kernels").load(*KEY)
    assert kept == made
    program = TaskProgram(graph.to_bytes(), b.safetensors(), kernels=kept)
    assert program.run(program.new_state(), [X.tobytes()]) == plain.run(
        plain.new_state(), [X.tobytes()]
    )


@pytest.mark.long  # in small: node/worker/test_process.py
async def test_the_compiler_starts_again_when_it_died_or_was_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make_layer(2, 8, 8)[1].to_bytes()
    monkeypatch.setattr(tuning, "COMPILER_IDLE_S", 0.0)
    with closing(CompileServer(WarmChild(MODULE, "CPU:X86"), 0, KernelCache(tmp_path))) as server:
        first = await server.compile(graph, 10**9, None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert server._child.pid is None
        monkeypatch.setattr(tuning, "COMPILER_IDLE_S", 60.0)
        assert await server.compile(graph, 10**9, None) == first
        assert server._child.pid is not None
        os.kill(server._child.pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="its process ended"):
            await server.compile(graph, 10**9, None)
        assert await server.compile(graph, 10**9, None) == first


async def test_s04_a_task_that_is_too_slow_gets_more_time_and_is_given_up_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = CompileServer(WarmChild(MODULE, "CPU:X86"), 0, KernelCache(tmp_path))
    asked: list[int] = []

    async def ask(question: dict[str, Any], *arguments: Any, **options: Any) -> None:
        asked.append(question["patience"])
        raise TooSlow("it takes longer than this machine spends on it at once")

    monkeypatch.setattr(server._child, "ask", ask)
    for _ in range(6):
        with pytest.raises(TooSlow):
            await server.compile(b"task", 10**9, None)
    assert asked == [1, 2, 4, 8]
    with pytest.raises(TooSlow):
        await server.compile(b"another", 10**9, None)
    assert asked[4:] == [1]


def test_a_schedule_survives_its_encoding() -> None:
    for graph in (make_layer(2, 64, 64)[1], make_attention(16)):
        schedule = compile_graph(check_graph(graph), "CPU")
        data = encode_schedule(schedule)
        assert data is not None and decode_schedule(data) == schedule


def test_only_the_daemon_s_user_reads_the_cache(tmp_path: Path) -> None:
    directory = tmp_path / "kernels"
    KernelCache(directory).store(*KEY, b"code")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    files = list(directory.iterdir())
    assert len(files) == 2 and {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def find_entry(directory: Path) -> Path:
    (file,) = directory.glob("*.kernels")
    return file


def test_f23_a_damaged_file_is_deleted(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    cache.store(*KEY, b"machine code" * 9)
    file = find_entry(tmp_path)
    good = file.read_bytes()
    for bad in (b"", good[:10], good[:-1], good[:50] + b"?" + good[51:], bytes(len(good))):
        file.write_bytes(bad)
        assert cache.load(*KEY) is None and not file.exists()
    file.write_bytes(good)
    assert cache.load(*KEY) == b"machine code" * 9


def test_f23_a_damaged_key_costs_only_time(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    cache.store(*KEY, b"code")
    (tmp_path / "key").write_bytes(b"short")
    assert cache.load(*KEY) is None
    cache.store(*KEY, b"code")
    assert cache.load(*KEY) == b"code"


def test_s18_a_file_is_used_for_its_own_task_class_and_device_alone(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    cache.store(*KEY, b"code")
    first = find_entry(tmp_path)
    for key in (("other", "class", "CPU"), ("task", "other", "CPU"), ("task", "class", "CUDA")):
        assert cache.load(*key) is None
        cache.store(*key, b"own")
        (file,) = {*tmp_path.glob("*.kernels")} - {first}
        file.write_bytes(first.read_bytes())  # the first task's, under the other's name
        assert cache.load(*key) is None and cache.load(*KEY) == b"code"


def test_s18_a_file_that_another_wrote_is_not_used(tmp_path: Path) -> None:
    """Whoever lacks the key, such as a worker that broke out, cannot make a file."""
    ours, theirs = KernelCache(tmp_path / "ours"), KernelCache(tmp_path / "theirs")
    ours.store(*KEY, b"code")
    theirs.store(*KEY, b"\x0f\x0b")
    find_entry(tmp_path / "ours").write_bytes(find_entry(tmp_path / "theirs").read_bytes())
    assert ours.load(*KEY) is None


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    data = bytes(1000)
    cache = KernelCache(tmp_path, max_bytes=2 * len(data) + 100)
    for age, task in ((300, "a"), (200, "b")):
        cache.store(task, "class", "CPU", data)
        (new,) = (f for f in tmp_path.glob("*.kernels") if f.stat().st_mtime > 1e9)
        os.utime(new, (1e9 - age, 1e9 - age))
    assert cache.load("a", "class", "CPU") is not None  # used: now younger than b
    cache.store("c", "class", "CPU", data)
    assert [cache.load(task, "class", "CPU") is None for task in "abc"] == [False, True, False]
    KernelCache(tmp_path / "small", max_bytes=999).store("a", "class", "CPU", data)
    assert not (tmp_path / "small").exists()


def test_f23_a_disk_that_takes_nothing_costs_only_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = KernelCache(tmp_path / "file" / "kernels")
    cache.store(*KEY, b"code")
    assert cache.load(*KEY) is None
    assert "not kept" in caplog.text


async def test_daemons_that_share_a_cache_compile_a_task_once(tmp_path: Path) -> None:
    cache, entered = KernelCache(tmp_path), asyncio.Event()

    async def wait() -> None:
        async with KernelCache(tmp_path).reserve():
            entered.set()

    async with cache.reserve():
        other = asyncio.create_task(wait())
        await asyncio.sleep(0)
        assert not entered.is_set()
    async with asyncio.timeout(HANG_S):
        await entered.wait()
    await other
