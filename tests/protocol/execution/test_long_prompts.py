"""A long prompt over four nodes' queues, in virtual time: how it overlaps, and what others wait."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable
from typing import Any

from splitup.core import limits
from splitup.messages.base import CLIENT
from splitup.protocol.execution.task_queue import LocalTask, Run, TaskQueue, Tensor

NODES = 4
CHUNK, TOKEN = 8, 1  # how long a node computes a step of many rows, and of one
CHUNKS = 125  # a prompt of 2,000 tokens in chunks of 16
PROMPT, TEXT = "0x" + "01" * 32, "0x" + "02" * 32


class Pipeline:
    """Four nodes with a task each, and clients that sign for every 16 steps; sending takes no time.

    A client's step that is ``done`` gives its next one through ``on_step``.
    """

    def __init__(self, on_step: Callable[[str, int], None]) -> None:
        self.now = 0
        self._on_step = on_step
        self._events: list[tuple[int, int, int, Run]] = []
        self._order = itertools.count()
        self._busy = [False] * NODES
        self.queues = [TaskQueue() for _ in range(NODES)]
        for place, queue in enumerate(self.queues):
            source = (CLIENT, 0) if place == 0 else (place - 1, 0)
            for execution in (PROMPT, TEXT):
                queue.assign(execution, [LocalTask(place, (source,), 1, 0)], 10_000)

    def send(self, execution: str, step: int) -> None:
        self._offer(0, execution, (CLIENT, 0), step)

    def run(self) -> None:
        while self._events:
            self.now, _, place, run = heapq.heappop(self._events)
            self._busy[place] = False
            self.queues[place].finish(run, [])
            if place + 1 < NODES:
                self._offer(place + 1, run.execution_id, (place, 0), run.step)
            else:
                if (run.step + 1) % limits.INTERIM_STEPS == 0:
                    for queue in self.queues:
                        queue.extend(run.execution_id, run.step + 1)
                self._on_step(run.execution_id, run.step)
            for other in range(NODES):
                self._start(other)

    def _offer(self, place: int, execution: str, port: Any, step: int) -> None:
        data = f"{port} {step}".encode()
        tensor = Tensor(hashlib.sha256(data).digest(), data)
        self.queues[place].offer(execution, port, step, tensor)
        self._start(place)

    def _start(self, place: int) -> None:
        if self._busy[place] or (run := self.queues[place].next()) is None:
            return
        self._busy[place] = True
        ends = self.now + (CHUNK if run.execution_id == PROMPT else TOKEN)
        heapq.heappush(self._events, (ends, next(self._order), place, run))


def test_all_nodes_work_on_a_prompt_at_once() -> None:
    done: list[int] = []
    pipeline = Pipeline(lambda _, step: done.append(step))
    for step in range(CHUNKS):
        pipeline.send(PROMPT, step)
    pipeline.run()
    assert done == [*range(CHUNKS)]
    # the first chunk passes all nodes; after 16 steps they wait once, for the client's signature
    assert pipeline.now == CHUNK * (CHUNKS + 2 * (NODES - 1))


def test_a_token_waits_at_each_node_for_no_more_than_the_chunk_that_has_begun() -> None:
    came: list[int] = []
    ends: list[int] = []

    def take(execution: str, step: int) -> None:
        if execution == PROMPT:
            ends.extend([pipeline.now] * (step + 1 == CHUNKS))
        else:
            came.append(pipeline.now)
            if not ends:
                pipeline.send(TEXT, step + 1)

    pipeline = Pipeline(take)
    for step in range(CHUNKS):
        pipeline.send(PROMPT, step)
    pipeline.send(TEXT, 0)
    pipeline.run()
    gaps = [after - before for before, after in itertools.pairwise(came)]
    assert len(gaps) > 30 and max(gaps) <= NODES * (CHUNK + TOKEN)
    # and the prompt loses the time that the tokens take, no more
    alone = CHUNK * (CHUNKS + 2 * (NODES - 1))
    assert ends[0] <= alone + NODES * TOKEN * len(came)
