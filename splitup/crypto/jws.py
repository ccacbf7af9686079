"""Signed HTTP requests: compact JWS with EdDSA (RFC 7515, RFC 8037) in one canonical form.

The header is not negotiated: the verifier builds the expected one and compares bytes, so that no
other algorithm can be substituted. ``kid`` and ``iss`` are the signer's key. The body is a part of
the payload and therefore signed.
"""

from __future__ import annotations

import base64
import binascii
import heapq
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from splitup.core import limits, tuning
from splitup.core.codec import decode_canonical, encode_canonical
from splitup.core.errors import BadSignature, InvalidInput, PeerFault, Unavailable
from splitup.crypto.keys import Identity, verify_raw

_SEGMENT: Final = re.compile(r"[A-Za-z0-9_-]+\Z")
_TOKEN_ID: Final = re.compile(r"[0-9a-f]{32}\Z")
_SIGNATURE_CHARS: Final = 86
_HEADER_CHARS: Final = 512
_CLAIM_TYPES: Final = {"aud": str, "body": dict, "exp": int, "iat": int, "iss": str, "jti": str}


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims of a verified token. The caller checks whether ``issuer``, a key, is allowed."""

    issuer: str
    audience: str
    issued_at_s: int
    expires_at_s: int
    token_id: str
    body: dict[str, Any]


def sign_jws(
    identity: Identity,
    *,
    typ: str,
    audience: str,
    body: dict[str, Any],
    now_s: int,
    ttl_s: int = 30,
) -> str:
    """Return a compact JWS over ``body`` for one audience, valid for ``ttl_s`` ≤ 60 seconds."""
    if not 1 <= ttl_s <= limits.JWS_TTL_S:
        raise InvalidInput(f"a token lives 1 to {limits.JWS_TTL_S} s, not {ttl_s}")
    payload = encode_canonical(
        {
            "aud": audience,
            "body": body,
            "exp": now_s + ttl_s,
            "iat": now_s,
            "iss": identity.signing_key_hex,
            "jti": secrets.token_hex(16),
        }
    )
    signing_input = f"{_encode(_header(typ, identity.signing_key_hex))}.{_encode(payload)}"
    token = f"{signing_input}.{_encode(identity.sign_raw(signing_input.encode()))}"
    if len(token) > limits.MAX_JWS_BYTES:
        raise InvalidInput(f"a token has {len(token)} bytes; the limit is {limits.MAX_JWS_BYTES}")
    return token


def verify_jws(
    token: str,
    *,
    typ: str,
    audience: str,
    now_s: int | None,
    key: str | None = None,
    check: Callable[[Claims], object] | None = None,
) -> Claims:
    """Check form, type, audience, times and signature, in that order, and return the claims.

    With ``key`` only that signer is accepted. ``check`` may refuse claims by an error before the
    signature is verified, which costs more than all the rest. With ``now_s`` None times are not
    checked: use that for evidence, never to authorise a request. Raises BadSignature when the
    signature or the signer is wrong, PeerFault for everything else. ``ReplayCache`` detects
    replays.
    """
    if len(token) > limits.MAX_JWS_BYTES:
        raise PeerFault(f"token is longer than {limits.MAX_JWS_BYTES} bytes")
    segments = token.split(".", 3)
    if len(segments) != 3 or not all(_SEGMENT.match(segment) for segment in segments):
        raise PeerFault("token is not a compact JWS of three base64url segments")
    header, payload, signature = segments
    if len(header) > _HEADER_CHARS or len(signature) != _SIGNATURE_CHARS:
        raise PeerFault("token's header or signature has the wrong length")
    claims = _parse_claims(_decode(payload))
    if key is not None and claims.issuer != key:
        raise BadSignature(f"token is signed by {claims.issuer}, expected {key}")
    if _decode(header) != _header(typ, claims.issuer):
        raise PeerFault(f"token's header is not that of an EdDSA '{typ}' token of its issuer")
    if claims.audience != audience:
        raise PeerFault("token is meant for another audience", peer=claims.issuer)
    if not 1 <= claims.expires_at_s - claims.issued_at_s <= limits.JWS_TTL_S:
        raise PeerFault(f"token lives longer than {limits.JWS_TTL_S} s", peer=claims.issuer)
    if now_s is not None and claims.issued_at_s > now_s + limits.CLOCK_SKEW_S:
        ahead_s = claims.issued_at_s - now_s
        raise PeerFault(
            f"token is {ahead_s} s from the future by our clock; compare the clocks",
            peer=claims.issuer,
        )
    if now_s is not None and claims.expires_at_s <= now_s - limits.CLOCK_SKEW_S:
        age_s = now_s - claims.issued_at_s
        raise PeerFault(
            f"token is {age_s} s old by our clock; ask again, or compare the clocks",
            peer=claims.issuer,
        )
    if check is not None:
        check(claims)
    verify_raw(claims.issuer, f"{header}.{payload}".encode(), _decode(signature))
    return claims


class ReplayCache:
    """Remembers token ids until they expire. Has no clock: the caller passes the time.

    Only tokens of keys that are authorised are remembered, so that strangers take no memory. When
    it is full, the key with the most tokens is refused until these have expired, instead of being
    remembered one by one. So no valid token is forgotten, and nobody fills the memory for others.
    """

    def __init__(self, max_entries: int | None = None) -> None:
        self._max_entries = tuning.MAX_REPLAY_ENTRIES if max_entries is None else max_entries
        self._seen: dict[str, dict[str, int]] = {}  # key -> token id -> expiry
        self._refused: dict[str, int] = {}  # key -> until when
        self._count = 0  # of both
        self._expiries: list[tuple[int, str, str]] = []  # with "" for a refused key
        self._open: set[tuple[str, str]] = set()  # requests that are being answered

    def __len__(self) -> int:
        return self._count

    @contextmanager
    def once(self, claims: Claims, now_s: int) -> Iterator[None]:
        """Use a verified token for a block, and remember it if the block raises no error.

        The block checks whether the key is authorised. Raises PeerFault when the token was used
        before, Unavailable when the key uses too many.
        """
        self._check(claims, now_s)
        entry = (claims.issuer, claims.token_id)
        self._open.add(entry)
        try:
            yield
            self._remember(claims)
        finally:
            self._open.discard(entry)

    def add(self, claims: Claims, now_s: int) -> None:
        """Remember a verified token of an authorised key; raises as ``once`` does."""
        with self.once(claims, now_s):
            pass

    def _check(self, claims: Claims, now_s: int) -> None:
        while self._expiries and self._expiries[0][0] <= now_s - limits.CLOCK_SKEW_S:
            _, key, token_id = heapq.heappop(self._expiries)
            self._forget(key, token_id)
        entry = (claims.issuer, claims.token_id)
        if entry in self._open or claims.token_id in self._seen.get(claims.issuer, ()):
            raise PeerFault(f"token {claims.token_id} was used before", peer=claims.issuer)
        if claims.issuer in self._refused:
            raise Unavailable("this key sends too many requests; try again in two minutes")

    def _remember(self, claims: Claims) -> None:
        if claims.issuer in self._refused:  # since the block began
            raise Unavailable("this key sends too many requests; try again in two minutes")
        if self._count >= self._max_entries:
            self._shed(claims.issuer)
        self._seen.setdefault(claims.issuer, {})[claims.token_id] = claims.expires_at_s
        self._count += 1
        heapq.heappush(self._expiries, (claims.expires_at_s, claims.issuer, claims.token_id))

    def _shed(self, newcomer: str) -> None:
        """Refuse the key with the most tokens from now on; raise Unavailable if that is ours."""
        largest = max(self._seen, key=lambda key: len(self._seen[key]), default=newcomer)
        tokens = self._seen.get(largest, {})
        if len(tokens) <= len(self._seen.get(newcomer, ())) + 1:
            raise Unavailable("too many requests at once; try again in a minute")
        del self._seen[largest]
        self._refused[largest] = until_s = max(tokens.values())
        self._count -= len(tokens) - 1
        self._expiries = [entry for entry in self._expiries if entry[1] != largest]
        self._expiries.append((until_s, largest, ""))
        heapq.heapify(self._expiries)

    def _forget(self, key: str, token_id: str) -> None:
        if not token_id:
            del self._refused[key]
        else:
            del self._seen[key][token_id]
            if not self._seen[key]:
                del self._seen[key]
        self._count -= 1


def _header(typ: str, key: str) -> bytes:
    return encode_canonical({"alg": "EdDSA", "kid": key, "typ": typ})


def _parse_claims(payload: bytes) -> Claims:
    try:
        value = decode_canonical(payload, max_bytes=limits.MAX_JWS_BYTES)
    except InvalidInput as error:
        raise PeerFault(f"token's payload is {error}") from None
    if not isinstance(value, dict) or value.keys() != _CLAIM_TYPES.keys():
        raise PeerFault("token's payload does not hold exactly aud, body, exp, iat, iss and jti")
    for name, expected in _CLAIM_TYPES.items():
        if type(value[name]) is not expected:  # not isinstance: True is an int
            raise PeerFault(f"token's claim '{name}' has the wrong type")
    if not _TOKEN_ID.match(value["jti"]):
        raise PeerFault("token's jti is not 32 lower-case hexadecimal digits")
    return Claims(
        issuer=value["iss"],
        audience=value["aud"],
        issued_at_s=value["iat"],
        expires_at_s=value["exp"],
        token_id=value["jti"],
        body=value["body"],
    )


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(segment: str) -> bytes:
    try:
        data = base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4))
    except (binascii.Error, ValueError):
        raise PeerFault("token holds a segment that is not base64url") from None
    if _encode(data) != segment:  # trailing bits: a token has one form only
        raise PeerFault("token holds a segment with stray bits")
    return data
