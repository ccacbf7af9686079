"""The bytes of the data plane: frames, bundles of frames under one signature, and chunks.

All integers are big-endian. ``splitup.net.signed_frames`` makes, signs and verifies frames. Some
frames carry a JSON message, of the class that ``FrameKind`` names.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from splitup.core import limits, tuning
from splitup.core.errors import BadSignature, PeerFault
from splitup.core.tensors import NO_STEPS, extend_steps, is_zero
from splitup.messages.base import CLIENT


class FrameKind(IntEnum):
    TENSOR = 1  # payload: the tensor's bytes, or nothing when they travel another way
    END = 2  # from the client: ``step`` is a number of steps; payload is a SignedEnd
    ERROR = 3  # from a node: payload is a TaskFailure
    TRACE = 4  # from a node, after END: payload is a Trace
    TAKEOVER = 5  # from the client, passed on by nodes: payload is a SignedTakeover
    PROBE = 6  # from the client, no payload: asks a node for its Progress
    PROGRESS = 7  # from a node: payload is a Progress


_DOMAIN = b"splitup/frame/v1\0"
_FIELDS = "4sBB32sHHI32sQ32s"
_HEADER = struct.Struct(f">{_FIELDS}")
_SIGNED = struct.Struct(f">{len(_DOMAIN)}s{_FIELDS}")
_MAGIC = b"SUf2"
_STORED, _ZEROS, _DIRECT = 1, 2, 4  # the header's flag; 0 for a tensor in the payload
_FLAGS = frozenset({0, _STORED, _ZEROS, _DIRECT})
_SIGNATURE_BYTES = 64
FRAME_HEADER_BYTES = _HEADER.size + _SIGNATURE_BYTES
_KINDS = {kind.value: kind for kind in FrameKind}
_BUNDLE = struct.Struct(">4sH64s")
_BUNDLE_MAGIC = b"SUb1"
_BUNDLE_DOMAIN = b"splitup/frames/v1\0"
BUNDLE_HEADER_BYTES = _BUNDLE.size


@dataclass(frozen=True, slots=True)
class Frame:
    """One message between nodes, or between a node and the client.

    ``task`` and ``port`` name the producer (``CLIENT`` and the input's index for graph inputs).
    ``digest`` is the SHA-256 of the tensor, or of the payload of a frame without tensor, and
    ``length`` is its size in bytes. The bytes of a tensor are in ``payload``, or else in the object
    store (``stored``), in chunks that were sent before this frame (``direct``), or all zero
    (``zeros``): those are not sent, and ``decode_frames`` fills ``payload`` with them.

    ``before`` is set in graph outputs for the client: the digest of the port's earlier steps, as in
    a TaskCommitment. So the frame of the last step signs all that the producer sent.
    """

    kind: FrameKind
    execution_id: str
    task: int
    port: int
    step: int
    digest: bytes
    length: int
    payload: bytes | memoryview  # empty for a tensor that is ``stored`` or ``direct``
    stored: bool = False
    zeros: bool = False
    direct: bool = False
    before: bytes = NO_STEPS

    def signed_bytes(self) -> bytes:
        """Return what the producer signs: domain and header; the payload is bound by its digest."""
        return _SIGNED.pack(
            _DOMAIN,
            _MAGIC,
            self.kind,
            _STORED * self.stored + _ZEROS * self.zeros + _DIRECT * self.direct,
            bytes.fromhex(self.execution_id[2:]),
            self.task,
            self.port,
            self.step,
            self.digest,
            self.length,
            self.before,
        )

    def encode(self, signature: bytes) -> bytes:
        """Return header ‖ signature ‖ payload."""
        return self.seal(lambda signed: signature)

    def seal(self, sign: Callable[[bytes], bytes]) -> bytes:
        """Return header ‖ signature ‖ payload; ``sign`` gets the ``signed_bytes``."""
        signed = self.signed_bytes()
        signature = sign(signed)
        if len(signature) != _SIGNATURE_BYTES:
            raise BadSignature(
                f"a frame signature has {_SIGNATURE_BYTES} bytes, not {len(signature)}"
            )
        payload = b"" if self.zeros else self.payload
        return b"".join((signed[len(_DOMAIN) :], signature, payload))


@dataclass(slots=True)
class Seal:
    """A signature and the bytes that it signs: one frame's header, or those of a bundle.

    ``key`` is the public key that verified it, "" before it was verified.
    """

    signed: bytes
    signature: bytes
    key: str = ""

    @property
    def is_single(self) -> bool:
        """Return whether it signs one frame, not a bundle."""
        return self.signed.startswith(_DOMAIN)


# ---- what a producer signed for the client ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a frame to the client proves: all steps of an output that its producer sent up to one.

    ``total`` is the digest of these steps, as in a TaskCommitment. The signature in ``seal`` is not
    verified yet.
    """

    execution_id: str
    task: int
    port: int
    step: int
    total: bytes
    seal: Seal


def make_delivery(seal: Seal) -> str:
    """Return the header and signature of a single frame, without the tensor, in hexadecimal."""
    return (seal.signed[len(_DOMAIN) :] + seal.signature).hex()


def read_delivery(delivery: str) -> Delivery | None:
    """Parse what ``make_delivery`` gives; return None for what no producer sends to a client.

    A frame for other nodes has no ``before``, so that after the first step it proves nothing.
    """
    data = bytes.fromhex(delivery)
    header, signature = data[: _HEADER.size], data[_HEADER.size :]
    magic, kind, _, execution, task, port, step, digest, _, before = _HEADER.unpack(header)
    if magic != _MAGIC or kind != FrameKind.TENSOR or (step and before == NO_STEPS):
        return None
    total = extend_steps(before, digest)
    return Delivery(
        "0x" + execution.hex(), task, port, step, total, Seal(_DOMAIN + header, signature)
    )


def make_order(seal: Seal) -> str:
    """Return what a client signed when it sent inputs, without the tensors, in hexadecimal."""
    return (seal.signed + seal.signature).hex()


def read_order(order: str, execution_id: str) -> tuple[int, Seal]:
    """Return how many steps of an execution the inputs in ``make_order``'s result are for.

    0 if they are no inputs of it. The signature in the seal is not verified yet. Raises PeerFault
    for what no client signs.
    """
    data = bytes.fromhex(order)
    signed, signature = data[:-_SIGNATURE_BYTES], data[-_SIGNATURE_BYTES:]
    for domain in (_DOMAIN, _BUNDLE_DOMAIN):
        headers = signed[len(domain) :]
        if signed.startswith(domain) and len(headers) % _HEADER.size == 0:
            break
    else:
        raise PeerFault("an order is no signed frame, and no bundle of frames")
    wanted = FrameKind.TENSOR, bytes.fromhex(execution_id[2:]), CLIENT
    found = [
        step + 1
        for magic, kind, _, execution, task, _, step, *_ in _HEADER.iter_unpack(headers)
        if magic == _MAGIC and (kind, execution, task) == wanted
    ]
    return max(found, default=0), Seal(signed, signature)


# ---- bundles: several tensors in one message, under one signature -----------------------------


def get_bundle_bytes(frame: Frame) -> int:
    """Return how many bytes a frame adds to a bundle.

    Zeros count although they are not sent: the reader allocates them.
    """
    return _HEADER.size + (0 if frame.stored or frame.direct else frame.length)


def make_bundle_message(frames: Sequence[Frame]) -> bytes:
    """Return the bytes that the sender of a bundle signs: domain and headers."""
    headers = (frame.signed_bytes()[len(_DOMAIN) :] for frame in frames)
    return b"".join((_BUNDLE_DOMAIN, *headers))


def encode_bundle(frames: Sequence[Frame], signed: bytes, signature: bytes) -> bytes:
    """Return magic ‖ u16 count ‖ signature ‖ headers ‖ payloads; TENSOR frames only.

    ``signed`` is the frames' ``make_bundle_message``.
    """
    head = _BUNDLE.pack(_BUNDLE_MAGIC, len(frames), signature)
    payloads = (b"" if frame.zeros else frame.payload for frame in frames)
    return b"".join((head, signed[len(_BUNDLE_DOMAIN) :], *payloads))


def decode_frames(data: bytes) -> tuple[Seal, list[Frame]]:
    """Parse a frame or a bundle; raise PeerFault for anything malformed.

    Checks sizes and the payloads' digests. Returns the signature, which the caller has to verify,
    and the frames.
    """
    if data.startswith(_BUNDLE_MAGIC):
        seal, headers, sizes = _read_bundle(data)
    elif FRAME_HEADER_BYTES <= len(data) <= limits.MAX_FRAME_BYTES:
        headers, sizes = [_HEADER.unpack_from(data)], [len(data) - FRAME_HEADER_BYTES]
        signature = data[_HEADER.size : FRAME_HEADER_BYTES]
        seal = Seal(_DOMAIN + data[: _HEADER.size], signature)
    else:
        raise PeerFault(
            f"frame of {len(data)} bytes; "
            f"allowed are {FRAME_HEADER_BYTES} to {limits.MAX_FRAME_BYTES}"
        )
    payloads, frames = memoryview(data)[len(data) - sum(sizes) :], []
    header: tuple[Any, ...]
    for header, size in zip(headers, sizes, strict=True):
        magic, kind, flag, execution, task, port, step, digest, length, before = header
        payload: bytes | memoryview = payloads[:size]
        payloads = payloads[size:]
        if magic != _MAGIC or kind not in _KINDS or flag not in _FLAGS:
            raise PeerFault(
                "frame with an unknown magic, kind or flag; the peer speaks another version"
            )
        if flag == _ZEROS:
            if kind != FrameKind.TENSOR or size or not is_zero(digest, length):
                raise PeerFault("frame for a tensor of zeros needs their digest and no payload")
            payload = bytes(length)
        elif flag:
            if kind != FrameKind.TENSOR or size or length > limits.MAX_TENSOR_BYTES:
                raise PeerFault(
                    "frame announces a tensor sent elsewhere, but is no such tensor frame"
                )
        elif size != length:
            raise PeerFault(f"frame announces {length} bytes and carries {size}")
        elif hashlib.sha256(payload).digest() != digest:
            raise PeerFault("frame payload does not match its digest")
        frames.append(
            Frame(
                _KINDS[kind],
                "0x" + execution.hex(),
                task,
                port,
                step,
                digest,
                length,
                payload,
                stored=flag == _STORED,
                zeros=flag == _ZEROS,
                direct=flag == _DIRECT,
                before=before,
            )
        )
    return seal, frames


def _read_bundle(data: bytes) -> tuple[Seal, list[tuple[Any, ...]], list[int]]:
    """Return a bundle's signature, its headers, and how many bytes follow for each of them."""
    if not _BUNDLE.size <= len(data) <= limits.MAX_FRAME_BYTES:
        raise PeerFault(
            f"bundle of {len(data)} bytes; allowed are {_BUNDLE.size} to {limits.MAX_FRAME_BYTES}"
        )
    _, count, signature = _BUNDLE.unpack_from(data)
    start = _BUNDLE.size + count * _HEADER.size
    if not 0 < count <= limits.BUNDLE_FRAMES or len(data) < start:
        raise PeerFault(f"bundle of {count} frames in {len(data)} bytes")
    headers = list(_HEADER.iter_unpack(data[_BUNDLE.size : start]))
    if any(header[1] != FrameKind.TENSOR for header in headers):
        raise PeerFault("a bundle holds a frame that is no tensor")
    sizes = [0 if header[2] else header[8] for header in headers]
    if start + sum(sizes) != len(data):
        raise PeerFault(f"bundle announces {sum(sizes)} bytes and carries {len(data) - start}")
    zeros = sum(header[8] for header in headers if header[2] == _ZEROS)
    if len(data) + zeros > limits.MAX_FRAME_BYTES:
        raise PeerFault(f"bundle of {len(data)} bytes with {zeros} bytes of zeros beside them")
    return Seal(_BUNDLE_DOMAIN + data[_BUNDLE.size : start], signature), headers, sizes


# ---- chunks of tensors that are too large for a frame -----------------------------------------

_CHUNK = struct.Struct(">4s32sHHIQQ")
CHUNK_MAGIC = b"SUp1"  # with which no frame begins


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A part of a tensor that is too large for a frame, sent directly to a reader.

    It is not signed: the signed ``direct`` frame that follows the last chunk has the digest of all.
    """

    execution_id: str
    task: int
    port: int
    step: int
    length: int  # of the whole tensor
    offset: int
    payload: bytes | memoryview

    def encode(self) -> bytes:
        """Return header ‖ payload."""
        header = _CHUNK.pack(
            CHUNK_MAGIC,
            bytes.fromhex(self.execution_id[2:]),
            self.task,
            self.port,
            self.step,
            self.length,
            self.offset,
        )
        return b"".join((header, self.payload))


def decode_chunk(data: bytes) -> TensorChunk:
    """Parse what begins with ``CHUNK_MAGIC``; raise PeerFault for impossible bounds."""
    if not data.startswith(CHUNK_MAGIC):
        raise PeerFault("a message that is no chunk came where one was expected")
    if not _CHUNK.size < len(data) <= _CHUNK.size + limits.TENSOR_CHUNK_BYTES:
        raise PeerFault(
            f"a chunk of {len(data)} bytes; it may carry 1 to {limits.TENSOR_CHUNK_BYTES}"
        )
    _, execution, task, port, step, length, offset = _CHUNK.unpack_from(data)
    payload = memoryview(data)[_CHUNK.size :]
    if not limits.INLINE_TENSOR_BYTES < length <= tuning.DIRECT_BYTES:
        raise PeerFault(f"a chunk of a tensor of {length} bytes, a size that is not sent in chunks")
    if offset + len(payload) > length:
        raise PeerFault(f"a chunk ends {offset + len(payload) - length} bytes behind its tensor")
    return TensorChunk("0x" + execution.hex(), task, port, step, length, offset, payload)
