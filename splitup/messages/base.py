"""The base of every JSON message, and the types of its fields.

JSON objects are pydantic models (strict, frozen, unknown fields refused); ``canonical_bytes``
is what is hashed and signed. Messages from peers enter through ``parse`` or ``from_value``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import Field

from splitup.core import limits
from splitup.core.codec import check_canonical, decode_canonical, encode_canonical
from splitup.core.errors import InvalidInput, PeerFault
from splitup.core.records import Record

AddressField = Annotated[str, Field(pattern=r"^0x[0-9a-f]{40}$")]
Bytes32Field = Annotated[str, Field(pattern=r"^0x[0-9a-f]{64}$")]
DigestField = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
HexField = Annotated[str, Field(pattern=r"^0x([0-9a-f]{2})*$", max_length=2 * limits.MIB)]
Count = Annotated[int, Field(ge=0, le=2**53 - 1)]
Credit = Annotated[int, Field(ge=-limits.MAX_CREDIT_MILLI, le=limits.MAX_CREDIT_MILLI)]
EndpointField = Annotated[
    str, Field(pattern=r"^https?://[^/?#@\s]+$", max_length=limits.MAX_ENDPOINT_CHARS)
]
RELAY_PATH = "/v1/relay"  # of a relay's HTTP interface (splitup.messages.api)
NodeEndpointField = Annotated[  # where a node is reached: at its own host, or through a relay
    str,
    Field(
        pattern=rf"^https?://[^/?#@\s]+({RELAY_PATH}/0x[0-9a-f]{{40}})?$",
        max_length=limits.MAX_ENDPOINT_CHARS,
    ),
]
Speed = Annotated[int, Field(ge=0, le=limits.MAX_SPEED_MFLOPS)]
Bandwidth = Annotated[int, Field(ge=0, le=limits.MAX_BANDWIDTH_KBPS)]
T = TypeVar("T")
ZERO_BYTES32 = "0x" + "00" * 32
TaskField = Annotated[int, Field(ge=0, lt=limits.MAX_TASKS)]
CLIENT = 0xFFFF  # the task index that stands for the client, which produces the graph inputs


def count_values(max_bytes: int) -> int:
    """Return how many values a message of at most so many bytes may have."""
    is_large = max_bytes > limits.HTTP_BODY_BYTES
    return limits.MAX_DOCUMENT_VALUES if is_large else limits.MAX_JSON_VALUES


class Message(Record):
    """Base of every JSON message: strict types, immutable, unknown fields refused."""

    def canonical_bytes(self) -> bytes:
        """Return the bytes that are hashed and signed (``splitup.core.codec``)."""
        return encode_canonical(self.model_dump(mode="json"))

    def digest(self, domain: str) -> str:
        """Return SHA-256(domain ‖ 0x00 ‖ canonical bytes) as a bytes32 string."""
        return "0x" + hashlib.sha256(domain.encode() + b"\0" + self.canonical_bytes()).hexdigest()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy without the results that ``once`` keeps of the original."""
        copied = super().model_copy(update=update, deep=deep)
        for name in set(copied.__dict__) - set(type(self).model_fields):
            del copied.__dict__[name]
        return copied

    def once(self, compute: Callable[[Self], T]) -> T:
        """Return ``compute(self)``, a pure function, and keep the result: roots are costly."""
        name = f"{compute.__module__}.{compute.__qualname__}"
        if name not in self.__dict__:
            self.__dict__[name] = compute(self)
        value: T = self.__dict__[name]
        return value

    @classmethod
    def parse(cls, data: bytes, *, max_bytes: int = limits.MAX_MESSAGE_BYTES) -> Self:
        """Parse canonical bytes from a peer; raise PeerFault when they are not a valid message."""
        try:
            value = decode_canonical(data, max_bytes=max_bytes, max_values=count_values(max_bytes))
        except InvalidInput as error:
            raise PeerFault(f"{cls.__name__} is malformed: {error}") from None
        return cls.from_value(value)

    @classmethod
    def from_value(cls, value: Any) -> Self:
        """Validate an already decoded JSON value; raise PeerFault naming the offending field."""
        try:
            message = cls.read(value)
            check_canonical(value)
        except InvalidInput as error:
            raise PeerFault(str(error)) from None
        return message
