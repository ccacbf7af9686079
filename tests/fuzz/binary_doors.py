"""What costs most a byte beside hostile JSON: workers' messages, frames, model files, good ones."""

from __future__ import annotations

import contextlib
import hashlib
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

from splitup_deploy.frontends.gguf.header import read_gguf
from splitup_speculation import rpc
from splitup_speculation import speculation_pb2 as pb
from splitup_speculation.trees import read_tokens, read_tree

from splitup.core import limits
from splitup.core.errors import InvalidInput
from splitup.core.tensors import compute_zero_digest
from splitup.graph.ir import parse_graph
from splitup.graph.manifest_rules import load_manifest
from splitup.messages.base import CLIENT
from splitup.messages.frames import (
    Frame,
    FrameKind,
    TensorChunk,
    decode_chunk,
    decode_frames,
    encode_bundle,
    make_bundle_message,
)
from splitup.net.relay import RelayKind, decode_control, encode_control
from tests.builders import make_chain_manifest
from tests.graph.hostile import make_moves

_ID = "0x" + "5a" * 32
_ROWS = 512  # of a step of a model
Door = tuple[Callable[[bytes], object], dict[str, bytes]]


def find_binary_doors(size: int) -> dict[str, Door]:
    """Return what reads bytes, by name, each with inputs of about ``size`` bytes, by name."""
    return {
        "a message of a worker": (_read_request, _make_requests(size)),
        "frames of a link": (decode_frames, _make_frames(size)),
        "a chunk of a link": (decode_chunk, {"its bytes": _make_chunk(size).encode()}),
        "a message of a relay": (
            decode_control,
            {"a body": encode_control(RelayKind.REQUEST, 1, 1, bytes(size))},
        ),
        "a header of GGUF": (_read_gguf, _make_headers(size)),
        "a manifest that is good": (load_manifest, {"a chain": _make_manifest(size)}),
        "a graph that is good": (parse_graph, {"many operations": _make_graph(size)}),
    }


def _read_request(data: bytes) -> None:
    request = pb.VerifyDraftsRequest.FromString(data)
    with contextlib.suppress(InvalidInput):
        read_tree(request.drafts, vocabulary=2**31, most=_ROWS)
    tokens = read_tokens(request.tokens, vocabulary=2**31, most=rpc.MAX_MESSAGE_BYTES)
    _ = tokens, list(request.kept)


def _make_requests(size: int) -> dict[str, bytes]:
    drafts = pb.TokenTree(tokens=range(_ROWS), parents=[-1] * _ROWS)
    return {
        "tokens, packed": pb.VerifyDraftsRequest(tokens=[0] * size).SerializeToString(),
        "tokens, one by one": b"\x18\0" * (size // 2),
        "kept rows": pb.VerifyDraftsRequest(kept=[0] * size).SerializeToString(),
        "empty lists": b"\x1a\0" * (size // 2),
        "unknown fields": b"\x78\0" * (size // 2),
        "empty trees": b"\x22\0" * (size // 2),
        "empty nodes": b"\x22" + _pack_length(size) + b"\x22\0" * (size // 2),
        "drafts": pb.VerifyDraftsRequest(drafts=drafts).SerializeToString(),
    }


def _make_manifest(size: int) -> bytes:
    one = len(make_chain_manifest(1).to_bytes())
    return make_chain_manifest(min(limits.MAX_TASKS, size // one)).to_bytes()


def _make_graph(size: int) -> bytes:
    one = len(make_moves(2).to_bytes()) - len(make_moves(1).to_bytes())
    return make_moves(size // one).to_bytes()


def _pack_length(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _make_frames(size: int) -> dict[str, bytes]:
    def make(payload: bytes, *, zeros: int = 0, stored: bool = False) -> Frame:
        digest = compute_zero_digest(zeros) if zeros else hashlib.sha256(payload).digest()
        length = zeros or len(payload)
        kind, is_zero = FrameKind.TENSOR, zeros > 0
        return Frame(kind, _ID, CLIENT, 0, 0, digest, length, payload, stored, is_zero)

    def bundle(frame: Frame, count: int) -> bytes:
        return encode_bundle([frame] * count, make_bundle_message([frame] * count), bytes(64))

    most = limits.INLINE_TENSOR_BYTES
    return {
        "one tensor": make(bytes(size)).encode(bytes(64)),
        "empty tensors": bundle(make(b""), limits.BUNDLE_FRAMES),
        "tensors of a byte": bundle(make(b"a"), limits.BUNDLE_FRAMES),
        "stored tensors": bundle(make(b"", stored=True), limits.BUNDLE_FRAMES),
        "a tensor of zeros": make(b"", zeros=most).encode(bytes(64)),
        "tensors of zeros": bundle(
            make(b"", zeros=most // limits.BUNDLE_FRAMES), limits.BUNDLE_FRAMES // 2
        ),
    }


def _make_chunk(size: int) -> TensorChunk:
    return TensorChunk(_ID, CLIENT, 0, 0, limits.INLINE_TENSOR_BYTES + 1, 0, bytes(size))


def _read_gguf(data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        read_gguf(Path(file.name))


def _make_headers(size: int) -> dict[str, bytes]:
    def head(tensors: int, keys: int) -> bytes:
        return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys)

    def name(number: int) -> bytes:
        return struct.pack("<Q", 4) + b"%04x" % number

    def array(kind: int, item: bytes) -> bytes:
        count = size // len(item)
        return head(0, 1) + name(0) + struct.pack("<IIQ", 9, kind, count) + item * count

    def tensor(number: int) -> bytes:
        return name(number) + struct.pack("<IQIQ", 1, 1, 0, 32 * number)

    keys, tensors = size // 17, size // len(tensor(0))
    return {
        "bytes": array(0, b"a"),
        "truth values": array(7, b"\1"),
        "numbers": array(10, b"a" * 8),
        "empty texts": array(8, bytes(8)),
        "texts of a byte": array(8, b"\1" + bytes(7) + b"a"),
        "texts that are not UTF-8": array(8, struct.pack("<Q", 64) + b"\xff" * 64),
        "keys": head(0, keys) + b"".join(name(i) + b"\0\0\0\0a" for i in range(keys)),
        "tensors": head(tensors, 0) + b"".join(map(tensor, range(tensors))),
    }
