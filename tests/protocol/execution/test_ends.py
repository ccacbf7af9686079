"""What the client says it sent: who commits to other inputs is not paid, whoever else is wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from splitup.core.errors import BadSignature, PeerFault
from splitup.graph.manifest import Manifest
from splitup.messages.completions import (
    EMPTY_DIGEST,
    UNSTATED,
    Completion,
    End,
    SignedEnd,
    TaskCommitment,
)
from splitup.messages.frames import make_delivery
from splitup.messages.plans import Plan
from splitup.net.signed_frames import seal_frame
from splitup.protocol.execution.ends import check_end, check_interim, sign_end
from splitup.protocol.planning.exposure import Economics
from splitup.protocol.planning.selection import compute_plan
from splitup.protocol.settlement.edge_faults import find_input_faults
from splitup.protocol.settlement.proof_of_sampling import check_completion
from tests.builders import (
    decode_frame,
    make_chain_manifest,
    make_diamond_manifest,
    make_request,
    make_snapshot,
    make_tensor_frame,
)
from tests.protocol.committees import make_identity
from tests.protocol.simulator import Simulation

VERIFY_ALL, VERIFY_NONE = Economics(10_000, 1_200, 100_000), Economics(0, 1_200, 100_000)
SHAPES = {"chain": make_chain_manifest(4), "diamond": make_diamond_manifest()}
CLIENT, STEPS, PRICE = make_identity(77), 4, 10 * 4
SENT, OTHER = "1" * 64, "2" * 64


def play(
    shape: str, *, client: str = "honest", fault: str = "", economics: Economics = VERIFY_ALL
) -> tuple[Simulation, str, str]:
    """Return a settled execution whose first task's executor is at fault, its id, and that one."""
    simulation = Simulation(10, economics=economics, nodes=8, manifest=SHAPES[shape])
    assert simulation.run(20, lambda: simulation.chain.sequence >= 1)
    simulation.client = client
    execution_id = simulation.request()
    assert simulation.run(8, lambda: bool(simulation.certificates.get(execution_id)))
    plan = simulation.find_plan(execution_id)
    first = plan.executors()[0]
    if fault:
        setattr(simulation.by_node[first], fault, True)
    assert simulation.run(120, lambda: simulation.is_settled(execution_id))
    simulation.run(3)
    simulation.check()
    return simulation, execution_id, first


def get_pay(simulation: Simulation, execution_id: str) -> dict[str, int]:
    settled = simulation.chain.settlements[execution_id]
    assert not settled.slashes, "the client's word costs nobody's stake"
    return {p.account: p.amount_micro_usdc for p in settled.payments}


@pytest.mark.parametrize("shape", SHAPES)
def test_a21_who_misstates_what_the_client_sent_is_not_paid(shape: str) -> None:
    """Drawn or not: every executor reveals, and shows the client's word."""
    for economics in (VERIFY_ALL, VERIFY_NONE):
        simulation, execution_id, first = play(shape, fault="misstates_inputs", economics=economics)
        plan = simulation.find_plan(execution_id)
        own = {task for task, executor in enumerate(plan.executors()) if executor == first}
        outcomes = simulation.find_outcomes(execution_id)
        assert {task for task, found in outcomes.items() if found == "contradicted"} == own
        assert set(outcomes.values()) <= {"contradicted", "honest"}
        pay = get_pay(simulation, execution_id)
        if economics is VERIFY_NONE:
            assert first not in pay and sum(pay.values()) == (len(plan.tasks) - len(own)) * PRICE


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("client", ["honest", "two-faced", "hasty"])
def test_whom_nothing_contradicts_is_paid(shape: str, client: str) -> None:
    simulation, execution_id, _ = play(shape, client=client, economics=VERIFY_NONE)
    assert simulation.find_outcomes(execution_id) == {}
    assert sum(get_pay(simulation, execution_id).values()) == 4 * PRICE


@pytest.mark.parametrize("shape", SHAPES)
def test_a_client_that_says_it_sent_something_else_takes_nobody_stake(shape: str) -> None:
    """It keeps what its inputs' readers would have earned: less than by never ending."""
    simulation, execution_id, _ = play(shape, client="false", economics=VERIFY_NONE)
    assert simulation.find_outcomes(execution_id) == {0: "contradicted"}
    assert sum(get_pay(simulation, execution_id).values()) == 3 * PRICE


def claim(task: int, read: str, inputs: int = 1) -> TaskCommitment:
    return TaskCommitment(task=task, inputs=(read,) * inputs, outputs=(OTHER,), state=EMPTY_DIGEST)


def make_end(*inputs: str, steps: int = STEPS) -> End:
    return End(execution_id="0x" + "ab" * 32, steps=steps, inputs=inputs)


@pytest.mark.parametrize(
    ("ends", "found"),
    [
        ((make_end(SENT), make_end(SENT)), set()),
        ((make_end(OTHER), make_end(OTHER)), {0}),
        ((make_end(OTHER),), {0}),
        ((make_end(),), set()),  # states nothing
        ((make_end(OTHER), make_end(SENT)), set()),  # the client signed both
        ((make_end(OTHER), make_end()), set()),
    ],
)
def test_what_follows_from_ends(ends: tuple[End, ...], found: set[int]) -> None:
    manifest = make_chain_manifest(2)
    claims = {0: claim(0, SENT), 1: claim(1, SENT)}
    assert find_input_faults(manifest, claims, ends) == found
    assert find_input_faults(manifest, {0: None, 1: None}, ()) == set(), "nobody revealed anything"


def make_plan(manifest: Manifest) -> Plan:
    request = make_request(STEPS).model_copy(update={"client_key": CLIENT.signing_key_hex})
    count = len(manifest.tasks)
    return compute_plan(request, f"0x{7:064x}", make_snapshot(6, count), manifest)


