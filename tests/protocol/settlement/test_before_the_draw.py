"""What nodes say of an execution before its tasks are drawn: nobody knows yet who has to say it."""

from __future__ import annotations

from typing import Any

import pytest

from splitup.core import limits
from splitup.core.errors import PeerFault, Unavailable
from splitup.messages.base import Message
from splitup.messages.completions import EMPTY_DIGEST, Completion, TaskCommitment
from splitup.messages.verification import (
    Attestation,
    Held,
    Ruling,
    Silence,
    ValidatorCommitment,
    VerificationResult,
)
from splitup.protocol.committee import events as ev
from splitup.protocol.committee.peer_messages import Attested
from splitup.protocol.settlement.attestations import sign_attestation
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


def make_words(execution_id: str, member: str, **said: Any) -> Attestation:
    empty = {"held": (), "silent": (), "rulings": ()}
    words = {"execution_id": execution_id, "member": member, "steps": 1, "due": False}
    return Attestation.model_validate({**words, **empty, **said})


def test_s115_a_member_says_of_an_execution_no_more_than_its_draw_asks() -> None:
    """One of them could fill the memory of all others by 8 MiB about each open execution."""
    simulation = start(tasks=2, economics=VERIFY_ALL)
    for node in simulation.nodes:
        node.mute_validator = True
    execution_id = simulation.request()
    assert simulation.run(5, lambda: len(simulation.certificates.get(execution_id, {})) == 4)
    ours, liar = simulation.identities[:2]
    member = simulation.members[ours.address]
    state = member.settlements._states[execution_id]

    def tell(**said: Any) -> None:
        words = make_words(execution_id, liar.address, **said)
        message = Attested(attestation=sign_attestation(liar, words))
        member.handle(ev.GossipReceived(liar.address, message), simulation.now)

    held = Held(task=0, validator=simulation.nodes[0].address, root=ID)
    tell(held=(held,))
    assert liar.address not in {one.attestation.member for one in state.attestations.get_all()}
    assert simulation.run(20, lambda: state.verification is not None)
    assert state.verification is not None
    simulation.down.add(liar.address)  # it says only what the test says
    task, check = next(iter(state.verification.checks.items()))
    validator, stranger = check.validators[0], "0x" + "77" * 20
    held = Held(task=task, validator=validator, root=ID)
    ruling = Ruling(task=task, inputs=(), outputs=(), state=EMPTY_DIGEST, error="")
    many = (ruling.model_copy(update={"outputs": ("1" * 64,) * 9}),)
    tries = [ruling.model_copy(update={"missing": (n,)}) for n in range(9)]
    silence = Silence(node=stranger, task=None)
    for said in (
        {"held": (held.model_copy(update={"validator": stranger}),)},
        {"held": (held.model_copy(update={"task": limits.MAX_TASKS - 1}),)},
        {"held": (held, held.model_copy(update={"root": "0x" + "12" * 32}))},
        {"silent": (silence,)},
        {"silent": (silence.model_copy(update={"task": task}),)},
        {"rulings": (ruling.model_copy(update={"task": limits.MAX_TASKS - 1}),)},
        {"rulings": (ruling.model_copy(update={"validator": stranger}),)},
        {"rulings": many},
        {"rulings": tuple(tries)},
    ):
        with pytest.raises(PeerFault, match="says more than the draw asks"):
            tell(**said)
    executor = state.verification.executors[task]
    silent = (Silence(node=executor, task=None), Silence(node=validator, task=task))
    tell(held=(held,), silent=silent, rulings=tuple(tries[:8]))
    assert liar.address in {one.attestation.member for one in state.attestations.get_all()}
