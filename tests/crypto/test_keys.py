from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitup.core.errors import BadSignature, InvalidInput
from splitup.crypto.keys import (
    Identity,
    check_public_key,
    derive_key,
    generate_identity,
    verify,
    verify_raw,
)

IDENTITY = Identity.from_private_key(bytes.fromhex("46" * 32))
PINNED_SIGNING_KEY = "0x225dff2875454a722d22c7baf9208ad6aaf3ab725c195685b35dddc2f2bfe71e"

# Points of order 1, 2, 4 and 8 in canonical form (y = 1, -1, 0, and the four roots of order 8).
LOW_ORDER = [
    "0100000000000000000000000000000000000000000000000000000000000000",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000080",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
]
# The same and other values of y, written as y + p, or with a sign bit where x is zero.
NON_CANONICAL = [
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "0100000000000000000000000000000000000000000000000000000000000080",
    "f0ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
]
NOT_ON_CURVE = "0200000000000000000000000000000000000000000000000000000000000000"


def test_address_is_the_known_one_of_the_ethereum_key() -> None:
    # EIP-155's example key
    assert IDENTITY.address == "0x9d8a62f656a8d1615c1294fd71e9cfb3e4855a4f"


def test_signing_key_follows_from_the_one_secret() -> None:
    again = Identity.from_private_key(bytes.fromhex("46" * 32))
    other = Identity.from_private_key(bytes.fromhex("47" * 32))
    assert again.signing_key_hex == IDENTITY.signing_key_hex != other.signing_key_hex
    # pinned: a change here orphans every registered key
    assert IDENTITY.signing_key_hex == PINNED_SIGNING_KEY


def test_hkdf_is_rfc_5869_case_3() -> None:
    expected = (
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
    )
    assert derive_key(b"\x0b" * 22, b"", 42).hex() == expected


def test_raw_signature_is_rfc_8032_test_2() -> None:
    public = "0x3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    signature = bytes.fromhex(
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    verify_raw(public, b"\x72", signature)
    with pytest.raises(BadSignature):
        verify_raw(public, b"\x73", signature)


@pytest.mark.parametrize("key", [*LOW_ORDER, *NON_CANONICAL, NOT_ON_CURVE])
def test_a16_low_order_and_non_canonical_keys_are_refused(key: str) -> None:
    with pytest.raises(BadSignature):
        check_public_key("0x" + key)


def test_a16_a_point_off_the_prime_order_subgroup_is_refused() -> None:
    import nacl.bindings as sodium

    mixed = sodium.crypto_core_ed25519_add(
        bytes.fromhex(IDENTITY.signing_key_hex[2:]), bytes.fromhex(LOW_ORDER[4])
    )
    with pytest.raises(BadSignature, match="prime-order"):
        check_public_key("0x" + mixed.hex())


@pytest.mark.parametrize(
    "change", [str.upper, lambda k: k[2:], lambda k: k + "\n", lambda k: k + "0"]
)
def test_a_key_has_one_spelling(change) -> None:  # type: ignore[no-untyped-def]
    assert check_public_key(IDENTITY.signing_key_hex) == IDENTITY.signing_key_hex
    with pytest.raises(BadSignature):
        check_public_key(change(IDENTITY.signing_key_hex))


def test_a15_a_signature_holds_in_its_domain_only() -> None:
    signature = IDENTITY.sign(b"plan", b"message")
    verify(IDENTITY.signing_key_hex, b"plan", b"message", signature)
    for domain, message in [(b"plane", b"message"), (b"pla", b"nmessage"), (b"plan", b"messag")]:
        with pytest.raises(BadSignature):
            verify(IDENTITY.signing_key_hex, domain, message, signature)
    with pytest.raises(BadSignature):
        verify(generate_identity().signing_key_hex, b"plan", b"message", signature)


def test_a16_a_signature_with_a_large_s_is_refused() -> None:
    signature = IDENTITY.sign(b"d", b"m")
    order = 2**252 + 27742317777372353535851937790883648493
    s = int.from_bytes(signature[32:], "little") + order
    with pytest.raises(BadSignature):
        verify(IDENTITY.signing_key_hex, b"d", b"m", signature[:32] + s.to_bytes(32, "little"))


@given(st.integers(0, 511))
@settings(max_examples=40)
def test_every_bit_of_a_signature_counts(bit: int) -> None:
    signature = bytearray(IDENTITY.sign(b"d", b"m"))
    signature[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadSignature):
        verify(IDENTITY.signing_key_hex, b"d", b"m", bytes(signature))


@pytest.mark.parametrize("domain", [b"", b"x" * 256])
def test_a_domain_fits_its_length_byte(domain: bytes) -> None:
    with pytest.raises(InvalidInput):
        IDENTITY.sign(domain, b"")


@pytest.mark.parametrize("key", [bytes(32), b"\xff" * 32, bytes(31), b"\x01" * 33, b""])
def test_a_private_key_outside_the_group_is_refused(key: bytes) -> None:
    with pytest.raises(InvalidInput):
        Identity.from_private_key(key)


def test_a12_secrets_are_not_printed() -> None:
    text = repr(IDENTITY) + str(IDENTITY)
    assert "46" * 8 not in text and "FFFF" not in text
    assert "private_key" not in text and "secret" not in text


def test_a16_verify_checks_the_key_itself() -> None:
    """libsodium alone accepts a key with a low-order part; who signed would then be ambiguous."""
    import nacl.bindings as sodium

    mixed = sodium.crypto_core_ed25519_add(
        bytes.fromhex(IDENTITY.signing_key_hex[2:]), bytes.fromhex(LOW_ORDER[4])
    )
    with pytest.raises(BadSignature, match="prime-order"):
        verify("0x" + mixed.hex(), b"d", b"m", IDENTITY.sign(b"d", b"m"))
