"""What tasks read and give in a world: made-up tensors, and the messages that carry them."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Final

from pydantic import Field

from splitup.core import limits
from splitup.core.tensors import NO_STEPS, extend_steps
from splitup.crypto.keys import Identity
from splitup.messages.base import CLIENT as CLIENT_TASK
from splitup.messages.base import AddressField, Bytes32Field, DigestField, Message
from splitup.messages.completions import (
    Completion,
    SignedEnd,
    SignedTakeover,
)
from splitup.messages.frames import Frame, FrameKind, Seal, make_delivery
from splitup.messages.plans import Plan, PlanCertificate
from splitup.messages.verification import (
    ValidatorCommitment,
    VerificationResult,
)
from splitup.protocol.execution.takeovers import ExecutorMap
from splitup.protocol.settlement.attestations import Attestations
from tests.protocol.adversary.world import NODES

LATE_S: Final = 1.0  # a tensor that comes later has been replaced by then
BY_ADDRESS: Final = {node.address: node for node in NODES}
Tensors = tuple[str, ...]  # of one port, one digest a step


class SentTensors(Message):
    """A port's tensors of all steps, as frames carry them from ``node`` to one reader."""

    execution_id: Bytes32Field
    node: AddressField
    task: Annotated[int, Field(ge=0, le=CLIENT_TASK)]
    port: int
    tensors: tuple[DigestField, ...] = Field(max_length=limits.MAX_STEPS)


class LoggedTensors(SentTensors):
    """A port's tensors of all steps, as the store holds them."""


class RecomputedTensors(LoggedTensors):
    """A port's tensors of all steps, as a validator stores what it got."""


class MadeTensors(SentTensors):
    """A port's tensors of all steps, as an executor says that it computed them."""


@dataclass(slots=True)
class Work:
    """What a node read and gave for a task; ``right`` is what follows from what it read."""

    inputs: tuple[Tensors, ...]
    outputs: Tensors
    right: Tensors


@dataclass(slots=True)
class Run:
    """One execution as its client and nodes know it."""

    certificate: PlanCertificate
    executors: ExecutorMap
    attestations: Attestations
    work: dict[tuple[int, str], Work] = field(default_factory=dict)  # by task and node
    store: dict[tuple[int, str], Tensors] = field(default_factory=dict)  # by task and author
    received: dict[int, Tensors] = field(default_factory=dict)  # by the client, by task
    sources: dict[tuple[int, str], tuple[str, ...]] = field(default_factory=dict)  # whose tensors
    takeovers: list[SignedTakeover] = field(default_factory=list)
    told: dict[str, SignedEnd] = field(default_factory=dict)  # what ended it, by node
    interim: dict[str, deque[SignedEnd]] = field(default_factory=dict)  # by node
    # as committed to, by node and root: which one counts is on chain
    completions: dict[tuple[str, str], Completion] = field(default_factory=dict)
    results: dict[tuple[int, str], VerificationResult] = field(default_factory=dict)
    ordered: dict[tuple[int, str], int] = field(default_factory=dict)  # steps, by task and node
    waiting: list[tuple[str, Message, ValidatorCommitment | None]] = field(default_factory=list)
    computed: bool = False  # by nodes

    @property
    def plan(self) -> Plan:
        return self.certificate.plan

    @property
    def id(self) -> str:
        return self.plan.request.execution_id


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@lru_cache(4_096)
def digest_all(tensors: Tensors) -> str:
    """Return the digest of a port over all its steps."""
    return _extend(tensors).hex()


def _extend(tensors: Tensors) -> bytes:
    total = NO_STEPS
    for tensor in tensors:
        total = extend_steps(total, bytes.fromhex(tensor))
    return total


def make_signed_delivery(node: Identity, execution_id: str, task: int, sent: Tensors) -> str:
    """Return what a producer signs with the last output that it sends to the client."""
    frame = Frame(
        kind=FrameKind.TENSOR,
        execution_id=execution_id,
        task=task,
        port=0,
        step=len(sent) - 1,
        digest=bytes.fromhex(sent[-1]),
        length=4,
        payload=b"",
        before=_extend(sent[:-1]),
    )
    signed = frame.signed_bytes()
    return make_delivery(Seal(signed, node.sign_raw(signed)))


@lru_cache(4_096)
def compute(task: int, inputs: tuple[Tensors, ...]) -> Tensors:
    """Return a task's right outputs; each depends on all inputs up to its step."""
    outputs, state = [], ""
    for step in range(min(map(len, inputs))):
        state = digest(task, state, *(tensors[step] for tensors in inputs))
        outputs.append(state)
    return tuple(outputs)
