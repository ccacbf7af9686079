from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.core import limits, tuning
from splitup.core.errors import PeerFault
from splitup.messages.frames import (
    FRAME_HEADER_BYTES,
    Frame,
    FrameKind,
    Seal,
    TensorChunk,
    decode_chunk,
)
from splitup.messages.snapshots import Heartbeat
from tests.builders import decode_frame

SIGNATURE = bytes(range(64))


def make_frame(payload: bytes = b"tensor") -> Frame:
    return Frame(
        kind=FrameKind.TENSOR,
        execution_id="0x" + "ab" * 32,
        task=7,
        port=1,
        step=65_535,
        digest=hashlib.sha256(payload).digest(),
        length=len(payload),
        payload=payload,
    )


@given(
    st.binary(max_size=300),
    st.integers(0, 0xFFFF),
    st.integers(0, 0xFFFF),
    st.integers(0, 2**32 - 1),
)
def test_frame_round_trip(payload: bytes, task: int, port: int, step: int) -> None:
    frame = replace(make_frame(payload), task=task, port=port, step=step)
    decoded, seal = decode_frame(frame.encode(SIGNATURE))
    assert replace(decoded, payload=bytes(decoded.payload)) == frame
    assert seal == Seal(frame.signed_bytes(), SIGNATURE)


@given(st.binary(max_size=400))
def test_random_bytes_are_refused_without_a_crash(data: bytes) -> None:
    with pytest.raises(PeerFault):
        decode_frame(data)


def test_a15_every_header_field_is_signed() -> None:
    """Replay across execution, task, port, step or tensor changes what the signature covers."""
    frame = make_frame()
    variants = [
        replace(frame, kind=FrameKind.ERROR),
        replace(frame, execution_id="0x" + "ac" * 32),
        replace(frame, task=8),
        replace(frame, port=2),
        replace(frame, step=0),
        replace(frame, digest=bytes(32)),
        replace(frame, length=7),
        replace(frame, stored=True),
    ]
    assert len({frame.signed_bytes(), *(v.signed_bytes() for v in variants)}) == len(variants) + 1


def test_a09_a_lying_length_is_refused() -> None:
    with pytest.raises(PeerFault, match="announces 1000 bytes and carries 6"):
        decode_frame(replace(make_frame(), length=1000).encode(SIGNATURE))


def test_a_payload_that_is_not_its_digest_is_refused() -> None:
    with pytest.raises(PeerFault, match="does not match its digest"):
        decode_frame(replace(make_frame(), payload=b"tensoR").encode(SIGNATURE))


def test_a_stored_tensor_has_a_length_but_no_payload() -> None:
    stored = replace(make_frame(), payload=b"", length=5 * limits.MIB, stored=True)
    decoded, _ = decode_frame(stored.encode(SIGNATURE))
    assert decoded.stored and decoded.length == 5 * limits.MIB
    with pytest.raises(PeerFault, match="announces a tensor sent elsewhere"):
        decode_frame(replace(make_frame(), stored=True).encode(SIGNATURE))


def test_frames_are_bounded() -> None:
    for size in (0, FRAME_HEADER_BYTES - 1, limits.MAX_FRAME_BYTES + 1):
        with pytest.raises(PeerFault, match=f"frame of {size} bytes"):
            decode_frame(bytes(size))


HEARTBEAT = Heartbeat(
    node="0x" + "1" * 40,
    boot_id="2" * 64,
    sequence=3,
    sent_at_ms=4,
    block_hash="0x" + "05" * 32,
    queue_ms=6,
    resident=("7" * 64,),
    vram_free_bytes=8,
    determinism="CPU:X86",
)


def test_messages_round_trip_and_digests_separate_domains() -> None:
    assert Heartbeat.parse(HEARTBEAT.canonical_bytes()) == HEARTBEAT
    assert HEARTBEAT.digest("a") != HEARTBEAT.digest("b")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("node", "0x" + "A" * 40),
        ("sequence", -1),
        ("sequence", True),
        ("sequence", "3"),
        ("resident", ["7" * 63]),
        ("resident", ["7" * 64] * (limits.MAX_RESIDENT_TASKS + 1)),
        ("unknown", 1),
    ],
)
def test_a25_malformed_messages_name_the_field(field: str, value: object) -> None:
    with pytest.raises(PeerFault, match=rf"Heartbeat\.{field}"):
        Heartbeat.from_value({**HEARTBEAT.model_dump(mode="json"), field: value})


def make_zeros(length: int) -> Frame:
    digest = hashlib.sha256(bytes(length)).digest()
    return replace(make_frame(), payload=bytes(length), length=length, digest=digest, zeros=True)


def test_zeros_travel_without_their_bytes() -> None:
    frame = make_zeros(1000)
    data = frame.encode(SIGNATURE)
    assert len(data) == FRAME_HEADER_BYTES
    decoded, _ = decode_frame(data)
    assert decoded == frame and decoded.payload == bytes(1000)
    assert decoded.signed_bytes() != replace(frame, zeros=False).signed_bytes()


@pytest.mark.parametrize(
    "frame",
    [
        replace(make_zeros(8), digest=hashlib.sha256(bytes(7)).digest()),
        replace(make_zeros(8), length=9),
        replace(make_zeros(8), stored=True),
        replace(make_zeros(8), kind=FrameKind.END),
        replace(make_zeros(8), length=2**62),  # refused without being hashed
        make_zeros(limits.INLINE_TENSOR_BYTES + 1),
    ],
)
def test_zeros_that_are_none_are_refused(frame: Frame) -> None:
    with pytest.raises(PeerFault):
        decode_frame(frame.encode(SIGNATURE))


def test_zeros_have_no_payload() -> None:
    with pytest.raises(PeerFault, match="zeros"):
        decode_frame(make_zeros(8).encode(SIGNATURE) + bytes(8))


CHUNK = TensorChunk(
    "0x" + "ab" * 32, 1, 2, 3, 2 * limits.MIB, limits.TENSOR_CHUNK_BYTES, b"x" * 100
)


def test_piece_round_trips_and_is_no_frame() -> None:
    assert decode_chunk(CHUNK.encode()) == CHUNK
    with pytest.raises(PeerFault, match="no chunk"):
        decode_chunk(make_frame().encode(SIGNATURE))
    with pytest.raises(PeerFault, match="magic"):
        decode_frame(CHUNK.encode() + bytes(FRAME_HEADER_BYTES))


@pytest.mark.parametrize(
    "chunk",
    [
        replace(CHUNK, payload=b""),
        replace(CHUNK, payload=bytes(limits.TENSOR_CHUNK_BYTES + 1)),
        replace(CHUNK, length=limits.INLINE_TENSOR_BYTES),
        replace(CHUNK, length=tuning.DIRECT_BYTES + 1),
        replace(CHUNK, offset=CHUNK.length - 99),
        replace(CHUNK, offset=2**64 - 1),
    ],
)
def test_a25_impossible_chunks_are_refused(chunk: TensorChunk) -> None:
    with pytest.raises(PeerFault, match="chunk"):
        decode_chunk(chunk.encode())


def test_direct_frame_is_not_a_stored_one() -> None:
    frame = replace(make_frame(), payload=b"", stored=True)
    direct = replace(frame, stored=False, direct=True)
    assert decode_frame(direct.encode(SIGNATURE))[0] == direct
    assert direct.signed_bytes() != frame.signed_bytes()
    with pytest.raises(PeerFault, match="flag"):
        decode_frame(replace(frame, direct=True).encode(SIGNATURE))
