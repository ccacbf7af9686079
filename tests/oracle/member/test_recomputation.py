"""A task replayed in a process of its own: the same digests, within bounds, without secrets."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from splitup_oracle.member import recomputation
from splitup_oracle.member.recomputation import Recomputer
from splitup_oracle.member.recompute_process import write_tensor
from splitup_oracle.member.rulings import Rulings

from splitup.backend.compiler.compile_server import CompileServer
from splitup.backend.compiler.kernel_cache import KernelCache
from splitup.backend.devices.device_choice import select_device
from splitup.core import limits, tuning
from splitup.core.codec import compute_digest
from splitup.core.errors import InvalidInput, Unavailable
from splitup.graph.ir import Graph, encode_float, remove_names
from splitup.graph.tolerances import Tolerance
from splitup.messages.completions import EMPTY_DIGEST
from tests.graph.graphs import Builder, make_running_sum
from tests.node.graphs import make_accumulator, make_sum

STEPS, SIZE = 3, 4
CLASS = select_device().determinism_class
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def recomputer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recomputer]:
    """With processes that serve all tests: to start them takes a second."""
    with closing(Recomputer(KernelCache(tmp_path_factory.mktemp("kernels")))) as made:
        yield made


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Recomputer]:
    """One that has started no process and compiled nothing."""
    with closing(Recomputer(KernelCache(tmp_path / "kernels"))) as made:
        yield made


def make_job(
    directory: Path, graph: Graph, ports: int
) -> tuple[recomputation.RecomputeJob, list[np.ndarray]]:
    (directory / "task.json").write_bytes(graph.to_bytes())
    data = [np.random.default_rng(port).random((STEPS, SIZE), np.float32) for port in range(ports)]
    for port, array in enumerate(data):
        with (directory / f"input-{port}").open("wb") as file:
            for row in array:
                write_tensor(file, row.tobytes())
            file.write(b"more")
    job = recomputation.RecomputeJob(
        directory=directory,
        task=directory / "task.json",
        weights=None,
        inputs=[directory / f"input-{port}" for port in range(ports)],
        steps=STEPS,
        gate=None,
        determinism=CLASS,
        memory_bytes=10**6,
    )
    return job, data


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def digest_steps(array: np.ndarray) -> str:
    """Of a port, one row a step."""
    total = bytes(32)
    for row in array:
        total = hashlib.sha256(total + hashlib.sha256(row.tobytes()).digest()).digest()
    return total.hex()


async def test_replay_gives_the_digests_that_nodes_commit_to(
    recomputer: Recomputer, tmp_path: Path
) -> None:
    job, (x,) = make_job(tmp_path, make_accumulator(SIZE), 1)
    sums = np.cumsum(x, axis=0, dtype=np.float32)
    assert await recomputer.replay(job) == {
        "inputs": [digest_steps(x)],
        "outputs": [digest_steps(sums)],
        "state": digest(sums[-1]),
        "accepted": [],
        "is_defined": True,
        "noisy_steps": 0,
    }


async def test_a_contradiction_is_judged_step_by_step(
    recomputer: Recomputer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many steps take one pass only where nobody is convicted by it; the digests are the same."""
    job, (x,) = make_job(tmp_path, make_running_sum(8, SIZE), 1)
    before = np.concatenate([np.zeros((1, SIZE), np.float32), np.cumsum(x * x, axis=0)[:-1]])
    right = ((digest_steps(x * x + before),), digest(before[-1] + x[-1] * x[-1]))
    wrong = (right[0], "ab" * 32)
    replay, passes = recomputer.replay, list[bool]()

    async def record(asked: recomputation.RecomputeJob) -> dict[str, Any]:
        passes.append(asked.merges)
        return await replay(asked)

    monkeypatch.setattr(recomputer, "replay", record)
    rulings = Rulings(cast(Any, None), cast(Any, None), recomputer, tmp_path / "replays")
    found = []
    for claimed, expected in (
        ({right}, [True]),
        ({wrong}, [True, False]),
        ({right, wrong}, [False]),
    ):
        passes.clear()
        found.append(await rulings._replay(job, claimed))
        assert passes == expected
    assert found[0] == found[1] == found[2]
    assert (tuple(found[0]["outputs"]), found[0]["state"]) == right


