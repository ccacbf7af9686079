"""Changes to any field of any message, found by walking its model: no list of fields.

A changed message is one that its type still accepts: the receiver refuses the others unread.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

from splitup.core.errors import SplitUpError
from splitup.messages.base import Message

TRIES: Final = 6  # for a change that the message's type accepts
_HEX: Final = "0123456789abcdef"
_ADDRESS_CHARS: Final = 42


class Pool:
    """Values seen in the messages of a run, by field and by kind: fields can be cross-wired."""

    def __init__(self) -> None:
        self._values: dict[object, list[Any]] = defaultdict(list)
        self._messages: dict[int, Message] = {}
        self._read = 0  # of the messages

    def note(self, message: Message) -> None:
        """Keep a message for later."""
        self._messages.setdefault(id(message), message)

    def draw(self, rng: random.Random, like: Any, name: str) -> Any:
        """Return another field's value of the same name or kind; ``like`` when none was seen."""
        for message in list(self._messages.values())[self._read :]:
            self._note(message, "")
        self._read = len(self._messages)
        by_name = self._values[name, type(like)]
        by_kind = () if isinstance(like, tuple) else self._values[_get_kind(like)]
        values = by_name if by_name and rng.random() < 0.5 else by_kind or by_name
        return rng.choice(values) if values else like

    def _note(self, value: Any, name: str) -> None:
        if isinstance(value, Message):
            for inner in type(value).model_fields:
                self._note(getattr(value, inner), inner)
        elif isinstance(value, tuple):
            for item in value:
                self._note(item, name)
        for key in ((name, type(value)), _get_kind(value)):
            if len(self._values[key]) < 64:
                self._values[key].append(value)


def _get_kind(value: Any) -> object:
    """Return what a value can be exchanged with: type, and for text its length."""
    return (str, len(value)) if isinstance(value, str) else type(value)


def mutate(message: Message, rng: random.Random, pool: Pool) -> tuple[Message, str] | None:
    """Return a changed copy and the path of what changed, None when no try was accepted."""
    for _ in range(TRIES):
        path: list[str] = []
        changed = _change(message, rng, pool, path)
        if changed == message:
            continue
        try:
            value = changed.model_dump(mode="json", warnings=False)
            return type(message).from_value(value), ".".join(path)
        except (SplitUpError, ValueError, TypeError, AttributeError, OverflowError):
            continue
    return None


def count_leaves(value: Any) -> float:
    """Return the weight of a field: a large one is entered more often, but not in proportion."""
    if isinstance(value, Message):
        inner = (getattr(value, name) for name in type(value).model_fields)
        return 0.5 + sum(map(count_leaves, inner)) ** 0.7
    if isinstance(value, tuple):
        return 1 + sum(map(count_leaves, value[:4])) ** 0.5
    return 1


def _change(value: Any, rng: random.Random, pool: Pool, path: list[str]) -> Any:
    """Descend to some field and change it."""
    name = next((part for part in reversed(path) if not part.isdigit()), "")
    if isinstance(value, Message):
        if path and rng.random() < 0.15:
            return pool.draw(rng, value, name)
        fields = list(type(value).model_fields)
        inner = rng.choices(fields, [count_leaves(getattr(value, field)) for field in fields])[0]
        path.append(inner)
        return value.model_copy(update={inner: _change(getattr(value, inner), rng, pool, path)})
    if isinstance(value, tuple):
        if value and rng.random() < 0.6:
            place = rng.randrange(len(value))
            path.append(str(place))
            item = _change(value[place], rng, pool, path)
            return (*value[:place], item, *value[place + 1 :])
        return _change_tuple(value, rng, pool, name)
    return _change_leaf(value, rng, pool, name)


def _change_tuple(
    value: tuple[Any, ...], rng: random.Random, pool: Pool, name: str
) -> tuple[Any, ...]:
    if not value or rng.random() < 0.2:
        return pool.draw(rng, value, name)
    place = rng.randrange(len(value))
    changes: tuple[Callable[[], tuple[Any, ...]], ...] = (
        lambda: (),
        lambda: value[:place],
        lambda: (*value[:place], *value[place + 1 :]),
        lambda: (*value, value[place]),
        lambda: (*value, pool.draw(rng, value[place], name)),
        lambda: tuple(reversed(value)),
    )
    return rng.choice(changes)()


def _change_leaf(value: Any, rng: random.Random, pool: Pool, name: str) -> Any:
    if rng.random() < 0.25:
        return pool.draw(rng, value, name)
    match value:
        case bool():
            return not value
        case int():
            step = 2 ** rng.randrange(10)
            return rng.choice((0, value // 2, value - 1, value - step, value + 1, value + step))
        case str() if value.startswith("0x"):
            if len(value) == _ADDRESS_CHARS or rng.random() < 0.2:
                return pool.draw(rng, value, name)
            return "0x" + "".join(rng.choices(_HEX, k=len(value) - 2))
        case str() if len(value) == 64:
            return "".join(rng.choices(_HEX, k=64))
        case str():
            return rng.choice(("", "other"))
    return None  # of an optional field
