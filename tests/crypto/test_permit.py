from __future__ import annotations

from dataclasses import replace

import pytest
from eth_account import Account
from eth_account.messages import encode_typed_data

from splitup.crypto.keys import generate_identity
from splitup.crypto.permit import Permit, compute_permit_digest, sign_permit

DOMAIN = {
    "name": "Test USD Coin",
    "version": "1",
    "chainId": 31337,
    "verifyingContract": "0x" + "12" * 20,
}
TYPES = {
    "Permit": [
        {"name": "owner", "type": "address"},
        {"name": "spender", "type": "address"},
        {"name": "value", "type": "uint256"},
        {"name": "nonce", "type": "uint256"},
        {"name": "deadline", "type": "uint256"},
    ]
}


def test_agrees_with_an_independent_implementation_of_eip_712() -> None:
    identity = generate_identity()
    permit = Permit(identity.address, "0x" + "ab" * 20, 5_000_000, 3, 2_000_000_000)
    message = {
        "owner": permit.owner,
        "spender": permit.spender,
        "value": permit.value,
        "nonce": permit.nonce,
        "deadline": permit.deadline,
    }
    expected = Account.sign_typed_data(identity.private_key, DOMAIN, TYPES, message)
    separator = bytes(encode_typed_data(DOMAIN, TYPES, message).header)
    v, r, s = sign_permit(identity.private_key, permit, separator)
    assert (v, int.from_bytes(r, "big"), int.from_bytes(s, "big")) == (
        expected.v,
        expected.r,
        expected.s,
    )


@pytest.mark.parametrize(
    "change",
    [{"owner": "0x" + "01" * 20}, {"spender": "0x" + "02" * 20}, {"value": 1}, {"nonce": 0}],
)
def test_every_field_is_signed(change: dict[str, object]) -> None:
    permit = Permit("0x" + "aa" * 20, "0x" + "bb" * 20, 7, 3, 9)
    other = replace(permit, **change)  # type: ignore[arg-type]
    assert compute_permit_digest(permit, bytes(32)) != compute_permit_digest(other, bytes(32))
