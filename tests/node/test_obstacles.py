"""Why a node gets no work, as ``splitup-node status`` says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from splitup_node.owner_facts import list_obstacles, list_rows
from splitup_node.status_file import NodeStatus

from tests.node.test_status_file import VALUES

FILE = Path("node.toml")
CHAIN: dict[str, Any] = {
    "stake_micro_usdc": 1_100_000_000,
    "least_stake_micro_usdc": 1_100_000_000,
    "locked_micro_usdc": 0,
    "active": True,
    "unbonding_at_s": 0,
}
RUNNING = VALUES | {"loading": "", "not_loaded": []}
REFUSED = {"reason": "it is malformed", "is_refused": True}
FULL = {"reason": "the disk is full", "is_refused": False}


def test_a_node_that_lacks_nothing_has_no_obstacle() -> None:
    assert list_obstacles(CHAIN, NodeStatus(RUNNING, True), FILE) == []
    relayed = RUNNING | {"reach_problem": "no route", "relay": "http://m:2"}
    assert list_obstacles(CHAIN, NodeStatus(relayed, True), FILE) == []
    assert list_obstacles(CHAIN, NodeStatus({"pid": 7}, True, "disk full"), FILE) == []


@pytest.mark.parametrize(
    ("chain", "words"),
    [
        ({"stake_micro_usdc": 0, "active": False}, "splitup-node stake"),
        (
            {"stake_micro_usdc": 1_099_999_968, "active": False},
            "its stake of 1,099.999968 USDC is 0.000032 USDC below the least since a slash; "
            "fill it up with: splitup-node stake",
        ),
        ({"unbonding_at_s": 5}, "splitup-node unstake --cancel"),
        ({"locked_micro_usdc": 1_000_000_000}, "1,000 USDC of its stake are locked"),
    ],
)
def test_a_stake_that_does_not_do_is_named(chain: dict[str, Any], words: str) -> None:
    [found] = list_obstacles(CHAIN | chain, NodeStatus(RUNNING, True), FILE)
    assert words in found


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"reach_problem": "no route"}, "no relay carries it"),
        ({"resident": [], "loading": "head"}, "it is loading head"),
        ({"resident": []}, "it holds no task: no model has one"),
        ({"resident": [], "not_loaded": [REFUSED, FULL]}, "it holds no task: the disk is full"),
    ],
)
def test_a_daemon_that_can_do_nothing_says_why(values: dict[str, Any], words: str) -> None:
    [found] = list_obstacles(CHAIN, NodeStatus(RUNNING | values, True), FILE)
    assert words in found


def test_a_daemon_that_does_not_run_is_all_that_is_said_of_it() -> None:
    for values in ({}, RUNNING | {"resident": []}):
        [found] = list_obstacles(CHAIN, NodeStatus(values, False), FILE)
        assert "splitup-node run" in found


@pytest.mark.parametrize("is_running", [True, False])
def test_a_stopped_daemon_warns_of_nothing(is_running: bool) -> None:
    """A node that left still had the warning that the committee no longer takes its heartbeats."""
    money = ("ready_to_withdraw", "undistributed", "withdrawn", "wallet")
    chain = CHAIN | {"address": "0x1"} | {f"{name}_micro_usdc": 0 for name in money}
    node = NodeStatus(RUNNING | {"warnings": ["nobody takes its heartbeats"]}, is_running)
    facts = {"chain": chain, "node": node.to_dict(), "obstacles": []}
    said = [text for name, text in list_rows(facts, FILE, 0.0) if name == "warning"]
    assert said == (["nobody takes its heartbeats"] if is_running else [])
