"""Read a GGUF file's header: its metadata, and where its tensors lie.

The file may come from anybody. Every count and length is checked against the bytes that are left
before it is used, keys and names are unique, and the tensors fill the file to its end, apart from
padding, without overlap. Tensor data are not read here.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3 (and 2, which only
lacks big-endian files).
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from splitup.core import limits
from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.own_files import check_own
from splitup_deploy.frontends.weight_sources import FileSlice

Scalar = int | float | bool | str
Metadata = dict[str, Scalar | list[Scalar]]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a tensor's elements are stored: the elements and the bytes of a block."""

    name: str
    elements: int
    nbytes: int


FORMATS: Final[dict[int, BlockFormat]] = {
    0: BlockFormat("F32", 1, 4),
    1: BlockFormat("F16", 1, 2),
    2: BlockFormat("Q4_0", 32, 18),
    3: BlockFormat("Q4_1", 32, 20),
    6: BlockFormat("Q5_0", 32, 22),
    7: BlockFormat("Q5_1", 32, 24),
    8: BlockFormat("Q8_0", 32, 34),
    10: BlockFormat("Q2_K", 256, 84),
    11: BlockFormat("Q3_K", 256, 110),
    12: BlockFormat("Q4_K", 256, 144),
    13: BlockFormat("Q5_K", 256, 176),
    14: BlockFormat("Q6_K", 256, 210),
    20: BlockFormat("IQ4_NL", 32, 18),
    23: BlockFormat("IQ4_XS", 256, 136),
    30: BlockFormat("BF16", 1, 2),
    39: BlockFormat("MXFP4", 32, 17),
}
_UNSUPPORTED: Final = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
}

MAX_KEYS: Final = 4_096  # real files have 50
MAX_TEXT_BYTES: Final = 2**20  # a chat template; the longest seen has 20 KB
MAX_ARRAY: Final = 2**21  # all arrays; those of the largest tokenizers (Gemma 4) have 1.3 million
MAX_HEADER_BYTES: Final = limits.MAX_TOKENIZER_BYTES  # nearly all of it is the tokenizer
MAX_ALIGNMENT: Final = 2**16  # 32 is usual, a page at most useful

