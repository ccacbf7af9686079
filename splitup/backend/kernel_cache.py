"""Compiled tasks on the node's disk: after a restart nothing has to be compiled again.

A file's name is a digest of everything that its content depends on: task, determinism class, device
and this package's code. Only this node writes it, into a directory that only its user can read; the
digest in it detects damage, not attacks. The least recently used files are deleted first.

    file     32 bytes SHA-256 of the rest | u32 header bytes | header, JSON | machine code

The header is a ``Schedule`` as nested lists in the order of its fields, with the length of each
piece of machine code in its place.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any, Final

from splitup.backend.native_code import NativeCode, find_native_code
from splitup.backend.schedule import Executable, Launch, Place, Schedule
from splitup.core import tuning
from splitup.core.codec import encode_canonical, parse_json

_SUFFIX: Final = ".kernels"
_HEAD: Final = struct.Struct("<32sI")

_log = logging.getLogger("splitup.backend.kernel_cache")


class KernelCache:
    """A directory of schedules, at most ``max_bytes`` of them."""

    def __init__(self, directory: Path, max_bytes: int = tuning.KERNEL_CACHE_BYTES) -> None:
        self._directory = directory
        self._max_bytes = max_bytes

    def load(self, task_id: str, determinism_class: str, device: str) -> Schedule | None:
        """Return a task's schedule; None when there is none, or a damaged one, which is deleted."""
        path = self._get_path(task_id, determinism_class, device)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        try:
            schedule = decode_schedule(data, find_native_code(device))
        except ValueError as error:
            _log.warning("%s is damaged (%s) and will be compiled again", path, error)
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)  # the order in which files are removed
        return schedule

    def store(self, task_id: str, determinism_class: str, device: str, schedule: Schedule) -> None:
        """Write a schedule; a disk that fails is logged, and the next start compiles again."""
        data = encode_schedule(schedule, find_native_code(device))
        if len(data) > self._max_bytes:
            return
        path = self._get_path(task_id, determinism_class, device)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._directory, delete=False) as file:
                file.write(data)
            Path(file.name).replace(path)  # several workers may share the directory
            self._trim()
        except OSError as error:
            _log.warning("compiled kernels are not kept: %s", error)

    @contextmanager
    def reserve(self) -> Iterator[None]:
        """Wait until no other worker compiles for this directory: it may be for the same task."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            number = os.open(self._directory, os.O_RDONLY)
        except OSError:  # a disk that fails, as in ``store``
            yield
            return
        try:
            fcntl.flock(number, fcntl.LOCK_EX)  # until it is closed, or the process ends
            yield
        finally:
            os.close(number)

    def _get_path(self, task_id: str, determinism_class: str, device: str) -> Path:
        key = encode_canonical([task_id, determinism_class, device, _get_code_digest()])
        return self._directory / (hashlib.sha256(key).hexdigest() + _SUFFIX)

    def _trim(self) -> None:
        files = []
        for path in self._directory.glob("*" + _SUFFIX):
            with suppress(OSError):  # another worker may have removed it
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self._max_bytes:
                return
            with suppress(OSError):
                path.unlink()
            total -= size


@functools.cache
def _get_code_digest() -> str:
    """Return a digest of the code that decides what is compiled."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for folder in ("graph", "backend", "cpu"):
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


# ---- bytes ---------------------------------------------------------------------------------------


def encode_schedule(schedule: Schedule, native: NativeCode | None) -> bytes:
    """Return the bytes of a file."""
    header = [
        schedule.inputs,
        schedule.weights,
        schedule.states,
        schedule.values,
        [_list_place(place) for place in schedule.outputs],
        [_list_executable(item) for item in schedule.executables],
        [] if native is None else [native.encode_kernel(kernel) for kernel in schedule.natives],
        [
            [launch.kind, launch.index, launch.is_shared, *map(_list_place, launch.places)]
            for launch in schedule.launches
        ],
    ]
    text = json.dumps(header, separators=(",", ":")).encode()
    codes = b"".join(item.code for item in schedule.executables)
    rest = struct.pack("<I", len(text)) + text + codes
    return hashlib.sha256(rest).digest() + rest


def decode_schedule(data: bytes, native: NativeCode | None) -> Schedule:
    """Return the schedule of a file; raises ValueError when it is damaged."""
    if len(data) < _HEAD.size:
        raise ValueError("it is cut off")
    digest, length = _HEAD.unpack_from(data)
    if hashlib.sha256(memoryview(data)[32:]).digest() != digest:
        raise ValueError("its digest is wrong")
    end = _HEAD.size + length
    header = parse_json(data[_HEAD.size : end])
    inputs, weights, states, values, outputs, executables, natives, launches = header
    read = []
    for code_bytes, *numbers in executables:
        read.append(_read_executable(data[end : end + code_bytes], numbers))
        end += code_bytes
    return Schedule(
        inputs=tuple(inputs),
        weights=tuple(weights),
        states=tuple(states),
        values=tuple(values),
        outputs=tuple(Place(*place) for place in outputs),
        executables=tuple(read),
        natives=() if native is None else tuple(map(native.decode_kernel, natives)),
        launches=tuple(
            Launch(kind, index, tuple(Place(*place) for place in places), is_shared)
            for kind, index, is_shared, *places in launches
        ),
    )


def _list_place(place: Place) -> list[Any]:
    return list(astuple(place))


def _list_executable(item: Executable) -> list[Any]:
    return [
        len(item.code),
        item.name,
        item.target,
        item.signature,
        item.variables,
        item.global_size,
        item.local_size,
    ]


def _read_executable(code: bytes, values: Sequence[Any]) -> Executable:
    name, target, signature, variables, global_size, local_size = values
    return Executable(
        code=code,
        name=name,
        target=target,
        signature=tuple((n, slot, dtype, tuple(shape)) for n, slot, dtype, shape in signature),
        variables=tuple(variables),
        global_size=tuple(global_size),
        local_size=None if local_size is None else tuple(local_size),
    )
