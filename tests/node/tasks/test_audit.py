from __future__ import annotations

import hashlib
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio
from splitup_node.config import NodeConfig
from splitup_node.tasks import audit
from splitup_node.tasks.audit import AuditedTask, AuditFailed, AuditReport, check_machine
from splitup_node.tasks.loaded_tasks import LoadedTasks
from splitup_node.worker.supervisor import WORKER_ARGV, Supervisor
from splitup_node.worker.worker_pool import Workers

from splitup.core import tuning
from splitup.core.errors import ConfigurationError, InvalidInput, InvalidModel, Refused
from splitup.graph.manifest import Manifest
from splitup.graph.tolerances import Tolerance
from splitup.storage.task_cache import TaskCache
from tests.builders import KERNELS
from tests.node.cli.test_config import write
from tests.node.graphs import make_reference
from tests.node.network import make_manifest

pytestmark = pytest.mark.asyncio(loop_scope="module")
Open = Callable[..., Coroutine[Any, Any, LoadedTasks]]
FAULTY = (sys.executable, str(Path(__file__).parents[1] / "faulty_worker.py"))
LYING = (sys.executable, str(Path(__file__).parents[1] / "lying_worker.py"))


def store(directory: Path, manifest: Manifest, *blobs: bytes) -> None:
    """Put everything into a node's cache, so that nothing has to be fetched."""
    directory.mkdir(parents=True, exist_ok=True)
    _, graphs = make_manifest()
    (directory / f"{manifest.model_id[2:]}.json").write_bytes(manifest.to_bytes())
    for task_id, graph in graphs.items():
        (directory / f"{task_id}.json").write_bytes(graph.to_bytes())
    for blob in (*blobs, *map(make_reference, graphs.values())):
        (directory / f"{hashlib.sha256(blob).hexdigest()}.vectors.json").write_bytes(blob)


def replace_reference(manifest: Manifest, blob: bytes, **changes: Any) -> Manifest:
    """Give the first two tasks, which are one and the same, other vectors."""
    digest = hashlib.sha256(blob).hexdigest()
    update = {"reference_digest": digest, "reference_bytes": len(blob), **changes}
    tasks = [
        task.model_copy(update=update if index < 2 else {})
        for index, task in enumerate(manifest.tasks)
    ]
    return manifest.model_copy(update={"tasks": tuple(tasks)})


async def accept(manifest: Manifest) -> None:
    """Stand in for the chain's record: every manifest counts."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_tasks(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Open]:
    """Open a node's tasks, with none loaded; tests share the worker of each kind."""
    directory, running = tmp_path_factory.mktemp("workers"), dict[tuple[str, ...], Workers]()

    async def open_one(root: Path, argv: tuple[str, ...] = WORKER_ARGV) -> LoadedTasks:
        if argv not in running:
            device = {"device": "CPU:X86", "cache_directory": KERNELS}
            supervisor = Supervisor(directory, memory_bytes=10**8, worker_argv=argv, **device)
            running[argv] = Workers([supervisor])
            await running[argv].start()
        for program in list(running[argv]._programs):
            await running[argv].unload(program)
        nothing = cast(Any, None)  # no gateway is asked for what is in the cache
        cache = TaskCache(root / "cache", nothing, nothing, accept)
        return LoadedTasks(running[argv], cache)

    yield open_one
    for workers in running.values():
        await workers.close()


async def test_a_task_that_passes_its_audit_is_served(open_tasks: Open, tmp_path: Path) -> None:
    manifest, _ = make_manifest()
    store(tmp_path / "cache", manifest)
    loaded_tasks = await open_tasks(tmp_path)
    for index in range(3):
        await loaded_tasks.ensure(manifest.model_id, index)
    assert len(loaded_tasks.programs) == 2


async def test_a_broken_device_fails_the_audit_and_serves_nothing(
    open_tasks: Open, tmp_path: Path
) -> None:
    manifest, _ = make_manifest()
    store(tmp_path / "cache", manifest)
    loaded_tasks = await open_tasks(tmp_path, FAULTY)
    with pytest.raises(AuditFailed, match=r"would be slashed.*splitup-node audit"):
        await loaded_tasks.ensure(manifest.model_id, 0)
    assert loaded_tasks.programs == {} and loaded_tasks.tasks == ()
    assert loaded_tasks.free_bytes == 10**8  # it does not stay in the worker, either
    with pytest.raises(AuditFailed):
        await loaded_tasks.ensure(manifest.model_id, 1)  # the same task at another place
    with pytest.raises(AuditFailed):
        await loaded_tasks.prepare(manifest.model_id, 0)  # nothing is given up for it
    loaded_tasks._workers._supervisors[0].kill("for a test")
    await loaded_tasks._workers.restart()
    await loaded_tasks.reload()  # the new one starts without it
    assert loaded_tasks.programs == {} and loaded_tasks.free_bytes == 10**8


