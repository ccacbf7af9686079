"""Requests that streams answer, as far as they tell whether another one is the same."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from splitup.core import tuning
from splitup_gateway.errors import ApiError

_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


@dataclass(frozen=True, slots=True)
class KeptRequest:
    """A request, for the server that goes on with its answer."""

    path: str
    body: bytes


@dataclass(frozen=True, slots=True)
class StreamedCall:
    """A request as far as it tells whether another one is the same.

    ``key`` is its Idempotency-Key, "" without one. ``retries`` is how often its client has sent it
    before, None for clients that do not tell.
    """

    owner: str  # the name of an API key, "" without keys
    digest: bytes
    key: str = ""
    retries: int | None = None
    patience_s: float | None = None  # that its client waits for a byte, None when it does not say
    asked: KeptRequest | None = None  # None when it is too large to be kept

    @classmethod
    def make(cls, owner: str, path: str, body: bytes, headers: Mapping[str, str]) -> StreamedCall:
        """Read a request; raise ApiError for a key that is none."""
        key = headers.get("Idempotency-Key", "")
        if len(key) > tuning.IDEMPOTENCY_KEY_CHARS:
            raise ApiError(
                f"an Idempotency-Key has up to {tuning.IDEMPOTENCY_KEY_CHARS} characters, this one "
                f"has {len(key)}; a UUID will do",
                param="Idempotency-Key",
            )
        told = headers.get("x-stainless-retry-count", "")  # of clients of OpenAI and Anthropic
        retries = int(told) if told.isascii() and told.isdigit() and len(told) < 4 else None
        waits = headers.get("x-stainless-read-timeout") or headers.get("x-stainless-timeout", "")
        patience_s = float(waits) if _SECONDS.fullmatch(waits) else None
        digest = hashlib.sha256(path.encode() + b"\n" + body).digest()
        asked = KeptRequest(path, body) if len(body) <= tuning.STREAM_REQUEST_BYTES else None
        return cls(owner, digest, key, retries, patience_s, asked)
