from __future__ import annotations

from collections.abc import Sequence

import pytest

from splitup.core.errors import BadSignature, PeerFault
from splitup.crypto.keys import generate_identity
from splitup.messages.completions import Completion, SignedTakeover, Takeover
from splitup.messages.plans import Plan, PlanNode
from splitup.protocol.execution.takeovers import (
    ExecutorMap,
    check_takeover,
    find_executors,
    is_given_away,
    sign_takeover,
)
from tests.builders import make_request
from tests.protocol.simulator import make_signed_end

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
    executor_map = ExecutorMap(PLAN)
    assert executor_map.executors == (NODES[0].address, NODES[1].address)
    assert executor_map.apply(sign(0, 2))
    assert not executor_map.apply(sign(0, 1)) and not executor_map.apply(sign(0, 2))
    assert executor_map.executors == (NODES[2].address, NODES[1].address)
    assert executor_map.get_key(0) == NODES[2].signing_key_hex


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
    executor_map = ExecutorMap(PLAN)
    message = b"a frame"
    old, new = NODES[0].sign_raw(message), NODES[1].sign_raw(message)
    assert not executor_map.is_replaced(0, message, old)
    executor_map.apply(sign(0, 1))
    assert executor_map.is_replaced(0, message, old) and not executor_map.is_replaced(
        0, message, new
    )
    assert not executor_map.is_replaced(1, message, old)


def find(named: Sequence[tuple[int, int]], *committed: int) -> tuple[str, ...] | None:
    places = {NODES[node].address: place for place, node in enumerate(committed)}
    return find_executors(PLAN, named, places)


def test_the_plans_executors_answer_when_nobody_took_over() -> None:
    assert find([], 0) is None and find([], 0, 2, 3) is None
    assert find([], 1, 0) == find([], 2, 1, 3, 0) == PLAN.executors()


def test_the_highest_candidate_with_takeover_and_commitment_answers_for_a_task() -> None:
    assert find([(0, 1)], 1) == (NODES[1].address,) * 2
    assert find([(0, 2), (0, 1)], 0, 2, 1) == (NODES[2].address, NODES[1].address)
    assert find([(0, 2)], 0, 1) == PLAN.executors(), "who took over and never committed is no one"
    assert find([(1, 1)], 0, 3) == (NODES[0].address, NODES[3].address)
    assert find([(0, 1), (0, 2), (1, 1)], 0) is None


def test_later_commitments_change_nothing() -> None:
    """Members that read the chain at different times have to draw over the same."""
    assert find([(0, 2)], 0, 1, 2) == PLAN.executors()
    assert find([(0, 2), (1, 1)], 0, 3, 2, 1) == (NODES[0].address, NODES[3].address)


def test_who_was_passed_over_for_its_stake_takes_nothing_over() -> None:
    plan = PLAN.model_copy(update={"places": (2, 0)})
    assert plan.executors() == (NODES[2].address, NODES[1].address)
    with pytest.raises(PeerFault, match="passed over"):
        check_takeover(sign(0, 1), plan)


def test_of_commitments_without_an_order_the_highest_candidates_count() -> None:
    places = {NODES[node].address: 0 for node in (0, 1, 2)}
    assert find_executors(PLAN, [(0, 1), (0, 2)], places) == (NODES[2].address, NODES[1].address)


def make_completion(place: int, *takeovers: SignedTakeover) -> Completion:
    return Completion(
        execution_id=REQUEST.execution_id,
        node=NODES[place].address,
        tasks=(),
        takeovers=takeovers,
        salt="0x" + "00" * 32,
        end=make_signed_end(REQUEST.execution_id, 8),
    )


def test_a_completion_shows_that_a_task_was_given_away_only_by_the_clients_word() -> None:
    """Otherwise an executor that goes on with another task is slashed for the one that it lost."""
    for place in (0, 1, 2):
        assert is_given_away(make_completion(place, sign(0, 2)), PLAN, 0)
    assert not is_given_away(make_completion(0, sign(1, 1)), PLAN, 0), "another task"
    assert not is_given_away(make_completion(0), PLAN, 0)
    forged = sign_takeover(NODES[0], make_takeover())
    with pytest.raises(BadSignature):
        is_given_away(make_completion(0, forged), PLAN, 0)
