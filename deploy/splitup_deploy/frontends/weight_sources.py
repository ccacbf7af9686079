"""The sources of weights' bytes, read in chunks so that memory does not grow with the model."""

from __future__ import annotations

import hashlib
import math
import os
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import accumulate, product
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import numpy as np

from splitup.core.errors import InvalidModel
from splitup.core.tensors import ITEM_BYTES, TensorSpec, encode_safetensors_header
from splitup.graph.ir import Weight
from splitup_deploy.frontends.finite_check import FiniteCheck

CHUNK_BYTES: Final = 4 * 1024 * 1024  # large enough for full disk speed, small beside any model


class HashProgress(Protocol):
    """Receives the progress of hashing: every byte is hashed as a weight and again in its task."""

    def start(self, what: str, total_bytes: int) -> None:
        """Begin with so many bytes of ``what``."""
        ...

    def advance(self, hashed_bytes: int) -> None:
        """Count bytes that were hashed just now."""
        ...


# The progress display is far above the code that hashes; a context variable connects them without
# passing it through every front end.
_progress: ContextVar[HashProgress | None] = ContextVar("progress", default=None)


@contextmanager
def watch_hashing(progress: HashProgress) -> Iterator[None]:
    """Report all hashing within the block to ``progress``."""
    token = _progress.set(progress)
    try:
        yield
    finally:
        _progress.reset(token)


def start_hashing(what: str, total_bytes: int) -> None:
    """Report that ``total_bytes`` of ``what`` will be hashed."""
    if (progress := _progress.get()) is not None:
        progress.start(what, total_bytes)


def compute_digest_of(chunks: Iterator[bytes]) -> tuple[str, int]:
    """Return the SHA-256 and the number of all bytes, and report the progress."""
    digest, length, progress = hashlib.sha256(), 0, _progress.get()
    for chunk in chunks:
        digest.update(chunk)
        length += len(chunk)
        if progress is not None:
            progress.advance(len(chunk))
    return digest.hexdigest(), length


class FilePart(Protocol):
    """Bytes that can be read as often as needed: a slice of a file, or computed ones."""

    def read(self) -> Iterator[bytes]:
        """Yield the bytes in chunks."""
        ...


class Table:
    """Bytes computed from a few numbers: those of two tables with equal fields are equal."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class FileSlice:
    """Bytes ``start`` to ``end`` of a file."""

    path: Path
    start: int
    end: int

    def read(self) -> Iterator[bytes]:
        """Yield the bytes in chunks; raises InvalidModel when the file has become shorter."""
        with self._open() as file:
            file.seek(self.start)
            for place in range(self.start, self.end, CHUNK_BYTES):
                size = min(CHUNK_BYTES, self.end - place)
                yield self._check(file.read(size), size)

    def read_columns(self, row_bytes: int, first: int, size: int) -> Iterator[bytes]:
        """Yield ``size`` bytes from byte ``first`` on of each row, in chunks; reads only those.

        Raises InvalidModel when the file has become shorter.
        """
        places = range(self.start + first, self.end, row_bytes)
        count = max(1, CHUNK_BYTES // size)
        with self._open() as file:
            for start in range(0, len(places), count):
                group = places[start : start + count]
                chunk = b"".join(os.pread(file.fileno(), size, place) for place in group)
                yield self._check(chunk, len(group) * size)

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        try:
            with self.path.open("rb") as file:
                yield file
        except OSError as error:
            raise InvalidModel(f"cannot read '{self.path}': {error.strerror}") from None

    def _check(self, data: bytes, size: int) -> bytes:
        if len(data) != size:
            raise InvalidModel(
                f"weights file '{self.path}' ended early: it changed while it was read"
            )
        return data


@dataclass(frozen=True, slots=True)
class Absent:
    """The bytes of a weight of which only the shape is known, as in a dry run without weights."""

    def read(self) -> Iterator[bytes]:
        """Raise InvalidModel: there is nothing to read."""
        raise InvalidModel(
            "the model's weights are not here, so it can be inspected but not run or registered: "
            "put its safetensors files beside config.json"
        )


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A weight and its bytes: the concatenation of ``parts`` (along the first axis).

    With an ``encoding`` it is uint8 [rows, blocks, bytes per block] and stands for float32 [rows,
    elements]; see ``splitup_deploy.frontends.decoder.quantised``. The encoding "bfloat16" is uint16
    that holds such numbers. ``names`` are those of the parts in the file, if not the weight's own.
    ``sizes`` are the bytes of each part, if there are several. One that ``is_piece`` is a part of
    another, which has all of its numbers.
    """

    spec: TensorSpec
    parts: tuple[FilePart | bytes, ...]
    encoding: str = ""
    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    is_piece: bool = False

    def read(self) -> Iterator[bytes]:
        """Yield the little-endian bytes in chunks."""
        for part in self.parts:
            yield from _read_part(part)

    @property
    def is_absent(self) -> bool:
        """Say whether only the shape is known."""
        return any(isinstance(part, Absent) for part in self.parts)

    def describe_weight(self) -> Weight:
        """Return the weight without reading it: the digest is of its name, dtype and shape.

        That of a table is of its fields, so that equal tables are seen to be equal.
        """
        is_table = all(isinstance(part, Table) for part in self.parts)
        what = repr(self.parts) if is_table else self.spec.name
        text = f"absent {what} {self.spec.dtype} {self.spec.shape}"
        digest = hashlib.sha256(text.encode()).hexdigest()
        return Weight(self.spec.name, self.spec.dtype, self.spec.shape, digest)

    def examine_weight(self) -> tuple[Weight, list[str]]:
        """Read the bytes once; return the weight with its digest, and which tensors are not finite.

        These are names of tensors in the file that hold NaN or infinity; a piece names none.
        """
        is_plain = self.encoding in ("", "bfloat16")
        unit = 0 if is_plain else self.spec.shape[-1]
        checks = [FiniteCheck(self.encoding or self.spec.dtype, unit) for _ in self.parts]
        watched = zip(checks, self.parts, strict=True)
        chunks = (chunk for check, part in watched for chunk in check.watch(_read_part(part)))
        digest, _ = compute_digest_of(chunks)
        names = self.names or (self.spec.name,) * len(self.parts)
        pairs = () if self.is_piece else zip(names, checks, strict=True)
        found = [name for name, check in pairs if not check.is_finite]
        weight = Weight(self.spec.name, self.spec.dtype, self.spec.shape, digest)
        return weight, list(dict.fromkeys(found))


