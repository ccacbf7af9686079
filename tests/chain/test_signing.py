"""Every byte is compared with eth_account, an implementation of somebody else."""

from __future__ import annotations

from typing import Any

import pytest
from eth_account import Account
from hypothesis import given
from hypothesis import strategies as st

from splitup.chain.signing import sign_transaction

KEYS = st.binary(min_size=32, max_size=32).filter(lambda key: 0 < int.from_bytes(key) < 2**255)
WEI = st.integers(0, 10**20)


@given(
    key=KEYS,
    chain_id=st.integers(1, 2**53),
    nonce=st.integers(0, 2**40),
    gas=st.integers(21_000, 30_000_000),
    to=st.just(b"") | st.binary(min_size=20, max_size=20),
    data=st.binary(max_size=300).map(lambda data: "0x" + data.hex()),
    fees=st.fixed_dictionaries({"gasPrice": WEI})
    | st.fixed_dictionaries({"maxFeePerGas": WEI, "maxPriorityFeePerGas": WEI}),
)
def test_transactions_are_those_of_eth_account(
    key: bytes,
    chain_id: int,
    nonce: int,
    gas: int,
    to: bytes,
    data: str,
    fees: dict[str, Any],
) -> None:
    fields = {"to": to, "data": data, "gas": gas, **fees}
    known = Account.sign_transaction(
        fields | {"chainId": chain_id, "nonce": nonce, "value": 0}, key
    )
    signed = sign_transaction(key, chain_id, nonce, fields)
    assert signed == (known.raw_transaction.to_0x_hex(), known.hash.to_0x_hex())


@pytest.mark.parametrize("fees", [{}, {"maxFeePerGas": 1}])
def test_a_transaction_without_fees_is_a_bug(fees: dict[str, int]) -> None:
    with pytest.raises(KeyError):
        sign_transaction(b"\1" * 32, 1, 0, {"to": b"", "data": "0x", "gas": 21_000, **fees})
