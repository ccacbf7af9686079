"""Threshold BLS on BLS12-381: the committee's randomness.

Signatures are points of G1 (48 bytes), keys points of G2 (96 bytes): this is the cheapest form for
the chain to verify (EIP-2537). A signature by t = 2f+1 members is unique: any t members produce the
same bytes, so nobody can bias them by withholding a part.

Outside of this module points are compressed, as "0x" hex. Each is checked when it is parsed:
canonical form, on the curve, in the prime-order subgroup, not the identity (which verifies
anything).

Sources: draft-irtf-cfrg-bls-signature-05 (basic scheme, minimal signature size), RFC 9380,
Boldyreva 2003 for the threshold form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from eth_hash.auto import keccak
from py_arkworks_bls12381 import GT, G1Point, G2Point, Scalar

from splitup.core import limits
from splitup.core.errors import BadSignature, InvalidInput
from splitup.crypto.keys import separate_domain

DST: Final = b"SPLITUP-V1-BLS12381G1_XMD:SHA-256_SSWU_RO_"
GROUP_ORDER: Final = 0x73EDA753299D7D483339D80809A1D80553BDA402FFFE5BFEFFFFFFFF00000001
SCALAR_BYTES: Final = 32
_FIELD_BYTES: Final = 48
_SIGNATURE: Final = re.compile(r"0x[0-9a-f]{96}\Z")
_PUBLIC_KEY: Final = re.compile(r"0x[0-9a-f]{192}\Z")


def compute_threshold(members: int) -> int:
    """Return t = 2f+1 for n = 3f+1 … 3f+3 members, 4 ≤ n ≤ 31."""
    if not 4 <= members <= limits.MAX_COMMITTEE:
        raise InvalidInput(f"a committee has 4 to {limits.MAX_COMMITTEE} members, not {members}")
    return 2 * ((members - 1) // 3) + 1


def compute_public_key(secret: bytes) -> str:
    """Return the G2 key of a 32-byte big-endian secret in 1 … order−1."""
    return encode_point(G2Point() * parse_scalar(secret))


def sign_partial(secret: bytes, domain: bytes, message: bytes) -> str:
    """Return secret · H(domain, message) in G1; with a member's share it is a partial signature."""
    return encode_point(_hash_to_curve(domain, message) * parse_scalar(secret))


def verify_signature(public_key: str, domain: bytes, message: bytes, signature: str) -> None:
    """Check a partial signature (member's key) or a combined one (group key), or BadSignature."""
    point = parse_signature(signature)
    key = parse_public_key(public_key)
    digest = _hash_to_curve(domain, message)
    if not GT.pairing_check([point, -digest], [G2Point(), key]):
        raise BadSignature(
            "the BLS signature does not verify",
            peer=public_key,
            evidence=bytes.fromhex(signature[2:]),
        )


def combine(partials: Mapping[int, str], threshold: int) -> str:
    """Return the group's signature from partials by 0-based member index.

    The partials must be verified: one wrong share makes the result invalid. Of more than
    ``threshold`` the lowest indices are used. Raises InvalidInput with too few, BadSignature for a
    bad point.
    """
    if len(partials) < threshold:
        raise InvalidInput(f"{threshold} partial signatures are needed, there are {len(partials)}")
    chosen = sorted(partials)[:threshold]
    points = [parse_signature(partials[index]) for index in chosen]
    signature = G1Point.multiexp_unchecked(points, compute_lagrange([i + 1 for i in chosen], 0))
    if signature == G1Point.identity():
        raise BadSignature("the partial signatures cancel out; one of them is wrong")
    return encode_point(signature)


def compute_seed(signature: str) -> str:
    """Return the random value as bytes32: keccak256 of the bytes the contract verifies."""
    return "0x" + bytes(keccak(encode_signature_eip2537(signature))).hex()


def encode_signature_eip2537(signature: str) -> bytes:
    """Return a signature as EIP-2537's G1 point: x, y of 64 big-endian bytes each."""
    return _pad_fields(parse_signature(signature).to_xy_bytes_be())


