from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.messages.base import CLIENT
from splitup.messages.storage import SegmentHeader
from splitup.protocol.execution.log_segments import LogEntry, LogNameer, PortLog

ZEROS = st.integers(0, 40).map(bytes)
EXECUTION, NODE = "0x" + "01" * 32, "0x" + "ab" * 20


def make_entry(step: int, data: bytes, *, apart: bool = False) -> LogEntry:
    digest = hashlib.sha256(data).digest()
    return LogEntry(step, digest, len(data), None if apart else data)


def store(log: PortLog) -> list[bytes]:
    """Return the objects of all closed segments, marked as stored."""
    objects = []
    while (segment := log.get_oldest()) is not None:
        data = b"".join(segment.encode(EXECUTION, log.previous))
        log.mark_stored(segment, hashlib.sha256(data).hexdigest())
        objects.append(data)
    return objects


def make_reader(task: int = 3, accepts: Callable[[int], bool] = lambda length: True) -> LogNameer:
    return LogNameer(EXECUTION, task, 0, NODE, accepts)


@settings(max_examples=50, deadline=None)
@given(
    tensors=st.lists(st.tuples(st.binary(max_size=20) | ZEROS, st.booleans()), max_size=600),
    flushes=st.sets(st.integers(0, 600)),
)
def test_what_is_read_and_what_is_unstored_is_what_was_written(
    tensors: list[tuple[bytes, bool]], flushes: set[int]
) -> None:
    log, reader = PortLog(3, 0, NODE), make_reader()
    entries = [make_entry(n, data, apart=apart) for n, (data, apart) in enumerate(tensors)]
    read: list[LogEntry] = []
    for entry in entries:
        log.append(entry, now=float(entry.step))
        if entry.step in flushes:
            log.flush(before=float(entry.step))
        for data in store(log):
            read += reader.read(data)
        assert [e.step for e in (*read, *log.iter_unstored())] == list(range(entry.step + 1))
    assert log.unstored_bytes == sum(len(e.data or b"") for e in log.iter_unstored())
    log.flush(before=float(len(entries)))
    for data in store(log):
        read += reader.read(data)
    assert read == entries and log.unstored_bytes == 0


def test_segments_are_full_by_steps_or_by_bytes_and_young_ones_wait() -> None:
    log = PortLog(0, 0, NODE)
    for step in range(limits.SEGMENT_STEPS - 1):
        log.append(make_entry(step, b"x"), 1.0)
    assert not log.flush(before=0.9) and log.get_oldest() is None
    log.append(make_entry(limits.SEGMENT_STEPS - 1, b"x"), 1.0)
    assert log.flush(before=0.9) and log.get_oldest() is not None and not log.is_behind
    large = PortLog(0, 0, NODE)
    half = bytes(limits.SEGMENT_BYTES // 2 + 1)
    large.append(make_entry(0, half), 1.0)
    assert large.get_oldest() is None
    large.append(make_entry(1, half), 1.0)  # ends the first segment and opens the second
    assert large.get_oldest() is not None and not large.is_behind
    large.append(make_entry(2, half), 1.0)
    assert large.is_behind
    assert [e.step for e in large.iter_unstored()] == [0, 1, 2]


def make_segments(count: int = 2) -> list[bytes]:
    log = PortLog(3, 0, NODE)
    for step in range(count):
        log.append(make_entry(step, bytes([step + 1] * 4)), 0.0)
        log.flush(before=0.0)
    return store(log)


def test_f21_truncated_or_altered_segment_breaks_the_chain() -> None:
    first, second = make_segments()
    for cut in range(len(first)):
        with pytest.raises(PeerFault):
            make_reader().read(first[:cut])
    reader = make_reader()
    reader.read(first[:-1] + b"!")  # the bytes of the tensor are what the chain is over …
    with pytest.raises(PeerFault, match="does not follow the segment"):
        reader.read(second)


def test_segments_of_another_place_or_length_are_refused() -> None:
    first, second = make_segments()
    with pytest.raises(PeerFault, match="does not match its key"):
        make_reader(task=CLIENT).read(first)
    with pytest.raises(PeerFault, match="does not match its key"):
        make_reader().read(second)
    with pytest.raises(PeerFault, match="impossible length"):
        make_reader(accepts=lambda length: length == 8).read(first)
    with pytest.raises(PeerFault, match="another length than"):
        make_reader().read(first + b"\0")


def test_zeros_take_no_room_in_a_segment() -> None:
    log, reader = PortLog(3, 0, NODE), make_reader()
    tensors = [bytes(10_000), b"\1" * 10_000, bytes(10_000), bytes(10_000)]
    for step, data in enumerate(tensors):
        log.append(make_entry(step, data), 0.0)
    log.flush(0.0)
    (data,) = store(log)
    assert len(data) < 11_000
    assert [entry.data for entry in reader.read(data)] == tensors


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"zeros": (2,)}, "zeros where it has no step"),
        ({"zeros": ()}, "another length"),
        ({"zeros": (0,), "apart": ((0, "ab" * 32),)}, "stores zeros"),
        ({"lengths": (4, limits.SEGMENT_BYTES - 3)}, "too many bytes, or zeros"),
        ({"lengths": (4, *[2**20] * 4), "zeros": (1, 2, 3, 4)}, "too many bytes, or zeros"),
        ({"lengths": (4, 2**50)}, "too many bytes, or zeros"),
    ],
)
def test_s52_impossible_zeros_are_refused(change: dict[str, object], problem: str) -> None:
    values = {"lengths": (4, 4), "apart": (), "zeros": (1,), **change}
    header = SegmentHeader(
        execution_id=EXECUTION,
        task=3,
        port=0,
        node=NODE,
        index=0,
        first_step=0,
        previous="0" * 64,
        **values,  # type: ignore[arg-type]
    ).canonical_bytes()
    with pytest.raises(PeerFault, match=problem):
        make_reader().read(len(header).to_bytes(4, "big") + header + b"\1\2\3\4")
