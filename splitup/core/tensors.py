"""Tensors as bytes: names of dtypes, conversion to and from numpy, strict safetensors files.

A tensor's bytes are little-endian, in C order, without padding.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from splitup.core import limits
from splitup.core.codec import check_structure, load_unique
from splitup.core.errors import InvalidInput, InvalidModel

if TYPE_CHECKING:  # loaded by those who compute: most programs only pass tensors on
    import numpy as np

ITEM_BYTES: Final[dict[str, int]] = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
}
SAFETENSORS_DTYPES: Final[dict[str, str]] = {
    "BOOL": "bool",
    "I8": "int8",
    "U8": "uint8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
}
# Numbers that files may hold and nothing computes with.
_STORED_BYTES: Final = {**ITEM_BYTES, "float8_e4m3fn": 1}

_LENGTHS: Final = 1024  # cached digests of zeros: a port has one length per number of rows


@dataclass(frozen=True)  # without slots, so that its sizes are computed once
class TensorSpec:
    """Name, dtype and shape of a tensor.

    ``rows`` is "" for a tensor of exactly this shape. Otherwise it is the symbol of the leading
    dimension: 1 to ``shape[0]`` rows, the same number in all tensors of one step and symbol.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: str = ""

    @functools.cached_property
    def nbytes(self) -> int:
        """Size in bytes, the largest one where rows vary."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of one row; of the whole tensor where rows do not vary."""
        shape = self.shape[1:] if self.rows else self.shape
        return math.prod(shape) * ITEM_BYTES[self.dtype]

    @functools.cached_property
    def sizes(self) -> range:
        """How many bytes a tensor may have: one number unless rows vary."""
        if not self.rows:
            return range(self.nbytes, self.nbytes + 1)
        step = self.row_bytes
        return range(step, self.nbytes + 1, step) if step else range(0)

    def accepts(self, length: int) -> bool:
        """Return whether a tensor of ``length`` bytes fits."""
        return length in self.sizes

    def get_shape(self, length: int) -> tuple[int, ...]:
        """Return the shape of a tensor of ``length`` bytes, which fits."""
        return (length // self.row_bytes, *self.shape[1:]) if self.rows else self.shape

    def __str__(self) -> str:
        sizes = [str(size) for size in self.shape]
        if self.rows and sizes:  # an unchecked port may have rows and no shape
            sizes[0] = f"{self.rows} <= {sizes[0]}"
        return f"{self.dtype}[{', '.join(sizes)}]"


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """A tensor in a safetensors file; ``start`` and ``end`` are offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@functools.lru_cache(_LENGTHS)
def compute_zero_digest(length_bytes: int) -> bytes:
    """Return the SHA-256 of this many zero bytes."""
    return hashlib.sha256(bytes(length_bytes)).digest()


NO_STEPS: Final = bytes(32)  # the digest of a port before its first step


def extend_steps(before: bytes, digest: bytes) -> bytes:
    """Return a port's digest after a step: that before the step, and the SHA-256 of its tensor."""
    return hashlib.sha256(before + digest).digest()


class StepsDigest:
    """A hash chain over the SHA-256 of every step's tensor: a party's commitment to a port.

    Frames and logs carry the digests of the steps already, so no tensor has to be read again. Steps
    are separated: no bytes can be moved from one step to the next without changing the digest. Two
    neighbouring values of the chain prove a step without the others.

    The values after every ``limits.INTERIM_STEPS`` steps are kept until ``forget``, as an interim
    end comes when more steps have been added; and those of the last ``limits.UNPAID_STEPS``, as
    more steps than the client asked for may come from others.
    """

    def __init__(self) -> None:
        self.value = NO_STEPS
        self.steps = 0
        self._kept: dict[int, bytes] = {}  # by number of steps

    def add(self, digest: bytes) -> None:
        """Add the next step by the SHA-256 of its tensor."""
        self.value = extend_steps(self.value, digest)
        self.steps += 1
        self._kept[self.steps] = self.value
        old = self.steps - limits.UNPAID_STEPS - 1
        if old % limits.INTERIM_STEPS:
            self._kept.pop(old, None)

    def find(self, steps: int) -> str | None:
        """Return the digest after so many steps, if it is the latest or kept."""
        value = self.value if steps == self.steps else self._kept.get(steps)
        return None if value is None else value.hex()

    def forget(self, steps: int) -> None:
        """Drop the kept values of fewer steps."""
        for known in [known for known in self._kept if known < steps]:
            del self._kept[known]

    def add_tensor(self, data: bytes | memoryview) -> None:
        """Add the next step."""
        self.add(hashlib.sha256(data).digest())

    def hexdigest(self) -> str:
        """Return the digest so far, 64 hexadecimal digits."""
        return self.value.hex()


def is_zero(digest: bytes, length_bytes: int) -> bool:
    """Return whether a tensor of this SHA-256 that fits a frame holds nothing but zero bytes."""
    return length_bytes <= limits.INLINE_TENSOR_BYTES and digest == compute_zero_digest(
        length_bytes
    )


def holds_zeros(data: bytes | memoryview) -> bool:
    """Return whether a tensor, which is not empty, holds nothing but zero bytes."""
    import numpy as np

    return not np.frombuffer(data, np.uint8).any()


@functools.cache
def get_numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return numpy's little-endian dtype; bfloat16, which numpy lacks, gives its raw uint16."""
    import numpy as np

    name = "uint16" if dtype == "bfloat16" else dtype
    if name not in ITEM_BYTES:
        raise InvalidInput(f"unknown dtype '{dtype}'; use one of {', '.join(sorted(ITEM_BYTES))}")
    return np.dtype(name).newbyteorder("<")


def check_array(spec: TensorSpec, array: np.ndarray[Any, Any]) -> None:
    """Raise InvalidInput unless ``array`` has the dtype of ``spec`` and a shape it accepts."""
    wanted = get_numpy_dtype(spec.dtype)
    if array.dtype != wanted:
        raise InvalidInput(
            f"input '{spec.name}' has dtype {array.dtype}; the model wants {spec.dtype}: "
            f"convert it with .astype('{wanted.name}')"
        )
    shape = array.shape
    if spec.rows and shape and 1 <= shape[0] <= spec.shape[0]:
        shape = (spec.shape[0], *shape[1:])
    if shape != spec.shape:
        raise InvalidInput(
            f"input '{spec.name}' has shape {list(array.shape)}; the model wants {spec}"
        )


def array_to_bytes(spec: TensorSpec, array: np.ndarray[Any, Any]) -> bytes:
    """Return the bytes of an array that matches ``spec``; raises InvalidInput otherwise."""
    check_array(spec, array)
    return array.astype(get_numpy_dtype(spec.dtype), copy=False).tobytes(order="C")


def bytes_to_array(spec: TensorSpec, data: bytes | memoryview) -> np.ndarray[Any, Any]:
    """Return a writable array of ``spec`` from its bytes; raises InvalidInput on another length."""
    if len(data) not in spec.sizes:
        raise InvalidInput(
            f"tensor '{spec.name}' came with {len(data)} bytes; {spec} has {spec.nbytes}"
        )
    import numpy as np

    shape = spec.get_shape(len(data))
    return np.frombuffer(data, get_numpy_dtype(spec.dtype)).reshape(shape).copy()


def check_inputs(
    specs: Sequence[TensorSpec], arrays: Mapping[str, np.ndarray[Any, Any]]
) -> list[bytes]:
    """Return the bytes of every input in the order of ``specs``.

    Raises InvalidInput for a missing or an unknown name, for a wrong dtype or shape, and where
    inputs of one symbol disagree on their rows.
    """
    data = []
    for spec in specs:
        if spec.name not in arrays:
            raise _describe_names(specs, arrays)
        data.append(array_to_bytes(spec, arrays[spec.name]))
    if len(arrays) > len(specs):
        raise _describe_names(specs, arrays)
    rows: dict[str, tuple[str, int]] = {}
    for spec in specs:
        if spec.rows:
            count = arrays[spec.name].shape[0]
            other, expected = rows.setdefault(spec.rows, (spec.name, count))
            if count != expected:
                raise InvalidInput(
                    f"input '{spec.name}' has shape {list(arrays[spec.name].shape)}; "
                    f"'{other}' has {expected} rows, and it needs as many"
                )
    return data


def _describe_names(specs: Sequence[TensorSpec], arrays: Collection[str]) -> InvalidInput:
    """Return the error for inputs whose names are not those of ``specs``."""
    wanted = {spec.name: spec for spec in specs}
    for name in arrays:
        if name not in wanted:
            return InvalidInput(f"the model has no input '{name}'; it wants {', '.join(wanted)}")
    name = next(name for name in wanted if name not in arrays)
    return InvalidInput(f"input '{name}' is missing; the model wants {wanted[name]}")


def validate_safetensors(file: Path | BinaryIO) -> dict[str, SafeTensor]:
    """Read a safetensors header and return its tensors, in file order; leave the file open.

    Stricter than other readers, because the file is untrusted: the header's length is bounded, keys
    are unique, dtypes known, dimensions not negative, and the tensors fill the file from the header
    to the end without gap or overlap. Raises InvalidModel.
    Source: https://github.com/huggingface/safetensors (format section).
    """
    try:
        if isinstance(file, Path):
            with file.open("rb") as opened:
                return validate_safetensors(opened)
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if length <= limits.MAX_SAFETENSORS_HEADER_BYTES:
            start += file.read(length)
    except OSError as error:
        name = file if isinstance(file, Path) else file.name
        raise InvalidModel(f"cannot read weights file '{name}': {error.strerror}") from None
    return parse_safetensors(start, size, f"'{file.name}'")


def parse_safetensors(
    data: bytes | memoryview, size: int | None = None, name: str = "in memory"
) -> dict[str, SafeTensor]:
    """Do the same for the first bytes of a file of ``size`` bytes, by default all of it."""
    size = len(data) if size is None else size
    length = int.from_bytes(data[:8], "little")
    _check_file(name, len(data) >= 8, "is shorter than its header")
    _check_file(
        name,
        length <= limits.MAX_SAFETENSORS_HEADER_BYTES and 8 + length <= size,
        f"claims a header of {length} bytes",
    )
    return _parse_header(name, bytes(data[8 : 8 + length]), 8 + length, size)


def encode_safetensors_header(specs: Sequence[TensorSpec]) -> bytes:
    """Return length and header of a safetensors file that holds ``specs`` in this order.

    One list of specs has one encoding: names in the order given, no metadata, padded with spaces
    to a multiple of 8 bytes as the format asks.
    """
    names = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}
    header: dict[str, Any] = {}
    offset = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": names[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _check_file(name: str, condition: bool, problem: str) -> None:
    if not condition:
        raise InvalidModel(f"weights file {name} {problem}; fetch or export it again")