def encode_public_key_eip2537(public_key: str) -> bytes:
    """Return a key as EIP-2537's G2 point: x.c0, x.c1, y.c0, y.c1 of 64 big-endian bytes each."""
    return _pad_fields(parse_public_key(public_key).to_xy_bytes_be())


def decode_public_key_eip2537(data: bytes) -> str:
    """Return the compressed hex of a key of EIP-2537; raise BadSignature for a bad point."""
    fields = [data[start : start + 64] for start in range(0, len(data), 64)]
    if len(data) != 256 or any(any(field[: 64 - _FIELD_BYTES]) for field in fields):
        raise BadSignature("a BLS key on chain is four fields of 64 bytes", evidence=data[:256])
    try:
        point = G2Point.from_xy_bytes_be(b"".join(field[64 - _FIELD_BYTES :] for field in fields))
    except ValueError:
        raise BadSignature("a BLS key is no point of the curve", evidence=data) from None
    key = encode_point(point)
    parse_public_key(key)
    return key


def parse_signature(signature: str) -> Any:
    """Return the G1 point of 96 hex digits; raise BadSignature unless it is valid."""
    if not _SIGNATURE.match(signature):
        raise BadSignature("a BLS signature is '0x' and 96 lower-case hexadecimal digits")
    return _parse_point(G1Point, bytes.fromhex(signature[2:]))


def parse_public_key(public_key: str) -> Any:
    """Return the G2 point of 192 hex digits; raise BadSignature unless it is valid."""
    if not _PUBLIC_KEY.match(public_key):
        raise BadSignature("a BLS key is '0x' and 192 lower-case hexadecimal digits")
    return _parse_point(G2Point, bytes.fromhex(public_key[2:]))


def parse_scalar(secret: bytes) -> Any:
    """Return the scalar of 32 big-endian bytes; raise InvalidInput for zero and above the order."""
    # The library's from_be_bytes reduces silently: a secret would have two encodings.
    if len(secret) != SCALAR_BYTES or not 0 < int.from_bytes(secret) < GROUP_ORDER:
        raise InvalidInput("a BLS secret is a number of 32 bytes between 1 and the group order")
    return Scalar.from_be_bytes(secret)


def encode_point(point: Any) -> str:
    """Return a G1 or G2 point as "0x" and its compressed bytes in hex."""
    data: bytes = point.to_compressed_bytes()
    return "0x" + data.hex()


def compute_lagrange(places: list[int], at: int) -> list[Any]:
    """Return the coefficients that take a polynomial's values at ``places`` to that at ``at``."""
    coefficients = []
    for place in places:
        numerator, denominator = 1, 1
        for other in places:
            if other != place:
                numerator = numerator * (at - other) % GROUP_ORDER
                denominator = denominator * (place - other) % GROUP_ORDER
        value = numerator * pow(denominator, -1, GROUP_ORDER) % GROUP_ORDER
        coefficients.append(Scalar.from_be_bytes(value.to_bytes(SCALAR_BYTES)))
    return coefficients


def _parse_point(group: Any, data: bytes) -> Any:
    try:
        point = group.from_compressed_bytes(data)  # checks curve and subgroup
    except ValueError:
        raise BadSignature(
            "a BLS point is not in the prime-order subgroup", evidence=data
        ) from None
    if point == group.identity():
        raise BadSignature("a BLS point is the identity", evidence=data)
    if point.to_compressed_bytes() != data:
        raise BadSignature("a BLS point is not in canonical form", evidence=data)
    return point


def _hash_to_curve(domain: bytes, message: bytes) -> Any:
    return G1Point.hash_to_curve(separate_domain(b"", domain, message), DST)


def _pad_fields(data: bytes) -> bytes:
    padding = bytes(64 - _FIELD_BYTES)
    return b"".join(
        padding + data[start : start + _FIELD_BYTES] for start in range(0, len(data), _FIELD_BYTES)
    )
