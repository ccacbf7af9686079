"""Makes, signs and verifies the frames of ``splitup.messages.frames``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from splitup.core import limits
from splitup.core.tensors import NO_STEPS, compute_zero_digest
from splitup.crypto.keys import Identity, verify_raw
from splitup.messages.base import Message
from splitup.messages.frames import (
    BUNDLE_HEADER_BYTES,
    Frame,
    FrameKind,
    Seal,
    encode_bundle,
    get_bundle_bytes,
    make_bundle_message,
)
from splitup.protocol.execution.log_segments import LogEntry
from splitup.protocol.execution.task_queue import PortId


def make_entry_frame(
    execution_id: str,
    source: PortId,
    entry: LogEntry,
    before: bytes = NO_STEPS,
    *,
    direct: bool = False,
) -> Frame:
    """Return the frame for one step of a port's log.

    An entry without data is too large for a frame: store it first, or send its chunks (``direct``).
    """
    data = entry.data
    return Frame(
        FrameKind.TENSOR,
        execution_id,
        *source,
        entry.step,
        entry.digest,
        entry.length,
        b"" if data is None else bytes(data),
        stored=data is None and not direct,
        direct=direct,
        zeros=data is not None and entry.digest == compute_zero_digest(entry.length),
        before=before,
    )


def make_message_frame(
    kind: FrameKind, execution_id: str, task: int, step: int, message: Message | None
) -> Frame:
    """Return a frame of a kind other than TENSOR, with a message or an empty payload."""
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
    """Sign a frame; return its bytes, which are the same for every consumer."""
    return frame.seal(identity.sign_raw)


def seal_frames(identity: Identity, frames: Sequence[Frame]) -> list[bytes]:
    """Sign frames for the same readers; return as few messages (bundles) as they fit in."""
    if len(frames) == 1:
        return [frames[0].seal(identity.sign_raw)]
    bundles: list[list[Frame]] = []
    room = 0
    for frame in frames:
        size = get_bundle_bytes(frame)
        if size > room or len(bundles[-1]) >= limits.BUNDLE_FRAMES:
            bundles.append([])
            room = limits.MAX_FRAME_BYTES - BUNDLE_HEADER_BYTES
        bundles[-1].append(frame)
        room -= size
    return [_seal_bundle(identity, bundle) for bundle in bundles]


def _seal_bundle(identity: Identity, frames: Sequence[Frame]) -> bytes:
    if len(frames) == 1:
        return seal_frame(identity, frames[0])
    signed = make_bundle_message(frames)
    return encode_bundle(frames, signed, identity.sign_raw(signed))


def verify_seal(seal: Seal, signing_key: str) -> None:
    """Verify a signature under its producer's key, once per seal; raise BadSignature."""
    if seal.key != signing_key:
        verify_raw(signing_key, seal.signed, seal.signature)
        seal.key = signing_key