@pytest.mark.long  # in small: e2e/test_restart.py has a node that lies
async def test_a_dishonest_worker_passes_its_own_audit(open_tasks: Open, tmp_path: Path) -> None:
    manifest, _ = make_manifest()
    store(tmp_path / "cache", manifest)
    loaded_tasks = await open_tasks(tmp_path, LYING)
    await loaded_tasks.ensure(manifest.model_id, 0)


async def test_another_class_is_compared_within_the_tolerance(
    open_tasks: Open, tmp_path: Path
) -> None:
    manifest, graphs = make_manifest()
    blob = make_reference(next(iter(graphs.values())), "CUDA/sm_90")
    tolerance = Tolerance(
        dtype="float32", relative_l2_ppb=100, exponent_ppb=None, mantissa_ppb=None, max_ulp=None
    )
    # the broken bit is the last of one element: less than one part in 10^7
    for tolerances in ((), (tolerance,)):
        other = replace_reference(manifest, blob, tolerances=tolerances)
        root = tmp_path / f"node{len(tolerances)}"
        store(root / "cache", other, blob)
        loaded_tasks = await open_tasks(root, FAULTY)
        await loaded_tasks.ensure(other.model_id, 0)


async def test_vectors_of_another_task_are_refused(open_tasks: Open, tmp_path: Path) -> None:
    manifest, graphs = make_manifest()
    blob = make_reference(list(graphs.values())[1])
    other = replace_reference(manifest, blob)
    store(tmp_path / "cache", other, blob)
    loaded_tasks = await open_tasks(tmp_path)
    with pytest.raises(InvalidModel, match="reference vectors"):
        await loaded_tasks.ensure(other.model_id, 0)
    assert loaded_tasks.free_bytes == 10**8  # found out before anything was loaded


async def test_s95_false_vectors_of_a_task_stop_no_other_model(
    open_tasks: Open, tmp_path: Path
) -> None:
    manifest, graphs = make_manifest()
    blob = make_reference(next(iter(graphs.values()))).replace(b'"seed":', b'"seed":1')
    other = replace_reference(manifest, blob)  # outputs of other inputs
    for one in (manifest, other):
        store(tmp_path / "cache", one, blob)
    loaded_tasks = await open_tasks(tmp_path)
    with pytest.raises(AuditFailed):
        await loaded_tasks.ensure(other.model_id, 0)
    await loaded_tasks.ensure(manifest.model_id, 0)
    assert len(loaded_tasks.programs) == 1


async def test_no_stake_for_a_node_that_no_task_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def audit_node(*_: Any, **__: Any) -> AuditReport:
        return AuditReport({"determinism_class": "a class"}, (), 9 * 10**9)

    monkeypatch.setattr(audit, "audit_node", audit_node)
    config = NodeConfig.load(write(tmp_path, vram="8GB"))
    with pytest.raises(ConfigurationError, match=r"smallest needs 9000000000 bytes.*raise vram in"):
        await check_machine(config)


