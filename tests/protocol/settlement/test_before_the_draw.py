"""What nodes say of an execution before its tasks are drawn: nobody knows yet who has to say it."""

from __future__ import annotations

import pytest

from splitup.core import limits
from splitup.core.errors import PeerFault, Unavailable
from splitup.messages.base import Message
from splitup.messages.completions import EMPTY_DIGEST, Completion, TaskCommitment
from splitup.messages.verification import Ruling, ValidatorCommitment, VerificationResult
from splitup.protocol.committee import events as ev
from tests.protocol.simulator import VERIFY_ALL, make_signed_end, settle, start

ID = "0x" + "11" * 32
RESULT = VerificationResult(
    execution_id=ID,
    task=limits.MAX_TASKS - 1,
    validator="0x" + "22" * 20,
    inputs=(),
    outputs=("2" * 64,),
    state=EMPTY_DIGEST,
    salt=ID,
    error="",
)


def test_s112_before_the_draw_a_node_leaves_nothing_in_a_members_memory() -> None:
    """Any node of the snapshot could send 1,024 results of 5 MiB for each open execution."""
    simulation = start(tasks=2, economics=VERIFY_ALL)
    execution_id = simulation.request()
    assert simulation.run(5, lambda: len(simulation.certificates.get(execution_id, {})) == 4)
    account, certificate = next(iter(simulation.certificates[execution_id].items()))
    member, node = simulation.members[account], simulation.nodes[0]
    named = {"execution_id": execution_id, "validator": node.address}
    completion = Completion(
        execution_id=execution_id,
        node=certificate.plan.executors()[0],
        tasks=(TaskCommitment(task=0, inputs=(), outputs=(), state=EMPTY_DIGEST),),
        salt=ID,
        end=make_signed_end(execution_id, 4),
    )
    reports: list[tuple[str, ev.NodeReport]] = [
        (node.address, RESULT.model_copy(update=named)),
        (node.address, ValidatorCommitment(task=0, root=ID, **named)),
        (completion.node, completion),
    ]
    state = member.settlements._states[execution_id]
    for address, report in reports:
        key = simulation.by_node[address].identity.signing_key_hex
        with pytest.raises(Unavailable, match="no draw here yet; try again"):
            member.handle(ev.ReportReceived(report, key, "token"), simulation.now)
    assert not state.early.completions
    settle(simulation, execution_id)


@pytest.mark.parametrize("field", ["inputs", "outputs"])
@pytest.mark.parametrize("kind", [VerificationResult, Ruling])
def test_s112_a_result_has_no_more_digests_than_a_task_has_ports(
    kind: type[Message], field: str
) -> None:
    value = {**RESULT.model_dump(mode="json"), field: ["3" * 64] * limits.MAX_PORTS}
    if kind is Ruling:
        value = {name: value[name] for name in ("task", "inputs", "outputs", "state", "error")}
    kind.from_value(value)
    value[field] = ["3" * 64] * (limits.MAX_PORTS + 1)
    with pytest.raises(PeerFault, match=f"{field} is invalid"):
        kind.from_value(value)