def join_sources(spec: TensorSpec, sources: Sequence[WeightSource]) -> WeightSource:
    """Return the concatenation of weights that are stored in one way."""
    parts = tuple(part for source in sources for part in source.parts)
    names = tuple(name for s in sources for name in s.names or (s.spec.name,) * len(s.parts))
    sizes = tuple(size for s in sources for size in s.sizes or (s.spec.nbytes,))
    return WeightSource(spec, parts, sources[0].encoding, names, sizes)


def _read_part(part: FilePart | bytes) -> Iterable[bytes]:
    return (part,) if isinstance(part, bytes) else part.read()


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Bytes ``start`` to ``end`` of computed ones, which are computed from their beginning."""

    whole: FilePart
    start: int
    end: int

    def read(self) -> Iterator[bytes]:
        """Yield the bytes in chunks; raises InvalidModel when there are fewer."""
        place = 0
        for chunk in self.whole.read():
            if part := chunk[max(self.start - place, 0) : max(self.end - place, 0)]:
                yield part
            place += len(chunk)
            if place >= self.end:
                return
        raise InvalidModel(f"a weight has {place} bytes, and its shape wants {self.end}")


@dataclass(frozen=True, slots=True)
class Selection:
    """A box, an (offset, size) for each axis but the first, of a weight.

    Of a matrix in one file only the box is read; else all of the weight.
    """

    source: WeightSource
    box: tuple[tuple[int, int], ...]

    def read(self) -> Iterator[bytes]:
        """Yield the box's bytes in C order; holds one chunk and one row of the first axis."""
        shape, width = self.source.spec.shape[1:], ITEM_BYTES[self.source.spec.dtype]
        row_bytes, pending = math.prod(shape) * width, b""
        if len(shape) == len(self.source.parts) == 1:
            part, (first, count) = self.source.parts[0], self.box[0]
            if isinstance(part, FileSlice):
                yield from part.read_columns(row_bytes, first * width, count * width)
                return
        inner = (slice(None), *(slice(start, start + size) for start, size in self.box))
        for chunk in self.source.read():
            pending += chunk
            count = len(pending) // row_bytes
            rows = np.frombuffer(pending[: count * row_bytes], f"V{width}")
            if count:
                yield rows.reshape(count, *shape)[inner].tobytes()
            pending = pending[count * row_bytes :]


def select(source: WeightSource, name: str, box: tuple[tuple[int, int], ...]) -> WeightSource:
    """Return the part of a weight that lies in a box, called ``name``.

    Where the box is not more runs of bytes than the weight has parts, only these are read: of a
    bank of experts those in the box, and of each its rows.
    """
    spec = TensorSpec(name, source.spec.dtype, tuple(size for _, size in box))
    if source.is_absent:
        return WeightSource(spec, (Absent(),), is_piece=True)
    shape = source.spec.shape
    divided = [axis for axis, size in enumerate(shape) if box[axis] != (0, size)]
    last = max(divided, default=0)
    if math.prod(size for _, size in box[:last]) > len(source.parts):
        rows = select(source, name, (box[0], *((0, size) for size in shape[1:])))
        return WeightSource(spec, (Selection(rows, box[1:]),), is_piece=True)
    unit = source.spec.nbytes // math.prod(shape[: last + 1])
    offsets = [0, *accumulate(source.sizes or (source.spec.nbytes,))]
    parts: list[tuple[FilePart | bytes, int]] = []
    for place in product(*(range(start, start + size) for start, size in box[:last])):
        row = 0
        for index, size in zip(place, shape, strict=False):
            row = row * size + index
        start = (row * shape[last] + box[last][0]) * unit
        parts += _cut(source.parts, offsets, start, start + box[last][1] * unit)
    chosen, sizes = zip(*parts, strict=True)
    return WeightSource(spec, chosen, sizes=sizes, is_piece=True)


