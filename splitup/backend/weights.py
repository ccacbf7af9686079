"""The weights of a task: from a safetensors file into device memory, checked on the way."""

from __future__ import annotations

import functools
import hashlib
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from tinygrad.device import Buffer

from splitup.backend.buffers import make_writer
from splitup.core.errors import InvalidModel
from splitup.core.tensors import SafeTensor, parse_safetensors, validate_safetensors
from splitup.graph.ir import Weight


def load_weights(
    weights: Sequence[Weight],
    get_bytes: Callable[[str], memoryview],
    buffers: Sequence[Buffer],
    on_progress: Callable[[], None],
) -> None:
    """Fill each weight's buffer, and call ``on_progress`` after each.

    Raises InvalidModel for bytes that are not those it names.
    """
    for weight, buffer in zip(weights, buffers, strict=True):
        data = get_bytes(weight.name)
        if len(data) != weight.spec.nbytes:
            raise InvalidModel(
                f"weight '{weight.name}' has {len(data)} bytes; the task wants {weight.spec}"
            )
        if hashlib.sha256(data).hexdigest() != weight.digest:
            raise InvalidModel(
                f"weight '{weight.name}' has another digest than the task names; "
                "fetch the weights again"
            )
        if weight.dtype == "bool" and max(bytes(data)) > 1:
            raise InvalidModel(f"weight '{weight.name}' is bool and holds more than 0 and 1")
        make_writer(buffer)(data)
        on_progress()


def open_weights(weights: bytes | Path | BinaryIO | None) -> Callable[[str], memoryview]:
    """Return a function that gives a weight's bytes by name, from a validated safetensors file."""
    if weights is None:
        return functools.partial(_get_tensor, {}, memoryview(b""))
    if isinstance(weights, bytes):
        return functools.partial(_get_tensor, parse_safetensors(weights), memoryview(weights))
    table = validate_safetensors(weights)
    with weights.open("rb") if isinstance(weights, Path) else weights as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return functools.partial(_get_tensor, table, memoryview(mapped))


def _get_tensor(table: dict[str, SafeTensor], view: memoryview, name: str) -> memoryview:
    if (tensor := table.get(name)) is None:
        raise InvalidModel(f"the weights hold no tensor '{name}' that the task names")
    return view[tensor.start : tensor.end]
