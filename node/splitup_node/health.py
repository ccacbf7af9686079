"""Whether a node takes work, and what its owner has to know.

What is not in the journal is lost with a crash, the payment included: a node whose disk is full
takes no work, says so to whoever sends a plan, and goes on once there is room.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

from splitup.chain.clock import ChainClock
from splitup.core import limits, tuning
from splitup.core.errors import Unavailable
from splitup.storage.journal import Journal

_log = logging.getLogger("splitup.node.health")


class Health:
    """Looks at disk, journal and clock once a second; logs what has changed."""

    def __init__(self, journal: Journal, directory: Path, clock: ChainClock) -> None:
        self._journal = journal
        self._directory = directory
        self._clock = clock
        self._heartbeat_problem = ""  # set while no member takes this node's heartbeats
        self._worker_problem = ""  # set while a worker has died and was not replaced
        self._told: tuple[str, ...] = ()
        self.trouble = ""  # why the node takes no work

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return one sentence for everything that is wrong."""
        found = (
            *(self.trouble, self._worker_problem),
            *(self._clock.describe_skew(), self._heartbeat_problem),
        )
        return tuple(sentence for sentence in found if sentence)

    def check(self) -> None:
        """Raise Unavailable when the node takes no work."""
        if self.trouble:
            raise Unavailable(self.trouble)

    def note_journal(self, error: Unavailable) -> None:
        """Take no work until the journal can be written again."""
        self.trouble = f"the node's journal cannot be written: {error}"

    def note_workers(self, problem: str) -> None:
        """Note why workers have died and were not replaced, "" once all run again."""
        self._worker_problem = (
            f"the node computes with fewer devices, or none: {problem}; it tries again"
            if problem
            else ""
        )

    def note_heartbeats(self, failures: set[str], members: int) -> None:
        """Note why no member took the last heartbeat: the node gets no work then."""
        said = "; ".join(sorted(failures))
        self._heartbeat_problem = (
            f"none of the {members} committee members takes this node's heartbeats: {said}"
            if said
            else ""
        )

    async def look(self) -> None:
        """Find out what is wrong now, and log each problem once."""
        self.trouble = await asyncio.to_thread(self._find_trouble)
        warnings = self.warnings
        for sentence in warnings:
            if sentence not in self._told:
                _log.warning("%s", sentence)
        if self._told and not warnings:
            _log.info("all earlier problems are solved")
        self._told = warnings

    def _find_trouble(self) -> str:
        try:
            if shutil.disk_usage(self._directory).free < tuning.DISK_LEAST_BYTES:
                # without the number of free bytes: another sentence would be logged again
                return (
                    f"the disk of {self._directory} has less than "
                    f"{tuning.DISK_LEAST_BYTES // limits.MIB} MiB left; the node takes no work "
                    "until there is more free space"
                )
            if self.trouble:  # otherwise the next real write finds out
                self._journal.put("health", "probe", {})
        except (Unavailable, OSError) as error:
            return f"the node's journal cannot be written: {error}"
        return ""
