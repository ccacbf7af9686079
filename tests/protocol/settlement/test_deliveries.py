"""What the client received is judged: a node that sent it other outputs than it commits to lied."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from splitup.core.tensors import NO_STEPS, StepsDigest
from splitup.crypto.keys import Identity
from splitup.messages.completions import End, SignedEnd, TaskCommitment
from splitup.messages.frames import Frame, FrameKind, make_delivery
from splitup.messages.plans import Plan
from splitup.net.signed_frames import seal_frame
from splitup.protocol.execution.ends import sign_end
from splitup.protocol.settlement.edge_faults import find_output_faults
from tests.builders import decode_frame, make_tensor_frame
from tests.protocol.simulator import (
    CLIENT,
    CLIENT_IDENTITY,
    VERIFY_ALL,
    VERIFY_NONE,
    Simulation,
    digest,
    get_slashes,
)

STEPS, TASKS, PRICE = 4, 3, 10 * 4
LAST = TASKS - 1


def sign(identity: Identity, execution_id: str, data: bytes, **changes: object) -> str:
    """Return the delivery for ``STEPS`` tensors with these bytes."""
    before = StepsDigest()
    for _ in range(STEPS - 1):
        before.add_tensor(data)
    frame = make_tensor_frame(execution_id, LAST, 0, STEPS - 1, data, before=before.value)
    return seal_delivery(identity, replace(frame, **changes))  # type: ignore[arg-type]


def seal_delivery(identity: Identity, frame: Frame) -> str:
    return make_delivery(decode_frame(seal_frame(identity, frame))[1])


def get_total(data: bytes) -> str:
    total = StepsDigest()
    for _ in range(STEPS):
        total.add_tensor(data)
    return total.hexdigest()


class Deliveries(Simulation):
    """The last task gives real tensors, and the client shows what ``delivery`` returns."""

    def __init__(self, delivery: Callable[[Identity, str], str], **options: object) -> None:
        super().__init__(0, nodes=8, tasks=TASKS, **options)  # type: ignore[arg-type]
        self.delivery = delivery

    def _compute(self, execution_id: str, plan: Plan, task: int) -> tuple[str, ...]:
        if task == LAST:
            return (get_total(b"right"),)
        return super()._compute(execution_id, plan, task)

    def _sign_end(self, plan: Plan, task: int) -> SignedEnd:
        end = super()._sign_end(plan, task).end
        executor = self.by_node[self.find_executors(plan)[LAST]]
        delivery = self.delivery(executor.identity, end.execution_id)
        return sign_end(CLIENT_IDENTITY, end.model_copy(update={"outputs": (delivery,)}))


def play(simulation: Deliveries) -> tuple[str, str]:
    """Settle an execution; return its id and who ran the last task."""
    assert simulation.run(20, lambda: simulation.chain.sequence >= 1)
    execution_id = simulation.request(steps=STEPS)
    assert simulation.run(60, lambda: simulation.is_settled(execution_id))
    simulation.run(3)
    plan = simulation.find_plan(execution_id)
    return execution_id, simulation.find_executors(plan)[LAST]


@pytest.mark.parametrize("economics", [VERIFY_ALL, VERIFY_NONE])
@pytest.mark.parametrize("took_over", [False, True])
def test_s07_who_signs_other_outputs_for_the_client_than_it_commits_to_is_slashed(
    economics: object, took_over: bool
) -> None:
    """Drawn or not: the two signatures contradict each other, so nobody has to compute anything."""
    simulation = Deliveries(
        lambda node, execution_id: sign(node, execution_id, b"wrong"), economics=economics
    )
    if took_over:
        simulation.broken = lambda plan: {plan.executors()[LAST]}
    execution_id, deceiver = play(simulation)
    assert simulation.find_outcomes(execution_id)[LAST] == "lied"
    assert set(get_slashes(simulation, execution_id)) == {deceiver}
    paid = simulation.get_paid(execution_id)
    plan = simulation.find_plan(execution_id)
    executors = simulation.find_executors(plan)
    honest = {node for node in executors if node != deceiver}
    assert honest <= paid.keys()
    if economics is VERIFY_NONE:
        due = {node: PRICE * executors[:LAST].count(node) for node in executors[:LAST]}
        assert paid == due, "the others are paid, and the deceiver for its other tasks at most"
        back = simulation.chain.settlements[execution_id].payments
        assert [p.amount_micro_usdc for p in back if p.account == CLIENT] == [TASKS * PRICE]


STRANGER = Identity.from_private_key(bytes([9]) * 32)


@pytest.mark.parametrize(
    "delivery",
    [
        lambda node, execution_id: "",  # the client shows nothing
        lambda node, execution_id: sign(node, execution_id, b"right"),
        lambda node, execution_id: sign(STRANGER, execution_id, b"wrong"),
        lambda node, execution_id: sign(node, "0x" + "77" * 32, b"wrong"),
        lambda node, execution_id: sign(node, execution_id, b"right", step=0, before=NO_STEPS),
        # a frame for another node, which says nothing about the steps before
        lambda node, execution_id: sign(node, execution_id, b"right", before=NO_STEPS),
        lambda node, execution_id: sign(node, execution_id, b"right", port=1),
        lambda node, execution_id: sign(node, execution_id, b"other", kind=FrameKind.TRACE),
    ],
)
def test_s07_no_client_can_frame_a_node_that_sent_what_it_commits_to(
    delivery: Callable[[Identity, str], str],
) -> None:
    simulation = Deliveries(delivery, economics=VERIFY_NONE)
    execution_id, _ = play(simulation)
    assert simulation.find_outcomes(execution_id) == {}
    assert not get_slashes(simulation, execution_id)
    assert sum(simulation.get_paid(execution_id).values()) == TASKS * PRICE


def test_s07_a_client_that_signs_two_ends_changes_nothing_about_a_delivery() -> None:
    """A node that deceives it shows the end without a delivery, and the others the one with it."""
    simulation = Deliveries(lambda node, execution_id: "", economics=VERIFY_NONE)
    assert simulation.run(20, lambda: simulation.chain.sequence >= 1)
    execution_id = simulation.request(steps=STEPS)
    assert simulation.run(8, lambda: bool(simulation.certificates.get(execution_id)))
    plan = simulation.find_plan(execution_id)
    executors = plan.executors()
    node = simulation.by_node[executors[LAST]].identity
    claim = TaskCommitment(
        task=LAST,
        inputs=(digest("in"),),
        outputs=(get_total(b"right"),),
        state=hashlib.sha256().hexdigest(),
    )
    claims = {LAST: claim}

    def end(*outputs: str, steps: int = STEPS) -> End:
        return End(execution_id=execution_id, steps=steps, inputs=(), outputs=outputs)

    wrong, right = (sign(node, execution_id, data) for data in (b"wrong", b"right"))
    for ends, found in (
        ((end(""), end(wrong)), {LAST}),
        ((end(wrong), end(right)), {LAST}),
        ((end(right), end(right, steps=3)), set()),
        ((end(right, right), end()), set()),
        ((end(),), set()),
    ):
        assert find_output_faults(plan, claims, executors, ends, STEPS) == found
    for steps in (STEPS - 1, STEPS + 1):
        assert find_output_faults(plan, claims, executors, (end(wrong),), steps) == set()
    assert find_output_faults(plan, {LAST: None}, executors, (end(wrong),), STEPS) == set()
