from __future__ import annotations

from itertools import combinations

import pytest
from py_arkworks_bls12381 import G1Point, G2Point

from splitup.core.errors import BadSignature, InvalidInput
from splitup.crypto import bls

SECRET = (7).to_bytes(32)
KEY = bls.compute_public_key(SECRET)
PINNED_SEED = "0x79fbda118fd422ae03d963a990f71e4afedeebde212b8dd6b741889255ae472e"


def deal(coefficients: list[int], members: int) -> list[bytes]:
    return [
        (sum(c * x**k for k, c in enumerate(coefficients)) % bls.GROUP_ORDER).to_bytes(32)
        for x in range(1, members + 1)
    ]


def test_the_group_order_is_the_curves() -> None:
    assert bls.compute_public_key((bls.GROUP_ORDER - 1).to_bytes(32)) == bls.encode_point(
        -G2Point()
    )


def test_hash_to_curve_is_rfc_9380_appendix_j_9_1() -> None:
    # The library underneath, on the RFC's vector for the suite that DST names.
    dst = b"QUUX-V01-CS02-with-BLS12381G1_XMD:SHA-256_SSWU_RO_"
    x = (
        "052926add2207b76ca4fa57a8734416c8dc95e24501772c8"
        "14278700eed6d1e4e8cf62d9c09db0fac349612b759e79a1"
    )
    assert G1Point.hash_to_curve(b"", dst).to_xy_bytes_be()[:48].hex() == x


@pytest.mark.parametrize(
    ("members", "threshold"), [(4, 3), (5, 3), (6, 3), (7, 5), (10, 7), (31, 21)]
)
def test_threshold_is_two_f_plus_one(members: int, threshold: int) -> None:
    assert bls.compute_threshold(members) == threshold


@pytest.mark.parametrize("members", [0, 1, 3, 32])
def test_other_committee_sizes_are_refused(members: int) -> None:
    with pytest.raises(InvalidInput):
        bls.compute_threshold(members)


def test_a_signature_verifies_and_is_bound_to_all_it_covers() -> None:
    signature = bls.sign_partial(SECRET, b"plan", b"alpha")
    bls.verify_signature(KEY, b"plan", b"alpha", signature)
    other = bls.compute_public_key((8).to_bytes(32))
    for key, domain, message in [
        (other, b"plan", b"alpha"),
        (KEY, b"draw", b"alpha"),
        (KEY, b"plan", b"alphb"),
        (KEY, b"plana", b"lpha"),
    ]:
        with pytest.raises(BadSignature):
            bls.verify_signature(key, domain, message, signature)


@pytest.mark.parametrize(("members", "threshold"), [(4, 3), (7, 5)])
def test_every_quorum_gives_the_same_bytes(members: int, threshold: int) -> None:
    coefficients = list(range(11, 11 + threshold))
    shares = deal(coefficients, members)
    partials = {i: bls.sign_partial(share, b"d", b"m") for i, share in enumerate(shares)}
    whole = bls.sign_partial(coefficients[0].to_bytes(32), b"d", b"m")
    for chosen in combinations(range(members), threshold):
        assert bls.combine({i: partials[i] for i in chosen}, threshold) == whole
    assert bls.combine(partials, threshold) == whole
    bls.verify_signature(bls.compute_public_key(coefficients[0].to_bytes(32)), b"d", b"m", whole)


def test_one_share_too_few_is_refused_and_gives_nothing() -> None:
    shares = deal([5, 6, 7], 4)
    partials = {i: bls.sign_partial(share, b"d", b"m") for i, share in enumerate(shares[:2])}
    with pytest.raises(InvalidInput, match="3 partial"):
        bls.combine(partials, 3)
    assert bls.combine(partials, 2) != bls.sign_partial((5).to_bytes(32), b"d", b"m")


def test_a_wrong_partial_is_found_by_its_own_key() -> None:
    shares = deal([5, 6, 7], 4)
    partial = bls.sign_partial(shares[1], b"d", b"m")
    bls.verify_signature(bls.compute_public_key(shares[1]), b"d", b"m", partial)
    with pytest.raises(BadSignature):
        bls.verify_signature(bls.compute_public_key(shares[2]), b"d", b"m", partial)


