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
    token: str, *, typ: str, audience: str, now_s: int | None, key: str | None = None
) -> Claims:
    """Check form, type, audience, times and signature, in that order, and return the claims.

    With ``key`` only that signer is accepted. With ``now_s`` None times are not checked: use that
    for evidence, never to authorise a request. Raises BadSignature when the signature or the signer
    is wrong, PeerFault for everything else. ``ReplayCache`` detects replays.
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
    verify_raw(claims.issuer, f"{header}.{payload}".encode(), _decode(signature))
    return claims


class ReplayCache:
    """Remembers token ids until they expire. Has no clock: the caller passes the time.

    When it is full it rejects new tokens (Unavailable) rather than forget a valid one early.
    """

    def __init__(self, max_entries: int = tuning.MAX_REPLAY_ENTRIES) -> None:
        self._max_entries = max_entries
        self._seen: set[tuple[str, str]] = set()
        self._expiries: list[tuple[int, tuple[str, str]]] = []

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, claims: Claims, now_s: int) -> None:
        """Remember a verified token; raise PeerFault when it was used before."""
        while self._expiries and self._expiries[0][0] <= now_s - limits.CLOCK_SKEW_S:
            self._seen.discard(heapq.heappop(self._expiries)[1])
        entry = (claims.issuer, claims.token_id)
        if entry in self._seen:
            raise PeerFault(f"token {claims.token_id} was used before", peer=claims.issuer)
        if len(self._seen) >= self._max_entries:
            raise Unavailable("too many requests at once; try again in a minute")
        self._seen.add(entry)
        heapq.heappush(self._expiries, (claims.expires_at_s, entry))


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
