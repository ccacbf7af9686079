from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from splitup.client.collector import (
    FetchNeeded,
    OutputCollector,
    StepDone,
    TraceReceived,
    get_input_consumers,
)
from splitup.errors import BadSignature, PeerFault
from splitup.frames import FrameKind, decode_frame
from splitup.net.frames import (
    make_message_frame,
    make_stored_frame,
    seal_frame,
    verify_seal,
)
from splitup.protocol.takeovers import Roster
from splitup.wire import Span, TaskFailure, Trace
from tests.client.parties import make_parties
from tests.node.network import make_manifest

PARTIES = make_parties()
ONE, TWO = b"\0\0\x80\x3f", b"\0\0\0\x40"


def make_collector() -> OutputCollector:
    return OutputCollector(PARTIES.manifest, PARTIES.plan, verify_seal, Roster(PARTIES.plan))


def test_a_step_is_done_when_its_outputs_are_there() -> None:
    assert make_collector().receive(*PARTIES.make_output(2, ONE)) == [StepDone(2, (ONE,))]


def test_duplicates_are_silent_and_contradictions_are_not() -> None:
    collector = make_collector()
    collector.receive(*PARTIES.make_output(0, ONE))
    assert collector.receive(*PARTIES.make_output(0, ONE)) == []
    stored = make_stored_frame(PARTIES.execution_id, 1, 0, 1, hashlib.sha256(ONE).digest(), 4)
    collector.receive(*decode_frame(seal_frame(PARTIES.nodes[1], stored)))
    with pytest.raises(PeerFault, match="two different outputs") as caught:
        collector.receive(*PARTIES.make_output(1, TWO))
    assert caught.value.peer == PARTIES.nodes[1].address


def test_another_nodes_signature_is_refused() -> None:
    with pytest.raises(BadSignature):
        make_collector().receive(*PARTIES.make_output(0, ONE, signer=0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"execution_id": "0x" + "12" * 32}, "another's link"),
        ({"task": 0}, "no output of this execution"),
        ({"port": 1}, "no output of this execution"),
        ({"step": 4}, "no output of this execution"),
        ({"length": 8}, "sent 8 bytes for an output of float32"),
        ({"kind": FrameKind.END}, "only clients do"),
    ],
)
def test_frames_that_do_not_belong_are_refused(change: dict[str, object], message: str) -> None:
    frame, signature = PARTIES.make_output(0, ONE)
    with pytest.raises(PeerFault, match=message):
        make_collector().receive(replace(frame, **change), signature)  # type: ignore[arg-type]


def test_stored_output_is_fetched_first() -> None:
    collector = make_collector()
    digest = hashlib.sha256(ONE).digest()
    frame = make_stored_frame(PARTIES.execution_id, 1, 0, 3, digest, 4)
    (need,) = collector.receive(*decode_frame(seal_frame(PARTIES.nodes[1], frame)))
    assert need == FetchNeeded(1, 0, PARTIES.nodes[1].address, 3, digest, 4)
    assert isinstance(need, FetchNeeded)
    assert collector.receive_stored(need, ONE) == [StepDone(3, (ONE,))]
    assert collector.receive_stored(need, ONE) == []


def test_failures_and_traces_are_believed_of_the_node_alone() -> None:
    first, second = PARTIES.nodes
    failure = TaskFailure(task=0, step=1, node=first.address, reason="no memory")
    frame = make_message_frame(FrameKind.ERROR, PARTIES.execution_id, 0, 1, failure)
    assert make_collector().receive(*decode_frame(seal_frame(first, frame))) == [failure]
    with pytest.raises(BadSignature):
        make_collector().receive(*decode_frame(seal_frame(second, frame)))
    times = {name: "5" for name in ("received_ns", "started_ns", "ended_ns", "sent_ns")}
    for task, is_own in ((0, True), (1, False)):
        trace = Trace(
            execution_id=PARTIES.execution_id,
            node=first.address,
            spans=(Span(task=task, step=0, **times),),
        )
        frame = make_message_frame(FrameKind.TRACE, PARTIES.execution_id, 0, 0, trace)
        sealed = decode_frame(seal_frame(first, frame))
        if is_own:
            assert make_collector().receive(*sealed) == [TraceReceived(trace, is_last=True)]
        else:
            with pytest.raises(PeerFault, match="it did not run"):
                make_collector().receive(*sealed)


def test_inputs_go_to_the_nodes_that_read_them() -> None:
    executors = PARTIES.plan.executors()
    assert get_input_consumers(PARTIES.manifest, executors) == {(0,): (PARTIES.nodes[0].address,)}


def test_the_earliest_task_gets_its_inputs_first() -> None:
    manifest, _ = make_manifest(tasks=3)  # x goes to the first task and to the last
    assert list(get_input_consumers(manifest, ["f", "a", "b"]).items()) == [((0,), ("f", "b"))]
    assert get_input_consumers(manifest, ["f", "a", "f"]) == {(0,): ("f",)}
