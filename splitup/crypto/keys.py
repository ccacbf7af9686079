"""A party's keys: an Ethereum key, and the Ed25519 signing key that is derived from it.

One secret needs one backup. The chain identifies a party by its address, peers by its signing key.
Every Ed25519 check uses libsodium: other libraries accept keys and signatures that it rejects, and
parties that disagree about a signature would disagree about evidence.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field
from typing import Final

import coincurve
import nacl.bindings as sodium
from eth_hash.auto import keccak
from nacl.exceptions import BadSignatureError

from splitup.core.errors import BadSignature, InvalidInput

SIGNING_INFO: Final = b"splitup/ed25519/v1"
PRIVATE_KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
_PREFIX: Final = b"splitup/v1"
_KEY_PATTERN: Final = re.compile(r"0x[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True, eq=False)
class Identity:
    """The secrets and public names of one party. Made by ``from_private_key``; never printed."""

    private_key: bytes = field(repr=False)
    address: str
    signing_key_hex: str
    _secret_key: bytes = field(repr=False)  # libsodium's form: 32-byte seed | public key

    @staticmethod
    def from_private_key(private_key: bytes) -> Identity:
        """Derive both identities from a 32-byte secp256k1 key; raise InvalidInput out of range."""
        try:
            if len(private_key) != PRIVATE_KEY_BYTES:
                raise ValueError  # the library would fill it up with zeros
            public = coincurve.PublicKey.from_secret(private_key).format(compressed=False)
        except Exception:  # the message of the library may quote the key
            raise InvalidInput("the private key is not a number of the secp256k1 group") from None
        seed = derive_key(private_key, SIGNING_INFO)
        signing_key, secret_key = sodium.crypto_sign_seed_keypair(seed)
        return Identity(
            private_key=private_key,
            address="0x" + keccak(public[1:])[12:].hex(),
            signing_key_hex="0x" + signing_key.hex(),
            _secret_key=secret_key,
        )

    def sign(self, domain: bytes, message: bytes) -> bytes:
        """Return the 64-byte Ed25519 signature of ``message`` within ``domain`` (1–255 bytes)."""
        return self.sign_raw(separate_domain(_PREFIX, domain, message))

    def sign_raw(self, message: bytes) -> bytes:
        """Return the plain RFC 8032 signature, for formats such as JWS with their own domain."""
        return sodium.crypto_sign(message, self._secret_key)[:SIGNATURE_BYTES]

    def compute_exchange_scalar(self) -> bytes:
        """Return the Ed25519 secret scalar, modulo the group order (32 bytes, little-endian).

        It is the scalar of ``signing_key_hex`` (RFC 8032 section 5.1.5): a message can be sealed to
        a party whose signing key is known (``splitup.crypto.sealed_message``).
        """
        digest = bytearray(hashlib.sha512(self._secret_key[:32]).digest()[:32])
        digest[0] &= 248
        digest[31] = (digest[31] & 127) | 64
        return sodium.crypto_core_ed25519_scalar_reduce(bytes(digest) + bytes(32))


def generate_identity() -> Identity:
    """Make an identity from the operating system's randomness."""
    while True:
        try:
            return Identity.from_private_key(secrets.token_bytes(32))
        except InvalidInput:
            continue  # a value above the group order has probability 2^-128


@functools.lru_cache(maxsize=4096)  # this is half the cost of a check, and a peer sends many
def check_public_key(public_key: str) -> str:
    """Return an Ed25519 key that is safe to verify with, or raise BadSignature.

    Rejects other forms than "0x" and 64 lower-case digits, non-canonical encodings, and points of
    low order or outside the prime-order subgroup (a low-order key has signatures for any message).
    """
    if not _KEY_PATTERN.match(public_key):
        raise BadSignature("a signing key is '0x' and 64 lower-case hexadecimal digits")
    if not sodium.crypto_core_ed25519_is_valid_point(bytes.fromhex(public_key[2:])):
        raise BadSignature(
            f"signing key {public_key} is not a point of Ed25519's prime-order group",
            peer=public_key,
        )
    return public_key


def verify(public_key: str, domain: bytes, message: bytes, signature: bytes) -> None:
    """Check a signature made by ``Identity.sign``; raise BadSignature."""
    verify_raw(public_key, separate_domain(_PREFIX, domain, message), signature)


def verify_raw(public_key: str, message: bytes, signature: bytes) -> None:
    """Check a plain Ed25519 signature; raise BadSignature."""
    if len(signature) != SIGNATURE_BYTES:
        raise BadSignature(f"an Ed25519 signature has 64 bytes, not {len(signature)}")
    check_public_key(public_key)
    try:
        sodium.crypto_sign_open(signature + message, bytes.fromhex(public_key[2:]))
    except BadSignatureError:
        raise BadSignature(
            f"the signature does not verify under {public_key}", peer=public_key, evidence=message
        ) from None


def separate_domain(prefix: bytes, domain: bytes, message: bytes) -> bytes:
    """Return prefix | u8 length | domain | message: no two (domain, message) give equal bytes."""
    if not 1 <= len(domain) <= 255:
        raise InvalidInput(f"a signing domain has 1 to 255 bytes, not {len(domain)}")
    return prefix + bytes([len(domain)]) + domain + message


def derive_key(secret: bytes, info: bytes, length_bytes: int = 32) -> bytes:
    """HKDF-SHA256 with an empty salt (RFC 5869); at most 8160 bytes."""
    pseudo_random_key = hmac.digest(bytes(32), secret, "sha256")
    output, block = b"", b""
    for counter in range(1, -(-length_bytes // 32) + 1):
        block = hmac.digest(pseudo_random_key, block + info + bytes([counter]), "sha256")
        output += block
    return output[:length_bytes]
