"""Signed transactions: with a fee cap and a tip (EIP-1559), or with a plain gas price (EIP-155).

The tests compare every byte with ``eth_account``, whose import takes most of a second of CPU time:
its key files bring the pairings of ``py_ecc``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import coincurve
import rlp
from eth_hash.auto import keccak

_EIP_1559: Final = b"\x02"  # the transaction's type (EIP-2718)


def sign_transaction(
    private_key: bytes, chain_id: int, nonce: int, fields: Mapping[str, Any]
) -> tuple[str, str]:
    """Return a transaction of no ether as its signed bytes and its hash, both "0x…".

    ``fields`` has ``to`` (20 bytes, none for a deployment), ``data`` ("0x…"), ``gas``, and either
    ``gasPrice`` or ``maxFeePerGas`` with ``maxPriorityFeePerGas``, in wei.
    """
    call = [fields["gas"], fields["to"], 0, bytes.fromhex(fields["data"][2:])]
    key = coincurve.PrivateKey(private_key)
    if "gasPrice" in fields:
        unsigned = [nonce, fields["gasPrice"], *call]
        parity, r, s = _sign(key, rlp.encode([*unsigned, chain_id, 0, 0]))
        raw = rlp.encode([*unsigned, 35 + 2 * chain_id + parity, r, s])
    else:
        fees = fields["maxPriorityFeePerGas"], fields["maxFeePerGas"]
        no_access_list: list[bytes] = []
        unsigned = [chain_id, nonce, *fees, *call, no_access_list]
        signature = _sign(key, _EIP_1559 + rlp.encode(unsigned))
        raw = _EIP_1559 + rlp.encode([*unsigned, *signature])
    return "0x" + raw.hex(), "0x" + keccak(raw).hex()


def _sign(key: coincurve.PrivateKey, message: bytes) -> tuple[int, int, int]:
    """Return y parity, r and s; deterministic (RFC 6979), and s is low (EIP-2)."""
    signature = key.sign_recoverable(message, hasher=keccak)
    return signature[64], int.from_bytes(signature[:32]), int.from_bytes(signature[32:64])
