"""State files of PyTorch and pickles of numpy arrays: where each tensor's bytes lie.

    .pt .pth .bin   what torch.save writes: a zip archive with one pickle and one entry per
                    storage; before version 1.6 a run of pickles with the storages behind them
    .pkl            one pickle of a dict of numpy arrays (protocol 3 or later) or torch tensors

Read without torch and without unpickling (``splitup_deploy.frontends.pytorch.pickle_reader``);
tensors stay slices of the file, so memory does not grow with the model. Source:
torch/serialization.py, torch/_utils.py and numpy's ndarray.__reduce__ for the forms.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from splitup.core import limits, tuning
from splitup.core.errors import InvalidModel
from splitup.core.tensors import ITEM_BYTES, TensorSpec
from splitup_deploy.frontends.own_files import check_own
from splitup_deploy.frontends.pytorch.pickle_reader import (
    Constructor,
    Names,
    PickledBytes,
    read_pickle,
    refuse,
)
from splitup_deploy.frontends.weight_sources import FileSlice, WeightSource

_LEGACY_MAGIC: Final = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL: Final = 1001
_STORAGES: Final = {
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.DoubleStorage": "float64",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
}
# By numpy's names, such as "f4"; bfloat16 is none of its dtypes.
_NUMPY_DTYPES: Final = {np.dtype(n).str[1:]: n for n in ITEM_BYTES if n != "bfloat16"}
# the errors of zipfile for broken fields
_ZIP_ERRORS: Final = (
    zipfile.BadZipFile,
    NotImplementedError,
    ValueError,
    OverflowError,
    EOFError,
    struct.error,
)
_INNER: Final = ("state_dict", "model_state_dict", "model")  # where trainers put the weights


@dataclass(frozen=True, slots=True)
class _StorageType:
    dtype: str


@dataclass(slots=True)
class _Storage:
    """An array of items in the file. ``start`` is set when the file's layout is known."""

    dtype: str
    items: int
    start: int | None = None


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    offset: int  # in items
    shape: tuple[int, ...]


@dataclass(slots=True)
class _NumpyDtype:
    name: str
    order: str = "|"


@dataclass(slots=True)
class _NumpyArray:
    tensor: _Tensor | None = None


