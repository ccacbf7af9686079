"""Reads protobuf messages of an untrusted file: every length is checked, nothing is copied."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from splitup.core.errors import InvalidModel

MAX_TEXT_BYTES: Final = 4096  # names of values are paths through modules; 300 is long
MAX_FIELDS: Final = 2**22  # of all messages together: 65,536 nodes with 64 fields each
MAX_LISTED: Final = 2**20  # numbers of a tensor that are not in raw form; each costs 100 bytes here
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # messages and terminals repeat names
Span = tuple[int, int]
Field = tuple[int, int, "int | Span"]  # number, wire type, and the number or the place of the bytes

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types


def take_last(values: Sequence[Any], default: Any) -> Any:
    """Return what a field that stands once means: its last value, or the default."""
    return values[-1] if values else default


class ProtobufReader:
    """The fields of the messages of one mapped file; raises InvalidModel for what is malformed."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data = path, data
        self.fields_left = MAX_FIELDS

    def fail(self, problem: str) -> InvalidModel:
        return InvalidModel(f"ONNX file '{self.path}' {problem}; export the model again")

    def expect(self, condition: bool, problem: str) -> None:
        if not condition:
            raise self.fail(problem)

    def varint(self, position: int, end: int) -> tuple[int, int]:
        """Return the number at ``position`` (64 bits, unsigned) and the position behind it."""
        result = 0
        for count in range(10):
            self.expect(position < end, "ends in the middle of a number")
            byte = self.data[position]
            position += 1
            result |= (byte & 0x7F) << (7 * count)
            if byte < 0x80:
                self.expect(result < 2**64, "has a number of more than 64 bits")
                return result, position
        raise self.fail("has a number of more than 64 bits")

    def fields(self, span: Span) -> Iterator[Field]:
        """Yield the fields of a message; values of fixed size as the place of their bytes."""
        position, end = span
        while position < end:
            self.fields_left -= 1
            self.expect(self.fields_left >= 0, f"has more than {MAX_FIELDS} fields")
            tag, position = self.varint(position, end)
            number, wire = tag >> 3, tag & 7
            self.expect(1 <= number < 2**29, "has a field without a number")
            if wire == VARINT:
                value, position = self.varint(position, end)
                yield number, wire, value
                continue
            if wire == BYTES:
                length, position = self.varint(position, end)
            elif wire in (FIXED64, FIXED32):
                length = 8 if wire == FIXED64 else 4
            else:
                raise self.fail(f"has a field of unknown kind {wire}")
            self.expect(length <= end - position, "claims more bytes than it has")
            yield number, wire, (position, position + length)
            position += length

    def gather(
        self,
        span: Span,
        readers: Mapping[int, Callable[[Field], Any]],
        most: Mapping[int, tuple[int, str]] = MappingProxyType({}),
    ) -> dict[int, list[Any]]:
        """Return what the reader of each field made of it, by the field's number; others are left.

        ``most`` says of how many there are at most, and what they are.
        """
        found: dict[int, list[Any]] = {number: [] for number in readers}
        for field in self.fields(span):
            if (read := readers.get(field[0])) is not None:
                count, what = most.get(field[0], (MAX_FIELDS, "fields"))
                self.expect(len(found[field[0]]) < count, f"has too many {what}")
                found[field[0]].append(read(field))
        return found

    def span(self, field: Field) -> Span:
        number, wire, value = field
        self.expect(wire == BYTES, f"has a number where field {number} holds bytes")
        assert isinstance(value, tuple)  # as the wire type says
        return value

    def integer(self, field: Field) -> int:
        """Return a signed 64-bit integer."""
        number, wire, value = field
        self.expect(wire == VARINT, f"has no integer in field {number}")
        assert isinstance(value, int)  # as the wire type says
        return value - 2**64 if value >= 2**63 else value

    def integers(self, field: Field) -> list[int]:
        """Return one entry of a repeated integer, or many when they are packed."""
        if field[1] == VARINT:
            return [self.integer(field)]
        position, end = self.span(field)
        self.expect(end - position <= 10 * MAX_LISTED, "lists too many numbers in one field")
        result = []
        while position < end:
            value, position = self.varint(position, end)
            result.append(value - 2**64 if value >= 2**63 else value)
        return result

    def floats(self, field: Field, wire: int, code: str) -> list[float]:
        """Return one entry of a repeated float or double, or many when they are packed."""
        size = struct.calcsize(code)
        self.expect(field[1] in (BYTES, wire), f"has no float in field {field[0]}")
        assert isinstance(field[2], tuple)  # as the wire type says
        start, end = field[2]
        self.expect((end - start) % size == 0, "has half a float")
        self.expect((end - start) // size <= MAX_LISTED, "lists too many numbers in one field")
        return [item[0] for item in struct.iter_unpack(f"<{code}", self.data[start:end])]

    def text(self, field: Field) -> str:
        start, end = self.span(field)
        self.expect(end - start <= MAX_TEXT_BYTES, f"has a text of {end - start} bytes")
        try:
            text = self.data[start:end].decode()
        except UnicodeDecodeError:
            raise self.fail("has a text that is no UTF-8") from None
        self.expect(not _CONTROL.search(text), "has a text with control characters")
        return text