async def test_what_another_class_claims_is_compared_within_the_tolerance(
    recomputer: Recomputer, tmp_path: Path
) -> None:
    job, (x,) = make_job(tmp_path, make_accumulator(SIZE), 1)
    sums = np.cumsum(x, axis=0, dtype=np.float32)
    tolerance = Tolerance(
        dtype="float32", relative_l2_ppb=1000, exponent_ppb=None, mantissa_ppb=None, max_ulp=None
    )
    claims = []
    for step, factor in ((0, 1.0), (2, 1 + 5e-7), (1, 1 + 5e-6)):
        claimed = sums.copy()
        claimed[step] *= np.float32(factor)
        claims.append([tmp_path / f"claimed-{step}"])
        with claims[-1][0].open("wb") as file:
            for row in claimed:
                write_tensor(file, row.tobytes())
    found = await recomputer.replay(replace(job, claims=claims, tolerances=[tolerance]))
    assert found["accepted"] == [True, True, False]
    with pytest.raises(InvalidInput, match="has 1 outputs, not 2"):
        await recomputer.replay(replace(job, claims=[[job.task, job.task]]))


@pytest.mark.long  # in small: above, within the tolerance; bounds in graph/test_rounding.py
@pytest.mark.parametrize(("is_chaotic", "is_defined"), [(False, True), (True, False)])
async def test_s05_what_rounding_may_explain_is_no_lie(
    recomputer: Recomputer, tmp_path: Path, is_chaotic: bool, is_defined: bool
) -> None:
    """Whoever chooses model and inputs cannot make two honest devices accuse each other."""
    b = Builder()
    x = value = b.input("x", "float32", SIZE)
    factor = b.const("float32", encode_float(3.9375 if is_chaotic else 0.5))
    one = b.const("float32", encode_float(1.0))
    for _ in range(28):  # x' = r x (1 - x), the logistic map
        left = b.add("SUB", "float32", one, value)
        product = b.add("MUL", "float32", b.add("MUL", "float32", value, left), factor)
        value = b.store("float32", product)
    y = b.store("float32", b.add("ADD", "float32", value, x))
    job, (data,) = make_job(tmp_path, b.graph({"y": y}), 1)
    claimed = tmp_path / "claimed"
    with claimed.open("wb") as file:
        for row in data:
            write_tensor(file, (row * np.float32(2)).tobytes())
    tolerance = Tolerance(
        dtype="float32", relative_l2_ppb=10_000, exponent_ppb=None, mantissa_ppb=None, max_ulp=None
    )
    job = replace(job, claims=[[claimed]], tolerances=[tolerance], seed="0x12/3")
    found = await recomputer.replay(job)
    assert (found["accepted"], found["is_defined"]) == ([False], is_defined)
    assert found["noisy_steps"] == 1
    for inputs, again in ((found["inputs"], True), (["00" * 32], is_defined)):  # nobody else's
        known = replace(job, defined_steps=1, defined_inputs=inputs)
        assert (await recomputer.replay(known))["is_defined"] == again
    found = await recomputer.replay(replace(job, seed=""))
    assert found["is_defined"], "asked only of results of another class"


async def test_a_machine_knows_in_which_class_it_computes(recomputer: Recomputer) -> None:
    assert await recomputer.find_class(CLASS) == CLASS
    with pytest.raises(InvalidInput, match="cannot use DEV=NOSUCH:THING"):
        await recomputer.find_class("tinygrad 0.14.0/NOSUCH:THING")


async def test_a_task_without_state_has_the_empty_digest(
    recomputer: Recomputer, tmp_path: Path
) -> None:
    job, (x, y) = make_job(tmp_path, make_sum(SIZE), 2)
    found = await recomputer.replay(job)
    assert (found["outputs"], found["state"]) == ([digest_steps(x + y)], EMPTY_DIGEST)


async def test_another_class_is_refused_before_computing(
    recomputer: Recomputer, tmp_path: Path
) -> None:
    job, _ = make_job(tmp_path, make_sum(SIZE), 2)
    for determinism, message in (
        ("tinygrad 0.13.0/CPU:X86/x86_64", "this machine computes as"),
        ("tinygrad 0.14.0/NOSUCH:THING", "cannot use DEV=NOSUCH:THING"),
        ("something else", "this machine computes as"),
    ):
        with pytest.raises(InvalidInput, match=message):
            await recomputer.replay(replace(job, determinism=determinism))