@dataclass(slots=True)
class _Reader:
    """Reads one file; ``entries`` are a zip archive's, ``storages`` a legacy file's, by key."""

    path: Path
    file: BinaryIO
    size: int
    entries: dict[str, PickledBytes] | None = None
    storages: dict[str, _Storage] = field(default_factory=dict)
    inner: dict[PickledBytes, _Storage] = field(default_factory=dict)  # what was read, once each
    nested: bool = False

    def fail(self, problem: str) -> InvalidModel:
        return refuse(str(self.path), problem)

    def read(self, blob: PickledBytes) -> Any:
        self.file.seek(blob.start)
        table: dict[str, Any] = {
            "collections.OrderedDict": Constructor("OrderedDict", self.make_dict),
            "torch._utils._rebuild_tensor": Constructor("tensor", self.make_tensor),
            "torch._utils._rebuild_tensor_v2": Constructor("tensor", self.make_tensor),
            "torch._utils._rebuild_parameter": Constructor("parameter", self.make_parameter),
            "torch.Size": Constructor("Size", self.make_size),
            "torch.storage._load_from_bytes": Constructor("storage", self.load_nested),
            "numpy.ndarray": None,  # the class that _reconstruct is told to make; it is not called
            "numpy.dtype": Constructor("dtype", self.make_numpy_dtype),
            **{name: _StorageType(dtype) for name, dtype in _STORAGES.items()},
        }
        for core in ("core", "_core"):  # numpy 1 and 2
            table[f"numpy.{core}.multiarray._reconstruct"] = Constructor(
                "array", lambda arguments: _NumpyArray()
            )
            table[f"numpy.{core}.numeric._frombuffer"] = Constructor("array", self.make_numpy_array)
        names = Names(table, self.load_storage, self.set_state)
        return read_pickle(self.file, str(self.path), blob.end, names)

    def check(self, condition: bool, problem: str) -> None:
        if not condition:
            raise self.fail(problem)

    # constructors

    def make_dict(self, arguments: tuple[Any, ...]) -> dict[str | int, Any]:
        pairs = arguments[0] if len(arguments) == 1 else []
        result: dict[str | int, Any] = {}
        self.check(isinstance(pairs, list) and len(arguments) <= 1, "has a malformed OrderedDict")
        for pair in pairs:
            self.check(
                isinstance(pair, list | tuple) and len(pair) == 2 and type(pair[0]) in (str, int),
                "has a malformed OrderedDict",
            )
            result[pair[0]] = pair[1]
        return result

    def make_size(self, arguments: tuple[Any, ...]) -> tuple[int, ...]:
        self.check(len(arguments) == 1, "has a malformed torch.Size")
        return self.read_shape(arguments[0])

    def read_shape(self, value: Any) -> tuple[int, ...]:
        self.check(
            isinstance(value, list | tuple)
            and len(value) <= limits.MAX_RANK
            and all(type(n) is int and 0 <= n <= limits.MAX_DIMENSION for n in value),
            "has a tensor of impossible shape",
        )
        return tuple(value)

    def make_tensor(self, arguments: tuple[Any, ...]) -> _Tensor:
        self.check(len(arguments) in (4, 6, 7), "has a malformed tensor")
        storage, offset, size, stride = arguments[:4]
        shape = self.read_shape(size)
        self.check(
            isinstance(storage, _Storage) and type(offset) is int and offset >= 0,
            "has a tensor without a storage",
        )
        items = math.prod(shape)
        self.check(
            offset + items <= storage.items,
            f"has a tensor of {items} items from {offset} on a storage of {storage.items}",
        )
        strides = self.read_shape(stride)
        self.check(len(strides) == len(shape), "has a tensor with malformed strides")
        step = 1
        for length, distance in zip(reversed(shape), reversed(strides), strict=True):
            self.check(
                length <= 1 or items == 0 or distance == step,
                "has a tensor that does not lie in order: call .contiguous() on it first",
            )
            step *= length
        return _Tensor(storage, offset, shape)

    def make_parameter(self, arguments: tuple[Any, ...]) -> _Tensor:
        self.check(
            len(arguments) == 3 and isinstance(arguments[0], _Tensor), "has a malformed parameter"
        )
        tensor: _Tensor = arguments[0]
        return tensor

    def make_numpy_dtype(self, arguments: tuple[Any, ...]) -> _NumpyDtype:
        name = arguments[0] if arguments else None
        self.check(
            isinstance(name, str) and name in _NUMPY_DTYPES, f"has an array of dtype {name!r:.40}"
        )
        return _NumpyDtype(_NUMPY_DTYPES[str(name)])

    def make_numpy_array(self, arguments: tuple[Any, ...]) -> _Tensor:
        self.check(
            len(arguments) == 4 and arguments[3] == "C",
            "has an array in Fortran order: save numpy.ascontiguousarray of it",
        )
        data, dtype, shape, _ = arguments
        return self.place_array(data, dtype, shape)

    def place_array(self, data: Any, dtype: Any, shape: Any) -> _Tensor:
        dims = self.read_shape(shape)
        self.check(
            isinstance(dtype, _NumpyDtype) and dtype.order in ("<", "|"),
            "has an array that is not little-endian",
        )
        items = math.prod(dims)
        self.check(
            isinstance(data, PickledBytes) and data.nbytes == items * ITEM_BYTES[dtype.name],
            "has an array whose bytes do not fit its shape",
        )
        return _Tensor(_Storage(dtype.name, items, data.start), 0, dims)

    def set_state(self, value: Any, state: Any) -> bool:
        if isinstance(value, dict):
            return True  # attributes of a state_dict, as _metadata: they hold no weights
        if isinstance(value, _NumpyDtype) and isinstance(state, tuple) and len(state) >= 2:
            self.check(isinstance(state[1], str), "has a malformed numpy dtype")
            value.order = state[1]
            return True
        if isinstance(value, _NumpyArray) and isinstance(state, tuple) and len(state) == 5:
            self.check(
                state[3] is False,
                "has an array in Fortran order: save numpy.ascontiguousarray of it",
            )
            value.tensor = self.place_array(state[4], state[2], state[1])
            return True
        return False

    def load_storage(self, identity: Any) -> _Storage:
        self.check(
            isinstance(identity, tuple)
            and len(identity) in (5, 6)
            and identity[0] == "storage"
            and isinstance(identity[1], _StorageType)
            and isinstance(identity[2], str)
            and type(identity[4]) is int
            and 0 <= identity[4] <= self.size,
            "has a malformed storage",
        )
        self.check(len(identity) == 5 or identity[5] is None, "has a storage that is a view")
        kind, key, items = identity[1], identity[2], identity[4]
        known = self.storages.get(key)
        if known is not None:
            self.check(
                (known.dtype, known.items) == (kind.dtype, items), f"has two storages {key!r:.40}"
            )
            return known
        storage = self.storages[key] = _Storage(kind.dtype, items)
        if self.entries is not None:
            blob = self.entries.get(f"data/{key}")
            if blob is None or blob.nbytes != items * ITEM_BYTES[kind.dtype]:
                raise self.fail(f"lacks the {items} items of storage {key!a:.42}")
            storage.start = blob.start
        return storage

    def load_nested(self, arguments: tuple[Any, ...]) -> _Storage:
        """Read a storage that is pickled as the bytes of another legacy file."""
        self.check(
            len(arguments) == 1 and isinstance(arguments[0], PickledBytes) and not self.nested,
            "has a malformed storage",
        )
        if (known := self.inner.get(arguments[0])) is not None:
            return known
        position = self.file.tell()
        inner = _Reader(self.path, self.file, self.size, nested=True)
        root = inner.read_legacy(arguments[0])
        self.file.seek(position)
        self.check(isinstance(root, _Storage), "has a malformed storage")
        assert isinstance(root, _Storage)  # for the type checker
        self.inner[arguments[0]] = root
        return root

    # layouts

    def read_legacy(self, blob: PickledBytes) -> Any:
        """Read magic, protocol, system, value and storage keys, then place the storages."""
        magic = self.read(blob)
        if type(magic) is not int or magic != _LEGACY_MAGIC:
            self.check(not self.nested, "has a malformed storage")
            self.check(self.file.tell() == blob.end, "has more behind its pickle than a state file")
            return magic
        header: list[Any] = []
        for _ in range(4):
            header.append(self.read(PickledBytes(self.file.tell(), blob.end)))
        protocol, system, root, keys = header
        self.check(protocol == _LEGACY_PROTOCOL, "has an unknown protocol")
        self.check(
            isinstance(system, dict) and system.get("little_endian") is True,
            "was written on a big-endian machine",
        )
        self.check(
            isinstance(keys, list) and all(isinstance(key, str) for key in keys),
            "has malformed storage keys",
        )
        position = self.file.tell()
        for key in keys:
            storage = self.storages.get(key)
            if storage is None or storage.start is not None:
                raise self.fail(f"lists storage {key!a:.42} once too often")
            self.file.seek(position)
            self.check(
                int.from_bytes(self.file.read(8), "little") == storage.items,
                f"has another length for storage {key!r:.40}",
            )
            storage.start = position + 8
            position = storage.start + storage.items * ITEM_BYTES[storage.dtype]
            self.check(position <= blob.end, f"ends in the middle of storage {key!r:.40}")
        return root

    def read_zip(self) -> Any:
        """Read the pickle of an archive whose entries lie in it as they are."""
        self.entries = {}
        try:
            with zipfile.ZipFile(_Bounded(self.file, self)) as archive:
                infos = archive.infolist()
        except _ZIP_ERRORS:
            raise self.fail("is no readable zip archive") from None
        tops = {info.filename.partition("/")[0] for info in infos}
        self.check(len(tops) == 1, "is a zip archive, but none that torch.save writes")
        for info in infos:
            name = info.filename.partition("/")[2]
            self.check(name not in self.entries, f"has the entry {name!r:.40} twice")
            self.entries[name] = self.find_entry(info)
        self.check(
            "constants.pkl" not in self.entries, "is a TorchScript program, not a state file"
        )
        self.check("data.pkl" in self.entries, "is a zip archive, but none that torch.save writes")
        if (order := self.entries.get("byteorder")) is not None:
            self.file.seek(order.start)
            self.check(
                self.file.read(min(order.nbytes, 16)) == b"little",
                "was written on a big-endian machine",
            )
        return self.read(self.entries["data.pkl"])

    def find_entry(self, info: zipfile.ZipInfo) -> PickledBytes:
        self.check(
            info.compress_type == zipfile.ZIP_STORED
            and not info.flag_bits & 1
            and info.compress_size == info.file_size,
            f"has a compressed entry '{info.filename:.80}', which torch.save never writes",
        )
        inside = 0 <= info.header_offset <= self.size
        self.check(inside, "has a zip entry outside of the file")
        self.file.seek(info.header_offset)
        header = self.file.read(30)
        self.check(header[:4] == b"PK\x03\x04" and len(header) == 30, "has a broken zip entry")
        start = info.header_offset + 30
        start += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        end = start + info.file_size
        self.check(end <= self.size, f"ends in the middle of the entry '{info.filename:.80}'")
        return PickledBytes(start, end)


