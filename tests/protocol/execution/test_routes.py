from __future__ import annotations

from collections.abc import Iterator

import pytest

from splitup.core import tuning
from splitup.core.errors import PeerFault
from splitup.graph.manifest import Manifest, Task, TaskSource
from splitup.graph.manifest_rules import load_manifest
from splitup.messages.base import CLIENT
from splitup.messages.plans import Plan, PlanNode
from splitup.protocol.execution.routes import compute_path_flops, compute_routes, get_sources
from tests.builders import address, make_chain_manifest, make_manifest, make_request


def make_plan(*executors: int) -> Plan:
    nodes = tuple(
        PlanNode(node=address(n), signing_key=f"0x{n:064x}", endpoint=f"http://h{n}:1")
        for n in sorted(set(executors))
    )
    return Plan(
        request=make_request(),
        seed="0x" + "11" * 32,
        tasks=tuple((address(n),) for n in executors),
        nodes=nodes,
    )


def test_outputs_go_once_to_every_other_node_that_reads_them() -> None:
    manifest = make_chain_manifest(4)
    routes = compute_routes(make_plan(1, 2, 2, 1), manifest, address(2))
    assert [task.index for task in routes.tasks] == [1, 2]
    assert {port: spec.nbytes for port, spec in routes.specs.items()} == {(0, 0): 4, (1, 0): 4}
    assert routes.targets == {(1, 0): (), (2, 0): (address(1),)}
    assert routes.to_client == frozenset()


def test_last_task_answers_the_client() -> None:
    routes = compute_routes(make_plan(1, 2, 2, 1), make_chain_manifest(4), address(1))
    assert routes.to_client == {(3, 0)} and routes.specs.keys() == {(CLIENT, 0), (2, 0)}


def test_takeover_changes_who_runs_and_who_reads() -> None:
    manifest, plan = make_chain_manifest(3), make_plan(1, 2, 1)
    now = (address(1), address(1), address(1))
    routes = compute_routes(plan, manifest, address(1), now)
    assert [task.index for task in routes.tasks] == [0, 1, 2] and not any(routes.targets.values())
    assert not compute_routes(plan, manifest, address(2), now).tasks


def test_longest_path_gets_the_whole_head_start() -> None:
    manifest = make_chain_manifest(4)
    assert compute_path_flops(manifest) == (4, 3, 2, 1)
    routes = compute_routes(make_plan(1, 1, 1, 1), manifest, address(1))
    assert [task.head_start for task in routes.tasks] == [
        tuning.QUEUE_HEAD_START * part // 4 for part in (4, 3, 2, 1)
    ]


def test_sources_name_the_client_or_the_producer() -> None:
    manifest = make_chain_manifest(2)
    assert get_sources(manifest, 0) == ((CLIENT, 0),) and get_sources(manifest, 1) == ((0, 0),)


def test_plan_of_another_size_than_the_model_is_a_fault() -> None:
    with pytest.raises(PeerFault, match="assigns 2 tasks; the model has 4"):
        compute_routes(make_plan(1, 2), make_chain_manifest(4), address(1))


def make_mixture() -> Manifest:
    """Task 0 routes: gate ports y1 and y2 and the value y; 1 and 2 are experts; 3 joins them."""
    manifest = make_manifest([[], [0, 0], [0, 0], [0, 1, 2]])
    router, one, two, join = manifest.tasks
    ports = tuple(router.outputs[0].model_copy(update={"name": n}) for n in ("y", "y1", "y2"))
    router = router.model_copy(update={"outputs": ports})

    def make_expert(task: Task, port: int) -> Task:
        gate = task.inputs[1].model_copy(update={"source": TaskSource(task=0, port=port)})
        return task.model_copy(update={"inputs": (task.inputs[0], gate), "gate": 1})

    tasks = (router, make_expert(one, 1), make_expert(two, 2), join)
    return manifest.model_copy(update={"tasks": tasks})


def test_experts_get_the_value_unless_all_of_their_gates_are_zero() -> None:
    manifest = make_mixture()
    apart = compute_routes(make_plan(1, 2, 3, 4), manifest, address(1))
    assert apart.gates[0, 0] == {address(2): {1}, address(3): {2}}  # the join always reads it
    assert apart.gates[0, 1] == apart.gates[0, 2] == {}  # gates are always sent
    assert apart.find_gates(0) == {1, 2} and apart.find_gates(3) == set()
    together = compute_routes(make_plan(1, 2, 2, 4), manifest, address(1))
    assert together.gates[0, 0] == {address(2): {1, 2}}
    with_join = compute_routes(make_plan(1, 2, 3, 2), manifest, address(1))
    assert with_join.gates[0, 0] == {address(3): {2}}
    assert [task.gate for task in together.tasks] == [None]
    experts = compute_routes(make_plan(1, 2, 2, 4), manifest, address(2))
    assert [task.gate for task in experts.tasks] == [(0, 1), (0, 2)]


def test_s67_a_models_edges_are_read_once_however_many_outputs_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Read once for each output, 50,000 ports kept a node for minutes."""
    manifest = load_manifest(make_chain_manifest(16).to_bytes())
    plan = make_plan(*[1] * 16)
    wanted = compute_routes(plan, manifest, address(1))
    reads: list[Manifest] = []
    read = Manifest._reads

    def count(self: Manifest) -> Iterator[tuple[TaskSource, int, int]]:
        reads.append(self)
        return read(self)

    monkeypatch.setattr(Manifest, "_reads", count)
    copied = manifest.model_copy()
    for _ in range(3):  # as after takeovers
        assert compute_routes(plan, copied, address(1)) == wanted
    assert len(reads) <= 1 + 3, "once for the readers, and for each path"
    assert copied.neighbours == {n: {n - 1, n + 1} & set(range(16)) for n in range(16)}
    shorter = copied.model_copy(update={"tasks": copied.tasks[:2]})
    assert shorter.neighbours == {0: {1}, 1: {0}} and shorter.consumers(1, 0) == []
