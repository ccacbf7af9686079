"""Which blocks a member has lately seen as the chain's head: what a fresh sign of life names.

A block's hash exists nowhere before the block does, and on one chain only: who signs it signs now
and for this chain. Every member judges by what it has seen itself, so that it needs to agree with
nobody about where the chain is; a head counts for as long as it stands, however long that is, and
a block that a reorganisation removed like any other head that was followed by another.
"""

from __future__ import annotations

from splitup.core import limits, tuning
from splitup.messages.base import ZERO_BYTES32


class RecentBlocks:
    """The head, and those before it for ``limits.HEAD_MEMORY_S`` after they were replaced."""

    def __init__(self) -> None:
        self.head = ZERO_BYTES32
        self._replaced: dict[str, float] = {}  # hash -> when it ceased to be the head, in order

    def process_head(self, block_hash: str, now: float) -> None:
        """Note the chain's head, bytes32 in hex; one that is known to be it changes nothing."""
        if block_hash == self.head:
            return
        if self.head != ZERO_BYTES32:
            self._replaced[self.head] = now
        self._replaced.pop(block_hash, None)  # a chain that was left may come back
        self.head = block_hash
        while len(self._replaced) > tuning.MAX_HEADS:
            del self._replaced[next(iter(self._replaced))]

    def is_recent(self, block_hash: str, now: float) -> bool:
        """Return whether a block is the head, or was until lately."""
        if block_hash == self.head:
            return block_hash != ZERO_BYTES32
        replaced_at = self._replaced.get(block_hash)
        return replaced_at is not None and now - replaced_at <= limits.HEAD_MEMORY_S
