"""Headers of log segments; requests to storage gateways, and the presigned URLs they grant."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.messages.base import CLIENT, AddressField, Bytes32Field, Count, DigestField, Message
from splitup.messages.completions import SignedTakeover
from splitup.messages.plans import PlanCertificate
from splitup.messages.verification import VerificationOrder


class SegmentHeader(Message):
    """The header of a log segment, which holds consecutive steps of one port of one producer.

    ``lengths`` has one entry per step, in bytes. The bytes of a tensor that is too large for a
    frame are in an object of their own: ``apart`` lists (index in ``lengths``, SHA-256). Tensors at
    the indices in ``zeros`` hold zeros and are not stored. ``previous`` is the SHA-256 of the
    segment before this one, and 64 zeros for the first.
    """

    execution_id: Bytes32Field
    task: Annotated[int, Field(ge=0, le=CLIENT)]
    port: Annotated[int, Field(ge=0, lt=limits.MAX_PORTS)]
    node: AddressField
    index: Annotated[int, Field(ge=0, lt=limits.MAX_STEPS)]
    first_step: Annotated[int, Field(ge=0, lt=limits.MAX_STEPS)]
    lengths: tuple[Count, ...] = Field(min_length=1, max_length=limits.SEGMENT_STEPS)
    apart: tuple[tuple[Count, DigestField], ...] = Field(max_length=limits.SEGMENT_STEPS)
    zeros: tuple[Count, ...] = Field(max_length=limits.SEGMENT_STEPS)
    previous: DigestField


class Grant(Message):
    """A presigned URL for one key and method. Whoever has the URL may use it: never log it."""

    method: Literal["GET", "PUT"]
    key: str = Field(max_length=512)
    url: str = Field(max_length=4096, repr=False)
    headers: dict[str, str]  # to be sent unchanged: the URL's signature covers them
    length_bytes: Count | None  # size of the object, when known
    expires_at_s: Count  # seconds since the epoch


class Grants(Message):
    """The presigned URLs that a party got for one request."""

    grants: tuple[Grant, ...]

    def get(self, method: str, key: str) -> Grant | None:
        """Return the grant for ``method`` and ``key``, None when it is missing."""
        return next((g for g in self.grants if g.method == method and g.key == key), None)

    def find(self, method: str, key: str) -> Grant:
        """Return the grant for ``method`` and ``key``; raise PeerFault when it is missing."""
        if (grant := self.get(method, key)) is not None:
            return grant
        raise PeerFault(f"the storage gateway issued no {method} grant for {key}")


# ---- requests to a storage gateway -------------------------------------------------------------


class UploadObject(Message):
    """A content-addressed object to be stored."""

    key: str = Field(max_length=limits.OBJECT_KEY_BYTES)
    length_bytes: Annotated[int, Field(ge=1, le=limits.MAX_UPLOAD_BYTES)]
    sha256: DigestField


class UploadRequest(Message):
    """Asks to store objects of a model. ``proof`` names the account with a deposit or a stake.

    See ``splitup.storage.gateway_client.prove_account``.
    """

    proof: Annotated[str, Field(pattern=r"^0x[0-9a-f]{130}$")]
    objects: tuple[UploadObject, ...] = Field(min_length=1, max_length=limits.MAX_UPLOAD_OBJECTS)


class UploadAnswer(Message):
    """PUT grants for the objects that the store lacks; ``present`` are the keys that it has."""

    grants: tuple[Grant, ...]
    present: tuple[str, ...]


class ModelRequest(Message):
    """Asks to read a model. ``proof`` names the account of a key that is no node's."""

    model_id: Bytes32Field
    proof: Annotated[str, Field(pattern=r"^(0x[0-9a-f]{130})?$")] = ""


class ExecutionRequest(Message):
    """Asks for the large tensors of an execution, by the plan that names the sender."""

    certificate: PlanCertificate


class LogWrite(Message):
    """A log object to be stored by its producer, with its exact length and digest."""

    task: Annotated[int, Field(ge=0, le=CLIENT)]
    port: Annotated[int, Field(ge=0, lt=limits.MAX_PORTS)]
    number: Annotated[int, Field(ge=0, lt=limits.MAX_STEPS)]
    apart: bool
    length_bytes: Annotated[int, Field(ge=1, le=limits.MAX_TENSOR_BYTES)]
    sha256: DigestField


class LogName(Message):
    """One object of the log of (``task``, ``port``) as ``node`` wrote it; it need not exist yet.

    ``task`` is CLIENT and ``node`` the client's account for a graph input. A producer does not
    store one object per step: ``number`` is the index of a segment of many consecutive steps
    (``splitup.protocol.execution.log_segments``). With ``apart`` it is the step of a tensor too
    large for a frame, stored by itself so that its consumers can fetch it. Every writer has a
    prefix of its own: a node that takes over a task never overwrites its predecessor's objects.
    """

    task: Annotated[int, Field(ge=0, le=CLIENT)]
    port: Annotated[int, Field(ge=0, lt=limits.MAX_PORTS)]
    node: AddressField
    number: Annotated[int, Field(ge=0, lt=limits.MAX_STEPS)]
    apart: bool

    @classmethod
    def of(cls, task: int, port: int, node: str, number: int, *, apart: bool = False) -> Self:
        """Return a name of values that are known to be right."""
        return cls.model_construct(task=task, port=port, node=node, number=number, apart=apart)

    def get_prefix(self, execution_id: str) -> str:
        """Return the part of the key that all objects of this log share."""
        producer = "input" if self.task == CLIENT else f"t{self.task:04d}"
        return f"executions/{execution_id[2:]}/{producer}.{self.port}/{self.node}/"

    def get_key(self, execution_id: str) -> str:
        """Return the object's key."""
        kind = "step-" if self.apart else ""
        return f"{self.get_prefix(execution_id)}{kind}{self.number:05d}"


class LogRequest(Message):
    """Asks for log objects. ``takeovers`` are all those the sender knows: they move rights."""

    certificate: PlanCertificate
    takeovers: tuple[SignedTakeover, ...] = Field(default=(), max_length=limits.MAX_TASKS)
    writes: tuple[LogWrite, ...] = Field(max_length=limits.LOG_OBJECTS)
    reads: tuple[LogName, ...] = Field(max_length=limits.LOG_OBJECTS)


class VerificationRequest(Message):
    """Asks for what a validator reads: a task's graph and weights, and log objects.

    It writes a log of its own outputs where members may have to compare them.
    """

    order: VerificationOrder
    writes: tuple[LogWrite, ...] = Field(default=(), max_length=limits.LOG_OBJECTS)
    reads: tuple[LogName, ...] = Field(default=(), max_length=limits.LOG_OBJECTS)
