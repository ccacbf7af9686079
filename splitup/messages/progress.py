"""What nodes report to the client about an execution: traces, failures, answers to probes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from splitup.core import limits
from splitup.messages.base import AddressField, Bytes32Field, Message, TaskField


class Span(Message):
    """The times of one task at one step, on its node's clock, in nanoseconds since the epoch.

    ``received`` is when the last input was complete, ``started`` and ``ended`` bound the
    computation, ``sent`` is when the outputs were handed to the network.
    """

    task: TaskField
    step: Annotated[int, Field(ge=0, lt=limits.MAX_STEPS)]
    received_ns: str = Field(pattern=r"^[0-9]{1,20}$")
    started_ns: str = Field(pattern=r"^[0-9]{1,20}$")
    ended_ns: str = Field(pattern=r"^[0-9]{1,20}$")
    sent_ns: str = Field(pattern=r"^[0-9]{1,20}$")


class Trace(Message):
    """A node's spans of one execution, sent to the client after its end."""

    execution_id: Bytes32Field
    node: AddressField
    spans: tuple[Span, ...]


class TaskFailure(Message):
    """Why a task failed; sent to the client in an ERROR frame."""

    task: TaskField
    step: Annotated[int, Field(ge=0, le=limits.MAX_STEPS)]
    node: AddressField
    reason: str = Field(max_length=500)


class TaskProgress(Message):
    """How many steps of a task have run, and whether the next one has all its inputs."""

    task: Annotated[int, Field(ge=0, lt=limits.MAX_TASKS)]
    steps: Annotated[int, Field(ge=0, le=limits.MAX_STEPS)]
    ready: bool


class Progress(Message):
    """A node's answer to a PROBE: the progress of every task of the execution that it runs.

    ``is_loading``: it has the plan and still loads its tasks; ``tasks`` is empty then.
    """

    execution_id: Bytes32Field
    node: AddressField
    tasks: tuple[TaskProgress, ...] = Field(max_length=limits.MAX_TASKS)
    is_loading: bool = False
