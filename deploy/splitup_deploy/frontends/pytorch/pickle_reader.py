"""Read a pickle without unpickling: an interpreter that only builds plain values.

A pickle is a program. This interpreter has the opcodes that build None, numbers, strings, lists,
tuples and dicts. Every name in the program must be in a table from the caller, whose entries are
constructors of this project. Nothing is imported, no class is instantiated, no method of a value is
called; any other opcode or name is refused. Bytes are not read but become ``PickledBytes``, a place
in the file.

Nothing recurses, strings and integers are bounded. Every opcode is counted, and every value of a
list or tuple each time that a constructor takes it: a pickle may name one list again and again.
Source: the opcodes' definitions in CPython's ``pickletools``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from splitup.core import limits, tuning
from splitup.core.errors import InvalidModel

HIGHEST_PROTOCOL: Final = 5


@dataclass(frozen=True, slots=True)
class PickledBytes:
    """Bytes of the file, from ``start`` to ``end``."""

    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Return the length."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Constructor:
    """The replacement of a name that a pickle may call: takes the arguments, returns a value."""

    name: str
    make: Callable[[tuple[Any, ...]], Any]


@dataclass(frozen=True, slots=True)
class Names:
    """The names that a pickle may use, its persistent ids, and how values take their state."""

    table: Mapping[str, Any]  # "module.name" -> Constructor or plain value
    load: Callable[[Any], Any]  # of a persistent id
    set_state: Callable[[Any, Any], bool]  # False when the value can take none


class _Mark:
    pass


_MARK: Final = _Mark()


def refuse(file: str, problem: str) -> InvalidModel:
    """Return the error for a file that cannot be read."""
    return InvalidModel(f"state file '{file}' {problem}; export the weights as safetensors")


def read_pickle(file: BinaryIO, name: str, end: int, names: Names) -> Any:
    """Return the value of the pickle at the file's position, which is then behind it.

    ``name`` is the file's name in messages, ``end`` the offset at which reading must stop. Raises
    InvalidModel.
    """
    return _Machine(file, name, end, names).run()


class _Machine:
    def __init__(self, file: BinaryIO, name: str, end: int, names: Names) -> None:
        self.file, self.name, self.names = file, name, names
        self.left = end - file.tell()
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.operations = 0

    def run(self) -> Any:
        while self.operations < tuning.MAX_PICKLE_OPCODES:
            self.operations += 1
            opcode = self.take(1)
            if opcode == b".":
                value = self.pop()
                if self.stack or value is _MARK:
                    raise self.fail("leaves values behind at its end")
                return value
            handler = _HANDLERS.get(opcode)
            if handler is None:
                raise self.fail(f"uses the pickle opcode {opcode!r}, which no weights need")
            handler(self)
        raise self.fail(f"holds a pickle of more than {tuning.MAX_PICKLE_OPCODES} operations")

    def fail(self, problem: str) -> InvalidModel:
        return refuse(self.name, problem)

    def take(self, count: int) -> bytes:
        """Return the next bytes, few of them."""
        self.left -= count
        data = self.file.read(count) if self.left >= 0 else b""
        if len(data) != count:
            raise self.fail("ends in the middle of a pickle")
        return data

    def number(self, form: str) -> int:
        """Return a little-endian integer of struct's format."""
        return int(struct.unpack("<" + form, self.take(struct.calcsize(form)))[0])

    def pop(self) -> Any:
        if not self.stack:
            raise self.fail("holds a pickle that takes more values than it made")
        return self.stack.pop()

    def pop_value(self) -> Any:
        value = self.pop()
        if value is _MARK:
            raise self.fail("holds a pickle that takes a mark for a value")
        return value

    def pop_to_mark(self) -> list[Any]:
        for place in range(len(self.stack) - 1, -1, -1):
            if self.stack[place] is _MARK:
                values = self.stack[place + 1 :]
                del self.stack[place:]
                return values
        raise self.fail("holds a pickle that looks for a mark in vain")

    def top(self, kind: type) -> Any:
        if not self.stack or type(self.stack[-1]) is not kind:
            raise self.fail(f"holds a pickle that adds to something that is no {kind.__name__}")
        return self.stack[-1]

    # opcodes

    def protocol(self) -> None:
        version = self.number("B")
        if version > HIGHEST_PROTOCOL:
            raise self.fail(f"holds a pickle of protocol {version}")

    def push_text(self, form: str) -> None:
        count = self.number(form)
        if count > tuning.MAX_PICKLE_STRING_BYTES:
            raise self.fail(f"holds a string of {count} bytes")
        try:
            self.stack.append(self.take(count).decode())
        except UnicodeDecodeError:
            raise self.fail("holds a string that is no UTF-8") from None

    def push_blob(self, form: str) -> None:
        count = self.number(form)
        if count > self.left:
            raise self.fail(f"claims {count} bytes where {self.left} are left")
        start = self.file.tell()
        self.file.seek(count, 1)
        self.left -= count
        self.stack.append(PickledBytes(start, start + count))

    def push_long(self) -> None:
        data = self.take(self.number("B"))
        self.stack.append(int.from_bytes(data, "little", signed=True))

    def push_float(self) -> None:
        self.stack.append(struct.unpack(">d", self.take(8))[0])

    def push_tuple(self, count: int) -> None:
        values = [self.pop_value() for _ in range(count)]
        self.stack.append(tuple(reversed(values)))

    def append(self, values: list[Any]) -> None:
        self.top(list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.top(dict)
        if len(values) % 2:
            raise self.fail("holds a pickle that sets a key without a value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            # a deep tuple as key would recurse in its hash, a tensor has none
            if type(key) not in (str, int):
                raise self.fail("has a dict with a key that is neither string nor integer")
            target[key] = value

    def make_dict(self) -> None:
        values = self.pop_to_mark()
        self.stack.append({})
        self.set_items(values)

    def put(self, place: int) -> None:
        if not self.stack or self.stack[-1] is _MARK:
            raise self.fail("holds a pickle that remembers nothing")
        self.memo[place] = self.stack[-1]

    def get(self, place: int) -> None:
        if place not in self.memo:
            raise self.fail("holds a pickle that recalls what it never remembered")
        self.stack.append(self.memo[place])

    def read_line(self) -> str:
        line = self.file.readline(min(limits.MAX_NAME_CHARS, max(self.left, 0)))
        self.left -= len(line)
        if not line.endswith(b"\n"):
            raise self.fail("names something at too great length")
        return line[:-1].decode("ascii", "backslashreplace")

    def name_global(self) -> None:
        module = self.read_line()
        self.find(module, self.read_line())

    def name_stacked(self) -> None:
        name, module = self.pop_value(), self.pop_value()
        if type(name) is not str or type(module) is not str:
            raise self.fail("names something by values that are no strings")
        self.find(module, name)

    def find(self, module: str, name: str) -> None:
        full = f"{module}.{name}"
        if full not in self.names.table:
            raise self.fail(f"names {full!a:.122}, which is not on the list of what builds tensors")
        self.stack.append(self.names.table[full])

    def reduce(self) -> None:
        arguments, function = self.pop_value(), self.pop_value()
        if type(function) is not Constructor or type(arguments) is not tuple:
            raise self.fail("calls something that is no constructor of tensors")
        self.operations += sum(len(one) for one in arguments if isinstance(one, list | tuple))
        self.stack.append(function.make(arguments))

    def build(self) -> None:
        state, value = self.pop_value(), self.pop_value()
        if not self.names.set_state(value, state):
            raise self.fail("sets the state of something that has none")
        self.stack.append(value)

    def persistent(self) -> None:
        self.stack.append(self.names.load(self.pop_value()))


def _drop(value: object) -> None:
    pass


def _push(value: Any) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value)


_HANDLERS: Final[dict[bytes, Callable[[_Machine], None]]] = {
    b"\x80": _Machine.protocol,
    b"\x95": lambda m: _drop(m.number("Q")),  # a frame: only a hint for readers that buffer
    b"(": _push(_MARK),
    b"0": lambda m: _drop(m.pop()),
    b"N": _push(None),
    b"\x88": _push(True),
    b"\x89": _push(False),
    b"J": lambda m: m.stack.append(m.number("i")),
    b"K": lambda m: m.stack.append(m.number("B")),
    b"M": lambda m: m.stack.append(m.number("H")),
    b"\x8a": _Machine.push_long,
    b"G": _Machine.push_float,
    b"X": lambda m: m.push_text("I"),
    b"\x8c": lambda m: m.push_text("B"),
    b"\x8d": lambda m: m.push_text("Q"),
    b"B": lambda m: m.push_blob("I"),
    b"C": lambda m: m.push_blob("B"),
    b"\x8e": lambda m: m.push_blob("Q"),
    b"\x96": lambda m: m.push_blob("Q"),
    b"}": lambda m: m.stack.append({}),
    b"]": lambda m: m.stack.append([]),
    b")": _push(()),
    b"\x85": lambda m: m.push_tuple(1),
    b"\x86": lambda m: m.push_tuple(2),
    b"\x87": lambda m: m.push_tuple(3),
    b"t": lambda m: m.stack.append(tuple(m.pop_to_mark())),
    b"l": lambda m: m.stack.append(m.pop_to_mark()),
    b"d": _Machine.make_dict,
    b"a": lambda m: m.append([m.pop_value()]),
    b"e": lambda m: m.append(m.pop_to_mark()),
    b"s": lambda m: m.set_items([m.pop_value(), m.pop_value()][::-1]),
    b"u": lambda m: m.set_items(m.pop_to_mark()),
    b"q": lambda m: m.put(m.number("B")),
    b"r": lambda m: m.put(m.number("I")),
    b"\x94": lambda m: m.put(len(m.memo)),
    b"h": lambda m: m.get(m.number("B")),
    b"j": lambda m: m.get(m.number("I")),
    b"c": _Machine.name_global,
    b"\x93": _Machine.name_stacked,
    b"R": _Machine.reduce,
    b"b": _Machine.build,
    b"Q": _Machine.persistent,
}