def _point_off_the_subgroup(size: int, group: type) -> str:
    """The first x that is on the curve but not in the subgroup (the cofactor makes most so)."""
    for x in range(1, 1000):
        data = bytes([0x80]) + x.to_bytes(size - 1)
        try:
            point = group.from_compressed_bytes_unchecked(data)  # type: ignore[attr-defined]
        except ValueError:
            continue
        if not point.is_in_subgroup():
            return "0x" + data.hex()
    raise AssertionError("no such point")


@pytest.mark.parametrize(
    "signature",
    [
        "",
        "0x",
        bls.encode_point(G1Point.identity()),
        "0x" + "ff" * 48,
        "0x" + "00" * 48,
        _point_off_the_subgroup(48, G1Point),
        bls.encode_point(G1Point())[2:],
        bls.encode_point(G1Point()).upper(),
        bls.encode_point(G1Point()) + "00",
    ],
)
def test_a16_hostile_signatures_are_refused(signature: str) -> None:
    with pytest.raises(BadSignature):
        bls.verify_signature(KEY, b"d", b"m", signature)
    with pytest.raises(BadSignature):
        bls.combine({0: signature}, 1)


@pytest.mark.parametrize(
    "key",
    [
        "0x",
        bls.encode_point(G2Point.identity()),
        "0x" + "ff" * 96,
        _point_off_the_subgroup(96, G2Point),
        bls.encode_point(G1Point()),
    ],
)
def test_a16_hostile_keys_are_refused(key: str) -> None:
    with pytest.raises(BadSignature):
        bls.verify_signature(key, b"d", b"m", bls.sign_partial(SECRET, b"d", b"m"))


def test_x_above_the_field_is_refused() -> None:
    p = int(
        "1a0111ea397fe69a4b1ba7b6434bacd764774b84f38512bf"
        "6730d2a0f6b0f6241eabfffeb153ffffb9feffffffffaaab",
        16,
    )
    room = 2**381 - p  # x + p fits beside the three flag bits for about a quarter of all points
    points = (bls.sign_partial(bytes([*bytes(31), k]), b"d", b"m") for k in range(1, 64))
    data = next(d for d in map(lambda s: bytes.fromhex(s[2:]), points) if _x_of(d) < room)
    wrapped = bytearray((_x_of(data) + p).to_bytes(48))
    wrapped[0] |= data[0] & 0xE0
    bls.parse_signature("0x" + data.hex())
    with pytest.raises(BadSignature):
        bls.parse_signature("0x" + wrapped.hex())


def _x_of(data: bytes) -> int:
    return int.from_bytes(bytes([data[0] & 0x1F])) << 376 | int.from_bytes(data[1:])


@pytest.mark.parametrize(
    "secret",
    [bytes(32), bls.GROUP_ORDER.to_bytes(32), b"\xff" * 32, b"\x01", bytes(31) + b"\x01\x01"],
)
def test_secrets_outside_the_group_are_refused(secret: bytes) -> None:
    with pytest.raises(InvalidInput):
        bls.sign_partial(secret, b"d", b"m")


def test_seed_and_contract_encodings_are_pinned() -> None:
    signature = bls.sign_partial(SECRET, b"plan", b"alpha")
    assert bls.compute_seed(signature) == PINNED_SEED
    encoded = bls.encode_signature_eip2537(signature)
    assert len(encoded) == 128 and encoded[:16] == encoded[64:80] == bytes(16)
    # EIP-2537 puts c0 before c1: the generator's x.c0 starts with 024aa2b2 (the EIP's own constant)
    generator = bls.encode_public_key_eip2537(bls.compute_public_key((1).to_bytes(32)))
    assert len(generator) == 256 and generator[16:20].hex() == "024aa2b2"
    assert generator[64 + 16 : 64 + 20].hex() == "13e02b60"


def test_a16_the_identity_verifies_nothing() -> None:
    """Identity key and identity signature satisfy the pairing equation for every message."""
    key, signature = bls.encode_point(G2Point.identity()), bls.encode_point(G1Point.identity())
    with pytest.raises(BadSignature, match="identity"):
        bls.verify_signature(key, b"d", b"m", signature)
    with pytest.raises(BadSignature, match="identity"):
        bls.parse_public_key(key)
