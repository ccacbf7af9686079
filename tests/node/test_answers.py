from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

from splitup_node.node import NodeDaemon

from splitup.core import limits
from splitup.core.background import BackgroundTasks


async def test_s78_a_node_answers_for_many_takeovers_in_few_messages() -> None:
    """A message for each went to each member, from each of eight candidates: 28,000 in all."""
    shown: list[tuple[Any, ...]] = []
    node: Any = SimpleNamespace(_replaced={}, _background=BackgroundTasks())
    node._show_signed_steps = lambda execution, *takeovers: shown.append(takeovers)
    node._answer_replaced = partial(NodeDaemon._answer_replaced, node)
    execution: Any = SimpleNamespace(id="0x1")
    for number in range(limits.MAX_TASKS + 1):
        NodeDaemon.on_replaced(node, execution, number)  # type: ignore[arg-type]
    await asyncio.gather(*node._background.tasks)
    assert shown == [tuple(range(limits.MAX_TASKS)), (limits.MAX_TASKS,)]
    NodeDaemon.on_replaced(node, execution, 2000)  # type: ignore[arg-type]
    await asyncio.gather(*node._background.tasks)
    assert shown[2:] == [(2000,)] and not node._replaced
