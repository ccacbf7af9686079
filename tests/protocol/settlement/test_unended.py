"""What is settled where the client never ends, or an executor never commits (ADR 21)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from splitup.core import limits, tuning
from splitup.core.errors import BadSignature, PeerFault
from splitup.crypto.keys import Identity
from splitup.messages import api
from splitup.messages.base import CLIENT
from splitup.messages.completions import (
    UNSTATED,
    Completion,
    End,
    ExecutorCommitment,
    SignedEnd,
    SignedTakeover,
    Takeover,
    Takeovers,
    TaskCommitment,
)
from splitup.messages.frames import decode_frame, decode_frames, make_order
from splitup.messages.plans import Plan
from splitup.net.signed_frames import seal_frame, seal_frames
from splitup.protocol.committee import events as ev
from splitup.protocol.committee.peer_messages import CommitmentsShared
from splitup.protocol.execution.ends import make_count, sign_end
from splitup.protocol.execution.takeovers import sign_takeover
from splitup.protocol.settlement.collected_commitments import CollectedCommitments
from tests.builders import make_tensor_frame
from tests.protocol.settlement.test_steps import PRICE, STEPS, Steps, get_pay
from tests.protocol.simulator import (
    CLIENT_IDENTITY,
    VERIFY_ALL,
    VERIFY_NONE,
    digest,
    get_slashes,
    make_commitment_event,
    sign_token,
)

DEADLINE_S = 30
STEP_PRICE = PRICE // STEPS


def open_execution(seed: int = 0) -> tuple[Steps, str, Plan]:
    """Return an execution of three tasks on three nodes, which do nothing by themselves."""
    simulation = Steps(seed, economics=VERIFY_NONE)
    assert simulation.run(20, lambda: simulation.chain.sequence >= 1)
    execution_id = simulation.request(steps=STEPS, deadline_s=DEADLINE_S)
    for node in simulation.nodes:
        node.plans[execution_id] = None  # type: ignore[assignment]
    assert simulation.run(8, lambda: len(simulation.certificates.get(execution_id, {})) == 4)
    plan = next(iter(simulation.certificates[execution_id].values())).plan
    return (
        (simulation, execution_id, plan)
        if len(set(plan.executors())) == 3
        else open_execution(seed + 1)
    )


def commit(
    simulation: Steps,
    plan: Plan,
    task: int,
    steps: int,
    *,
    final: bool = False,
    salt: str = "",
    **options: Any,
) -> Completion:
    """Let the executor of a task commit to an end of the client, and reveal it."""
    end = End(execution_id=plan.request.execution_id, steps=steps, inputs=(), final=final)
    completion = complete(simulation, plan, task, sign_end(CLIENT_IDENTITY, end), salt)
    send_commitment(simulation, completion, **options)
    return completion


def count(
    simulation: Steps,
    plan: Plan,
    task: int,
    steps: int,
    order: str = "",
    *,
    least: int = 1,
    **options: Any,
) -> list[Completion]:
    """Let the executor of a task commit to its own counts, from ``steps`` down to ``least``."""
    execution_id = plan.request.execution_id
    counts = [make_count(execution_id, number) for number in range(steps, least - 1, -1)]
    done = [complete(simulation, plan, task, counted) for counted in counts]
    earlier = tuple(completion.root() for completion in done[1:])
    send_commitment(simulation, done[0], earlier=earlier, order=order, **options)
    return done


def make_input_order(
    execution_id: str, step: int, *, task: int = CLIENT, identity: Identity = CLIENT_IDENTITY
) -> str:
    """Return the signed header of an input frame."""
    frame = make_tensor_frame(execution_id, task, 0, step, b"0000")
    return make_order(decode_frame(seal_frame(identity, frame))[1])


def send_commitment(
    simulation: Steps,
    completion: Completion,
    *,
    earlier: tuple[str, ...] = (),
    order: str = "",
    takeovers: tuple[SignedTakeover, ...] = (),
    to: Sequence[str] | None = None,
) -> None:
    commitment = ExecutorCommitment(
        execution_id=completion.execution_id,
        node=completion.node,
        root=completion.root(),
        end=completion.end,
        earlier=earlier,
        order=order,
        takeovers=takeovers,
    )
    event = make_commitment_event(simulation.by_node[completion.node].identity, commitment)
    for account in simulation.members if to is None else to:
        simulation.feed(account, event)


def complete(
    simulation: Steps, plan: Plan, task: int, signed: SignedEnd, salt: str = ""
) -> Completion:
    execution_id, node = plan.request.execution_id, plan.executors()[task]
    steps, final = signed.end.steps, signed.end.final
    value = digest(task, steps)
    state = value if final else UNSTATED
    claim = TaskCommitment(
        task=task,
        inputs=tuple(digest(task - 1, steps) for _ in simulation.manifest.tasks[task].inputs),
        outputs=tuple(value for _ in simulation.manifest.tasks[task].outputs),
        state=state,
    )
    return Completion(
        execution_id=execution_id,
        node=node,
        tasks=(claim,),
        salt="0x" + (salt or value),
        end=signed,
    )


def reveal(simulation: Steps, *completions: Completion) -> None:
    for completion in completions:
        key = simulation.by_node[completion.node].identity.signing_key_hex
        for account in simulation.members:
            simulation.feed(account, ev.CompletionReceived(completion, key))


def run_to_agreement(simulation: Steps, execution_id: str) -> bool:
    return simulation.run(DEADLINE_S, lambda: execution_id in simulation.chain.agreed)


def settle(simulation: Steps, plan: Plan, *revealed: Completion) -> dict[str, int]:
    """Return who is paid by task, once the settlement is on the chain; nobody loses stake."""
    execution_id = plan.request.execution_id
    assert run_to_agreement(simulation, execution_id)
    simulation.run(2)
    reveal(simulation, *revealed)
    assert simulation.run(60, lambda: simulation.is_settled(execution_id))
    assert not get_slashes(simulation, execution_id)
    return get_pay(simulation, execution_id)


def test_a_client_that_never_ends_pays_for_what_it_acknowledged() -> None:
    simulation, execution_id, plan = open_execution()
    done = [commit(simulation, plan, task, 2) for task in range(3)]
    before_s = DEADLINE_S - tuning.AGREE_MARGIN_S - 12
    assert not simulation.run(before_s, lambda: execution_id in simulation.chain.agreed), (
        "its final end may still come"
    )
    pay = settle(simulation, plan, *done)
    assert pay == dict.fromkeys(plan.executors(), 2 * STEP_PRICE)
    assert simulation.chain.settlements[execution_id].steps == 2


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_an_executor_that_never_commits_keeps_nobody_elses_pay(absent: int) -> None:
    simulation, _, plan = open_execution()
    rest = [task for task in range(3) if task != absent]
    done = [commit(simulation, plan, task, STEPS, final=True) for task in rest]
    assert run_to_agreement(simulation, plan.request.execution_id)
    late = commit(simulation, plan, absent, STEPS, final=True)
    pay = settle(simulation, plan, *done, late)
    assert pay == {plan.executors()[task]: PRICE for task in rest}
    simulation.run(3)  # until members see the block
    member = next(iter(simulation.members.values()))
    evidence = member.find_evidence(plan.request.execution_id)
    assert evidence is not None and evidence.draw.executors == plan.executors(), (
        "so that everybody sees which task nobody committed to"
    )


def test_no_minority_moves_the_number() -> None:
    """A client and an executor of its own show a higher number, or a lower one."""
    simulation, _, plan = open_execution()
    commit(simulation, plan, 0, STEPS, final=True)
    commit(simulation, plan, 0, 1, final=True)
    done = [commit(simulation, plan, task, 3) for task in range(3)]
    pay = settle(simulation, plan, *done)
    assert pay == dict.fromkeys(plan.executors(), 3 * STEP_PRICE)


def test_s02_a_client_that_signs_two_numbers_takes_no_step_from_anybodys_pay() -> None:
    """All executors have committed to its interim end; its own one shows the same as the final."""
    simulation, _, plan = open_execution()
    for task in range(3):
        commit(simulation, plan, task, STEPS - 1, final=task == 0)
    done = [commit(simulation, plan, task, STEPS, final=True) for task in range(3)]
    assert settle(simulation, plan, *done) == dict.fromkeys(plan.executors(), PRICE)


def test_what_most_executors_committed_to_comes_before_what_pays_one_of_them_more() -> None:
    simulation, _, plan = open_execution()
    commit(simulation, plan, 0, STEPS, final=True)
    done = [commit(simulation, plan, task, 1) for task in (1, 2)]
    assert settle(simulation, plan, *done) == dict.fromkeys(plan.executors()[1:], STEP_PRICE)


def test_of_two_common_numbers_the_one_that_pays_more_work_counts() -> None:
    """Ended at STEPS for two of three, all of them have one step less in common."""
    simulation, _, plan = open_execution()
    for task in (1, 2):
        commit(simulation, plan, task, STEPS, final=True)
    done = [commit(simulation, plan, task, STEPS - 1) for task in range(3)]
    assert len(settle(simulation, plan, *done)) == 3, "3 · 3 steps, not 2 · 4"


def test_s19_who_withholds_most_of_the_price_keeps_nobody_elses_pay() -> None:
    """One of three commits to what the client signed: near the deadline that is enough."""
    simulation, execution_id, plan = open_execution()
    done = commit(simulation, plan, 0, STEPS, final=True)
    assert run_to_agreement(simulation, execution_id)
    assert settle(simulation, plan, done).keys() == {plan.executors()[0]}


def test_a_task_without_a_commitment_is_not_drawn_and_nobody_is_asked() -> None:
    simulation, execution_id, plan = open_execution()
    for member in simulation.members.values():
        member._settlements._states[execution_id].economics = VERIFY_ALL
    done = [commit(simulation, plan, task, STEPS, final=True) for task in (0, 1)]
    assert run_to_agreement(simulation, execution_id)
    simulation.run(2)
    reveal(simulation, *done)
    state = next(iter(simulation.members.values()))._settlements._states[execution_id]
    assert state.verification is not None and 2 not in state.verification.checks
    assert state.verification.list_missing() == set()
    assert state.chain.get_locked().keys() == set(plan.executors()[:2]), "who agreed to it"


# ---- the client says nothing: executors count -------------------------------------------------


@pytest.mark.parametrize("shown_by", [0, 1, 2])
def test_a_client_that_says_nothing_pays_for_what_it_ordered(shown_by: int) -> None:
    """The executors computed different numbers of steps: what all of them have counts."""
    simulation, execution_id, plan = open_execution()
    order = make_input_order(execution_id, 3)
    done = []
    for task, steps in enumerate((4, 3, 2)):
        shown = order if task == shown_by else ""
        done += [one for one in count(simulation, plan, task, steps, shown) if one.steps == 2]
    assert settle(simulation, plan, *done) == dict.fromkeys(plan.executors(), 2 * STEP_PRICE)
    assert simulation.chain.settlements[execution_id].steps == 2


def test_a_client_that_ends_below_what_it_ordered_pays_for_what_was_computed() -> None:
    """One executor took the end; another one shows the input of a later step."""
    simulation, execution_id, plan = open_execution()
    commit(simulation, plan, 1, 1, final=True)
    order = make_input_order(execution_id, 3)
    done = [count(simulation, plan, task, 4, order)[0] for task in range(3)]
    assert settle(simulation, plan, *done) == dict.fromkeys(plan.executors(), 4 * STEP_PRICE)


def test_executors_cannot_count_steps_that_the_client_did_not_order() -> None:
    simulation, execution_id, plan = open_execution()
    order = make_input_order(execution_id, 1)
    done = [count(simulation, plan, task, 4, order) for task in range(3)]
    two = [next(one for one in counted if one.steps == 2) for counted in done]
    assert settle(simulation, plan, *two) == dict.fromkeys(plan.executors(), 2 * STEP_PRICE)


def test_a_minority_counts_no_steps_that_the_client_signed_nothing_for() -> None:
    """The executor of the graph's output alone says that ordered steps were computed."""
    simulation, execution_id, plan = open_execution()
    count(simulation, plan, 2, 4, make_input_order(execution_id, 3))
    assert not run_to_agreement(simulation, execution_id)


