"""How fast this machine compiles at the moment, measured instead of guessed.

Times of compiling are predicted for the machine on which they were fitted
(``splitup.graph.compile_cost``). A slower one takes more CPU time for the same work, and so does
any machine whose cores are shared with other work.
"""

from __future__ import annotations

import time
from typing import Final

_ENTRIES: Final = 8_000
_REFERENCE_S: Final = 0.013  # of CPU for ``_work``, where compiling takes what is predicted
_MOST: Final = 32.0  # a slower machine than this is of no use here; bounds what hostile work gets


def measure_slowness() -> float:
    """Return how many times the predicted CPU time compiling takes here: 1 or more.

    Takes a hundredth of the CPU that a usual task takes to compile.
    """
    start_s = time.process_time()
    _work()
    took_s = time.process_time() - start_s
    return min(max(took_s / _REFERENCE_S, 1.0), _MOST)


def _work() -> int:
    """Do what compiling does: build, hash and look up small objects, in more memory than caches."""
    table: dict[tuple[object, ...], object] = {}
    for number in range(_ENTRIES):
        key = (number * 7919 % 1009, str(number % 127), ("ADD", number % 61))
        found = table.get(key)
        table[key] = (key, found is None) if number % 3 else [key, None]
    return len(sorted(table, key=repr))
