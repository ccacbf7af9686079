from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from splitup.client.execution.output_collector import (
    FetchNeeded,
    OutputCollector,
    StepDone,
    TraceReceived,
    get_input_consumers,
)
from splitup.core.errors import BadSignature, PeerFault
from splitup.core.tensors import NO_STEPS, extend_steps
from splitup.messages.completions import Takeover
from splitup.messages.frames import FrameKind, TensorChunk, decode_frames, read_delivery
from splitup.messages.progress import Span, TaskFailure, Trace
from splitup.net.signed_frames import (
    make_message_frame,
    seal_frame,
    seal_frames,
    verify_seal,
)
from splitup.net.tensor_chunks import TensorChunks
from splitup.protocol.execution.takeovers import ExecutorMap, sign_takeover
from splitup.protocol.execution.task_queue import PortId
from tests.builders import decode_frame, make_stored_frame
from tests.client.parties import make_parties
from tests.node.network import make_manifest

PARTIES = make_parties()
ONE, TWO = b"\0\0\x80\x3f", b"\0\0\0\x40"


def make_collector() -> OutputCollector:
    executor_map = ExecutorMap(PARTIES.plan)
    return OutputCollector(
        PARTIES.manifest, PARTIES.plan, verify_seal, executor_map, TensorChunks().take
    )


def test_a_step_is_done_when_its_outputs_are_there() -> None:
    assert make_collector().receive(*PARTIES.make_output(2, ONE)) == [StepDone(2, (ONE,))]


def test_duplicates_are_silent_and_contradictions_are_not() -> None:
    collector = make_collector()
    collector.receive(*PARTIES.make_output(0, ONE))
    assert collector.receive(*PARTIES.make_output(0, ONE)) == []
    digest = hashlib.sha256(ONE).digest()
    before = extend_steps(NO_STEPS, digest)
    stored = make_stored_frame(PARTIES.execution_id, 1, 0, 1, digest, 4, before=before)
    collector.receive(*decode_frame(seal_frame(PARTIES.nodes[1], stored)))
    with pytest.raises(PeerFault, match="two different outputs") as caught:
        collector.receive(*PARTIES.make_output(1, TWO, before=before))
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


@pytest.mark.parametrize("is_whole", [True, False])
def test_output_in_chunks_is_taken_when_it_is_whole(is_whole: bool) -> None:
    taken: list[tuple[PortId, int]] = []

    def take(execution_id: str, port: PortId, step: int, digest: bytes) -> memoryview | None:
        taken.append((port, step))
        return memoryview(ONE) if is_whole else None

    collector, digest = make_collector(), hashlib.sha256(ONE).digest()
    collector.take_chunks = take
    frames = [
        make_stored_frame(PARTIES.execution_id, 1, 0, 3, digest, 4, direct=direct)
        for direct in (True, False)
    ]
    first, second = [
        collector.receive(*decode_frame(seal_frame(PARTIES.nodes[1], frame))) for frame in frames
    ]
    node = PARTIES.nodes[1].address
    if is_whole:
        assert (first, second) == ([StepDone(3, (ONE,))], [])
    else:
        assert (first, second) == ([], [FetchNeeded(1, 0, node, 3, digest, 4)])
    assert taken == [((1, 0), 3)] * 2, "nothing stays that nobody waits for"


def test_a15_chunks_that_nobody_may_send_are_faults() -> None:
    collector, node = make_collector(), PARTIES.nodes[1].address
    chunk = TensorChunk(PARTIES.execution_id, 1, 0, 0, 4, 0, ONE)
    assert collector.check_chunk(node, chunk)
    for change in ({"task": 0}, {"port": 1}, {"step": 4}, {"length": 8}, {"execution_id": "0x12"}):
        with pytest.raises(PeerFault, match="what is no output"):
            collector.check_chunk(node, replace(chunk, **change))  # type: ignore[arg-type]
    with pytest.raises(PeerFault, match="chunks of task 1"):
        collector.check_chunk(PARTIES.nodes[0].address, chunk)
    collector.receive(*PARTIES.make_output(0, ONE))
    assert not collector.check_chunk(node, chunk), "it is there already"


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


