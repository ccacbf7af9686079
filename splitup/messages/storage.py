"""Headers of log segments, and grants: presigned URLs for one key and method each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.messages.base import CLIENT, AddressField, Bytes32Field, Count, DigestField, Message
from splitup.messages.completions import SignedTakeover
from splitup.messages.plans import PlanCertificate
from splitup.messages.verification import VerificationOrder


class SegmentHeader(Message):
    """What a log segment holds: consecutive steps of one port, as one producer made them.

    ``lengths`` has an entry per step, in bytes. A tensor too large for a frame is an object of its
    own: ``apart`` lists (place in ``lengths``, SHA-256), and its bytes are not in the segment;
    neither are those of the places in ``zeros``.
    ``previous`` is the SHA-256 of the segment before, of 64 zeros for the first.
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
    """A presigned URL for exactly one key and method. The URL is a bearer secret: never log it."""

    method: Literal["GET", "PUT"]
    key: str = Field(max_length=512)
    url: str = Field(max_length=4096, repr=False)
    headers: dict[str, str]  # must be sent as they are; they are part of the signature
    length_bytes: Count | None  # size of the object, when known
    expires_at_s: Count  # seconds since the epoch


class Grants(Message):
    """What one party may read and write, as far as it was known or asked for."""

    grants: tuple[Grant, ...]

    def get(self, method: str, key: str) -> Grant | None:
        """Return the grant for ``method`` and ``key``, None when it is missing."""
        return next((g for g in self.grants if g.method == method and g.key == key), None)

    def find(self, method: str, key: str) -> Grant:
        """Return the grant for ``method`` and ``key``; raise PeerFault when it is missing."""
        if (grant := self.get(method, key)) is not None:
            return grant
        raise PeerFault(f"the storage gateway issued no {method} grant for {key}")


# ---- what a storage gateway is asked ----


class UploadObject(Message):
    """One content-addressed object somebody wants to store."""

    key: str = Field(max_length=limits.OBJECT_KEY_BYTES)
    length_bytes: Annotated[int, Field(ge=1, le=limits.MAX_UPLOAD_BYTES)]
    sha256: DigestField


class UploadRequest(Message):
    """``proof`` shows whose deposit or stake stands behind the key (``prove_account``)."""

    proof: Annotated[str, Field(pattern=r"^0x[0-9a-f]{130}$")]
    objects: tuple[UploadObject, ...] = Field(min_length=1, max_length=limits.MAX_UPLOAD_OBJECTS)


class UploadAnswer(Message):
    """PUT grants for what is missing; the keys that need not be sent again are in ``present``."""

    grants: tuple[Grant, ...]
    present: tuple[str, ...]


class ModelRequest(Message):
    """``proof`` shows whose key it is (``prove_account``) to a gateway that has not met it."""

    model_id: Bytes32Field
    proof: Annotated[str, Field(pattern=r"^(0x[0-9a-f]{130})?$")] = ""


class ExecutionRequest(Message):
    certificate: PlanCertificate


class LogWrite(Message):
    """One log object that its producer wants to store, with its exact length and digest."""

    task: Annotated[int, Field(ge=0, le=CLIENT)]
    port: Annotated[int, Field(ge=0, lt=limits.MAX_PORTS)]
    number: Annotated[int, Field(ge=0, lt=limits.MAX_STEPS)]
    apart: bool
    length_bytes: Annotated[int, Field(ge=1, le=limits.MAX_TENSOR_BYTES)]
    sha256: DigestField


class LogRead(Message):
    """One log object that a consumer or a validator wants to read; it need not exist yet."""

    task: Annotated[int, Field(ge=0, le=CLIENT)]
    port: Annotated[int, Field(ge=0, lt=limits.MAX_PORTS)]
    node: AddressField
    number: Annotated[int, Field(ge=0, lt=limits.MAX_STEPS)]
    apart: bool


class LogRequest(Message):
    """``takeovers`` are those the party knows of: who was replaced is granted nothing more."""

    certificate: PlanCertificate
    takeovers: tuple[SignedTakeover, ...] = Field(default=(), max_length=limits.MAX_TASKS)
    writes: tuple[LogWrite, ...] = Field(max_length=limits.LOG_OBJECTS)
    reads: tuple[LogRead, ...] = Field(max_length=limits.LOG_OBJECTS)


class VerificationRequest(Message):
    """What a validator needs: the task's graph and weights, and the log objects in ``reads``."""

    order: VerificationOrder
    reads: tuple[LogRead, ...] = Field(default=(), max_length=limits.LOG_OBJECTS)