_TEXT, _ARRAY = 8, 9
_SCALARS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in the file. ``shape`` is in numpy's order: the last axis is contiguous."""

    name: str
    format: BlockFormat
    shape: tuple[int, ...]
    path: Path
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a GGUF file; of several parts it is the first one's, with all tensors."""

    path: Path
    metadata: Metadata
    tensors: dict[str, GgufTensor]

    def read_floats(self, name: str, count: int) -> tuple[float, ...]:
        """Return the numbers of a float32 tensor, which has so many; raises InvalidModel."""
        self.get_shape(name)
        tensor = self.tensors[name]
        if tensor.format.name != "F32" or tensor.shape != (count,):
            raise InvalidModel(f"'{self.path}' has {name} of another shape than its heads")
        data = b"".join(FileSlice(tensor.path, tensor.start, tensor.end).read())
        return struct.unpack(f"<{count}f", data)

    def expect(self, keys: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> None:
        """Raise InvalidModel unless each key is absent or exactly this."""
        for key, value in wanted.items():
            if keys.get(key, value) != value:
                raise InvalidModel(
                    f"'{self.path}' has {prefix}{key} = {keys[key]!r:.40}; supported: {value}"
                )

    def get_shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape; raises InvalidModel when it is absent."""
        if name not in self.tensors:
            raise InvalidModel(f"'{self.path}' has no tensor '{name}'")
        return self.tensors[name].shape


def read_gguf(path: Path) -> GgufFile:
    """Read a file's header; raises InvalidModel naming the file and what is wrong with it."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise InvalidModel(
                    f"GGUF file '{path}' is shorter than its header; fetch or convert it again"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).read()
    except OSError as error:
        raise InvalidModel(f"cannot read GGUF file '{path}': {error.strerror}") from None


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data = path, data
        self.position, self.values_left = 0, MAX_ARRAY
        self.end = min(len(data), MAX_HEADER_BYTES)

    def expect(self, condition: bool, problem: str) -> None:
        if not condition:
            raise InvalidModel(f"GGUF file '{self.path}' {problem}; fetch or convert it again")

    def take(self, length: int) -> bytes:
        self.expect(
            length <= self.end - self.position,
            f"ends within its header, or has one of more than {MAX_HEADER_BYTES} bytes",
        )
        self.position += length
        return self.data[self.position - length : self.position]

    def number(self, code: str) -> int:
        result: int = struct.unpack(code, self.take(struct.calcsize(code)))[0]
        return result

    def text(self) -> str:
        """Return a text; incomplete characters, which tokenizers may hold, are replaced."""
        length = self.number("<Q")
        self.expect(length <= MAX_TEXT_BYTES, f"has a text of {length} bytes")
        return self.take(length).decode(errors="replace")

    def name(self) -> str:
        """Return a name that is safe to print in messages."""
        length = self.number("<Q")
        self.expect(length <= limits.MAX_NAME_CHARS, f"has a name of {length} bytes")
        text = self.take(length).decode(errors="replace")
        is_plain = text.isascii() and text.isprintable() and " " not in text
        self.expect(is_plain, "has a name that is no plain text")
        return text

    def value(self) -> Scalar | list[Scalar]:
        kind = self.number("<I")
        if kind != _ARRAY:
            return self.scalar(kind)
        kind, count = self.number("<I"), self.number("<Q")
        self.expect(
            count <= self.values_left, f"has arrays of more than {MAX_ARRAY} values, one of {count}"
        )
        self.values_left -= count
        if kind in _SCALARS:
            code = _SCALARS[kind]
            data = self.take(count * struct.calcsize(code))
            self.expect(kind != 7 or set(data) <= {0, 1}, "has a bool that is neither 0 nor 1")
            return [item[0] for item in struct.iter_unpack(code, data)]
        self.expect(kind == _TEXT, f"has an array of values of unknown kind {kind}")
        return [*self.texts(count)]

    def texts(self, count: int) -> Iterator[str]:
        """Yield texts as ``text`` does; tokenizers have a million, so calls would take long."""
        data, end, place = self.data, self.end, self.position
        for _ in range(count):
            first = place + 8
            place = first + int.from_bytes(data[place:first], "little")
            if place > end or place - first > MAX_TEXT_BYTES:
                self.position = first - 8
                self.text()  # says what is wrong
            yield data[first:place].decode(errors="replace")
        self.position = place

    def scalar(self, kind: int) -> Scalar:
        if kind == _TEXT:
            return self.text()
        self.expect(kind in _SCALARS, f"has a value of unknown kind {kind}")
        data = self.take(struct.calcsize(_SCALARS[kind]))
        self.expect(kind != 7 or data in (b"\0", b"\1"), "has a bool that is neither 0 nor 1")
        result: Scalar = struct.unpack(_SCALARS[kind], data)[0]
        return result

    def read(self) -> GgufFile:
        self.expect(self.take(4) == b"GGUF", "does not start as one")
        version = self.number("<I")
        self.expect(version in (2, 3), f"has version {version}, not 2 or 3 in little-endian order")
        tensor_count, key_count = self.number("<Q"), self.number("<Q")
        self.expect(tensor_count <= limits.MAX_WEIGHTS, f"claims {tensor_count} tensors")
        self.expect(key_count <= MAX_KEYS, f"claims {key_count} metadata keys")
        metadata: Metadata = {}
        for _ in range(key_count):
            key = self.name()
            self.expect(key not in metadata, f"has the key '{key:.80}' twice")
            metadata[key] = self.value()
        rows = [self.tensor_row() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        self.expect(
            type(alignment) is int
            and 8 <= alignment <= MAX_ALIGNMENT
            and not alignment & (alignment - 1),
            f"has an alignment of {alignment!r:.40}",
        )
        assert isinstance(alignment, int)  # for the type checker
        start = -(-self.position // alignment) * alignment
        return GgufFile(self.path, metadata, self.place(rows, start, alignment))

    def tensor_row(self) -> tuple[str, BlockFormat, tuple[int, ...], int]:
        """Return name, format, shape and offset of one tensor."""
        name = self.name()
        rank = self.number("<I")
        self.expect(1 <= rank <= 4, f"has a tensor '{name:.80}' of {rank} axes")
        *sizes, kind, offset = struct.unpack(f"<{rank}QIQ", self.take(8 * rank + 12))
        if kind not in FORMATS:
            raise InvalidModel(
                f"tensor '{name:.80}' of '{self.path}' is stored as "
                f"{_UNSUPPORTED.get(kind, f'number {kind}')}, which is not supported; these are: "
                + ", ".join(item.name for item in FORMATS.values())
            )
        form = FORMATS[kind]
        self.expect(
            all(1 <= size <= limits.MAX_DIMENSION for size in sizes)
            and math.prod(sizes) <= limits.MAX_VALUE_BYTES
            and sizes[0] % form.elements == 0,
            f"has a tensor '{name:.80}' of impossible shape",
        )
        return name, form, tuple(reversed(sizes)), offset

    def place(
        self,
        rows: list[tuple[str, BlockFormat, tuple[int, ...], int]],
        start: int,
        alignment: int,
    ) -> dict[str, GgufTensor]:
        """Check that the tensors fill the file and return them by name."""
        tensors: dict[str, GgufTensor] = {}
        position = start if rows else self.position  # nothing to align
        for name, form, shape, offset in sorted(rows, key=lambda row: row[3]):
            self.expect(name not in tensors, f"has two tensors '{name:.80}'")
            position = -(-position // alignment) * alignment
            self.expect(start + offset == position, f"has a gap or overlap before '{name:.80}'")
            nbytes = math.prod(shape) // form.elements * form.nbytes
            self.expect(
                position + nbytes <= len(self.data),
                f"has {len(self.data)} bytes and ends before '{name:.80}' does",
            )
            tensors[name] = GgufTensor(name, form, shape, self.path, position, position + nbytes)
            position += nbytes
        self.expect(
            position <= len(self.data) <= -(-position // alignment) * alignment,
            f"has {len(self.data)} bytes; its header describes {position}",
        )
        return tensors


# ---- models in several files -------------------------------------------------------------------
# NAME-00001-of-00003.gguf and so on. The first holds the metadata, and often no tensor; the others
# hold tensors, and of metadata only which part they are. Source: llama.cpp's gguf-split and the
# ``gguf`` package, which write them.

_PART_NAME: Final = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
_NUMBER, _COUNT, _PART_TENSORS = "split.no", "split.count", "split.tensors.count"


def read_gguf_parts(path: Path) -> GgufFile:
    """Read the header of a file, and of the parts that follow if it is the first of several.

    Raises InvalidModel naming the file and what is wrong with it.
    """
    first = read_gguf(path)
    count = first.metadata.get(_COUNT, 1)
    if type(count) is not int or count in (0, 1):
        return first
    match = _PART_NAME.fullmatch(path.name)
    if match is None or type(count) is not int or int(match[3]) != count:
        raise InvalidModel(
            f"'{path}' is one of {count!r:.40} parts: it must be called as llama-gguf-split calls "
            "them, NAME-00001-of-… with their number"
        )
    paths = [path.with_name(f"{match[1]}-{n:05}-of-{match[3]}.gguf") for n in range(1, count + 1)]
    if path != paths[0]:
        raise InvalidModel(f"'{path}' is a later part of a model: give the first, '{paths[0]}'")
    tensors = dict(first.tensors)
    _check_metadata(first, 0, first.metadata)
    for number, other in enumerate(paths[1:], 1):
        part = read_gguf(check_own(other))
        _check_metadata(part, number, first.metadata)
        if twice := tensors.keys() & part.tensors.keys():
            raise InvalidModel(f"'{other}' has the tensor '{min(twice):.80}' of a part before it")
        tensors |= part.tensors
        if len(tensors) > limits.MAX_WEIGHTS:
            raise InvalidModel(
                f"'{path}' and its parts have more than {limits.MAX_WEIGHTS} tensors"
            )
    if first.metadata.get(_PART_TENSORS, len(tensors)) != len(tensors):
        raise InvalidModel(
            f"'{path}' and its parts have {len(tensors)} tensors, not "
            f"{first.metadata[_PART_TENSORS]!r:.40}: fetch them again"
        )
    return replace(first, tensors=tensors)


def _check_metadata(part: GgufFile, number: int, first: Metadata) -> None:
    """Raise InvalidModel unless a part has its own number, and what the first part says."""
    wanted = {**first, _NUMBER: number}
    for key, value in {_NUMBER: None, **part.metadata}.items():
        if wanted.get(key) != value:
            raise InvalidModel(
                f"'{part.path}' has {key:.80} = {value!r:.40}; as part {number + 1} of its model "
                f"it would have {wanted.get(key)!r:.40}"
            )
