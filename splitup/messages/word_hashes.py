"""SHA-256 over 32-byte words, as Solidity's abi.encode lays them out."""

from __future__ import annotations

from hashlib import sha256
from typing import Final

ADDRESS_PAD: Final = bytes(12)  # before an address


def hash_words(*words: bytes) -> bytes:
    return sha256(b"".join(words)).digest()


def hash_text(text: str, known: dict[str, bytes]) -> bytes:
    digest = known.get(text)
    if digest is None:
        digest = known[text] = sha256(text.encode()).digest()
    return digest
