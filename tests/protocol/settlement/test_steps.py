"""Who says how many steps an execution had: the client, and nobody in its place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from splitup_node.settlement.verifier import check_order

from splitup.core.errors import BadSignature, PeerFault
from splitup.messages.base import Message
from splitup.messages.completions import SignedEnd
from splitup.messages.plans import Plan
from splitup.messages.verification import VerificationOrder
from splitup.protocol.committee import commands as cmd
from splitup.protocol.committee.certificates import check_draw
from splitup.protocol.planning.exposure import Economics
from tests.builders import make_chain_manifest
from tests.protocol.simulator import (
    CLIENT,
    VERIFY_ALL,
    Node,
    Simulation,
    digest,
    make_signed_end,
    settle,
    start,
)

STEPS, PRICE = 4, 10 * 4
SMALL = 300  # nano-USDC per step: three steps earn less than a micro-USDC


class Steps(Simulation):
    """As real logs are: the digest over a log's first steps is another one than over all.

    A log has as many steps as the client told its producer, and who looks for more finds it short.
    """

    def __init__(self, seed: int = 0, *, economics: Economics) -> None:
        super().__init__(seed, economics=economics, tasks=3, nodes=8)
        self.told_steps: Callable[[Plan, int], int] = lambda plan, task: plan.request.steps
        self._looked_for = STEPS

    def _sign_end(self, plan: Plan, task: int) -> SignedEnd:
        inputs = (digest("in", plan.request.execution_id),)
        return make_signed_end(
            plan.request.execution_id, self.told_steps(plan, task), inputs=inputs
        )

    def _recompute(self, account: str, command: cmd.RecomputeTask) -> None:
        self._looked_for = command.order.steps
        super()._recompute(account, command)

    def _verify(self, node: Node, order: VerificationOrder) -> None:
        self._looked_for = order.steps
        super()._verify(node, order)

    def _find_hidden(self, plan: Plan, task: int) -> tuple[int, ...]:
        short = [t for t in range(task) if self.told_steps(plan, t) < self._looked_for]
        return (*super()._find_hidden(plan, task), *(t for t in short if t == task - 1))

    def _read_store(self, execution_id: str, plan: Plan, task: int) -> tuple[str, ...]:
        values = super()._read_store(execution_id, plan, task)
        if self._looked_for == plan.request.steps:
            return values
        return tuple(digest("first", self._looked_for, value) for value in values)


def begin(economics: Economics) -> tuple[Steps, str, Plan]:
    """Return an execution of three tasks on three nodes that has a plan."""
    tries = (open_execution(Steps(seed, economics=economics)) for seed in range(20))
    return next(found for found in tries if len(set(found[2].executors())) == 3)


def open_execution(simulation: Steps) -> tuple[Steps, str, Plan]:
    assert simulation.run(20, lambda: simulation.chain.sequence >= 1)
    execution_id = simulation.request(steps=STEPS)
    for node in simulation.nodes:  # what follows begins when the test says so
        node.plans[execution_id] = None  # type: ignore[assignment]
    assert simulation.run(8, lambda: len(simulation.certificates.get(execution_id, {})) == 4)
    plan = simulation.find_plan(execution_id)
    return simulation, execution_id, plan


def end(simulation: Steps, execution_id: str) -> None:
    """Let all nodes of the plan commit."""
    certificate = next(iter(simulation.certificates[execution_id].values()))
    for node in simulation.nodes:
        del node.plans[execution_id]
        if node.address in certificate.plan.executors():
            simulation._run_plan(node, certificate)


def get_pay(simulation: Simulation, execution_id: str) -> dict[str, int]:
    paid = simulation.get_paid(execution_id)
    return {account: amount for account, amount in paid.items() if account != CLIENT}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_s02_a_client_that_signs_two_numbers_gets_no_settlement_and_no_stake(place: int) -> None:
    """It is as if it had never ended: nobody is paid, and its money is locked until the deadline.

    An executor that is told fewer steps may be the client's own: what it shows must not become
    the number by which its neighbours are judged.
    """
    simulation, execution_id, _ = begin(VERIFY_ALL)
    simulation.told_steps = lambda plan, task: STEPS - (task == place)
    end(simulation, execution_id)
    assert not simulation.run(60, lambda: simulation.is_settled(execution_id))
    assert not simulation.orders, "no draw"


def test_s02_fewer_members_than_a_quorum_cannot_move_the_number() -> None:
    """A member that says another number in the content of a root is refused by the root."""
    simulation, execution_id, _ = begin(VERIFY_ALL)
    liar = simulation.identities[0].address

    def lie(message: Message) -> Message:
        return message.model_copy(update={"steps": 1}) if hasattr(message, "steps") else message

    simulation.tamper[liar] = lie
    end(simulation, execution_id)
    assert simulation.run(60, lambda: simulation.is_settled(execution_id))
    simulation.run(3)
    simulation.check()
    assert simulation.chain.settlements[execution_id].steps == STEPS
    assert set(simulation.find_outcomes(execution_id).values()) == {"honest"}


def test_s09_an_order_with_another_number_of_steps_is_refused() -> None:
    """Whoever passes an order on cannot change what is computed: the draw's signature covers it."""
    simulation, execution_id, _ = begin(VERIFY_ALL)
    end(simulation, execution_id)
    assert simulation.run(60, lambda: simulation.is_settled(execution_id))
    assert simulation.orders
    for order in simulation.orders:
        assert order.steps == STEPS
        check_draw(order.draw, simulation.full_view)
        for steps in (1, STEPS - 1, STEPS + 1):
            other = order.draw.model_copy(update={"steps": steps})
            with pytest.raises(BadSignature):
                check_draw(other, simulation.full_view)


