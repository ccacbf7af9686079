"""Stop strings: the text ends before the first of them, which may begin within a token."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from splitup.core import tuning
from splitup.core.errors import InvalidInput


class StopFilter:
    """Holds back text that may be the beginning of a stop string, until it is certain.

    Raises InvalidInput for strings that are empty, too long or too many.
    """

    def __init__(self, stop: Sequence[str], taken: int = 0) -> None:
        """``taken`` tokens are released already."""
        if len(stop) > tuning.MAX_STOP_STRINGS or not all(
            1 <= len(text) <= tuning.MAX_STOP_CHARS for text in stop
        ):
            raise InvalidInput(
                f"give at most {tuning.MAX_STOP_STRINGS} stop strings of 1 to "
                f"{tuning.MAX_STOP_CHARS} characters"
            )
        self._stop = tuple(stop)
        self._held: deque[tuple[int, str]] = deque()  # token, its text
        self.found: str | None = None
        self.taken = taken  # tokens, also those whose text is never released

    def push(self, token: int, text: str) -> list[tuple[int, str]]:
        """Take the next token; return the tokens whose text is now certain, each with its text.

        Where a stop string begins inside a token's text, the token comes with the part before it
        and is the last; ``found`` is then that string.
        """
        self.taken += 1
        self._held.append((token, text))
        held = "".join(piece for _, piece in self._held)
        places = [(place, stop) for stop in self._stop if (place := held.find(stop)) >= 0]
        if places:
            place, self.found = min(places)
            return self._release(place, is_end=True)
        return self._release(len(held) - self._count_doubtful(held), is_end=False)

    def flush(self) -> list[tuple[int, str]]:
        """Return the text that is held back, when no token follows."""
        rest = list(self._held)
        self._held.clear()
        return rest

    def _count_doubtful(self, held: str) -> int:
        """Return the length of the longest suffix of ``held`` that is a prefix of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(held)), 0, -1):
            if any(stop.startswith(held[-length:]) for stop in self._stop):
                return length
        return 0

    def _release(self, length: int, *, is_end: bool) -> list[tuple[int, str]]:
        released = []
        while self._held and len(self._held[0][1]) <= length:
            token, text = self._held.popleft()
            released.append((token, text))
            length -= len(text)
        if is_end and length > 0:
            token, text = self._held[0]
            released.append((token, text[:length]))
        return released
