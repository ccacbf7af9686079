from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.core import limits
from splitup.core.errors import BadSignature, PeerFault
from splitup.crypto.keys import generate_identity
from splitup.messages.frames import BUNDLE_HEADER_BYTES, Frame, FrameKind, decode_frames
from splitup.net.signed_frames import seal_frames, verify_seal
from tests.builders import make_stored_frame, make_tensor_frame

IDENTITY, OTHER = generate_identity(), generate_identity()
EXECUTIONS = ["0x" + "ab" * 32, "0x" + "cd" * 32]
COUNT = struct.Struct(">H")  # behind the magic


def make_frames() -> list[Frame]:
    """A tensor, one of zeros, one that is stored, and one of another execution."""
    return [
        make_tensor_frame(EXECUTIONS[0], 1, 0, 3, b"tensor"),
        make_tensor_frame(EXECUTIONS[0], 1, 1, 3, bytes(100)),
        make_stored_frame(EXECUTIONS[0], 1, 2, 3, hashlib.sha256(b"").digest(), 2**30),
        make_tensor_frame(EXECUTIONS[1], 1, 0, 7, b"another"),
    ]


def seal_one(frames: list[Frame]) -> bytes:
    [message] = seal_frames(IDENTITY, frames)
    return message


def with_bytes(frame: Frame) -> Frame:
    return replace(frame, payload=bytes(frame.payload))


def test_a_bundle_carries_its_frames_under_one_signature() -> None:
    frames = make_frames()
    seal, decoded = decode_frames(seal_one(frames))
    assert list(map(with_bytes, decoded)) == frames
    verify_seal(seal, IDENTITY.signing_key_hex)
    with pytest.raises(BadSignature):  # a seal is verified per key
        verify_seal(seal, OTHER.signing_key_hex)


def test_a_frame_alone_is_no_bundle() -> None:
    frame = make_frames()[0]
    seal, [decoded] = decode_frames(seal_one([frame]))
    assert with_bytes(decoded) == frame and seal.signed == frame.signed_bytes()
    verify_seal(seal, IDENTITY.signing_key_hex)
    assert seal_frames(IDENTITY, []) == []


def test_what_does_not_fit_one_message_goes_in_several() -> None:
    large = [make_tensor_frame(EXECUTIONS[0], 0, 0, n, b"x" * 600_000) for n in range(3)]
    small = [make_tensor_frame(EXECUTIONS[0], 0, 1, n, b"x") for n in range(2 * 256)]
    full = make_tensor_frame(EXECUTIONS[0], 0, 2, 0, b"x" * limits.INLINE_TENSOR_BYTES)
    zeros = make_tensor_frame(EXECUTIONS[0], 0, 3, 0, bytes(limits.INLINE_TENSOR_BYTES))
    for frames, count in ((large, 3), (small, 2), ([full, zeros], 2), ([zeros, zeros], 2)):
        messages = seal_frames(IDENTITY, frames)
        assert len(messages) == count
        assert max(map(len, messages)) <= limits.MAX_FRAME_BYTES
        decoded = [frame for message in messages for frame in decode_frames(message)[1]]
        assert list(map(with_bytes, decoded)) == frames


@given(st.data())
def test_a15_no_byte_of_a_bundle_can_be_changed(data: Any) -> None:
    sealed = bytearray(seal_one(make_frames()))
    place = data.draw(st.integers(0, len(sealed) - 1))
    sealed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises((PeerFault, BadSignature)):
        verify_seal(decode_frames(bytes(sealed))[0], IDENTITY.signing_key_hex)


def test_a15_a_frame_cannot_leave_its_bundle_or_join_another() -> None:
    frames = make_frames()
    first, second = seal_one(frames[:2]), seal_one(frames[2:])
    mixed = first[:BUNDLE_HEADER_BYTES] + second[BUNDLE_HEADER_BYTES:]
    with pytest.raises(BadSignature):
        verify_seal(decode_frames(mixed)[0], IDENTITY.signing_key_hex)
    alone = frames[0].encode(decode_frames(first)[0].signature)
    with pytest.raises(BadSignature):
        verify_seal(decode_frames(alone)[0], IDENTITY.signing_key_hex)


@given(st.binary(max_size=600), st.booleans())
def test_random_bytes_are_refused_without_a_crash(data: bytes, is_bundle: bool) -> None:
    with pytest.raises(PeerFault):
        decode_frames(b"SUb1" * is_bundle + data)


@pytest.mark.parametrize("count", [0, 3, 5, limits.BUNDLE_FRAMES + 1, 0xFFFF])
def test_a09_a_bundle_that_lies_about_its_frames_is_refused(count: int) -> None:
    sealed = bytearray(seal_one(make_frames()))
    COUNT.pack_into(sealed, 4, count)
    with pytest.raises(PeerFault):
        decode_frames(bytes(sealed))


def test_a09_bundles_make_no_more_zeros_than_they_could_carry() -> None:
    frames = [make_tensor_frame(EXECUTIONS[0], 0, 0, n, bytes(2**20)) for n in range(2)]
    message = seal_one(make_frames()[:2])
    doubled = b"".join(
        (
            message[:4],
            COUNT.pack(2),
            bytes(64),
            *(frame.encode(bytes(64))[:-64] for frame in frames),
        )
    )
    with pytest.raises(PeerFault, match="bytes of zeros beside"):
        decode_frames(doubled)


def test_a_bundle_carries_nothing_but_tensors() -> None:
    frames = [replace(frame, kind=FrameKind.END) for frame in make_frames()[:1] * 2]
    with pytest.raises(PeerFault, match="holds a frame that is no tensor"):
        decode_frames(seal_one(frames))


def test_too_long_a_message_is_refused() -> None:
    with pytest.raises(PeerFault, match="allowed are"):
        decode_frames(seal_one(make_frames()) + bytes(limits.MAX_FRAME_BYTES))
