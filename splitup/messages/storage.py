"""Headers of log segments, and grants: presigned URLs for one key and method each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
)

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.messages.base import CLIENT, AddressField, Bytes32Field, Count, DigestField, Message


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
