"""Executions that nobody ends: what their executors commit to, count and reveal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from splitup.crypto.keys import Identity
from splitup.messages.base import CLIENT
from splitup.messages.completions import (
    UNSTATED,
    Completion,
    End,
    ExecutorCommitment,
    SignedEnd,
    SignedTakeover,
    TaskCommitment,
)
from splitup.messages.frames import make_order
from splitup.messages.plans import Plan
from splitup.net.signed_frames import seal_frame
from splitup.protocol.committee import events as ev
from splitup.protocol.execution.ends import make_count, sign_end
from tests.builders import decode_frame, make_tensor_frame
from tests.protocol.settlement.test_steps import PRICE, STEPS, Steps, get_pay
from tests.protocol.simulator import (
    CLIENT_IDENTITY,
    VERIFY_NONE,
    digest,
    get_slashes,
    make_commitment_event,
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
    plan = simulation.find_plan(execution_id)
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
            simulation.feed(account, ev.ReportReceived(completion, key))


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
