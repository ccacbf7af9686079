"""How far an execution is: traces, failures, and answers to the client's probes."""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    Field,
)

from splitup.core import limits
from splitup.messages.base import AddressField, Bytes32Field, Message, TaskField


class Span(Message):
    """One task at one step on its node's clock, nanoseconds since the epoch.

    ``received`` is when the last input was complete, ``started``/``ended`` bound the compute,
    ``sent`` is when the outputs were handed to the network.
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
    """Why a task did not produce its output; sent to the client in an ERROR frame."""

    task: TaskField
    step: Annotated[int, Field(ge=0, le=limits.MAX_STEPS)]
    node: AddressField
    reason: str = Field(max_length=500)


class TaskProgress(Message):
    """How far one task came: steps that have run, and whether the next has all its inputs."""

    task: Annotated[int, Field(ge=0, lt=limits.MAX_TASKS)]
    steps: Annotated[int, Field(ge=0, le=limits.MAX_STEPS)]
    ready: bool


class Progress(Message):
    """A node's answer to the client's PROBE: every task of the execution that it runs now."""

    execution_id: Bytes32Field
    node: AddressField
    tasks: tuple[TaskProgress, ...] = Field(max_length=limits.MAX_TASKS)
