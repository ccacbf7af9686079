"""What a server draws for an answer: the same again when another one goes on with it."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class AnswerNames:
    """Ids, a time and a seed, by the id of a stream and in the order in which they are asked for.

    Who has the stream's id, its client, can compute them.
    """

    stream: str = field(default_factory=secrets.token_hex)
    created: int = field(default_factory=lambda: int(time.time()))
    _count: int = 0

    def make_id(self, prefix: str) -> str:
        """Return a new id."""
        self._count += 1
        return f"{prefix}{self._hash(str(self._count))[:24]}"

    def make_seed(self) -> int:
        """Return the seed of a request that has none."""
        return int(self._hash("seed")[:16], 16) % 2**63

    def _hash(self, what: str) -> str:
        return hashlib.sha256(f"{self.stream} {what}".encode()).hexdigest()
