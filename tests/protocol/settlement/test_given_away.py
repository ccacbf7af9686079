"""What is settled where the client gives tasks to other nodes (ADR 7, 21)."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from splitup.core import limits, tuning
from splitup.messages.completions import (
    Completion,
    End,
    ExecutorCommitment,
    SignedEnd,
    SignedTakeover,
    Takeover,
    Takeovers,
)
from splitup.messages.plans import Plan
from splitup.protocol.committee import events as ev
from splitup.protocol.execution.ends import make_count, sign_end
from splitup.protocol.execution.takeovers import sign_takeover
from splitup.protocol.settlement.collected_commitments import CollectedCommitments
from tests.protocol.settlement.test_steps import PRICE, STEPS, Steps, get_pay
from tests.protocol.settlement.unended import (
    DEADLINE_S,
    STEP_PRICE,
    commit,
    complete,
    count,
    make_input_order,
    open_execution,
    reveal,
    run_to_agreement,
    send_commitment,
    settle,
)
from tests.protocol.simulator import (
    CLIENT_IDENTITY,
    get_slashes,
)


def test_s53_who_computed_is_paid_although_the_client_gave_its_tasks_away() -> None:
    """The successors know of it, and commit to nothing: the client sends them no inputs."""
    simulation, execution_id, plan = open_execution(1)
    for task in range(3):
        taken = Takeover(execution_id=execution_id, task=task, candidate=1, first_step=STEPS)
        message = Takeovers(
            execution_id=execution_id,
            node=plan.tasks[task][1],
            takeovers=(sign_takeover(CLIENT_IDENTITY, taken),),
        )
        key = simulation.by_node[message.node].identity.signing_key_hex
        for account in simulation.members:
            simulation.feed(account, ev.ReportReceived(message, key))
    order = make_input_order(execution_id, 2)
    done = [count(simulation, plan, task, 3, order)[0] for task in range(3)]
    pay = settle(simulation, plan, *done)
    assert pay == dict.fromkeys(plan.executors(), 3 * STEP_PRICE)


def open_with_successor(seed: int = 0) -> tuple[Steps, Plan, int, str, list[SignedTakeover]]:
    """Return an execution in which another executor is a task's candidate, and not the last one.

    The client gave it the task, and then to somebody else.
    """
    simulation, execution_id, plan = open_execution(seed)
    executors = plan.executors()
    for task, candidates in enumerate(plan.tasks):
        for place in range(1, len(candidates) - 1):
            if candidates[place] in executors[:-1]:  # the last one gives the output
                signed = [
                    sign_takeover(
                        CLIENT_IDENTITY,
                        Takeover(
                            execution_id=execution_id, task=task, candidate=number, first_step=STEPS
                        ),
                    )
                    for number in (place, place + 1)
                ]
                return simulation, plan, task, candidates[place], signed
    return open_with_successor(seed + 1)


def test_s60_a_node_answers_for_no_task_that_it_was_given_too_late() -> None:
    """It has computed its own. All members hear of the takeover, and it does not show it."""
    simulation, plan, _, successor, (taken, _) = open_with_successor()
    message = Takeovers(execution_id=plan.request.execution_id, node=successor, takeovers=(taken,))
    key = simulation.by_node[successor].identity.signing_key_hex
    for account in simulation.members:
        simulation.feed(account, ev.ReportReceived(message, key))
    order = make_input_order(plan.request.execution_id, 2)
    done = [count(simulation, plan, task, 3, order)[0] for task in range(3)]
    assert settle(simulation, plan, *done) == dict.fromkeys(plan.executors(), 3 * STEP_PRICE)


@pytest.mark.parametrize("settled", [3, 1])
def test_s60_a_node_answers_for_other_tasks_at_other_numbers_of_steps(settled: int) -> None:
    """It has computed more steps of what it lost than of what it took over."""
    simulation, plan, task, successor, (taken, _) = open_with_successor()
    executors, execution_id = plan.executors(), plan.request.execution_id
    own, order = executors.index(successor), make_input_order(execution_id, 2)
    done = {
        node: count(simulation, plan, place, settled, order)[0]
        for place, node in enumerate(executors)
        if place != own
    }
    done[successor] = count(simulation, plan, own, 3, order, least=2)[0]
    parts = [
        complete(simulation, plan, place, make_count(execution_id, 1)) for place in (own, task)
    ]
    both = tuple(sorted((claim for part in parts for claim in part.tasks), key=lambda c: c.task))
    fewer = parts[0].model_copy(update={"tasks": both, "takeovers": (taken,)})
    send_commitment(simulation, fewer, takeovers=fewer.takeovers)
    pay = dict.fromkeys(executors, settled * STEP_PRICE)
    if settled == 1:
        done[successor], pay[successor] = fewer, 2 * STEP_PRICE
        del done[executors[task]], pay[executors[task]]
    assert settle(simulation, plan, *done.values()) == pay


@pytest.mark.parametrize("order", list(itertools.permutations("abcd")))
def test_s60_of_counts_that_overlap_those_of_the_most_steps_count(order: tuple[str, ...]) -> None:
    """In whatever order they come. Of two messages for equally many steps none counts."""
    _, _, plan = open_execution()
    node, name, collected = plan.executors()[0], plan.request.execution_id, CollectedCommitments()
    for letter in order:
        commitment = ExecutorCommitment(
            execution_id=name,
            node=node,
            root="0x" + letter * 64,
            end=make_count(name, {"a": 4, "b": 3, "c": 2, "d": 2}[letter]),
            earlier=("0x" + letter * 64,),
        )
        collected.add_counted(commitment, letter, plan)
    numbers = [steps for steps, *_ in collected.sum_prices(plan, [1] * 3, [])]
    roots = {steps: collected.list_commitments(steps) for steps in numbers}
    assert {steps: root[node][-1] for steps, root in roots.items()} == {4: "a", 3: "a", 2: "b"}
    assert sorted(collected.list_tokens()) == ["a", "b", "c", "d"]


def test_s60_who_says_that_it_answers_for_a_task_and_does_not_pays_for_it() -> None:
    """A client with a node of its own would take all tasks from others, and pay nobody."""
    simulation, plan, _, successor, takeovers = open_with_successor()
    done = []
    for other, node in enumerate(plan.executors()):
        end = End(execution_id=plan.request.execution_id, steps=STEPS, inputs=())
        completion = complete(simulation, plan, other, sign_end(CLIENT_IDENTITY, end))
        shown: tuple[SignedTakeover, ...] = ()
        if node == successor:
            completion = completion.model_copy(update={"takeovers": tuple(takeovers)})
            shown = tuple(takeovers[:1])
        send_commitment(simulation, completion, takeovers=shown)
        done.append(completion)
    execution_id = plan.request.execution_id
    assert run_to_agreement(simulation, execution_id)
    simulation.run(2)
    reveal(simulation, *done)
    assert simulation.run(700, lambda: simulation.is_settled(execution_id))
    assert successor not in get_pay(simulation, execution_id)
    assert get_slashes(simulation, execution_id).keys() <= {successor}


def test_s63_commitments_to_an_interim_end_complete_no_final_one() -> None:
    """The client signs a final end for one executor, below what it has acknowledged to all."""
    simulation, execution_id, plan = open_execution()
    commit(simulation, plan, 0, 1, final=True)
    for task in (1, 2):
        commit(simulation, plan, task, 1)
    assert not simulation.run(3, lambda: execution_id in simulation.chain.agreed)
    done = [commit(simulation, plan, task, 3) for task in range(3)]
    assert settle(simulation, plan, *done) == dict.fromkeys(plan.executors(), 3 * STEP_PRICE)


def test_s63_members_wait_for_who_took_a_task_over() -> None:
    """It goes on, while the client ends it for all that were there before."""
    simulation, execution_id, plan = open_execution()
    taken = give_all_away(simulation, plan)
    for task in range(3):
        commit(simulation, plan, task, 1, final=True)
    before_s = DEADLINE_S - tuning.AGREE_MARGIN_S - 12
    assert not simulation.run(before_s, lambda: execution_id in simulation.chain.agreed)
    order = make_input_order(execution_id, STEPS - 1)
    counted = make_count(execution_id, STEPS)
    revealed = commit_successors(simulation, plan, taken, counted, order)
    paid = {one.node: PRICE * len(one.tasks) for one in revealed}
    assert settle(simulation, plan, *revealed) == paid


def give_all_away(simulation: Steps, plan: Plan) -> dict[int, SignedTakeover]:
    """Give every task to a node that is no executor yet; the members hear of it from that node."""
    found = {}
    for task, candidates in enumerate(plan.tasks):
        successor = next(node for node in candidates if node not in plan.executors())
        taken = Takeover(
            execution_id=plan.request.execution_id,
            task=task,
            candidate=candidates.index(successor),
            first_step=1,
        )
        found[task] = sign_takeover(CLIENT_IDENTITY, taken)
        tell_takeovers(simulation, plan, successor, found[task])
    return found


def tell_takeovers(
    simulation: Steps, plan: Plan, node: str, *takeovers: SignedTakeover, **options: Any
) -> None:
    message = Takeovers(
        execution_id=plan.request.execution_id, node=node, takeovers=takeovers, **options
    )
    key = simulation.by_node[node].identity.signing_key_hex
    for account in simulation.members:
        simulation.feed(account, ev.ReportReceived(message, key))


def commit_successors(
    simulation: Steps,
    plan: Plan,
    taken: dict[int, SignedTakeover],
    signed: SignedEnd,
    order: str = "",
) -> list[Completion]:
    """Let the nodes that took all tasks over commit to an end."""
    done, by_node = [], dict[str, list[int]]()
    for task, one in taken.items():
        by_node.setdefault(plan.tasks[task][one.takeover.candidate], []).append(task)
    for successor, tasks in by_node.items():
        parts = [complete(simulation, plan, task, signed) for task in tasks]
        completion = parts[0].model_copy(
            update={
                "node": successor,
                "tasks": tuple(claim for part in parts for claim in part.tasks),
                "takeovers": tuple(taken[task] for task in tasks),
            }
        )
        send_commitment(simulation, completion, order=order, takeovers=completion.takeovers)
        done.append(completion)
    return done


@pytest.mark.parametrize("shows", ["order", "interim end", "final end"])
def test_s69_a_client_that_replaces_all_pays_what_it_had_signed_for(shows: str) -> None:
    """It ends it for honest newcomers after one step. Those before hear it from the members."""
    simulation, execution_id, plan = open_execution()
    taken = give_all_away(simulation, plan)
    end = End(execution_id=execution_id, steps=1, inputs=())
    commit_successors(simulation, plan, taken, sign_end(CLIENT_IDENTITY, end))
    answers_s = limits.HEARTBEAT_PERIOD_S + tuning.REPLACED_ANSWER_S - 0.5
    assert not simulation.run(answers_s, lambda: execution_id in simulation.chain.agreed)
    order = make_input_order(execution_id, STEPS - 1)
    told: dict[str, Any] = {"order": order} if shows == "order" else {}
    if shows == "interim end":
        interim = end.model_copy(update={"steps": 2, "final": False})
        told = {"end": sign_end(CLIENT_IDENTITY, interim)}
    for member in simulation.members.values():
        for node in plan.executors():
            heard = member.settlements.list_replaced(node)
            assert [plan.executors()[one.takeover.task] for one in heard] == [node]
    first, *others = [(node, taken[task]) for task, node in enumerate(plan.executors())]
    tell_takeovers(simulation, plan, *first, **told)
    shown = commit(simulation, plan, 0, STEPS, final=True) if shows == "final end" else None
    for node, signed in others:
        tell_takeovers(simulation, plan, node, signed)
    before_s = DEADLINE_S - tuning.AGREE_MARGIN_S - 12
    assert not simulation.run(before_s, lambda: execution_id in simulation.chain.agreed)
    assert not any(
        m.settlements.list_replaced(plan.executors()[0]) for m in simulation.members.values()
    )
    done = [count(simulation, plan, task, STEPS, order)[0] for task in range(3)]
    done[0] = shown or done[0]
    assert settle(simulation, plan, *done) == dict.fromkeys(plan.executors(), PRICE)


@pytest.mark.parametrize("silent", [0, 1, 3])
def test_s69_a_replaced_node_holds_nothing_up_for_long(silent: int) -> None:
    """If all answer, members agree at once, and else after a heartbeat's period and two seconds."""
    simulation, execution_id, plan = open_execution()
    taken, since = give_all_away(simulation, plan), simulation.now
    for task, node in enumerate(plan.executors()[silent:], silent):
        tell_takeovers(simulation, plan, node, taken[task], order=make_input_order(execution_id, 1))
    end = End(execution_id=execution_id, steps=STEPS, inputs=())
    done = commit_successors(simulation, plan, taken, sign_end(CLIENT_IDENTITY, end))
    votes = [m.settlements._states[execution_id].collected for m in simulation.members.values()]
    assert simulation.run(6, lambda: all(one.voted for one in votes))
    waited_s = limits.HEARTBEAT_PERIOD_S + tuning.REPLACED_ANSWER_S if silent else 0
    assert waited_s <= simulation.now - since <= waited_s + 1
    paid = {one.node: PRICE * len(one.tasks) for one in done}
    assert settle(simulation, plan, *done) == paid


