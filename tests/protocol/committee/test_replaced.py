"""Executions in which nodes were replaced: who is drawn over, judged, waited for and paid."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from splitup.core.errors import BadSignature, PeerFault
from splitup.messages.completions import SignedTakeover, Takeover, Takeovers
from splitup.messages.plans import Plan
from splitup.protocol.committee import events as ev
from splitup.protocol.execution.takeovers import sign_takeover
from tests.parameters import some_of
from tests.protocol.simulator import (
    CLIENT_IDENTITY,
    VERIFY_ALL,
    Network,
    Simulation,
    get_slashes,
    settle,
    start,
)


def break_first(plan: Plan) -> Collection[str]:
    return plan.executors()[:1]


def play(simulation: Simulation) -> tuple[Plan, tuple[str, ...], str]:
    """Settle an execution in which the executor of task 0 fails; return who ran the tasks."""
    simulation.broken = break_first
    execution_id = simulation.request()
    settle(simulation, execution_id, within_s=250)
    plan = simulation.find_plan(execution_id)
    executors = simulation.find_executors(plan)
    assert executors != plan.executors()
    return plan, executors, execution_id


def find_paid(simulation: Simulation, execution_id: str) -> set[str]:
    return {
        p.account for p in simulation.chain.settlements[execution_id].payments if not p.from_slash
    }


@pytest.mark.parametrize("seed", some_of(range(3), 0))
def test_f01_who_took_over_is_drawn_over_and_paid_and_who_was_replaced_owes_nothing(
    seed: int,
) -> None:
    simulation = start(seed, economics=VERIFY_ALL)
    plan, executors, execution_id = play(simulation)
    assert set(simulation.find_outcomes(execution_id).values()) == {"honest"}
    assert not get_slashes(simulation, execution_id) and not simulation.faults
    assert set(executors) <= find_paid(simulation, execution_id)
    assert all(order.executors == executors for order in simulation.orders)
    assert plan.executors()[0] not in executors


@pytest.mark.parametrize("told", [1, 2])
def test_one_member_that_hears_of_a_takeover_is_enough(told: int) -> None:
    """The others learn it from the commitments."""
    simulation = start(economics=VERIFY_ALL)
    simulation.told = told
    _, executors, execution_id = play(simulation)
    assert set(executors) <= find_paid(simulation, execution_id)


@pytest.mark.parametrize("seed", some_of(range(3), 0))
def test_f10_takeovers_survive_loss_and_delay(seed: int) -> None:
    simulation = Simulation(
        seed, network=Network(loss=0.3, repeat=0.1, delay_ms=(1, 1000)), economics=VERIFY_ALL
    )
    assert simulation.run(600, lambda: simulation.chain.sequence >= 1)
    _, executors, execution_id = play(simulation)
    assert set(executors) <= find_paid(simulation, execution_id)
    assert not get_slashes(simulation, execution_id)


def test_a21_who_took_over_and_lies_is_slashed_and_who_was_replaced_is_not() -> None:
    simulation = start(economics=VERIFY_ALL)
    execution_id = simulation.request()
    simulation.broken = break_first
    assert simulation.run(8, lambda: bool(simulation.certificates.get(execution_id)))
    plan = simulation.find_plan(execution_id)
    liar = simulation.find_executors(plan)[0]
    simulation.by_node[liar].lies = True
    settle(simulation, execution_id)
    assert set(get_slashes(simulation, execution_id)) == {liar}
    assert simulation.find_outcomes(execution_id)[0] == "lied"


@pytest.mark.parametrize("fault", ["withholds_completion", "forgets_takeovers"])
def test_a_reveal_that_lacks_the_takeovers_is_one_that_never_came(fault: str) -> None:
    simulation = start(economics=VERIFY_ALL)
    execution_id = simulation.request()
    simulation.broken = break_first
    assert simulation.run(8, lambda: bool(simulation.certificates.get(execution_id)))
    plan = simulation.find_plan(execution_id)
    executors = simulation.find_executors(plan)
    setattr(simulation.by_node[executors[0]], fault, True)
    settle(simulation, execution_id, within_s=250)
    outcomes = simulation.find_outcomes(execution_id)
    own = {task for task, node in enumerate(executors) if node == executors[0]}
    assert {task for task, outcome in outcomes.items() if outcome == "withheld"} == own
    assert set(get_slashes(simulation, execution_id)) == {executors[0]}


def test_a15_only_the_clients_word_for_this_execution_counts() -> None:
    simulation = start(economics=VERIFY_ALL)
    simulation.broken = lambda plan: [entry.node for entry in plan.nodes[:-1]]
    execution_id = simulation.request()
    for node in simulation.nodes:
        node.plans[execution_id] = None  # type: ignore[assignment]  # the test plays them
    assert simulation.run(8, lambda: len(simulation.certificates.get(execution_id, {})) == 4)
    account, certificate = next(iter(simulation.certificates[execution_id].items()))
    plan, member = certificate.plan, simulation.members[account]
    node = simulation.by_node[plan.tasks[0][1]]
    takeover = Takeover(execution_id=execution_id, task=0, candidate=1, first_step=0)
    good = sign_takeover(CLIENT_IDENTITY, takeover)

    def tell(*takeovers: SignedTakeover, key: str = node.identity.signing_key_hex) -> None:
        told = Takeovers(execution_id=execution_id, node=node.address, takeovers=takeovers)
        member.handle(ev.ReportReceived(told, key), simulation.now)

    with pytest.raises(BadSignature):
        tell(good, key=simulation.nodes[0].identity.signing_key_hex[:-1] + "0")
    with pytest.raises(BadSignature):
        tell(sign_takeover(node.identity, takeover))
    for change in ({"execution_id": "0x" + "99" * 32}, {"task": 99}, {"candidate": 31}):
        with pytest.raises(PeerFault):
            tell(sign_takeover(CLIENT_IDENTITY, takeover.model_copy(update=change)))
    tell(good)
    tell(good)
