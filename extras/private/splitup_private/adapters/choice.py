"""Which adapter fits a question: decided on the user's machine, by the keywords of all adapters.

A host sends the keywords of every adapter that it holds, whatever the question is. So it learns
which adapter was chosen, and nothing else of the question.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Final

from splitup_private.adapters.messages import AdapterInfo

_WORD: Final = re.compile(r"\w+")


def choose_adapter(adapters: Sequence[AdapterInfo], question: str) -> AdapterInfo | None:
    """Return the adapter with most keywords in a question, the first of equal ones; None for none.

    A keyword is one word or several, in any case. A part of a word does not count, so that scripts
    without spaces need the whole run of characters.
    """
    words = _split(question)
    counts = [
        len({k for k in map(_split, a.keywords) if k.strip() and k in words}) for a in adapters
    ]
    most = max(counts, default=0)
    return adapters[counts.index(most)] if most else None


def _split(text: str) -> str:
    """Return the words of a text with a space before and behind each of them."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    return f" {' '.join(re.findall(_WORD, plain))} "
