"""Who reads a node's outputs, while the client gives tasks to other nodes."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from splitup_node.execution.kept.routing import Routing

from splitup.graph.manifest import Manifest
from splitup.protocol.execution.routes import compute_routes
from tests.builders import address, make_manifest

NODE = address(1)


class Executors:
    """A map of executors that changes without signatures."""

    def __init__(self, nodes: list[str]) -> None:
        self.nodes = nodes
        self.takeovers: dict[int, int] = {}

    @property
    def executors(self) -> tuple[str, ...]:
        return tuple(self.nodes)

    def take(self, task: int, node: str) -> None:
        self.nodes[task], self.takeovers[task] = node, 1


def make_routing(sources: list[list[int]], nodes: list[str]) -> tuple[Routing, Executors, Any]:
    executors = Executors(list(nodes))
    plan: Any = SimpleNamespace(
        executors=lambda: tuple(nodes),
        nodes=[SimpleNamespace(node=node, endpoint="") for node in sorted(set(nodes))],
        request=SimpleNamespace(execution_id="0x1"),
    )
    manifest = make_manifest(sources)
    routing = Routing(plan, manifest, NODE, executors)  # type: ignore[arg-type]
    for task in routing.routes.tasks:
        routing.begin(task.index, 0)
    return routing, executors, (plan, manifest)


def test_s81_takeovers_do_not_have_the_graph_looked_through_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph of 30,000 edges took a node a third of a second for each of 7,168 takeovers."""
    tasks = 64
    others = [address(2 + number % 3) for number in range(tasks - 1)]
    routing, executors, _ = make_routing([[], *[[0]] * (tasks - 1)], [NODE, *others])
    looked: list[tuple[int, int]] = []
    consumers = Manifest.consumers

    def count(self: Manifest, task: int, port: int) -> list[tuple[int, int]]:
        looked.append((task, port))
        return consumers(self, task, port)

    monkeypatch.setattr(Manifest, "consumers", count)
    for task in range(1, tasks):
        executors.take(task, address(2 + (task + 1) % 3))
        routing.renew(task)
    assert not looked
    routing.connect(0)
    assert set(looked) == {(0, 0)} and len(looked) <= 3


@pytest.mark.parametrize("seed", range(20))
def test_routes_after_takeovers_are_those_of_the_executors(seed: int) -> None:
    rng, tasks = random.Random(seed), 8
    sources = [[], *(rng.choices(range(task), k=rng.randint(0, 3)) for task in range(1, tasks))]
    nodes = [address(1 + rng.randrange(3)) for _ in range(tasks)]
    nodes[:3] = address(1), address(2), address(3)
    routing, executors, (plan, manifest) = make_routing(sources, nodes)
    for _ in range(12):
        task, node = rng.randrange(tasks), address(1 + rng.randrange(3))
        was_here = executors.nodes[task] == NODE
        executors.take(task, node)
        if was_here and node != NODE:
            routing.end(task)
        routing.renew(task)
        if node == NODE and not was_here:
            routing.begin(task, 0)
        for own in [task.index for task in routing.routes.tasks]:
            routing.connect(own)
        found = compute_routes(plan, manifest, NODE, executors.executors)
        assert routing.routes.specs.keys() == found.specs.keys()  # each named by one of its readers
        assert replace(routing.routes, specs={}) == replace(found, specs={})
        read = {node for targets in routing.routes.targets.values() for node in targets}
        assert read <= routing.successors
