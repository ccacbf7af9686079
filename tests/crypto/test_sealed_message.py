from __future__ import annotations

import nacl.bindings as sodium
import pytest

from splitup.core.errors import PeerFault
from splitup.crypto import sealed_message
from splitup.crypto.keys import Identity

RECEIVER = Identity.from_private_key(b"\x05" * 32)
SCALAR, EPHEMERAL = sealed_message.compute_ephemeral(b"\x07" * 64)
LOW_ORDER = bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05")
TEXT = sealed_message.seal(SCALAR, EPHEMERAL, RECEIVER.signing_key_hex, b"context", b"text")


def test_what_is_sealed_opens_for_its_receiver_in_its_context() -> None:
    assert len(TEXT) == len(b"text") + sealed_message.OVERHEAD_BYTES
    assert sealed_message.open_sealed(RECEIVER, EPHEMERAL, b"context", TEXT) == b"text"
    other = Identity.from_private_key(b"\x06" * 32)
    for identity, context in [(other, b"context"), (RECEIVER, b"contexu")]:
        with pytest.raises(PeerFault):
            sealed_message.open_sealed(identity, EPHEMERAL, context, TEXT)


def test_the_exchange_scalar_is_that_of_the_signing_key() -> None:
    point = sodium.crypto_scalarmult_ed25519_base_noclamp(RECEIVER.compute_exchange_scalar())
    assert "0x" + point.hex() == RECEIVER.signing_key_hex


def test_an_opening_proves_its_point_and_opens_the_text() -> None:
    opening = sealed_message.prove_opening(RECEIVER, EPHEMERAL, b"context")
    assert sealed_message.Opening.from_bytes(opening.to_bytes()) == opening
    key = RECEIVER.signing_key_hex
    sealed_message.verify_opening(opening, EPHEMERAL, key, b"context")
    assert (
        sealed_message.open_with_point(opening.point, EPHEMERAL, key, b"context", TEXT) == b"text"
    )
    with pytest.raises(PeerFault):
        sealed_message.verify_opening(opening, EPHEMERAL, key, b"other context")
    with pytest.raises(PeerFault):
        sealed_message.verify_opening(opening, RECEIVER.signing_key_hex, key, b"context")


def test_a_point_with_a_low_order_part_proves_nothing() -> None:
    """A challenge divisible by eight swallows the low-order part: one try in eight would pass."""
    secret, base = RECEIVER.compute_exchange_scalar(), bytes.fromhex(EPHEMERAL[2:])
    true_point = sodium.crypto_scalarmult_ed25519_noclamp(secret, base)
    wrong = sodium.crypto_core_ed25519_add(true_point, LOW_ORDER)
    for attempt in range(1, 200):
        nonce = attempt.to_bytes(32, "little")
        challenge = sealed_message._compute_challenge(
            RECEIVER.signing_key_hex,
            base,
            wrong,
            sodium.crypto_scalarmult_ed25519_base_noclamp(nonce),
            sodium.crypto_scalarmult_ed25519_noclamp(nonce, base),
            b"context",
        )
        if challenge[0] % 8 == 0:
            break
    assert challenge[0] % 8 == 0
    response = sodium.crypto_core_ed25519_scalar_sub(
        nonce, sodium.crypto_core_ed25519_scalar_mul(challenge, secret)
    )
    forged = sealed_message.Opening(wrong, challenge, response)
    with pytest.raises(PeerFault, match="prime-order"):
        sealed_message.verify_opening(forged, EPHEMERAL, RECEIVER.signing_key_hex, b"context")