def test_nothing_is_owed_for_steps_whose_outputs_were_not_computed() -> None:
    """Two of three tasks were, but the client got nothing of that."""
    simulation, execution_id, plan = open_execution()
    order = make_input_order(execution_id, 3)
    for task in (0, 1):
        count(simulation, plan, task, 4, order)
    assert not run_to_agreement(simulation, execution_id)


def test_an_order_that_one_member_was_shown_reaches_the_others() -> None:
    """And so do the counts of an executor; who signs two different ones is not paid."""
    simulation, execution_id, plan = open_execution()
    order, some = make_input_order(execution_id, 3), list(simulation.members)[:1]
    done = [count(simulation, plan, task, 4)[0] for task in (1, 2)]
    count(simulation, plan, 0, 4, order, to=some)
    count(simulation, plan, 0, 3, to=list(simulation.members)[1:2])
    pay = settle(simulation, plan, *done)
    assert pay == {plan.executors()[task]: 4 * STEP_PRICE for task in (1, 2)}


def test_members_take_no_order_but_the_clients_signed_input() -> None:
    simulation, execution_id, plan = open_execution()
    member = next(iter(simulation.members))
    state = simulation.members[member]._settlements._states[execution_id]
    node = simulation.by_node[plan.executors()[0]].identity
    done = complete(simulation, plan, 0, make_count(execution_id, 2))
    elsewhere = "0x" + "99" * 32

    def show(order: str, **changes: Any) -> int:
        commitment = ExecutorCommitment(
            execution_id=execution_id, node=done.node, root=done.root(), end=done.end, order=order
        ).model_copy(update=changes)
        state.add_commitment(commitment, order)
        return state.collected.ordered

    good = make_input_order(execution_id, 1)
    for false in ("00", "00" * 64, good[:-2], good + good, good[:-2] + "00", good[:-128]):
        with pytest.raises(PeerFault):
            show(false)
    with pytest.raises(BadSignature):
        show(make_input_order(execution_id, 1, identity=node))
    with pytest.raises(PeerFault):
        show(good, earlier=2 * (done.root(),))
    for end in (
        make_count(elsewhere, 2),
        make_count(execution_id, STEPS + 1),
        make_count(execution_id, 0),
        done.end.model_copy(update={"end": done.end.end.model_copy(update={"final": True})}),
    ):
        with pytest.raises(PeerFault):
            show(good, end=end)
    assert show(make_input_order(elsewhere, 1)) == 0
    assert show(make_input_order(execution_id, 1, task=0)) == 0
    assert not state.collected.order
    bundle = seal_frames(
        CLIENT_IDENTITY,
        [make_tensor_frame(execution_id, CLIENT, port, 2, b"0000") for port in range(2)],
    )
    assert show(make_order(decode_frames(bundle[0])[0])) == 3
    assert show(good) == 3, "the highest one counts"


