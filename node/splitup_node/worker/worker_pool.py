"""The node's worker processes, one per device, behind one interface.

A task is loaded into one worker and runs there. The pool gives programs its own numbers. A session
is one task of one execution, so it never changes its worker. All devices of a node must compute the
same bytes: the node announces one determinism class, which decides who verifies it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from splitup.core.errors import ConfigurationError
from splitup_node.worker.device_memory import find_memory
from splitup_node.worker.ipc import RunRequest
from splitup_node.worker.supervisor import BatchHandler, Supervisor, WorkerLost

_log = logging.getLogger("splitup.node.worker")


class Workers:
    """Supervisors behind one interface; ``memory_bytes`` is what each of them may fill."""

    def __init__(self, supervisors: Sequence[Supervisor]) -> None:
        self._supervisors = tuple(supervisors)
        self._programs: dict[int, tuple[int, int]] = {}  # number -> worker, the worker's number
        self._sessions: dict[int, int] = {}  # session -> worker
        self._next_program = 0
        self._given_up: list[Supervisor] = []

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Return the memory of each worker; 0 of one that has died and was not replaced."""
        return tuple(one.memory_bytes if one.is_running else 0 for one in self._supervisors)

    @property
    def unused_bytes(self) -> tuple[int | None, ...]:
        """Return what no program uses of each device; None where its driver does not say."""
        found = (one.report and find_memory(one.report["device"]) for one in self._supervisors)
        return tuple(memory.free_bytes if memory else None for memory in found)

    @property
    def is_running(self) -> bool:
        """Return whether requests can be sent to a worker."""
        for supervisor in self._supervisors:
            if supervisor.is_running:
                return True
        return False

    @property
    def problem(self) -> str:
        """Return which workers have died and why, "" while all run."""
        return "; ".join(
            f"worker {number}: {one.problem}"
            for number, one in enumerate(self._supervisors)
            if not one.is_running
        )

    @property
    def report(self) -> dict[str, str]:
        """Return the device report of the first worker, with the names of all devices."""
        names = ", ".join(one.report["device"] for one in self._supervisors)
        return {**self._supervisors[0].report, "device": names}

    @property
    def restarts(self) -> int:
        """Return how many times a worker was replaced."""
        return sum(supervisor.restarts for supervisor in self._supervisors)

    async def start(self) -> dict[str, str]:
        """Start all workers; returns ``report``.

        Raises WorkerLost, TaskFailed, and ConfigurationError when the devices' classes differ.
        """
        reports = await asyncio.gather(*(one.start() for one in self._supervisors))
        classes = {report["determinism_class"] for report in reports}
        if len(classes) > 1:
            raise ConfigurationError(
                "the node's devices do not compute the same bytes: "
                f"{'; '.join(sorted(classes))}; run one node per kind of device"
            )
        return self.report

    async def wait_lost(self) -> None:
        """Wait until a worker has died, other than those that ``restart`` could not replace."""
        watched = [one for one in self._supervisors if one not in self._given_up]
        waits = [asyncio.create_task(one.wait_lost()) for one in watched]
        waits = waits or [asyncio.create_task(_wait_for_ever())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def restart(self) -> dict[str, str]:
        """Replace every worker that died, where that is possible; returns ``report``.

        ``problem`` says of the others why they do not start. One whose determinism class differs
        from the others' does not stay.
        """
        for worker, supervisor in enumerate(self._supervisors):
            if not supervisor.is_running:
                lost = [number for number, place in self._programs.items() if place[0] == worker]
                for number in lost:
                    del self._programs[number]
                try:
                    await supervisor.restart()
                except WorkerLost as error:
                    _log.warning("worker %d: %s", worker, error)
                    continue
                if len({one.report["determinism_class"] for one in self._supervisors}) > 1:
                    supervisor.kill("its determinism class is not that of the node's other devices")
        self._given_up = [one for one in self._supervisors if not one.is_running]
        return self.report

    def is_loaded(self, program: int) -> bool:
        """Return whether a program's worker is running."""
        place = self._programs.get(program)
        return place is not None and self._supervisors[place[0]].is_running

    def get_width(self, program: int) -> int:
        """Return how many runs of a program, in different sessions, fit into one batch."""
        worker, own = self._programs[program]
        return self._supervisors[worker].get_width(own)

    def merges(self, program: int) -> bool:
        """Return whether consecutive steps of one session can run in one pass."""
        worker, own = self._programs[program]
        return self._supervisors[worker].merges(own)

    async def load(
        self,
        worker: int,
        task: Path,
        weights: Path | None,
        memory_bytes: int | None = None,
        gate: int | None = None,
    ) -> dict[str, Any]:
        """Load a task into a worker, as ``Supervisor.load``."""
        loaded = await self._supervisors[worker].load(task, weights, memory_bytes, gate)
        self._next_program += 1
        self._programs[self._next_program] = (worker, loaded["program"])
        return {**loaded, "program": self._next_program}

    async def unload(self, program: int) -> None:
        """Free a program's memory. Raises TaskFailed or WorkerLost."""
        worker, own = self._programs[program]
        del self._programs[program]
        await self._supervisors[worker].unload(own)

    def run_together(self, requests: Sequence[RunRequest], handler: BatchHandler) -> None:
        """Send runs of one program; ``handler`` as in Supervisor.run_together."""
        worker, program = self._programs[requests[0].program]
        own = []
        for request in requests:
            self._sessions[request.session] = worker
            own.append(RunRequest(request.session, program, request.inputs))
        self._supervisors[worker].run_together(own, handler)

    async def digest_state(self, session: int) -> str:
        """Return the SHA-256 of a session's state, in hex. Raises TaskFailed or WorkerLost."""
        worker = self._sessions.get(session, 0)  # one that never ran is unknown to every worker
        return await self._supervisors[worker].digest_state(session)

    def drop(self, sessions: Sequence[int]) -> None:
        """Free the states of sessions in all workers."""
        for session in sessions:
            self._sessions.pop(session, None)
        for supervisor in self._supervisors:
            supervisor.drop(sessions)

    async def close(self) -> None:
        """End all workers."""
        await asyncio.gather(*(supervisor.close() for supervisor in self._supervisors))


async def _wait_for_ever() -> None:
    await asyncio.Event().wait()
