"""What is settled where the client never ends, or an executor never commits (ADR 21)."""

from __future__ import annotations

from typing import Any

import pytest

from splitup.core import tuning
from splitup.core.errors import BadSignature, PeerFault
from splitup.messages import api
from splitup.messages.base import CLIENT
from splitup.messages.completions import (
    ExecutorCommitment,
    Takeover,
    Takeovers,
)
from splitup.messages.frames import decode_frames, make_order
from splitup.net.signed_frames import seal_frames
from splitup.protocol.committee import events as ev
from splitup.protocol.committee.peer_messages import CommitmentsShared
from splitup.protocol.execution.ends import make_count
from splitup.protocol.execution.takeovers import sign_takeover
from tests.builders import make_tensor_frame
from tests.protocol.settlement.test_steps import PRICE, STEPS
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
    settle,
)
from tests.protocol.simulator import (
    CLIENT_IDENTITY,
    VERIFY_ALL,
    sign_token,
)


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
    evidence = member.settlements.find_evidence(plan.request.execution_id)
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
        member.settlements._states[execution_id].economics = VERIFY_ALL
    done = [commit(simulation, plan, task, STEPS, final=True) for task in (0, 1)]
    assert run_to_agreement(simulation, execution_id)
    simulation.run(2)
    reveal(simulation, *done)
    state = next(iter(simulation.members.values())).settlements._states[execution_id]
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
    """One executor took the end; another one shows the input of a later step, but not at once."""
    simulation, execution_id, plan = open_execution()
    commit(simulation, plan, 1, 1, final=True)
    for task in range(3):
        count(simulation, plan, task, 4)
    assert not simulation.run(3, lambda: execution_id in simulation.chain.agreed)
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
    state = simulation.members[member].settlements._states[execution_id]
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
        simulation.feed(account, ev.ReportReceived(message, key))
    pay = settle(simulation, plan, *done)
    assert pay == dict.fromkeys(plan.executors()[:2], 2 * STEP_PRICE)


def test_a_member_that_shares_what_nobody_signed_is_blamed() -> None:
    simulation, execution_id, plan = open_execution()
    sender, receiver = list(simulation.members)[:2]
    state = simulation.members[receiver].settlements._states[execution_id]
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