# ---- not every member is told the same ---------------------------------------------------------


@pytest.mark.parametrize("told", [1, 2, 3])
def test_members_pass_on_what_an_executor_shows_to_some_of_them(told: int) -> None:
    simulation, execution_id, plan = open_execution()
    done = [commit(simulation, plan, task, STEPS, final=True) for task in (0, 1)]
    some = list(simulation.members)[:told]
    done.append(commit(simulation, plan, 2, STEPS, final=True, to=some))
    before_s = DEADLINE_S - tuning.AGREE_MARGIN_S - 12
    assert simulation.run(before_s, lambda: execution_id in simulation.chain.agreed), (
        "nobody has to wait for the deadline"
    )
    assert settle(simulation, plan, *done) == dict.fromkeys(plan.executors(), PRICE)


def test_an_executor_that_shows_each_half_of_the_members_another_commitment_is_unpaid() -> None:
    simulation, _, plan = open_execution()
    done = [commit(simulation, plan, task, STEPS, final=True) for task in (0, 1)]
    accounts = list(simulation.members)
    for half, salt in ((accounts[:2], "01" * 32), (accounts[2:], "02" * 32)):
        done.append(commit(simulation, plan, 2, STEPS, final=True, salt=salt, to=half))
    pay = settle(simulation, plan, *done)
    assert pay == {plan.executors()[task]: PRICE for task in (0, 1)}