async def test_a_task_that_is_none_or_lacks_inputs_ends_in_one_sentence(
    recomputer: Recomputer, tmp_path: Path
) -> None:
    job, _ = make_job(tmp_path, make_sum(SIZE), 2)
    with pytest.raises(InvalidInput, match="takes 2 inputs, not 1"):
        await recomputer.replay(replace(job, inputs=job.inputs[:1]))
    job.task.write_bytes(b"{}")
    with pytest.raises(InvalidInput, match="graph"):
        await recomputer.replay(job)


async def test_time_is_bounded(
    fresh: Recomputer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = make_job(tmp_path, make_sum(SIZE), 2)
    monkeypatch.setattr(limits, "RULING_S", 0.05)
    monkeypatch.setattr(limits, "RULING_STEP_S", 0.0)
    with pytest.raises(Unavailable, match="no answer within"):
        await fresh.replay(job)
    monkeypatch.undo()
    assert await fresh.replay(job), "the next question starts another process"


async def test_a_second_look_starts_no_process_and_compiles_nothing(
    recomputer: Recomputer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = make_job(tmp_path, make_sum(SIZE), 2)
    first = await recomputer.replay(job)
    started, compiled = list[Any](), list[bytes]()
    monkeypatch.setattr(subprocess, "Popen", started.append)

    async def compile_again(self: CompileServer, graph: bytes, *told: Any) -> bytes:
        compiled.append(graph)
        raise Unavailable("it is compiled again")

    monkeypatch.setattr(CompileServer, "compile", compile_again)
    assert await recomputer.replay(job) == first
    assert not started and not compiled


async def test_s10_a_task_that_breaks_its_process_leaves_the_next_one_alone(
    fresh: Recomputer, tmp_path: Path
) -> None:
    job, _ = make_job(tmp_path, make_sum(SIZE), 2)
    first = await fresh.replay(job)
    kernels = KernelCache(tmp_path / "kernels")
    task_id = compute_digest(remove_names(make_sum(SIZE)).to_bytes())
    device = "CPU"
    good = kernels.load(task_id, CLASS, device)
    assert good is not None
    kernels.store(task_id, CLASS, device, good[:-64])  # as if the code generator had a fault
    with pytest.raises((InvalidInput, Unavailable)):
        await fresh.replay(job)
    kernels.store(task_id, CLASS, device, good)
    assert await fresh.replay(job) == first


async def test_memory_is_bounded_and_no_secret_gets_in(
    fresh: Recomputer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = make_job(tmp_path, make_sum(SIZE), 2)
    given: dict[str, Any] = {}

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            given.update(options)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(tuning, "REPLAY_OVERHEAD_BYTES", 64 * limits.MIB)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(Unavailable, match=r"MemoryError|Cannot allocate memory"):
        await fresh.replay(job)
    assert "secret" not in given["env"].values()


async def test_a_step_that_its_gate_shuts_counts_as_zeros(
    recomputer: Recomputer, tmp_path: Path
) -> None:
    b = Builder()
    x, gate = b.input("x", "float32", SIZE), b.input("gate", "float32", SIZE)
    zero = b.const("float32", encode_float(0.0))
    product = b.add("MUL", "float32", x, gate)
    chosen = b.add("WHERE", "float32", b.add("CMPNE", "bool", gate, zero), product, zero)
    graph = b.graph({"y": b.store("float32", chosen)})
    job, (x_data, gates) = make_job(tmp_path, graph, 2)
    gates[1] = 0.0
    with (tmp_path / "input-1").open("wb") as file:
        for row in gates:
            write_tensor(file, row.tobytes())
    found = await recomputer.replay(replace(job, gate=1))
    counted = x_data.copy()
    counted[1] = 0.0
    assert found["inputs"] == [digest_steps(counted), digest_steps(gates)]
    assert found["outputs"] == [digest_steps(x_data * gates)]
    assert (await recomputer.replay(job))["inputs"] == [
        digest_steps(x_data),
        digest_steps(gates),
    ]
