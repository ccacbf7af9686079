"""The page's own computation of a plan's root gives what the chain stores."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from splitup_gateway.explorer.descriptions import open_plan

from splitup.messages.plans import Plan, PlanNode, TaskTerms
from tests.builders import address, make_request
from tests.page_build import run_node

SCRIPT = """
import { build } from "esbuild";
const entryPoints = ["src/plan_root.ts"];
const made = await build({ entryPoints, bundle: true, format: "esm", write: false });
const code = Buffer.from(made.outputFiles[0].contents).toString("base64");
const { computePlanRoot, listExecutors } = await import(`data:text/javascript;base64,${code}`);
const plans = JSON.parse(process.env.PLANS);
console.log(JSON.stringify(plans.map((plan) => [computePlanRoot(plan), listExecutors(plan)])));
"""


def make_plan(tasks: int, seed: int, *, has_terms: bool) -> Plan:
    draw = random.Random(seed)
    nodes = [address(n) for n in range(1, 7)]
    lists = tuple(tuple(draw.sample(nodes, draw.randint(1, 5))) for _ in range(tasks))
    return Plan(
        request=make_request(4),
        seed="0x" + draw.randbytes(32).hex(),
        tasks=lists,
        nodes=tuple(
            PlanNode(
                node=node,
                signing_key="0x" + draw.randbytes(32).hex(),
                endpoint="http://127.0.0.1:9",
                exposure_micro_usdc=draw.randrange(2**53),
            )
            for node in nodes
        ),
        terms=tuple(
            TaskTerms(
                task_id=draw.randbytes(32).hex(),
                flops=draw.randrange(2**53),
                weights_bytes=draw.randrange(2**40),
                input_bytes=draw.randrange(2**30),
                ready_ms=draw.randrange(1_000),
                crosses_classes=draw.random() < 0.5,
            )
            for _ in range(tasks if has_terms else 0)
        ),
        unverifiable=tuple(range(0, tasks, 3)) if seed % 2 else (),
        places=tuple(draw.randrange(len(nodes)) for nodes in lists) if seed % 2 else (),
    )


def compute_in_page(plans: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    found = run_node("--input-type=module", "--eval", SCRIPT, PLANS=json.dumps(plans))
    return [(root, executors) for root, executors in json.loads(found)]


def test_the_page_computes_the_roots_that_members_sign() -> None:
    plans = [
        make_plan(tasks, seed, has_terms=bool(seed % 3))
        for seed, tasks in enumerate((1, 2, 3, 4, 5, 8, 9, 100))
    ]
    found = compute_in_page([open_plan(plan) for plan in plans])
    assert found == [(plan.root(), list(plan.executors())) for plan in plans]


@pytest.mark.parametrize("has_terms", [True, False])
def test_any_other_plan_has_another_root(has_terms: bool) -> None:
    plan = make_plan(3, 1, has_terms=has_terms)

    def make_opening(**changes: Any) -> dict[str, Any]:
        opening = open_plan(plan)
        opening["tasks"][1]["candidates"] = [address(1), address(2)]
        return opening | changes

    first = make_opening()
    nodes, tasks = first["nodes"], first["tasks"]
    other_order = tasks[1] | {"candidates": [address(2), address(1)]}
    openings = [
        first,
        make_opening(tasks=[tasks[0], other_order, tasks[2]]),
        make_opening(tasks=tasks[::-1]),
        make_opening(tasks=[tasks[0] | {"verifiable": True}, *tasks[1:]]),
        make_opening(places=[*first["places"], 0]),
        make_opening(nodes=[nodes[0] | {"exposure": 1}, *nodes[1:]]),
        make_opening(nodes=[nodes[0] | {"endpoint": "http://127.0.0.1:8"}, *nodes[1:]]),
        *(
            make_opening(**{name: "0x" + "11" * 32})
            for name in ("seed", "execution_id", "model_id", "snapshot_root", "request_hash")
        ),
    ]
    roots = {root for root, _ in compute_in_page(openings)}
    assert len(roots) == len(openings)