def test_half_of_the_members_see_another_final_end_of_the_client() -> None:
    simulation, _, plan = open_execution()
    done = [commit(simulation, plan, task, STEPS, final=True) for task in range(3)]
    commit(simulation, plan, 0, 1, final=True, to=list(simulation.members)[:2])
    pay = settle(simulation, plan, *done)
    assert pay == dict.fromkeys(plan.executors(), PRICE)


def test_members_pass_on_takeovers_of_nodes_that_never_commit() -> None:
    simulation, execution_id, plan = open_execution(1)
    done = [commit(simulation, plan, task, 2) for task in range(2)]
    taken = Takeover(execution_id=execution_id, task=2, candidate=1, first_step=1)
    message = Takeovers(
        execution_id=execution_id,
        node=plan.tasks[2][1],
        takeovers=(sign_takeover(CLIENT_IDENTITY, taken),),
    )
    key = simulation.by_node[message.node].identity.signing_key_hex
    for account in list(simulation.members)[:2]:
        simulation.feed(account, ev.TakeoversReceived(message, key))
    pay = settle(simulation, plan, *done)
    assert pay == dict.fromkeys(plan.executors()[:2], 2 * STEP_PRICE)


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
            simulation.feed(account, ev.TakeoversReceived(message, key))
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
        simulation.feed(account, ev.TakeoversReceived(message, key))
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
    roots = {steps: collected.list_commitments(steps) for steps in collected.list_numbers()}
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
        simulation.feed(account, ev.TakeoversReceived(message, key))


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
            heard = member.list_replaced(node)
            assert [plan.executors()[one.takeover.task] for one in heard] == [node]
    first, *others = [(node, taken[task]) for task, node in enumerate(plan.executors())]
    tell_takeovers(simulation, plan, *first, **told)
    shown = commit(simulation, plan, 0, STEPS, final=True) if shows == "final end" else None
    for node, signed in others:
        tell_takeovers(simulation, plan, node, signed)
    before_s = DEADLINE_S - tuning.AGREE_MARGIN_S - 12
    assert not simulation.run(before_s, lambda: execution_id in simulation.chain.agreed)
    assert not any(m.list_replaced(plan.executors()[0]) for m in simulation.members.values())
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
    votes = [m._settlements._states[execution_id].collected for m in simulation.members.values()]
    assert simulation.run(6, lambda: all(one.voted for one in votes))
    waited_s = limits.HEARTBEAT_PERIOD_S + tuning.REPLACED_ANSWER_S if silent else 0
    assert waited_s <= simulation.now - since <= waited_s + 1
    paid = {one.node: PRICE * len(one.tasks) for one in done}
    assert settle(simulation, plan, *done) == paid


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


