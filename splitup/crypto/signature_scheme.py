"""The signatures that the committee's state machines make and check, as one object.

Processes use ``REAL``. The simulator, which runs thousands of histories, passes a cheaper scheme to
the same state machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from splitup.crypto import bls, keys, quorum
from splitup.crypto.keys import Identity
from splitup.crypto.quorum import Domain


class Scheme:
    """ECDSA for quorums, Ed25519 for members' statements, threshold BLS for randomness."""

    def sign_quorum(self, identity: Identity, domain: Domain, struct_hash: bytes) -> bytes:
        """Return the 65-byte quorum signature over an EIP-712 struct hash."""
        return quorum.sign_quorum(identity.private_key, domain, struct_hash)

    def recover_signer(self, domain: Domain, struct_hash: bytes, signature: bytes) -> str:
        """Return the signer of a quorum signature; raise BadSignature."""
        return quorum.recover_signer(domain, struct_hash, signature)

    def sign(self, identity: Identity, domain: bytes, message: bytes) -> bytes:
        """Return a member's 64-byte signature of its own statement."""
        return identity.sign(domain, message)

    def verify(self, public_key: str, domain: bytes, message: bytes, signature: bytes) -> None:
        """Check a statement's signature; raise BadSignature."""
        keys.verify(public_key, domain, message, signature)

    def sign_partial(self, share: bytes, domain: bytes, message: bytes) -> str:
        """Return a partial threshold signature."""
        return bls.sign_partial(share, domain, message)

    def combine(self, partials: Mapping[int, str], threshold: int) -> str:
        """Return the group's signature from partials by index; raise BadSignature."""
        return bls.combine(partials, threshold)

    def verify_threshold(
        self, public_key: str, domain: bytes, message: bytes, signature: str
    ) -> None:
        """Check a partial (member's key) or combined (group key) signature; raise BadSignature."""
        bls.verify_signature(public_key, domain, message, signature)

    def compute_seed(self, signature: str) -> str:
        """Return the random value of a threshold signature; raise BadSignature for a bad point."""
        return bls.compute_seed(signature)


REAL: Final = Scheme()
