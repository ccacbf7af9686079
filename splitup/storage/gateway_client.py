"""The client of storage gateways, which issue presigned URLs.

Only gateways hold the object store's secret; other parties get URLs for single keys. A request is
a JWS (``splitup.crypto.jws``), and the key of its issuer decides what is granted. Whoever has a URL
may use it, so nothing here logs one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import aiohttp
from eth_utils.crypto import keccak

from splitup.core import tuning
from splitup.core.background import Closing
from splitup.core.errors import (
    InvalidInput,
    PeerFault,
    Refused,
    StorageUnavailable,
    Throttled,
    Unavailable,
    name_server,
)
from splitup.core.silence import SilenceAlarm
from splitup.crypto.keys import Identity
from splitup.crypto.quorum import Domain, recover_signer, sign_quorum
from splitup.messages import api
from splitup.messages.completions import SignedTakeover
from splitup.messages.plans import PlanCertificate
from splitup.messages.storage import (
    ExecutionRequest,
    Grant,
    Grants,
    LogName,
    LogRequest,
    LogWrite,
    ModelRequest,
    UploadAnswer,
    UploadObject,
    UploadRequest,
    VerificationRequest,
)
from splitup.messages.verification import VerificationOrder
from splitup.net.http import SignedClient

_log = logging.getLogger("splitup.storage")
# the proof names no chain and no contract; the request that carries it is for one gateway and
# expires within a minute
_ANYWHERE: Final = Domain(0, "0x" + "00" * 20)
_ACCOUNT_KEY_TYPE: Final = keccak(text="AccountKey(bytes32 signingKey)")
_T = TypeVar("_T")


def prove_account(identity: Identity) -> str:
    """Return a signature by the account's key that links it to the identity's signing key."""
    struct_hash = _hash_account_key(identity.signing_key_hex)
    return "0x" + sign_quorum(identity.private_key, _ANYWHERE, struct_hash).hex()


def recover_account(signing_key: str, proof: str) -> str:
    """Return the account that a proof links to a signing key; raise BadSignature."""
    return recover_signer(_ANYWHERE, _hash_account_key(signing_key), bytes.fromhex(proof[2:]))


def _hash_account_key(signing_key: str) -> bytes:
    return keccak(_ACCOUNT_KEY_TYPE + bytes.fromhex(signing_key[2:]))


class GatewayClient(Closing):
    """A client of the gateways of one bucket. Close it, or use ``async with``.

    It uses one gateway until that fails, then the next one; a call tries each once. The first one
    depends on the identity, which spreads the load. Raises StorageUnavailable when none answers,
    Refused when one refuses, and PeerFault for an answer that is malformed or has a wrong digest.
    """

    def __init__(
        self,
        urls: tuple[str, ...],
        identity: Identity | None,
        *,
        http: SignedClient | None = None,
    ) -> None:
        self._urls = urls
        self._identity = identity
        self._place = int(identity.signing_key_hex, 16) % len(urls) if identity else 0
        self._http = http or SignedClient(identity)
        self._owns_http = http is None

    async def close(self) -> None:
        """Close the HTTP session, unless the caller passed it."""
        if self._owns_http:
            await self._http.close()

    async def ping(self) -> None:
        """Check that a gateway answers; raise StorageUnavailable when none does."""
        await self._try_each(lambda url: self._http.get_json(api.PING.url(url)))

    async def fetch_manifest(self, model_id: str) -> bytes:
        """Return a model's manifest, after checking that its SHA-256 is the model's id."""

        async def fetch(url: str) -> bytes:
            data = await self._http.get_bytes(
                api.MANIFEST.url(url, model_id=model_id), max_bytes=api.MANIFEST.max_reply_bytes
            )
            if "0x" + hashlib.sha256(data).hexdigest() != model_id:
                raise PeerFault(
                    f"the storage gateway at {url} sent a manifest that is not {model_id}",
                    peer=url,
                    evidence=data,
                )
            return data

        return await self._try_each(fetch)

    async def model_grants(self, model_id: str) -> Grants:
        """Return GET grants for a model's manifest, tasks, weights and tokenizer."""
        proof = "" if self._identity is None else prove_account(self._identity)
        request = ModelRequest(model_id=model_id, proof=proof)
        return await self._ask_grants(api.MODEL_REQUEST, request)

    async def upload_grants(self, objects: Sequence[UploadObject]) -> UploadAnswer:
        """Return PUT grants for the objects that the store lacks, and the keys that it has."""
        if self._identity is None:
            raise InvalidInput(
                "uploads need a key; pass --keystore FILE and --passphrase-file FILE"
            )
        request = UploadRequest(proof=prove_account(self._identity), objects=tuple(objects))
        reply = await self._ask(api.UPLOAD_REQUEST, request)
        return UploadAnswer.from_value(reply)

    async def log_grants(
        self,
        certificate: PlanCertificate,
        writes: Sequence[LogWrite],
        reads: Sequence[LogName],
        takeovers: Sequence[SignedTakeover] = (),
    ) -> Grants:
        """Return grants for log objects: PUT for one's own, GET for one's own and for others'."""
        request = LogRequest(
            certificate=certificate,
            takeovers=tuple(takeovers),
            writes=tuple(writes),
            reads=tuple(reads),
        )
        return await self._ask_grants(api.LOG_REQUEST, request)

    async def execution_grants(self, certificate: PlanCertificate) -> Grants:
        """Return grants for the tensors of an execution that are too large for a frame."""
        request = ExecutionRequest(certificate=certificate)
        return await self._ask_grants(api.EXECUTION_REQUEST, request)

    async def verification_grants(
        self,
        order: VerificationOrder,
        reads: Sequence[LogName] = (),
        writes: Sequence[LogWrite] = (),
    ) -> Grants:
        """Return GET grants for the graph, weights and inputs of a task to recompute.

        Also PUT grants for a validator's log of its own outputs.
        """
        request = VerificationRequest(order=order, writes=tuple(writes), reads=tuple(reads))
        return await self._ask_grants(api.VERIFICATION_REQUEST, request)

    async def upload_object(
        self,
        grant: Grant,
        open_chunks: Callable[[], Iterator[bytes]],
        on_sent: Callable[[int], None],
    ) -> None:
        """Stream one object to the store in bounded memory, reading it on a thread.

        ``on_sent`` is called with the length of every chunk. An object that exists already counts
        as stored, since its key is its digest. Raises StorageUnavailable, Refused.
        """
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=tuning.HTTP_CONNECT_S, sock_read=tuning.UPLOAD_STALL_S
        )
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(grant.length_bytes),
            **grant.headers,
        }
        failures: list[Exception] = []
        store = f"the object store at {name_server(grant.url)}"
        alarm = _make_alarm(store)

        def note_sent(length: int) -> None:
            alarm.note_progress()
            on_sent(length)

        body = _read_chunks(open_chunks, note_sent, failures)
        try:
            with alarm:
                async with self._http.session.put(
                    grant.url, data=body, headers=headers, timeout=timeout
                ) as response:
                    status = response.status
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            if failures:  # reading failed: the HTTP library only reports that the body ended
                raise failures[0] from None
            raise StorageUnavailable(  # only the type: the text may contain the URL
                f"{store} dropped the upload of {grant.key} ({type(error).__name__}); "
                "run the command again: objects that are stored already are not sent again"
            ) from None
        finally:
            await body.aclose()
        if status >= 500:
            raise StorageUnavailable(
                f"{store} answered {status} to the upload of {grant.key}; try again"
            )
        if status not in (200, 412):
            raise Refused(f"{store} refused the upload of {grant.key} with {status}", status=status)

    async def _ask_grants(self, route: api.Route[api.M], body: api.M) -> Grants:
        return Grants.from_value(await self._ask(route, body))

    async def _ask(self, route: api.Route[api.M], body: api.M) -> dict[str, Any]:
        async def ask(url: str) -> dict[str, Any]:
            # the audience is the gateway's own URL, so that no other gateway accepts the token
            return await self._http.post_signed(route, url, url, body)

        return await self._try_each(ask)

    async def _try_each(self, call: Callable[[str], Awaitable[_T]]) -> _T:
        """Return the answer of the first gateway that answers."""
        failures: dict[str, list[str]] = {}  # by what is said: both may have one silent store
        for _ in self._urls:
            url = self._urls[self._place]
            try:
                with _make_alarm(f"the storage gateway at {url}"):
                    return await call(url)
            except Throttled as error:  # the next gateway must not extend a quota
                failures = {str(error): [""]}
                break
            except Unavailable as error:
                failures.setdefault(str(error).removeprefix(url), []).append(url)
                if self._urls[self._place] == url:  # a concurrent call may have moved on already
                    self._place = (self._place + 1) % len(self._urls)
            except Refused as error:
                raise Refused(
                    f"the storage gateway refuses: {error}", status=error.status
                ) from None
        reasons = "; ".join(" and ".join(urls) + said for said, urls in failures.items())
        raise StorageUnavailable(f"the storage gateway failed: {reasons}; check that it runs")


def _make_alarm(server: str) -> SilenceAlarm:
    message = "%s has not answered for %g s"
    return SilenceAlarm(lambda: _log.warning(message, server, tuning.QUIET_S))


async def _read_chunks(
    open_chunks: Callable[[], Iterator[bytes]],
    on_sent: Callable[[int], None],
    failures: list[Exception],
) -> AsyncGenerator[bytes, None]:
    try:
        chunks = open_chunks()
        while True:
            chunk = await asyncio.to_thread(next, chunks, None)
            if chunk is None:
                return
            yield chunk
            on_sent(len(chunk))
    except OSError as error:
        failures.append(InvalidInput(f"the model's files cannot be read any more: {error}"))
        raise
    except Exception as error:
        failures.append(error)
        raise
