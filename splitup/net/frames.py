"""Frames, signed and checked: what producers and consumers of tensors do with ``wire.Frame``."""

from __future__ import annotations

import hashlib

from splitup.crypto.keys import Identity, verify_raw
from splitup.protocol.logs import LogEntry
from splitup.protocol.queue import PortId
from splitup.tensors import is_zero
from splitup.wire import Frame, FrameKind, Message


def make_tensor_frame(
    execution_id: str, task: int, port: int, step: int, data: bytes, digest: bytes | None = None
) -> Frame:
    """Return the frame of an inline tensor; ``digest`` is its SHA-256 when already known."""
    digest = hashlib.sha256(data).digest() if digest is None else digest
    return Frame(
        kind=FrameKind.TENSOR,
        execution_id=execution_id,
        task=task,
        port=port,
        step=step,
        digest=digest,
        length=len(data),
        payload=data,
        zeros=is_zero(digest, len(data)),
    )


def make_stored_frame(
    execution_id: str,
    task: int,
    port: int,
    step: int,
    digest: bytes,
    length_bytes: int,
    *,
    direct: bool = False,
) -> Frame:
    """Return the frame that announces a tensor too large to travel inline.

    PUT it first, or send its pieces (``direct``).
    """
    return Frame(
        kind=FrameKind.TENSOR,
        execution_id=execution_id,
        task=task,
        port=port,
        step=step,
        digest=digest,
        length=length_bytes,
        payload=b"",
        stored=not direct,
        direct=direct,
    )


def make_entry_frame(execution_id: str, source: PortId, entry: LogEntry) -> Frame:
    """Return the frame that carries a step of a port, or announces it when it is stored apart."""
    task, port = source
    if entry.data is None:
        return make_stored_frame(execution_id, task, port, entry.step, entry.digest, entry.length)
    return make_tensor_frame(execution_id, task, port, entry.step, bytes(entry.data), entry.digest)


def make_message_frame(
    kind: FrameKind, execution_id: str, task: int, step: int, message: Message | None
) -> Frame:
    """Return a frame of a kind that carries a message, or nothing (END, PROBE)."""
    payload = b"" if message is None else message.canonical_bytes()
    return Frame(
        kind=kind,
        execution_id=execution_id,
        task=task,
        port=0,
        step=step,
        digest=hashlib.sha256(payload).digest(),
        length=len(payload),
        payload=payload,
    )


def seal_frame(identity: Identity, frame: Frame) -> bytes:
    """Return the signed bytes of a frame: sign once, send to every consumer."""
    return frame.encode(identity.sign_raw(frame.signed_bytes()))


def verify_frame(frame: Frame, signature: bytes, signing_key: str) -> None:
    """Check a decoded frame's signature under its producer's key; raise BadSignature."""
    verify_raw(signing_key, frame.signed_bytes(), signature)