def select_matrix(
    source: WeightSource, name: str, rows: tuple[int, int], columns: tuple[int, int], width: int
) -> WeightSource:
    """Return a part of a matrix of ``width`` columns, each (start, size), called ``name``.

    Of a quantised one these must be whole blocks; raises InvalidModel.
    """
    if not source.encoding:
        return select(source, name, (rows, columns))
    count, nbytes = source.spec.shape[1:]
    block = width // count
    if any(number % block for number in columns):
        raise InvalidModel(
            f"'{source.spec.name}' is stored in blocks of {block} columns, and {columns[1]} from "
            f"{columns[0]} on are needed: convert the model again, with this weight as F16"
        )
    box = (rows, (columns[0] // block, columns[1] // block), (0, nbytes))
    return replace(select(source, name, box), encoding=source.encoding)


def _cut(
    parts: Sequence[FilePart | bytes], offsets: Sequence[int], start: int, end: int
) -> Iterator[tuple[FilePart | bytes, int]]:
    """Yield the parts of bytes ``start`` to ``end``, and their sizes."""
    for place in range(bisect_right(offsets, start) - 1, bisect_left(offsets, end)):
        low, high = max(start - offsets[place], 0), min(end, offsets[place + 1]) - offsets[place]
        part: FilePart | bytes = parts[place]
        if isinstance(part, bytes):
            part = part[low:high]
        elif isinstance(part, FileSlice):
            part = FileSlice(part.path, part.start + low, part.start + high)
        elif (low, high) != (0, offsets[place + 1] - offsets[place]):
            part = Excerpt(part, low, high)
        yield part, high - low


@dataclass(frozen=True, slots=True)
class Turned:
    """The transpose of a matrix, of which only ``size`` columns from ``start`` are taken."""

    source: WeightSource
    start: int
    size: int

    def read(self) -> Iterator[bytes]:
        """Yield the bytes in C order; holds the matrix."""
        shape, width = self.source.spec.shape, ITEM_BYTES[self.source.spec.dtype]
        matrix = np.frombuffer(b"".join(self.source.read()), f"V{width}").reshape(shape)
        yield matrix[:, self.start : self.start + self.size].T.tobytes()


def read_safetensors(sources: Sequence[WeightSource]) -> Iterator[bytes]:
    """Yield a safetensors file with these weights in this order."""
    yield encode_safetensors_header([source.spec for source in sources])
    for source in sources:
        yield from source.read()


def describe_not_finite(names: list[str]) -> tuple[str, ...]:
    """Return what to say of weights with such numbers."""
    if not names:
        return ()
    return (f"NaN or infinity in weight {name_some(names)}: the model's file may be broken",)


class StoredWeights(ABC):
    """What the weights of all kinds of sources have in common (``row_operations.Weights``)."""

    @abstractmethod
    def get(self, name: str, *shape: int) -> WeightSource:
        """Return one weight; raises InvalidModel when it is absent or has another shape."""

    def join(self, name: str, parts: list[tuple[str, int]], *shape: int) -> WeightSource:
        """Return the weights (name, rows) concatenated along the rows, called ``name``."""
        sources = [self.get(part, rows, *shape[1:]) for part, rows in parts]
        first = sources[0].spec
        return join_sources(TensorSpec(name, first.dtype, (shape[0], *first.shape[1:])), sources)


def describe_left_out(
    names: Iterable[str], others: Mapping[str, str], what: str, problem: str
) -> tuple[str, ...]:
    """Return what to say of weights that were left out.

    ``others`` says for prefixes of names what such weights are. Raises InvalidModel for any other:
    it would change the results.
    """
    left: dict[str, list[str]] = {}
    for name in names:
        why = next((others[prefix] for prefix in others if name.startswith(prefix)), "")
        left.setdefault(why, []).append(name)
    if unknown := left.pop("", []):
        raise InvalidModel(f"{what} {name_some(unknown)} for which {problem}")
    return tuple(f"left out: {name_some(left[why])}, {why}" for why in sorted(left))


def name_some(names: list[str]) -> str:
    """Return the first of some names, and how many others there are."""
    others = {1: "", 2: " and 1 other"}.get(len(names), f" and {len(names) - 1} others")
    return f"{names[0]!r:.120}{others}"