def test_an_order_whose_plan_names_no_executor_is_refused() -> None:
    """Before its signatures are checked: anybody may post an order to a node."""
    simulation, execution_id, _ = begin(VERIFY_ALL)
    end(simulation, execution_id)
    assert simulation.run(60, lambda: simulation.is_settled(execution_id))
    order = simulation.orders[0]
    plan = order.certificate.plan
    node = order.snapshot.entries[-1].entry.node
    check_order(order, simulation.manifest, node)
    less = plan.model_copy(update={"request": plan.request.model_copy(update={"verify_bps": 0})})
    assert less.root() != plan.root(), "the signatures of the plan bind the share"
    with pytest.raises(PeerFault, match="does not pick"):
        certificate = order.certificate.model_copy(update={"plan": less})
        check_order(
            order.model_copy(update={"certificate": certificate}), simulation.manifest, node
        )
    for places in ((99,) * len(plan.tasks), (0,) * (len(plan.tasks) + 1)):
        bad = order.certificate.model_copy(
            update={"plan": plan.model_copy(update={"places": places})}
        )
        draw = order.draw.model_copy(update={"executors": ()})
        with pytest.raises(PeerFault, match="not in its task's list"):
            other = order.model_copy(update={"certificate": bad, "draw": draw})
            check_order(other, simulation.manifest, node)


def test_a24_an_execution_below_a_micro_usdc_pays_nothing_and_settles() -> None:
    """Nodes and members agree on it like on any other; one step more pays every task."""
    manifest = make_chain_manifest(3)
    tasks = tuple(t.model_copy(update={"price_nano_usdc": SMALL}) for t in manifest.tasks)
    manifest = manifest.model_copy(update={"tasks": tasks})
    simulation = start(economics=VERIFY_ALL, nodes=8, manifest=manifest)
    for steps, pay in ((3, 0), (4, 1)):
        execution_id = simulation.request(steps, steps=steps)
        settle(simulation, execution_id)
        outcomes = simulation.find_outcomes(execution_id)
        assert outcomes == dict.fromkeys(range(3), "honest")
        settled = simulation.chain.settlements[execution_id]
        assert settled.steps == steps and not settled.slashes
        assert sum(p.amount_micro_usdc for p in settled.payments) == 2 * 3 * pay
