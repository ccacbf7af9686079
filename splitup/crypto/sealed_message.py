"""Messages sealed to a party's signing key, which the receiver can open in public.

A sender picks r and publishes R = r·B. For a receiver with Ed25519 key A = a·B both sides know
K = r·A = a·R, and the text is sealed under a hash of K (XSalsa20-Poly1305, libsodium). A receiver
of an invalid message reveals K with a proof that log_B(A) = log_R(K) (Chaum–Pedersen 1992, made
non-interactive), and everybody can open and check that one text; nothing else is revealed. With an
ordinary sealed box the receiver could only reveal its secret key.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import nacl.bindings as sodium
from nacl.exceptions import CryptoError
from nacl.exceptions import RuntimeError as SodiumError

from splitup.core.errors import PeerFault
from splitup.crypto.keys import Identity, check_public_key

OVERHEAD_BYTES: Final = 16
OPENING_BYTES: Final = 96
_NONCE: Final = bytes(24)  # every key seals one text only


@dataclass(frozen=True, slots=True)
class Opening:
    """K (32 bytes) and the proof (challenge, response; 32 bytes each) that it is correct."""

    point: bytes
    challenge: bytes
    response: bytes

    def to_bytes(self) -> bytes:
        """Return the 96 bytes."""
        return self.point + self.challenge + self.response

    @staticmethod
    def from_bytes(data: bytes) -> Opening:
        """Split 96 bytes; ``verify_opening`` checks the proof."""
        if len(data) != OPENING_BYTES:
            raise PeerFault(f"an opening has {OPENING_BYTES} bytes, not {len(data)}")
        return Opening(data[:32], data[32:64], data[64:])


def compute_ephemeral(secret: bytes) -> tuple[bytes, str]:
    """Return (r, R) from 64 uniform secret bytes: a scalar and its point as a key in hex."""
    scalar = sodium.crypto_core_ed25519_scalar_reduce(secret)
    return scalar, "0x" + sodium.crypto_scalarmult_ed25519_base_noclamp(scalar).hex()


def seal(scalar: bytes, ephemeral: str, receiver: str, context: bytes, text: bytes) -> bytes:
    """Seal one text per (ephemeral, receiver, context); the result is 16 bytes longer."""
    point = sodium.crypto_scalarmult_ed25519_noclamp(scalar, _key_bytes(receiver))
    key = _compute_key(point, ephemeral, receiver, context)
    return sodium.crypto_secretbox(text, _NONCE, key)


def open_sealed(identity: Identity, ephemeral: str, context: bytes, sealed: bytes) -> bytes:
    """Open a message to ``identity``; raise PeerFault when it cannot be opened."""
    point = sodium.crypto_scalarmult_ed25519_noclamp(
        identity.compute_exchange_scalar(), _key_bytes(ephemeral)
    )
    return open_with_point(point, ephemeral, identity.signing_key_hex, context, sealed)


def open_with_point(
    point: bytes, ephemeral: str, receiver: str, context: bytes, sealed: bytes
) -> bytes:
    """Open with a revealed K; raise PeerFault when the text was not sealed under it."""
    key = _compute_key(point, ephemeral, receiver, context)
    try:
        return sodium.crypto_secretbox_open(sealed, _NONCE, key)
    except CryptoError:
        raise PeerFault("a sealed text does not open with its key", evidence=sealed) from None


def prove_opening(identity: Identity, ephemeral: str, context: bytes) -> Opening:
    """Reveal K for one ephemeral key. The nonce is derived: equal calls give equal bytes."""
    secret = identity.compute_exchange_scalar()
    base = _key_bytes(ephemeral)
    point = sodium.crypto_scalarmult_ed25519_noclamp(secret, base)
    nonce = sodium.crypto_core_ed25519_scalar_reduce(
        _hash(b"splitup/opening-nonce/v1", secret, base, point, context)
    )
    challenge = _compute_challenge(
        identity.signing_key_hex,
        base,
        point,
        sodium.crypto_scalarmult_ed25519_base_noclamp(nonce),
        sodium.crypto_scalarmult_ed25519_noclamp(nonce, base),
        context,
    )
    response = sodium.crypto_core_ed25519_scalar_sub(
        nonce, sodium.crypto_core_ed25519_scalar_mul(challenge, secret)
    )
    return Opening(point, challenge, response)


def verify_opening(opening: Opening, ephemeral: str, receiver: str, context: bytes) -> None:
    """Check that ``opening.point`` is K for this pair of keys; raise PeerFault."""
    base, key = _key_bytes(ephemeral), _key_bytes(receiver)
    check_public_key("0x" + opening.point.hex())
    try:
        first = sodium.crypto_core_ed25519_add(
            sodium.crypto_scalarmult_ed25519_noclamp(opening.challenge, key),
            sodium.crypto_scalarmult_ed25519_base_noclamp(opening.response),
        )
        second = sodium.crypto_core_ed25519_add(
            sodium.crypto_scalarmult_ed25519_noclamp(opening.challenge, opening.point),
            sodium.crypto_scalarmult_ed25519_noclamp(opening.response, base),
        )
    except SodiumError:  # a zero scalar; an honest proof never has one
        raise PeerFault("an opening's proof is degenerate", peer=receiver) from None
    expected = _compute_challenge(receiver, base, opening.point, first, second, context)
    if expected != opening.challenge:
        raise PeerFault(
            "an opening's proof does not hold", peer=receiver, evidence=opening.to_bytes()
        )


def _key_bytes(key: str) -> bytes:
    return bytes.fromhex(check_public_key(key)[2:])


def _hash(*parts: bytes) -> bytes:
    state = hashlib.sha512()
    for part in parts:
        state.update(len(part).to_bytes(8) + part)
    return state.digest()


def _compute_key(point: bytes, ephemeral: str, receiver: str, context: bytes) -> bytes:
    parts = (point, bytes.fromhex(ephemeral[2:]), bytes.fromhex(receiver[2:]), context)
    return _hash(b"splitup/sealed/v1", *parts)[:32]


def _compute_challenge(
    receiver: str, base: bytes, point: bytes, first: bytes, second: bytes, context: bytes
) -> bytes:
    parts = (bytes.fromhex(receiver[2:]), base, point, first, second, context)
    return sodium.crypto_core_ed25519_scalar_reduce(_hash(b"splitup/opening/v1", *parts))