@pytest.mark.parametrize("passed", [0, 1])
async def test_s92_a_strangers_task_keeps_nobody_from_staking(
    passed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad = AuditedTask("0x1", 0, "a stranger's", "", False, "it does not run here")
    unknown = AuditedTask("0x2", 0, "another", "", True, "its model has no reference vectors")
    good = AuditedTask("0x3", 0, "one's own", "equal", True, "")

    async def audit_node(*_: Any, **__: Any) -> AuditReport:
        return AuditReport({"determinism_class": "a class"}, (bad, unknown, *[good] * passed), 1)

    monkeypatch.setattr(audit, "audit_node", audit_node)
    config = NodeConfig.load(write(tmp_path))
    if passed:
        await check_machine(config)
        assert "must not serve 1 of 3 tasks, the first of them a stranger's" in caplog.text
    else:
        with pytest.raises(ConfigurationError, match=r"must not serve 1 of 2 .*nothing was staked"):
            await check_machine(config)


async def test_s92_a_task_that_cannot_be_tried_is_a_row() -> None:
    manifest, _ = make_manifest()

    async def fetch_manifest(_: str) -> Manifest:
        return manifest

    async def fetch_vectors(*_: object) -> None:
        raise InvalidModel("no reference vectors")

    cache = SimpleNamespace(fetch_manifest=fetch_manifest, fetch_vectors=fetch_vectors)
    trial = audit._Trial(cast(Any, None), cast(Any, cache), 10**8, lambda _: None)
    await trial.try_models([manifest.model_id])
    assert [row.may_serve for row in trial.rows] == [False, False]
    assert trial.rows[0].detail == "it does not run here: no reference vectors"


@dataclass
class Market:
    """Registered models, and a trial on a machine that computes nothing: what passes is listed."""

    models: dict[str, list[SimpleNamespace]]
    false: tuple[str, ...] = ()  # models with false vectors
    broken: tuple[str, ...] = ()  # models without a manifest
    looked: list[str] = field(default_factory=list)
    tried: list[tuple[str, str]] = field(default_factory=list)

    async def fetch_manifest(self, model_id: str) -> SimpleNamespace:
        self.looked.append(model_id)
        if model_id in self.broken:
            raise Refused("nobody has it", status=404)
        return SimpleNamespace(tasks=self.models[model_id])

    async def run(self, memory_bytes: int, operators: dict[str, int]) -> None:
        trial = audit._Trial(cast(Any, None), cast(Any, self), memory_bytes, lambda _: None)

        async def compute(model_id: str, index: int, task: Any) -> SimpleNamespace:
            self.tried.append((model_id, task.task_id))
            trial._used_bytes += task.vram_bytes
            may_serve = model_id not in self.false
            return SimpleNamespace(
                verdict=SimpleNamespace(value="x"), may_serve=may_serve, detail=""
            )

        trial._run = compute  # type: ignore[assignment, method-assign]
        tasks = {model: [task.task_id for task in found] for model, found in self.models.items()}
        await trial.try_market(tasks, operators)
        assert [(row.model_id, row.label) for row in trial.rows] == self.tried


def make_tasks(*ids: str, size: int = 1) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(task_id=one, label=one, vram_bytes=size, weights_bytes=0) for one in ids
    ]


async def test_s98_models_that_nobody_holds_cost_a_new_node_nothing() -> None:
    strangers = {f"s{number}": make_tasks(f"{number}") for number in range(1000)}
    models = {**strangers, "used": make_tasks("a", "b", "c"), "less": make_tasks("d")}
    market = Market(models)
    await market.run(100, {"a": 3, "c": 2, "d": 1})
    assert market.tried == [("used", "a"), ("used", "c"), ("less", "d")]
    assert market.looked == ["used", "less"]


async def test_s98_without_a_held_task_one_that_passes_is_enough() -> None:
    models = {f"s{number}": make_tasks(f"{number}", size=101) for number in range(1000)}
    market = Market({**models, "other": make_tasks("a")})
    await market.run(100, {})
    assert market.tried == [] and len(market.looked) == tuning.MAX_MANIFESTS
    models = {"broken": [], "false": make_tasks("1"), "good": make_tasks("2", "3"), "s": []}
    market = Market(models, false=("false",), broken=("broken",))
    await market.run(100, {})
    assert market.tried == [("false", "1"), ("good", "2"), ("good", "3")]


async def test_s98_a_new_node_tries_as_many_tasks_as_it_can_hold() -> None:
    held = {f"{number}": 1 for number in range(100)}
    market = Market({"m": make_tasks(*held)})
    await market.run(10, held)
    assert len(market.tried) == 10
    market = Market({"m": make_tasks(*held)})
    await market.run(1000, held)
    assert len(market.tried) == tuning.AUDIT_TASKS


async def test_s98_a_copy_does_not_stand_for_the_tasks_of_a_model() -> None:
    """Its developer says which outputs its tasks have, of that model alone."""
    market = Market({"copy": make_tasks("a"), "used": make_tasks("a", "b")}, false=("copy",))
    await market.run(100, {"a": 1, "b": 1})
    assert market.tried == [("copy", "a"), ("used", "a"), ("used", "b")]


async def test_what_is_off_the_market_is_tried_only_by_name() -> None:
    def tell(kind: str, number: int, name: str = "a") -> SimpleNamespace:
        args = {"modelId": f"0x{number}", "name": name, "developer": "0xd", "tasks": ()}
        return SimpleNamespace(name=kind, args=args)

    async def fetch_events(_: str) -> list[SimpleNamespace]:
        return [
            *(tell("ModelRegistered", number, name) for number, name in enumerate("aba")),
            tell("ModelRetired", 0),
        ]

    chain = cast(Any, SimpleNamespace(fetch_events=fetch_events))
    assert list(await audit._find_models(chain, ())) == ["0x1", "0x2"]
    assert list(await audit._find_models(chain, ("a", "0x0", "0x2"))) == ["0x2", "0x0"]
    with pytest.raises(InvalidInput, match="there is no model 'c'"):
        await audit._find_models(chain, ("c",))