class Unread(dict[Any, Any]):
    """Takeovers that may be looked up, and not gone through."""

    __iter__ = keys = values = items = None  # type: ignore[assignment]


def test_s70_members_do_not_go_through_all_takeovers_at_every_tick() -> None:
    """A client signs seven for each of 1,024 tasks: 22 ms of each 50, for each execution."""
    simulation, execution_id, plan = open_execution()
    taken = give_all_away(simulation, plan)
    settlements = next(iter(simulation.members.values())).settlements
    collected = settlements._states[execution_id].collected
    collected.takeovers = Unread(collected.takeovers)
    settlements.process_tick(simulation.now)
    for task, node in enumerate(plan.executors()):
        assert settlements.list_replaced(node) == [taken[task]]


def test_s71_what_a_node_has_forgotten_hides_no_other_execution() -> None:
    """It cannot answer for that; 64 takeovers of it would fill each answer to a heartbeat."""
    simulation, execution_id, plan = open_execution()
    taken, node = give_all_away(simulation, plan), plan.executors()[0]
    member = next(iter(simulation.members.values()))
    states = member.settlements._states
    own, forgotten = states.pop(execution_id), object()
    collected = CollectedCommitments(replaced={node: dict.fromkeys(range(1024), forgotten)})  # type: ignore[arg-type]
    states["0x" + "00" * 32] = SimpleNamespace(chain=own.chain, collected=collected)  # type: ignore[assignment]
    states[execution_id] = own
    heard = member.settlements.list_replaced(node)
    assert heard == [forgotten, taken[0], *[forgotten] * (limits.MAX_TOLD_TAKEOVERS - 2)]


@pytest.mark.parametrize("counts", [False, True])
def test_s60_a_node_that_shows_members_different_takeovers_counts_as_none(counts: bool) -> None:
    simulation, plan, _, successor, (taken, _) = open_with_successor()
    done, accounts = [], list(simulation.members)
    order = make_input_order(plan.request.execution_id, STEPS - 1)
    for task, node in enumerate(plan.executors()):
        for half, shown in ((accounts[:2], ()), (accounts[2:], (taken,))):
            options: dict[str, Any] = {"to": half}
            if node == successor:
                options["takeovers"] = shown
            if counts:
                done.append(count(simulation, plan, task, STEPS, order, **options)[0])
            else:
                done.append(commit(simulation, plan, task, STEPS, final=True, **options))
    pay = settle(simulation, plan, *done)
    assert pay == dict.fromkeys(set(plan.executors()) - {successor}, PRICE)
