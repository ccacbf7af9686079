"""Signatures for simulations: the shape of the real ones, a hash instead of curves.

They bind signer and message, so that every check of the machines decides as with real ones; they
resist nobody who knows this file. ``tests/protocol/committee/test_histories.py`` runs real ones
beside.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache

from splitup.core.errors import BadSignature
from splitup.crypto import dkg
from splitup.crypto.keys import Identity
from splitup.crypto.quorum import Domain, compute_quorum_size
from splitup.crypto.signature_scheme import Scheme
from tests.protocol.committees import make_committee


def _mac(*parts: bytes) -> bytes:
    return hashlib.sha256(b"|".join(parts)).digest()


class CheapScheme(Scheme):
    """A quorum signature is address ‖ hash, a threshold one index ‖ hash (255: the group)."""

    def sign_quorum(self, identity: Identity, domain: Domain, struct_hash: bytes) -> bytes:
        account = bytes.fromhex(identity.address[2:])
        return account + _mac(account, struct_hash) + bytes(12) + b"\x1b"

    def recover_signer(self, domain: Domain, struct_hash: bytes, signature: bytes) -> str:
        if signature[20:52] != _mac(signature[:20], struct_hash):
            raise BadSignature("no quorum signature over this")
        return "0x" + signature[:20].hex()

    def sign(self, identity: Identity, domain: bytes, message: bytes) -> bytes:
        return _mac(identity.signing_key_hex.encode(), domain, message) * 2

    def verify(self, public_key: str, domain: bytes, message: bytes, signature: bytes) -> None:
        if signature[:32] != _mac(public_key.encode(), domain, message):
            raise BadSignature("no signature over this")

    def sign_partial(self, share: bytes, domain: bytes, message: bytes) -> str:
        return "0x" + (share[:1] + _mac(domain, message) + bytes(15)).hex()

    def combine(self, partials: Mapping[int, str], threshold: int) -> str:
        bodies = [bytes.fromhex(p[2:]) for _, p in sorted(partials.items())[:threshold]]
        if any(body[0] != index for index, body in zip(sorted(partials), bodies, strict=False)):
            raise BadSignature("a share of another member")
        body = bodies[0][1:33] if len({b[1:] for b in bodies}) == 1 else bytes(32)
        return "0x" + (b"\xff" + body + bytes(15)).hex()

    def verify_threshold(
        self, public_key: str, domain: bytes, message: bytes, signature: str
    ) -> None:
        expected = bytes.fromhex(public_key[2:]) + _mac(domain, message) + bytes(15)
        if bytes.fromhex(signature[2:]) != expected:
            raise BadSignature("no threshold signature over this")

    def compute_seed(self, signature: str) -> str:
        return "0x" + _mac(b"seed", signature.encode()).hex()


@cache
def make_cheap_keys(size: int) -> tuple[dkg.GroupKey, tuple[bytes, ...]]:
    """A group key and the members' shares for ``CheapScheme``."""
    _, view = make_committee(size)
    group = dkg.GroupKey(
        ceremony_id="0x" + "00" * 32,
        threshold=compute_quorum_size(size),
        public_key="0xff",
        member_keys=tuple(f"0x{index:02x}" for index in range(size)),
        qualified=tuple(range(len(view.members))),
    )
    return group, tuple(bytes([index]) * 32 for index in range(size))
