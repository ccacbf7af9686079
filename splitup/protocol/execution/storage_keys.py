"""Storage keys of an execution's logs: a pure function of task, port, writer and number.

A producer does not store one object per step. It writes *log segments* of many consecutive steps
(``splitup.protocol.execution.log_segments``). A tensor too large for a frame is an object of its
own, so that its consumers can fetch it. Every writer has a prefix of its own, so a node that takes
over a task never overwrites the objects of its predecessor.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitup.messages.base import CLIENT
from splitup.messages.storage import LogRead


@dataclass(frozen=True, slots=True)
class LogName:
    """One object of the log of (``task``, ``port``) as ``node`` wrote it.

    ``task`` is CLIENT and ``node`` the client's account for a graph input. ``number`` is the
    segment's index, or with ``apart`` the step of a tensor stored by itself.
    """

    task: int
    port: int
    node: str
    number: int
    apart: bool = False

    @classmethod
    def of(cls, read: LogRead) -> LogName:
        """Return the name of the object that somebody wants to read."""
        return cls(read.task, read.port, read.node, read.number, read.apart)

    def get_prefix(self, execution_id: str) -> str:
        """Return the part of the key that all objects of this log share."""
        producer = "input" if self.task == CLIENT else f"t{self.task:04d}"
        return f"executions/{execution_id[2:]}/{producer}.{self.port}/{self.node}/"

    def get_key(self, execution_id: str) -> str:
        """Return the object's key."""
        kind = "step-" if self.apart else ""
        return f"{self.get_prefix(execution_id)}{kind}{self.number:05d}"
