"""What a node commits to after the client gave tasks away, gave it others, or made it fail."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pytest
from splitup_node.execution.kept.claims import EarnedClaims
from splitup_node.execution.kept.parts import Part, make_part
from splitup_node.settlement.reports import group_counts

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.messages.completions import UNSTATED, Completion, End, SignedEnd, Takeover
from splitup.messages.frames import Seal
from splitup.messages.plans import PlanNode
from splitup.protocol.execution.ends import make_count, sign_end
from splitup.protocol.execution.takeovers import ExecutorMap, sign_takeover
from splitup.protocol.settlement.proof_of_sampling import check_completion
from tests.node.network import make_certificate, make_manifest
from tests.protocol.committees import make_identity

TASKS, STEPS = 4, 12
MANIFEST, _ = make_manifest(4, tasks=TASKS)
CLIENT: Final = make_identity(1)


def make_node(number: int) -> PlanNode:
    identity = make_identity(number)
    return PlanNode(
        node=identity.address, signing_key=identity.signing_key_hex, endpoint="http://127.0.0.1:1"
    )


A, B, C, D = map(make_node, range(2, 6))
# tasks on a, b, a, b; then c, d, a, b may take them over
PLAN = make_certificate(
    MANIFEST, [A, B, A, B], CLIENT.signing_key_hex, steps=STEPS, fallbacks=[C, D, A, B]
).plan
EXECUTION: Final = PLAN.request.execution_id


class Work:
    """One node's parts and claims."""

    def __init__(self, node: PlanNode) -> None:
        self.executor_map = ExecutorMap(PLAN)
        self.parts: dict[int, Part] = {}
        self.stored: dict[int, int] = {}
        self.claims = EarnedClaims(PLAN, MANIFEST, node.node, self.executor_map, self.parts)

    def run(self, task: int, steps: int = STEPS) -> None:
        """Have computed so many steps of a task."""
        entry = MANIFEST.tasks[task]
        self.parts[task] = part = make_part(task, entry, 1, ())
        for step in range(steps):
            data = bytes([step])
            part.digests.add([data * 32] * len(entry.inputs), [data * 32] * len(entry.outputs))

    def lose(self, task: int, to: PlanNode | None, stored: int = STEPS) -> None:
        """Lose a task to another node, or by a failure."""
        if to is not None:
            self.give(task, to)
        self.claims.keep_lost(self.parts.pop(task))
        self.stored[task] = stored
        self.claims.limit_lost(lambda lost: self.stored[lost])

    def give(self, task: int, to: PlanNode) -> None:
        place = PLAN.tasks[task].index(to.node)
        takeover = Takeover(execution_id=EXECUTION, task=task, candidate=place, first_step=STEPS)
        assert self.executor_map.apply(sign_takeover(CLIENT, takeover))

    def commit(self, signed: SignedEnd | None = None) -> Completion | None:
        """Return the first completion, checked as members do where no other node commits."""
        signed = signed or self.claims.find_substitute()
        if signed is None:
            return None
        self.claims.conclude(signed)
        first = self.claims.make_completions(lambda: bytes(32))[0]
        covered = {claim.task for claim in first.tasks}
        executors = [
            first.node if task in covered else node for task, node in enumerate(PLAN.executors())
        ]
        check_completion(first, PLAN, MANIFEST, first.root(), executors)
        return first


def make_end(steps: int = STEPS) -> SignedEnd:
    return sign_end(CLIENT, End(execution_id=EXECUTION, steps=steps, inputs=()))


def list_tasks(completion: Completion | None) -> list[int]:
    assert completion is not None
    return [claim.task for claim in completion.tasks]


@pytest.fixture
def work() -> Work:
    """What node a did: all of its tasks."""
    work = Work(A)
    work.run(0)
    work.run(2)
    return work


@pytest.mark.parametrize("loses", [(), (2,), (0, 2)])
def test_s60_a_task_that_comes_too_late_takes_nobodys_pay(work: Work, loses: tuple[int]) -> None:
    """The client sends no inputs of it. Its node does not answer for it, and for all else."""
    for task in loses:
        work.lose(task, C)
    work.give(1, A)
    work.run(1, 0)
    done = work.commit()
    assert list_tasks(done) == [0, 2] and done is not None and done.steps == STEPS
    assert {signed.takeover.task for signed in done.takeovers} == set(loses)


def test_s60_a_task_that_was_taken_over_in_time_is_committed_to(work: Work) -> None:
    work.give(1, A)
    work.run(1)
    assert list_tasks(work.commit()) == [0, 1, 2]


