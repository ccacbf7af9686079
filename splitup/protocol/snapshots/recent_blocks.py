"""The blocks that a member recently saw as the chain's head; a fresh heartbeat names one of them.

Nobody knows a block's hash before the block exists, and it exists on one chain only. A signature
over it is therefore recent and meant for this chain. Every member decides by the heads that it saw
itself, so members need not agree about the head. The current head counts however old it is. A block
that a reorganisation removed counts like any other replaced head.
"""

from __future__ import annotations

from splitup.core import limits, tuning
from splitup.messages.base import ZERO_BYTES32


class RecentBlocks:
    """The head, and those before it for ``memory_s`` after they were replaced."""

    def __init__(self) -> None:
        self.head = ZERO_BYTES32
        self.memory_s = limits.HEAD_MEMORY_S
        self._replaced: dict[str, float] = {}  # hash -> when it was replaced, in order

    def process_head(self, block_hash: str, now: float) -> None:
        """Record the chain's head (bytes32 in hex)."""
        if block_hash == self.head:
            return
        if self.head != ZERO_BYTES32:
            self._replaced[self.head] = now
        self._replaced.pop(block_hash, None)  # a reorganisation may return to it
        self.head = block_hash
        while len(self._replaced) > tuning.MAX_HEADS:
            del self._replaced[next(iter(self._replaced))]

    def is_recent(self, block_hash: str, now: float) -> bool:
        """Return whether a block is the head, or was until ``memory_s`` ago."""
        if block_hash == self.head:
            return block_hash != ZERO_BYTES32
        replaced_at = self._replaced.get(block_hash)
        return replaced_at is not None and now - replaced_at <= self.memory_s
