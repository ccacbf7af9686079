"""A few bytes that stand for many: no reader of models unpacks them or writes out what they mean.

Every compression that people put around files is tried on every format, and so are the descriptions
of large tensors that an ONNX graph may hold.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_deploy.cutting.build import build
from splitup_edge.export.onnx_file import encode_number as number
from splitup_edge.export.onnx_file import encode_piece as piece

from splitup.core.errors import InvalidModel
from tests.deploy import moes
from tests.deploy import statefiles as sf
from tests.deploy.llamas import TINY, save_llama
from tests.deploy.onnxes import Graph, encode_model, save_onnx

MIB = 2**20
UNPACKED = bytes(32 * MIB)
READ_BYTES = 16 * MIB  # half of it; the largest single read of a reader is 8 MiB
LARGE = 10**9


def pack_zip(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("weights/data.pkl", data)
    return file.getvalue()


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, 1),
    "bzip2": lambda data: bz2.compress(data, 1),
    "xz": lambda data: lzma.compress(data, preset=0),
    "zip": pack_zip,
}


@contextmanager
def refused_unread() -> Iterator[None]:
    """Expect InvalidModel, and no memory for what a file claims to hold."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidModel):
            yield
        assert tracemalloc.get_traced_memory()[1] < READ_BYTES
    finally:
        tracemalloc.stop()


def save_external(path: Path, data: bytes, items: int) -> Path:
    """Write an ONNX model of one weight in a file beside it; ``items`` float32 are asked for."""
    entries = {"location": "w.bin", "offset": "0", "length": str(4 * items)}.items()
    tensor = number(1, items) + number(2, 1) + piece(8, "w") + number(14, 1)
    tensor += b"".join(piece(13, piece(1, key) + piece(2, value)) for key, value in entries)
    port = (items,)
    graph = Graph([("x", "float32", port)], [("y", "float32", port)]).add("Add", "x w", "y")
    path.write_bytes(encode_model(graph.encode() + piece(5, tensor)))
    path.with_name("w.bin").write_bytes(data)
    return path


@pytest.mark.parametrize("packing", PACK)
def test_a07_compressed_models_are_refused(packing: str, tmp_path: Path) -> None:
    save_llama(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    packed = PACK[packing](UNPACKED)
    assert len(packed) < len(UNPACKED) // 100
    for name in ("model.safetensors", "pytorch_model.bin", "w.pt", "w.pth", "w.pkl"):
        path = tmp_path / "model" / name
        path.write_bytes(packed)
        with refused_unread():
            build(str(path.parent), LARGE)
        path.unlink()
    for name in ("m.gguf", "m.onnx"):
        (tmp_path / name).write_bytes(packed)
        with refused_unread():
            build(str(tmp_path / name), LARGE)
    with refused_unread():
        build(str(save_external(tmp_path / "m.onnx", packed, len(UNPACKED) // 4)), LARGE)


def test_a07_a_compressed_entry_of_a_state_file_is_refused(tmp_path: Path) -> None:
    """The archive is torch's own, but for the compression."""
    save_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    items = len(UNPACKED) // 4
    root = {"w": sf.tensor(sf.storage("float32", "0", items), (items,))}
    data = sf.archive(root, [UNPACKED], compression=zipfile.ZIP_DEFLATED)
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    assert len(data) < len(UNPACKED) // 100
    with refused_unread():
        build(str(tmp_path), LARGE)


def test_a07_a_header_or_configuration_of_blanks_is_refused(tmp_path: Path) -> None:
    """Sparse files: large to read, nothing to store."""
    for name in ("config.json", "model.safetensors.index.json"):
        directory = tmp_path / name
        save_llama(directory, TINY, shards=2)
        with (directory / name).open("r+b") as file:
            file.truncate(2**40)
        with refused_unread():
            build(str(directory), LARGE)


HUGE = 2**36
BOMBS: dict[str, Graph] = {
    "shape of a fill": Graph(
        [("x", "float32", (2, 3))], [("y", "float32", (None, None))], {"s": np.array([HUGE])}
    )
    .add("ConstantOfShape", "s", "c", value=np.array([1]))
    .add("Reshape", "x c", "y"),
    "shape of a range": Graph(
        [("x", "float32", (2, 3))],
        [("y", "float32", (None, None))],
        {"a": np.array(0), "b": np.array(HUGE), "d": np.array(1)},
    )
    .add("Range", "a b d", "c")
    .add("Reshape", "x c", "y"),
    "tiles": Graph(
        [("x", "float32", (2, 3))], [("y", "float32", (None, None))], {"s": np.array([1, HUGE])}
    ).add("Tile", "x s", "y"),
    "tiles of a constant": Graph(
        [("x", "float32", (2, 3))],
        [("y", "float32", (None, None))],
        {"s": np.array([HUGE]), "w": np.array([1])},
    )
    .add("Tile", "w s", "c")
    .add("Reshape", "x c", "y"),
    "margins": Graph(
        [("x", "float32", (2, 3))],
        [("y", "float32", (None, None))],
        {"s": np.array([0, HUGE, 0, HUGE])},
    ).add("Pad", "x s", "y"),
    "classes": Graph(
        [("x", "int64", (2, 3))],
        [("y", "float32", (None, None, None))],
        {"d": np.array(HUGE), "v": np.array([0, 1], np.float32)},
    ).add("OneHot", "x d v", "y"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a07_what_a_graph_blows_up_is_refused(name: str, tmp_path: Path) -> None:
    source = save_onnx(tmp_path / "m.onnx", BOMBS[name])
    with refused_unread():
        build(source, LARGE)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (TINY, "num_hidden_layers"),
        (moes.MIXTRAL, "num_local_experts"),
        (moes.QWEN3_MOE, "num_hidden_layers"),
        (moes.QWEN3_MOE, "num_experts"),
    ],
)
def test_a05_a_configuration_of_endless_parts_is_refused(
    config: dict[str, Any], field: str, tmp_path: Path
) -> None:
    """Shapes alone are enough to look at a cut, so no missing weight would end it."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "torch_dtype": "float16", field: 2**30}))
    with refused_unread():
        build(str(path), LARGE)
