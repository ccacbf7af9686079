"""What a node tells the members of takeovers."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from splitup_node.node import NodeDaemon

from splitup.core import limits
from splitup.core.background import BackgroundTasks


def make_node() -> tuple[Any, list[tuple[Any, ...]]]:
    told: list[tuple[Any, ...]] = []
    node: Any = SimpleNamespace(_untold={}, _watched=set(), _background=BackgroundTasks())
    node._send_takeovers = lambda execution, some, *, is_replaced: told.append(tuple(some))
    for name in ("_tell_takeover", "_tell_rest", "_watch_taken"):
        setattr(node, name, partial(getattr(NodeDaemon, name), node))
    return node, told


@pytest.mark.parametrize("tell", [NodeDaemon.on_replaced, NodeDaemon.on_taken])
async def test_s78_a_node_tells_of_many_takeovers_in_few_messages(tell: Any) -> None:
    """A message for each went to each member, from each of eight candidates: 28,000 in all."""
    node, told = make_node()
    node._reporter = SimpleNamespace(watch_taken=lambda *_: asyncio.sleep(0))
    execution: Any = SimpleNamespace(id="0x1", deadline_s=0)
    for number in range(limits.MAX_TASKS + 2):
        tell(node, execution, number)
    await asyncio.gather(*node._background.tasks)
    assert told == [(0,), tuple(range(1, limits.MAX_TASKS + 1)), (limits.MAX_TASKS + 1,)]
    tell(node, execution, 2000)
    await asyncio.gather(*node._background.tasks)
    assert told[3:] == [(2000,)] and not node._untold


async def test_s82_a_node_watches_an_execution_once_however_many_tasks_it_takes_over() -> None:
    """It asked its RPC endpoint four times a second for each of 1,024 tasks."""
    node, _ = make_node()
    watched: list[str] = []
    ended = asyncio.Event()

    async def watch(execution_id: str, *_: Any) -> None:
        watched.append(execution_id)
        await ended.wait()

    node._reporter = SimpleNamespace(watch_taken=watch)
    for name in ("0x1", "0x2"):
        for number in range(4):
            NodeDaemon.on_taken(node, SimpleNamespace(id=name, deadline_s=0), number)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert watched == ["0x1", "0x2"]
    ended.set()
    await asyncio.gather(*node._background.tasks)
    assert not node._watched