def test_s60_the_final_end_covers_what_was_given_away(work: Work) -> None:
    """Its last state is gone. Where the next node commits, that one counts."""
    work.lose(2, C)
    done = work.commit(make_end())
    assert list_tasks(done) == [0, 2] and done is not None
    states = {claim.task: claim.state for claim in done.tasks}
    assert (states[2] == UNSTATED) == bool(MANIFEST.tasks[2].state_bytes) and states[0] != UNSTATED
    with pytest.raises(PeerFault, match="lacks the state"):
        untold = done.model_copy(update={"takeovers": ()})
        check_completion(untold, PLAN, MANIFEST, untold.root())


def test_s60_what_was_given_away_too_early_is_left_out(work: Work) -> None:
    work.lose(2, C, stored=STEPS - 1)
    assert list_tasks(work.commit(make_end())) == [0]


def test_s60_who_has_not_stored_all_of_its_own_commits_to_less() -> None:
    """Otherwise it would withhold a task that nobody took from it, which costs stake."""
    for stored, steps in ((0, 0), (5, 5)):
        work = Work(A)
        work.run(0)
        work.run(2)
        work.lose(0, None)
        work.lose(2, None, stored)
        done = work.commit()
        assert (0 if done is None else done.steps) == steps


def test_s60_a_node_that_lost_what_it_took_over_shows_both() -> None:
    work = Work(C)
    work.give(0, C)
    work.run(0)
    work.lose(0, D)
    done = work.commit()
    assert list_tasks(done) == [0] and done is not None
    (shown,) = done.takeovers
    assert PLAN.tasks[0][shown.takeover.candidate] == C.node


@pytest.mark.parametrize(("lost", "covered"), [(3, [2, 3]), (2, [3])])
def test_s60_the_final_end_covers_what_was_taken_over_and_lost_again(
    lost: int, covered: list[int]
) -> None:
    """Unless it has a state: that is gone, and who takes over has to state it."""
    assert [bool(MANIFEST.tasks[task].state_bytes) for task in (2, 3)] == [True, False]
    work = Work(C)
    for task in (2, 3):
        work.give(task, C)
        work.run(task)
    work.lose(lost, D)
    assert list_tasks(work.commit(make_end())) == covered


def test_s63_an_end_below_what_the_client_ordered_is_no_end(work: Work) -> None:
    for task in (0, 2):  # of tasks that it runs, their states would tell
        work.lose(task, C)
    assert work.claims.make(make_end(STEPS - 1).end)
    work.claims.add_order(STEPS - 1, Seal(b"", b""))
    assert not work.claims.make(make_end(STEPS - 1).end)
    assert list_tasks(work.commit(make_end())) == [0, 2]


@pytest.mark.parametrize("ended", [0, 2])
def test_s60_of_tasks_that_differ_in_their_steps_each_is_counted(ended: int) -> None:
    """Whichever of them members settle, also where the client ended it after few steps."""
    work, fewer = Work(A), 4
    for task in (0, 2):
        work.run(task)
        work.lose(task, C)
    work.give(1, A)
    work.run(1, fewer)
    work.commit(make_end(ended) if ended else None)
    done = work.claims.make_completions(lambda: bytes(32))
    counted = {one.steps: list_tasks(one) for one in done if one.end.is_count}
    assert counted == {
        steps: [0, 1, 2] if steps <= fewer else [0, 2] for steps in range(ended + 1, STEPS + 1)
    }
    first, second = [[one.steps for one in group] for group in group_counts(done)]
    assert {tuple(first), tuple(second)} == {
        tuple(range(STEPS, fewer, -1)),
        tuple(range(fewer, ended, -1)),
    }


def test_s60_counts_are_told_in_messages_that_members_take() -> None:
    work = Work(A)
    for task in (0, 2):
        work.run(task)
        work.lose(task, C)
    work.commit()
    made = work.claims.make_completions(lambda: bytes(32))[0]

    def group(steps: Iterable[int]) -> list[list[int]]:
        counts = [
            made.model_copy(update={"end": make_count(EXECUTION, number)}) for number in steps
        ]
        return [[one.steps for one in group] for group in group_counts(counts)]

    assert group([9, 8, 5, 4]) == [[5, 4], [9, 8]]
    most = limits.UNPAID_STEPS
    assert group(range(most + 2, 0, -1)) == [[2, 1], [*range(most + 2, 2, -1)]]
    assert group(range(40, 0, -2)) == [[number] for number in range(26, 41, 2)]
    assert len(group(range(40, 0, -2))) == limits.MAX_ENDS