def test_a_member_that_shares_what_nobody_signed_is_blamed() -> None:
    simulation, execution_id, plan = open_execution()
    sender, receiver = list(simulation.members)[:2]
    state = simulation.members[receiver]._settlements._states[execution_id]
    completion = commit(simulation, plan, 0, STEPS, final=True, to=[sender])
    commitment = ExecutorCommitment(
        execution_id=execution_id,
        node=completion.node,
        root=completion.root(),
        end=completion.end,
    )
    honest, other = (
        sign_token(simulation.by_node[node].identity, api.EXECUTOR_COMMITMENT, commitment)
        for node in plan.executors()[:2]
    )
    elsewhere = sign_token(
        simulation.by_node[completion.node].identity,
        api.EXECUTOR_COMMITMENT,
        commitment.model_copy(update={"execution_id": "0x" + "99" * 32}),
    )
    end = commitment.end.model_copy(update={"signature": "0x" + "00" * 64})

    def share(**parts: object) -> None:
        message = CommitmentsShared(execution_id=execution_id, **parts)  # type: ignore[arg-type]
        event = ev.GossipReceived(sender, message, simulation.view.configuration)
        simulation.members[receiver].handle(event, simulation.now)

    for forged in ("no token", f"{honest[:-9]}AAAAAAAA{honest[-1]}", other, elsewhere):
        with pytest.raises(PeerFault):
            share(commitments=(forged,))
    with pytest.raises(PeerFault):
        share(ends=(end,))
    assert not state.collected.list_tokens()
    share(commitments=(honest, honest))
    share(commitments=(honest,))
    assert state.collected.list_commitments(STEPS) == {completion.node: completion.root()}
