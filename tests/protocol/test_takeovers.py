from __future__ import annotations

import pytest

from splitup.crypto.keys import generate_identity
from splitup.errors import BadSignature, PeerFault
from splitup.protocol.takeovers import Roster, check_takeover, compute_executors, sign_takeover
from splitup.wire import Completion, Plan, PlanNode, SignedTakeover, Takeover, TaskCommitment
from tests.builders import make_request

CLIENT_KEY = generate_identity()
NODES = tuple(generate_identity() for _ in range(4))
REQUEST = make_request(8).model_copy(update={"client_key": CLIENT_KEY.signing_key_hex})
PLAN = Plan(
    request=REQUEST,
    seed="0x" + "77" * 32,
    tasks=(
        (NODES[0].address, NODES[1].address, NODES[2].address),
        (NODES[1].address, NODES[3].address),
    ),
    nodes=tuple(
        sorted(
            (
                PlanNode(
                    node=node.address,
                    signing_key=node.signing_key_hex,
                    endpoint="http://127.0.0.1:1",
                )
                for node in NODES
            ),
            key=lambda entry: entry.node,
        )
    ),
)


def make_takeover(task: int = 0, candidate: int = 1, **changes: object) -> Takeover:
    values = {"execution_id": REQUEST.execution_id, "first_step": 3, **changes}
    return Takeover(task=task, candidate=candidate, **values)  # type: ignore[arg-type]


def sign(task: int = 0, candidate: int = 1, **changes: object) -> SignedTakeover:
    return sign_takeover(CLIENT_KEY, make_takeover(task, candidate, **changes))


def test_the_highest_candidate_named_runs_the_task_whatever_order_the_words_come_in() -> None:
    roster = Roster(PLAN)
    assert roster.executors == (NODES[0].address, NODES[1].address)
    assert roster.apply(sign(0, 2))
    assert not roster.apply(sign(0, 1)) and not roster.apply(sign(0, 2))
    assert roster.executors == (NODES[2].address, NODES[1].address)
    assert roster.get_key(0) == NODES[2].signing_key_hex


def test_a15_takeover_counts_for_its_execution_task_and_candidate_alone() -> None:
    good = sign()
    assert check_takeover(good, PLAN) == NODES[1].address
    for change in ({"task": 1}, {"candidate": 2}, {"first_step": 4}):
        moved = good.model_copy(update={"takeover": make_takeover(**{"task": 0, **change})})
        with pytest.raises(BadSignature):
            check_takeover(moved, PLAN)
    for odd in (sign(execution_id="0x" + "12" * 32), sign(1, 2), sign(2, 1), sign(first_step=9)):
        with pytest.raises(PeerFault):
            check_takeover(odd, PLAN)
    with pytest.raises(BadSignature):
        check_takeover(sign_takeover(NODES[1], make_takeover()), PLAN)


def test_f04_a_replaced_executors_signature_is_known_as_such() -> None:
    roster = Roster(PLAN)
    message = b"a frame"
    old, new = NODES[0].sign_raw(message), NODES[1].sign_raw(message)
    assert not roster.is_replaced(0, message, old)
    roster.apply(sign(0, 1))
    assert roster.is_replaced(0, message, old) and not roster.is_replaced(0, message, new)
    assert not roster.is_replaced(1, message, old)


def make_completion(
    node: int, *tasks: int, takeovers: tuple[SignedTakeover, ...] = ()
) -> Completion:
    return Completion(
        execution_id=REQUEST.execution_id,
        node=NODES[node].address,
        steps=8,
        tasks=tuple(
            TaskCommitment(task=task, task_id="a" * 64, inputs=(), outputs=()) for task in tasks
        ),
        takeovers=takeovers,
        salt="0x" + "11" * 32,
    )


def test_executors_follow_from_the_completions_and_the_highest_candidate_counts() -> None:
    def compute(*completions: Completion) -> tuple[str, ...] | None:
        return compute_executors(PLAN, {c.node: c for c in completions})

    usual = make_completion(0, 0), make_completion(1, 1)
    assert compute(*usual) == PLAN.executors()
    assert compute(usual[0]) is None
    both = make_completion(1, 0, 1, takeovers=(sign(0, 1),))
    assert compute(both) == (NODES[1].address,) * 2
    late = make_completion(2, 0, takeovers=(sign(0, 2),))
    assert compute(usual[0], both, late) == (NODES[2].address, NODES[1].address)
    with pytest.raises(PeerFault, match="not its own"):
        compute(usual[0], make_completion(3, 1))
