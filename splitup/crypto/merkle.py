"""Merkle trees whose proofs state a position, so that order and absence can be proved.

Inner nodes are SHA-256(left ‖ right); a level of odd length is filled up with 32 zero bytes. Leaves
are hashes of more than 64 bytes that begin with a tag of their own, so that no leaf is an inner
node. The number of leaves must be bound beside the root: it fixes the depth.

Solidity's side is contracts/src/libraries/Merkle.sol. SHA-256 and not keccak, because Python
computes it forty times as fast, and the chain nearly as cheaply.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from splitup.core.errors import InvalidInput, PeerFault

EMPTY: Final = bytes(32)  # the root without leaves, and what fills up a level


def compute_root(leaves: Sequence[bytes]) -> bytes:
    """Return the root over 32-byte leaves; 32 zero bytes when there are none."""
    return _build(leaves)[-1][0] if leaves else EMPTY


def make_proof(leaves: Sequence[bytes], index: int) -> tuple[bytes, ...]:
    """Return the siblings from the leaf at ``index`` up to the root; raise InvalidInput."""
    if not 0 <= index < len(leaves):
        raise InvalidInput(f"a tree of {len(leaves)} leaves has no leaf {index}")
    proof = []
    for level in _build(leaves)[:-1]:
        sibling = index ^ 1
        proof.append(level[sibling] if sibling < len(level) else EMPTY)
        index >>= 1
    return tuple(proof)


def check_proof(root: bytes, count: int, index: int, leaf: bytes, proof: Sequence[bytes]) -> None:
    """Raise PeerFault unless ``leaf`` is at ``index`` of the ``count`` leaves under ``root``."""
    if not 0 <= index < count or len(proof) != (count - 1).bit_length():
        raise PeerFault(f"a proof of leaf {index} of {count} has {len(proof)} steps")
    node = leaf
    for sibling in proof:
        node = sha256(sibling + node if index & 1 else node + sibling).digest()
        index >>= 1
    if node != root:
        raise PeerFault("a proof does not lead to the root")


def _build(leaves: Sequence[bytes]) -> list[Sequence[bytes]]:
    levels: list[Sequence[bytes]] = [leaves]
    while len(levels[-1]) > 1:
        level = levels[-1]
        even = level if len(level) % 2 == 0 else [*level, EMPTY]
        levels.append(
            [
                sha256(left + right).digest()
                for left, right in zip(even[::2], even[1::2], strict=True)
            ]
        )
    return levels
