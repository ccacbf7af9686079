"""The base of every JSON message, and the types of its fields.

JSON objects are pydantic models (strict, frozen, unknown fields refused); ``canonical_bytes``
is what is hashed and signed. Messages from peers enter through ``parse`` or ``from_value``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from splitup.core import limits
from splitup.core.codec import decode_canonical, encode_canonical
from splitup.core.errors import InvalidInput, PeerFault

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


class Message(BaseModel):
    """Base of every JSON message: strict types, immutable, unknown fields refused."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

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
            decode_canonical(data, max_bytes=max_bytes)
        except InvalidInput as error:
            raise PeerFault(f"{cls.__name__} is malformed: {error}") from None
        return cls._validate(data)

    @classmethod
    def from_value(cls, value: Any) -> Self:
        """Validate an already decoded JSON value; raise PeerFault naming the offending field."""
        return cls._validate(encode_canonical(value))

    @classmethod
    def _validate(cls, data: bytes) -> Self:
        try:
            # JSON mode, so that arrays may become tuples although types are strict
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "(root)"
            raise PeerFault(f"{cls.__name__}.{where} is invalid: {first['msg']}") from None
