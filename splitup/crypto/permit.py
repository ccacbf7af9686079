"""EIP-2612 permits: a signature in place of a token's ``approve``; a deposit is then one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import coincurve
from eth_abi.abi import encode
from eth_utils.crypto import keccak

_PERMIT_TYPE: Final = keccak(
    text="Permit(address owner,address spender,uint256 value,uint256 nonce,uint256 deadline)"
)


@dataclass(frozen=True, slots=True)
class Permit:
    """What an owner allows a spender; ``nonce`` is the token's count, ``deadline`` Unix time."""

    owner: str
    spender: str
    value: int
    nonce: int
    deadline: int


def compute_permit_digest(permit: Permit, domain_separator: bytes) -> bytes:
    """Return the 32 bytes to sign; ``domain_separator`` is what the token itself states."""
    types = ("bytes32", "address", "address", "uint256", "uint256", "uint256")
    words = (permit.owner, permit.spender, permit.value, permit.nonce, permit.deadline)
    return keccak(b"\x19\x01" + domain_separator + keccak(encode(types, (_PERMIT_TYPE, *words))))


def sign_permit(
    private_key: bytes, permit: Permit, domain_separator: bytes
) -> tuple[int, bytes, bytes]:
    """Return (v, r, s) of the owner's signature."""
    digest = compute_permit_digest(permit, domain_separator)
    signature = coincurve.PrivateKey(private_key).sign_recoverable(digest, hasher=None)
    return 27 + signature[64], signature[:32], signature[32:64]
