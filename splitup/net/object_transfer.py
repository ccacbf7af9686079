"""Transfers of objects over presigned URLs.

Whoever has a URL may use it. No message contains one, and no exception of the HTTP library, whose
text may quote it, leaves this module or stays attached to another. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Final, Self

import aiohttp
from yarl import URL

from splitup.core import limits, tuning
from splitup.core.errors import (
    InvalidInput,
    PeerFault,
    StorageUnavailable,
    describe,
    name_server,
)
from splitup.core.http_session import Redirected
from splitup.core.silence import SilenceAlarm
from splitup.messages.storage import Grant

_log = logging.getLogger("splitup.storage")
RETRYABLE: Final = frozenset({408, 429, 500, 502, 503, 504})
# hashed or written without a pause; frames wait for that, 0.1 ms
_CHUNK_BYTES: Final = 256 * limits.KIB
_FIRST_PAUSE_S: Final = 0.05

Body = bytes | memoryview | Sequence[bytes | memoryview]  # whole, or in parts without a copy


class NotStored(StorageUnavailable):
    """The object does not exist, or not yet."""


def count_bytes(data: Body) -> int:
    """Return the length of a body in bytes."""
    return sum(map(len, get_parts(data)))


async def compute_sha256(data: Body) -> bytes:
    """Return the SHA-256 of ``data``, on a thread if it is more than a chunk."""
    if count_bytes(data) <= _CHUNK_BYTES:
        return _hash(data)
    return await asyncio.to_thread(_hash, data)


def _hash(data: Body) -> bytes:
    digest = hashlib.sha256()
    for part in get_parts(data):
        digest.update(part)
    return digest.digest()


def get_parts(data: Body) -> Sequence[bytes | memoryview]:
    """Return the parts of a body, one if it is whole."""
    return (data,) if isinstance(data, bytes | memoryview) else data


async def put_object(
    session: aiohttp.ClientSession,
    grant: Grant,
    data: Body,
    *,
    deadline_s: float = 60.0,
    existing: Grant | None = None,
    pause_s: float = 0.0,
) -> None:
    """Write one object within ``deadline_s`` from now; return when the server has it.

    A pause of ``pause_s`` between chunks of 256 KiB leaves the network, and a store on this
    machine, to more urgent work.

    Objects are written once. When the key is taken (412), for example by an earlier try of ours
    whose answer got lost, this succeeds only if ``existing``, a GET grant for the key, yields equal
    bytes. Raises InvalidInput (the grant does not allow it), StorageUnavailable, or PeerFault (the
    key holds other bytes).
    """
    check_grant(grant, "PUT")
    size_bytes = count_bytes(data)
    if grant.length_bytes is not None and grant.length_bytes != size_bytes:
        raise InvalidInput(
            f"object {grant.key} must have {grant.length_bytes} bytes, not {size_bytes}"
        )
    with TransferPatience(grant, deadline_s, tuning.TRANSFER_STALL_S) as patience:
        while True:
            try:
                status = await _send(session, grant, data, patience, pause_s)
            except Redirected as error:
                raise make_refusal(grant, error.status) from None
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reason = describe_failure(error)
            else:
                if status in (200, 201, 204):
                    return
                if status == 412:
                    break
                if status not in RETRYABLE:
                    raise make_refusal(grant, status)
                reason = f"status {status}"
            await patience.pause(reason)
    if existing is None:
        raise PeerFault(f"object {grant.key} exists already; its bytes cannot be compared")
    if existing.key != grant.key:
        raise InvalidInput(f"the grant to compare object {grant.key} is for another key")
    await get_object(
        session,
        existing,
        max_bytes=size_bytes,
        expected_digest=(await compute_sha256(data)).hex(),
        deadline_s=patience.end - time.monotonic(),
    )


async def get_object(
    session: aiohttp.ClientSession,
    grant: Grant,
    *,
    max_bytes: int,
    expected_digest: str | None,
    deadline_s: float = 60.0,
) -> bytes:
    """Read one object of at most ``max_bytes`` and check its SHA-256 (hex).

    Fetched up to three times while the digest differs, and again after connection errors until
    ``deadline_s`` from now. ``expected_digest`` None: the bytes carry their own proof, which the
    caller checks. Raises StorageUnavailable (NotStored for a missing object, and for an expired
    grant) or PeerFault (too long, wrong digest).
    """
    check_grant(grant, "GET")
    fetches = 0
    with TransferPatience(grant, deadline_s, tuning.TRANSFER_STALL_S) as patience:
        while True:
            try:
                digest = None if expected_digest is None else hashlib.sha256()
                status, data = await _fetch(session, grant, max_bytes, patience, digest)
            except Redirected as error:
                raise make_refusal(grant, error.status) from None
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                await patience.pause(describe_failure(error))
                continue
            if status in RETRYABLE:
                await patience.pause(f"status {status}")
                continue
            if status == 404:
                raise NotStored(f"object {grant.key} does not exist (yet)")
            if status != 200:
                raise make_refusal(grant, status)
            if len(data) > max_bytes:
                raise PeerFault(f"object {grant.key} is longer than {max_bytes} bytes")
            if digest is None or digest.hexdigest() == expected_digest:
                return data
            fetches += 1
            if fetches == tuning.OBJECT_FETCHES:
                raise PeerFault(
                    f"object {grant.key} has another digest than {expected_digest}, "
                    f"{fetches} times over"
                )


class TransferPatience:
    """How long one transfer is tried: until a deadline, and ``silence_s`` without a byte.

    It warns of a silence long before. Between tries are exponential pauses with full jitter.
    """

    def __init__(self, grant: Grant, deadline_s: float, silence_s: float) -> None:
        self.end = time.monotonic() + deadline_s
        self._key, self._place = grant.key, name_server(grant.url)
        self._silence_s = silence_s
        self._silent_end = time.monotonic() + silence_s
        self._pause_s = _FIRST_PAUSE_S
        self._alarm = SilenceAlarm(self._warn)

    def __enter__(self) -> Self:
        self._alarm.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._alarm.__exit__()

    def note_progress(self) -> None:
        """Note that bytes moved: it begins to wait anew."""
        self._silent_end = time.monotonic() + self._silence_s
        self._alarm.note_progress()

    def make_timeout(self) -> aiohttp.ClientTimeout:
        """Return the limits of the next try."""
        return aiohttp.ClientTimeout(
            total=max(0.001, self.end - time.monotonic()),
            sock_connect=tuning.HTTP_CONNECT_S,
            sock_read=tuning.TRANSFER_STALL_S,
        )

    async def pause(self, reason: str) -> None:
        """Sleep, or raise StorageUnavailable when the time would be over meanwhile."""
        pause_s = random.uniform(0, self._pause_s)
        if time.monotonic() + pause_s >= min(self.end, self._silent_end):
            raise StorageUnavailable(
                f"the object store at {self._place} did not move {self._key} in time ({reason}); "
                "check that it runs ('splitup status' on your own network), or try again later"
            ) from None
        await asyncio.sleep(pause_s)
        self._pause_s = min(2 * self._pause_s, tuning.OBJECT_RETRY_S)

    def _warn(self) -> None:
        _log.warning(
            "the object store at %s has not answered for %g s", self._place, tuning.QUIET_S
        )


async def _send(
    session: aiohttp.ClientSession,
    grant: Grant,
    data: Body,
    patience: TransferPatience,
    pause_s: float,
) -> int:
    size_bytes = count_bytes(data)
    is_small = size_bytes <= _CHUNK_BYTES
    async with session.put(
        URL(grant.url, encoded=True),
        data=b"".join(get_parts(data)) if is_small else _slice(data, patience, pause_s),
        headers={"Content-Length": str(size_bytes)} | grant.headers,
        skip_auto_headers=("Content-Type",),
        timeout=patience.make_timeout(),
    ) as response:
        return response.status


async def _slice(
    data: Body, patience: TransferPatience, pause_s: float
) -> AsyncIterator[bytes | memoryview]:
    """Yield chunks, large ones without a copy; other tasks of the loop run between them."""
    small: list[bytes | memoryview] = []
    room = _CHUNK_BYTES
    for part in get_parts(data):
        is_small = len(part) <= _CHUNK_BYTES // 4
        if small and (len(part) > room or not is_small):
            yield b"".join(small)
            patience.note_progress()
            await asyncio.sleep(pause_s)  # writing alone does not yield to other tasks
            small, room = [], _CHUNK_BYTES
        if is_small:
            small.append(part)
            room -= len(part)
            continue
        view = memoryview(part)
        for start in range(0, len(view), _CHUNK_BYTES):
            yield view[start : start + _CHUNK_BYTES]
            patience.note_progress()
            await asyncio.sleep(pause_s)
    yield b"".join(small)


async def _fetch(
    session: aiohttp.ClientSession,
    grant: Grant,
    max_bytes: int,
    patience: TransferPatience,
    digest: hashlib._Hash | None,
) -> tuple[int, bytes]:
    """Return the status and at most ``max_bytes`` + 1 bytes, which also go into ``digest``."""
    async with session.get(
        URL(grant.url, encoded=True),
        # no compression: a small answer must not unfold into a large one
        headers={"Accept-Encoding": "identity"} | grant.headers,
        auto_decompress=False,
        timeout=patience.make_timeout(),
    ) as response:
        if response.status != 200:
            return response.status, b""
        if (response.content_length or 0) > max_bytes:
            return 200, bytes(max_bytes + 1)
        chunks, left = [], max_bytes + 1
        async for chunk in response.content.iter_any():
            patience.note_progress()
            chunks.append(chunk[:left])
            left -= len(chunks[-1])
            if digest is not None:
                digest.update(chunks[-1])
            if not left:
                break
        return 200, b"".join(chunks)


def check_grant(grant: Grant, method: str) -> None:
    """Raise InvalidInput for a grant of another method, StorageUnavailable for an expired one."""
    if grant.method != method:
        raise InvalidInput(f"the grant for {grant.key} allows {grant.method}, not {method}")
    if grant.expires_at_s <= time.time():
        raise StorageUnavailable(
            f"the grant for {grant.key} has expired; ask the storage gateway for a new one"
        )


def make_refusal(grant: Grant, status: int) -> InvalidInput | StorageUnavailable:
    """Return the error for a status for which a second try does not help."""
    if status == 403:
        return StorageUnavailable(
            f"the storage refuses the {grant.method} grant for {grant.key} (status 403: expired or "
            "altered); ask the storage gateway for a new one"
        )
    if 300 <= status < 400:
        return StorageUnavailable(
            f"the storage redirects object {grant.key} (status {status}); check the S3 endpoint"
        )
    return InvalidInput(f"the storage rejects the {grant.method} of {grant.key} (status {status})")


def describe_failure(error: BaseException) -> str:
    """Return what went wrong with a transfer, without its URL."""
    if isinstance(error, aiohttp.SocketTimeoutError):
        return f"nothing within {tuning.TRANSFER_STALL_S:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        return describe(error)
    # only the type: the text of these exceptions may contain the URL
    return "time ran out" if isinstance(error, TimeoutError) else type(error).__name__