def _parse_header(name: str, header: bytes, start: int, size: int) -> dict[str, SafeTensor]:
    try:
        text = header.decode()
        check_structure(text, max_values=limits.MAX_DOCUMENT_VALUES)
        table = load_unique(text)
    except (ValueError, RecursionError) as error:
        raise InvalidModel(
            f"the header of weights file {name} is invalid: {error}; fetch or export it again"
        ) from None
    _check_file(name, isinstance(table, dict), "has a header that is no JSON object")
    assert isinstance(table, dict)  # for the type checker
    table.pop("__metadata__", None)
    _check_file(name, len(table) <= limits.MAX_WEIGHTS, "lists too many tensors")
    tensors = {key: _parse_tensor(name, key, row, start) for key, row in table.items()}
    position = start
    for key, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        _check_file(name, tensor.start == position, f"has a gap or overlap before {key!r:.120}")
        position = tensor.end
    _check_file(name, position == size, f"has {size} bytes; its header describes {position}")
    return tensors


def _parse_tensor(name: str, key: str, row: Any, start: int) -> SafeTensor:
    keys = {"dtype", "shape", "data_offsets"}
    _check_file(name, isinstance(row, dict) and set(row) == keys, f"describes {key!r:.120} wrongly")
    dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    _check_file(
        name,
        isinstance(dtype, str) and dtype in SAFETENSORS_DTYPES,
        f"has a tensor {key!r:.120} of dtype {dtype!r:.40}, which is not supported",
    )
    _check_file(
        name,
        isinstance(shape, list)
        and len(shape) <= limits.MAX_RANK
        and all(type(n) is int and 0 <= n <= limits.MAX_DIMENSION for n in shape),
        f"has a tensor {key!r:.120} of impossible shape",
    )
    _check_file(
        name,
        isinstance(offsets, list)
        and len(offsets) == 2
        and all(type(n) is int and n >= 0 for n in offsets),
        f"has a tensor {key!r:.120} with impossible offsets",
    )
    nbytes = math.prod(shape) * _STORED_BYTES[SAFETENSORS_DTYPES[dtype]]
    _check_file(
        name,
        offsets[1] - offsets[0] == nbytes,
        f"has a tensor {key!r:.120} whose offsets do not fit its shape",
    )
    return SafeTensor(
        SAFETENSORS_DTYPES[dtype], tuple(shape), start + offsets[0], start + offsets[1]
    )