def test_a15_an_end_counts_for_its_execution_client_and_model_alone() -> None:
    manifest = make_chain_manifest(2)
    plan = make_plan(manifest)
    good = make_end(SENT).model_copy(update={"execution_id": plan.request.execution_id})
    for end in (good, good.model_copy(update={"inputs": ()})):
        check_end(sign_end(CLIENT, end), plan, manifest)
    for update, message in (
        ({"execution_id": "0x" + "cd" * 32}, "another execution"),
        ({"steps": STEPS + 1}, "more steps"),
        ({"inputs": (SENT, SENT)}, "model's ports"),
        ({"outputs": ("", "")}, "model's ports"),
    ):
        with pytest.raises(PeerFault, match=message):
            check_end(sign_end(CLIENT, good.model_copy(update=update)), plan, manifest)
    with pytest.raises(BadSignature):
        check_end(sign_end(make_identity(78), good), plan, manifest)
    signature = sign_end(CLIENT, good).signature
    changed = SignedEnd(end=good.model_copy(update={"inputs": (OTHER,)}), signature=signature)
    with pytest.raises(BadSignature):
        check_end(changed, plan, manifest)


def test_a_completion_is_bound_to_the_end_it_shows() -> None:
    manifest = make_chain_manifest(1)
    plan = make_plan(manifest)
    end = make_end(SENT).model_copy(update={"execution_id": plan.request.execution_id})
    shown = Completion(
        execution_id=end.execution_id,
        node=plan.executors()[0],
        tasks=(claim(0, SENT),),
        salt="0x" + "55" * 32,
        end=sign_end(CLIENT, end),
    )
    fewer = sign_end(CLIENT, end.model_copy(update={"steps": 1}))
    other = shown.model_copy(update={"end": fewer})
    assert shown.root() != other.root(), "all members see the same"
    for completion in (shown, other):
        assert Completion.parse(completion.canonical_bytes()) == completion
        check_completion(completion, plan, manifest, completion.root())
    assert (shown.steps, other.steps) == (STEPS, 1), "the client says how many steps there were"
    value = json.loads(shown.canonical_bytes())
    with pytest.raises(PeerFault):
        Completion.from_value({k: v for k, v in value.items() if k != "end"})
    for malformed in (None, {}, "", {"end": {}, "signature": "0x"}):
        with pytest.raises(PeerFault):
            Completion.from_value(value | {"end": malformed})
    false = shown.model_copy(update={"end": sign_end(make_identity(78), end)})
    with pytest.raises(BadSignature):
        check_completion(false, plan, manifest, false.root())


# ---- interim ends --------------------------------------------------------------------------------


NODE = make_identity(79)


def make_interim(plan: Plan, steps: int, *, signer: int = 0, step: int | None = None) -> SignedEnd:
    """Return an interim end that shows what a node signed for its last step."""
    author = make_identity(signer) if signer else NODE
    last = steps - 1 if step is None else step
    frame = replace(
        make_tensor_frame(plan.request.execution_id, 1, 0, last, b"1234"), before=b"\1" * 32
    )
    _, seal = decode_frame(seal_frame(author, frame))
    end = make_end(SENT, steps=steps).model_copy(
        update={
            "execution_id": plan.request.execution_id,
            "outputs": (make_delivery(seal),),
            "final": False,
        }
    )
    return sign_end(CLIENT, end)


def test_a15_an_interim_end_shows_what_was_received_and_follows_the_one_before() -> None:
    manifest = make_chain_manifest(2)
    request = make_request(100).model_copy(update={"client_key": CLIENT.signing_key_hex})
    plan = compute_plan(request, f"0x{7:064x}", make_snapshot(6, 2), manifest)
    keys = {"signing_key": NODE.signing_key_hex}
    nodes = tuple(node.model_copy(update=keys) for node in plan.nodes)
    plan = plan.model_copy(update={"nodes": nodes})
    for before, steps in ((0, 16), (0, 48), (16, 32), (32, 48)):
        check_interim(make_interim(plan, steps), plan, manifest, before)
    for before, steps in ((0, 15), (0, 17), (16, 48), (16, 64)):
        with pytest.raises(PeerFault):
            check_interim(make_interim(plan, steps), plan, manifest, before)
    with pytest.raises(PeerFault, match="does not show output"):
        check_interim(make_interim(plan, 16, step=14), plan, manifest, 0)
    with pytest.raises(BadSignature):
        check_interim(make_interim(plan, 16, signer=78), plan, manifest, 0)
    shown = make_interim(plan, 16).end
    for outputs in ((), ("",)):
        empty = sign_end(CLIENT, shown.model_copy(update={"outputs": outputs}))
        with pytest.raises(PeerFault, match="does not show"):
            check_interim(empty, plan, manifest, 0)
    with pytest.raises(BadSignature):
        check_interim(sign_end(make_identity(78), shown), plan, manifest, 0)


def test_a_state_may_be_unstated_with_an_interim_end_only() -> None:
    manifest = make_chain_manifest(1)
    plan = make_plan(manifest)
    final = make_end(SENT).model_copy(update={"execution_id": plan.request.execution_id})
    interim = final.model_copy(update={"final": False})
    for end in (final, interim):
        completion = Completion(
            execution_id=end.execution_id,
            node=plan.executors()[0],
            tasks=(claim(0, SENT).model_copy(update={"state": UNSTATED}),),
            salt="0x" + "55" * 32,
            end=sign_end(CLIENT, end),
        )
        assert Completion.parse(completion.canonical_bytes()) == completion
        if end.final:
            with pytest.raises(PeerFault, match="lacks the state"):
                check_completion(completion, plan, manifest, completion.root())
        else:
            check_completion(completion, plan, manifest, completion.root())
