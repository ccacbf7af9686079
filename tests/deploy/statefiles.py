"""Writes state files by hand: what torch.save and pickle write, and what an attacker would.

A ``Program`` is a pickle put together opcode by opcode, so that nothing here needs torch and
nothing is ever pickled.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MAGIC = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
STORAGES = {"float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage"}


@dataclass(frozen=True)
class Raw:
    """Opcodes that leave one value on the stack."""

    code: bytes


def name(module: str, attribute: str) -> Raw:
    return Raw(b"c" + module.encode() + b"\n" + attribute.encode() + b"\n")


def call(module: str, attribute: str, *arguments: Any) -> Raw:
    return Raw(name(module, attribute).code + encode(tuple(arguments)) + b"R")


def encode(value: Any) -> bytes:
    """Return the opcodes that make a plain value."""
    if isinstance(value, Raw):
        return value.code
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        if 0 <= value < 256:
            return b"K" + bytes([value])
        count = value.bit_length() // 8 + 1
        return b"\x8a" + bytes([count]) + value.to_bytes(count, "little", signed=True)
    if isinstance(value, str):
        data = value.encode()
        return b"X" + struct.pack("<I", len(data)) + data
    if isinstance(value, bytes):
        return b"B" + struct.pack("<I", len(value)) + value
    if isinstance(value, tuple):
        return b"(" + b"".join(encode(item) for item in value) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(encode(item) for item in value) + b"e"
    assert isinstance(value, dict)
    rows = b"".join(encode(key) + encode(item) for key, item in value.items())
    return b"}(" + rows + b"u"


def program(value: Any) -> bytes:
    """Return a whole pickle of protocol 2."""
    return b"\x80\x02" + encode(value) + b"."


def storage(dtype: str, key: str, items: int, *more: Any) -> Raw:
    identity = ("storage", name("torch", STORAGES[dtype]), key, "cpu", items, *more)
    return Raw(encode(identity) + b"Q")


def tensor(
    source: Any, shape: tuple[int, ...], offset: int = 0, stride: tuple[int, ...] | None = None
) -> Raw:
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= size
    order = tuple(reversed(steps)) if stride is None else stride
    hooks = call("collections", "OrderedDict")
    return call("torch._utils", "_rebuild_tensor_v2", source, offset, shape, order, False, hooks)


def state_dict(
    weights: Mapping[str, bytes], shapes: Mapping[str, tuple[int, ...]], dtype: str
) -> Raw:
    """Return what torch pickles for a module's state: an OrderedDict with ``_metadata``."""
    items = {"float32": 4, "float16": 2, "bfloat16": 2}[dtype]
    rows = {
        key: tensor(storage(dtype, str(place), len(data) // items), shapes[key])
        for place, (key, data) in enumerate(weights.items())
    }
    fill = b"".join(encode(key) + value.code for key, value in rows.items())
    start = call("collections", "OrderedDict").code + b"(" + fill + b"u"
    return Raw(start + encode({"_metadata": {"": {"version": 1}}}) + b"b")


def archive(
    root: Any,
    storages: Iterable[bytes] = (),
    *,
    more: Mapping[str, bytes] | None = None,
    compression: int = zipfile.ZIP_STORED,
) -> bytes:
    """Return a file as torch.save writes it since version 1.6."""
    entries = {"data.pkl": program(root), "byteorder": b"little"}
    entries.update({f"data/{key}": data for key, data in enumerate(storages)})
    entries.update({"version": b"3\n", **(more or {})})
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as target:
        for key, data in entries.items():
            target.writestr(f"weights/{key}", data)
    return file.getvalue()


def legacy(root: Any, storages: Mapping[str, tuple[int, bytes]] | None = None) -> bytes:
    """Return a file as torch.save wrote it before; ``storages`` are (items, bytes) by key."""
    rows = storages or {}
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"int": 4}}
    data = b"\x80\x02" + MAGIC + program(1001) + program(system)
    data += program(root) + program(list(rows))
    return data + b"".join(struct.pack("<q", items) + raw for items, raw in rows.values())