def send(
    collector: OutputCollector, step: int, data: bytes, before: bytes, signer: int = 1
) -> bytes:
    """Receive an output; return the digest of all steps up to it."""
    collector.receive(*PARTIES.make_output(step, data, signer, before))
    return extend_steps(before, hashlib.sha256(data).digest())


def test_s07_the_delivery_of_the_last_step_signs_all_that_was_sent() -> None:
    collector, sent = make_collector(), [NO_STEPS]
    for step, data in enumerate((ONE, TWO, ONE)):
        sent.append(send(collector, step, data, sent[-1]))
    (text,) = collector.make_deliveries(3)
    delivery = read_delivery(text)
    assert delivery is not None and (delivery.task, delivery.port, delivery.step) == (1, 0, 2)
    assert delivery.total == sent[-1]
    verify_seal(delivery.seal, PARTIES.nodes[1].signing_key_hex)
    assert collector.make_deliveries(4) == ("",), "the fourth is missing"
    assert make_collector().make_deliveries(0) == ("",)


def test_s07_who_signs_other_earlier_steps_than_it_sent_is_replaced() -> None:
    """Otherwise its last frame could sign what it commits to, whatever the client received."""
    told = extend_steps(NO_STEPS, hashlib.sha256(TWO).digest())
    for before in (told, NO_STEPS):
        collector = make_collector()
        send(collector, 0, ONE, NO_STEPS)
        with pytest.raises(PeerFault, match="did not sign what it sent before step 1") as caught:
            send(collector, 1, ONE, before)
        assert caught.value.peer == PARTIES.nodes[1].address
    collector = make_collector()
    send(collector, 1, ONE, told)  # the steps before are still on their way
    with pytest.raises(PeerFault, match="did not sign"):
        send(collector, 0, ONE, NO_STEPS)
    assert collector.make_deliveries(2) == ("",)


def test_s07_the_frame_that_is_kept_is_the_one_whose_tensor_is_used() -> None:
    """A large tensor is announced twice; both have to be the same."""
    collector, digest = make_collector(), hashlib.sha256(ONE).digest()
    direct = make_stored_frame(PARTIES.execution_id, 1, 0, 0, digest, 4, direct=True)
    collector.receive(*decode_frame(seal_frame(PARTIES.nodes[1], direct)))
    other = hashlib.sha256(TWO).digest()
    stored = make_stored_frame(PARTIES.execution_id, 1, 0, 0, other, 4)
    with pytest.raises(PeerFault, match="two different outputs"):
        collector.receive(*decode_frame(seal_frame(PARTIES.nodes[1], stored)))


def test_s07_outputs_that_share_a_signature_are_refused() -> None:
    frame, _ = PARTIES.make_output(0, ONE)
    (data,) = seal_frames(PARTIES.nodes[1], [frame, replace(frame, step=1)])
    seal, frames = decode_frames(data)
    with pytest.raises(PeerFault, match="did not sign"):
        make_collector().receive(frames[0], seal)


def test_s07_a_successor_signs_for_the_steps_that_it_computed_itself() -> None:
    """It may be of another determinism class than the node whose outputs the client has."""
    first, second = PARTIES.nodes
    tasks = (PARTIES.plan.tasks[0], (second.address, first.address))
    plan = PARTIES.plan.model_copy(update={"tasks": tasks})
    executor_map = ExecutorMap(plan)
    collector = OutputCollector(
        PARTIES.manifest, plan, verify_seal, executor_map, TensorChunks().take
    )
    send(collector, 0, ONE, NO_STEPS)
    takeover = Takeover(execution_id=PARTIES.execution_id, task=1, candidate=1, first_step=1)
    executor_map.apply(sign_takeover(PARTIES.client, takeover))
    collector.renew(1)
    assert collector.make_deliveries(1) == ("",), "it has sent nothing yet"
    own = extend_steps(NO_STEPS, hashlib.sha256(TWO).digest())  # its step 0 differs
    total = send(collector, 2, ONE, extend_steps(own, hashlib.sha256(ONE).digest()), signer=0)
    send(collector, 1, ONE, own, signer=0)
    delivery = read_delivery(collector.make_deliveries(3)[0])
    assert delivery is not None and delivery.total == total
    verify_seal(delivery.seal, first.signing_key_hex)