class _Bounded:
    """A file that refuses large reads, because a zip directory may claim any length."""

    def __init__(self, file: BinaryIO, reader: _Reader) -> None:
        self._file, self._reader = file, reader
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, count: int = -1) -> bytes:
        """Return ``count`` bytes, by default all to the end; raises InvalidModel for too many."""
        bound = tuning.MAX_ZIP_DIRECTORY_BYTES
        if count > bound:
            raise self._reader.fail(f"claims a zip directory of {count} bytes")
        return self._file.read(bound if count < 0 else count)


def read_state_file(path: Path) -> dict[str, WeightSource]:
    """Return where every tensor of a state file lies, by name; raises InvalidModel."""
    try:
        with check_own(path).open("rb") as file:
            size = path.stat().st_size
            reader = _Reader(path, file, size)
            archive = file.read(4) == b"PK\x03\x04"
            root = reader.read_zip() if archive else reader.read_legacy(PickledBytes(0, size))
    except OSError as error:
        raise InvalidModel(f"cannot read '{path}': {error.strerror}") from None
    return {name: _locate(reader, name, value) for name, value in _find_weights(reader, root)}


def _find_weights(reader: _Reader, root: Any) -> Sequence[tuple[str, Any]]:
    for key in _INNER:
        if isinstance(root, dict) and isinstance(root.get(key), dict):
            others = {id(root[name]): name for name in root if name != key}  # each value once
            other = next((name for name in others.values() if _holds_tensors(root[name])), None)
            reader.check(other is None, f"has weights under {key!r} and {other!r:.40}: keep one")
            root = root[key]
    reader.check(isinstance(root, dict) and bool(root), "holds no dict of tensors")
    reader.check(len(root) <= limits.MAX_WEIGHTS, "holds too many tensors")
    reader.check(all(isinstance(key, str) for key in root), "names tensors by numbers")
    return list(root.items())


def _holds_tensors(value: Any) -> bool:
    """Say whether an entry is a second dict of weights; a trainer's own state is nested deeper."""
    kinds = (_Tensor, _NumpyArray)
    return isinstance(value, dict) and any(isinstance(one, kinds) for one in value.values())


def _locate(reader: _Reader, name: str, value: Any) -> WeightSource:
    tensor = value.tensor if isinstance(value, _NumpyArray) else value
    if not isinstance(tensor, _Tensor) or tensor.storage.start is None:
        raise reader.fail(f"has an entry {name!r:.80} that is no tensor with data")
    spec = TensorSpec(name, tensor.storage.dtype, tensor.shape)
    start = tensor.storage.start + tensor.offset * ITEM_BYTES[spec.dtype]
    return WeightSource(spec, (FileSlice(reader.path, start, start + spec.nbytes),))
