from __future__ import annotations

import dataclasses

import pytest

from splitup.core.errors import BadSignature, PeerFault
from splitup.crypto import bls
from splitup.crypto.keys import Identity
from splitup.crypto.quorum import Domain, sign_quorum
from splitup.messages.plans import MemberSignature, Plan, PlanCertificate
from splitup.messages.verification import Draw
from splitup.protocol.committee.certificates import (
    RANDOMNESS_DOMAIN,
    CommitteeView,
    MemberView,
    check_certificate,
    check_draw,
    compute_plan_hash,
    draw_alpha,
    plan_alpha,
)
from splitup.protocol.planning.selection import compute_plan
from tests.builders import address, make_chain_manifest, make_request, make_snapshot

SECRET = (7).to_bytes(32, "big")
DOMAIN = Domain(31337, address(0xC0))
MEMBERS = sorted(
    (Identity.from_private_key(bytes([n]) * 32) for n in range(1, 5)), key=lambda m: m.address
)
COMMITTEE = CommitteeView(
    configuration=1,
    members=tuple(MemberView(m.address, m.signing_key_hex, "http://m:1") for m in MEMBERS),
    quorum=3,
    group_key=bls.compute_public_key(SECRET),
    domain=DOMAIN,
)


def attest(plan: Plan, signature: str, signers: list[Identity]) -> PlanCertificate:
    struct_hash = compute_plan_hash(plan, COMMITTEE.configuration)
    return PlanCertificate(
        plan=plan,
        seed_signature=signature,
        signatures=tuple(
            MemberSignature(
                member=member.address,
                signature="0x" + sign_quorum(member.private_key, DOMAIN, struct_hash).hex(),
            )
            for member in signers
        ),
    )


def make_plan() -> tuple[Plan, str]:
    request = make_request()
    signature = bls.sign_partial(SECRET, RANDOMNESS_DOMAIN, plan_alpha(request))
    seed = bls.compute_seed(signature)
    return compute_plan(request, seed, make_snapshot(3, 2), make_chain_manifest(2)), signature


def make_draw() -> Draw:
    commitments = ((address(1), "0x" + "11" * 32), (address(2), "0x" + "22" * 32))
    alpha = draw_alpha("0x" + "ee" * 32, "0x" + "aa" * 32, commitments, (), 4)
    signature = bls.sign_partial(SECRET, RANDOMNESS_DOMAIN, alpha)
    return Draw(
        execution_id="0x" + "ee" * 32,
        block_hash="0x" + "aa" * 32,
        commitments=commitments,
        steps=4,
        signature=signature,
        seed=bls.compute_seed(signature),
    )


def test_any_quorum_in_any_order_is_enough() -> None:
    plan, signature = make_plan()
    for signers in (MEMBERS, MEMBERS[:3], MEMBERS[:0:-1]):
        check_certificate(attest(plan, signature, signers), COMMITTEE)


def test_every_part_is_bound() -> None:
    plan, signature = make_plan()
    good = attest(plan, signature, MEMBERS[:3])
    reordered = plan.model_copy(update={"tasks": (plan.tasks[0][::-1], *plan.tasks[1:])})
    other_request = plan.model_copy(
        update={"request": plan.request.model_copy(update={"deadline": 1})}
    )
    for changed in (reordered, other_request, plan.model_copy(update={"seed": "0x" + "00" * 32})):
        with pytest.raises(BadSignature):
            check_certificate(good.model_copy(update={"plan": changed}), COMMITTEE)
    with pytest.raises(BadSignature, match="2 signatures"):
        check_certificate(attest(plan, signature, MEMBERS[:2]), COMMITTEE)
    with pytest.raises(BadSignature, match="no member"):
        stranger = Identity.from_private_key(b"\x09" * 32)
        check_certificate(attest(plan, signature, [*MEMBERS[:2], stranger]), COMMITTEE)
    swapped = (
        good.signatures[0].model_copy(update={"signature": good.signatures[1].signature}),
        good.signatures[1].model_copy(update={"signature": good.signatures[0].signature}),
        good.signatures[2],
    )
    with pytest.raises(BadSignature):
        check_certificate(good.model_copy(update={"signatures": swapped}), COMMITTEE)


def test_a_quorum_cannot_choose_the_seed() -> None:
    plan, _ = make_plan()
    forged = bls.sign_partial((8).to_bytes(32, "big"), RANDOMNESS_DOMAIN, plan_alpha(plan.request))
    chosen = plan.model_copy(update={"seed": bls.compute_seed(forged)})
    with pytest.raises(BadSignature, match="BLS signature does not verify"):
        check_certificate(attest(chosen, forged, MEMBERS), COMMITTEE)
    with pytest.raises(BadSignature, match="no group key"):
        check_certificate(
            attest(*make_plan(), MEMBERS), dataclasses.replace(COMMITTEE, group_key="")
        )


def test_malformed_plans_are_refused_whoever_signed_them() -> None:
    plan, signature = make_plan()
    node = plan.tasks[0][0]
    for update in (
        {"tasks": ()},
        {"tasks": ((), *plan.tasks[1:])},
        {"tasks": ((node, node), *plan.tasks[1:])},
        {"nodes": plan.nodes[1:]},
        {"nodes": plan.nodes[::-1]},
        {"terms": plan.terms[:-1]},
        {"places": (0,) * (len(plan.tasks) + 1)},
        {"places": (99,) * len(plan.tasks)},
        {"request": plan.request.model_copy(update={"chain_id": 1})},
    ):
        bad = plan.model_copy(update=update)
        signable = attest(plan, signature, MEMBERS)
        with pytest.raises(PeerFault) as fault:
            check_certificate(signable.model_copy(update={"plan": bad}), COMMITTEE)
        assert not isinstance(fault.value, BadSignature)


def test_draws_are_bound_to_their_commitments() -> None:
    draw = make_draw()
    check_draw(draw, COMMITTEE)
    for update in (
        {"block_hash": "0x" + "bb" * 32},
        {"execution_id": "0x" + "bb" * 32},
        {"commitments": draw.commitments[:1]},
        {"commitments": draw.commitments[::-1]},
        {"commitments": (draw.commitments[0], *draw.commitments)},
        {"commitments": ()},
        {"seed": "0x" + "00" * 32},
    ):
        with pytest.raises(PeerFault):
            check_draw(draw.model_copy(update=update), COMMITTEE)


def test_randomness_of_plans_and_draws_never_meets() -> None:
    request = make_request()
    assert not plan_alpha(request).startswith(b"splitup/draw-seed/v1")
    assert plan_alpha(request) != draw_alpha(request.execution_id, request.block_hash, (), (), 4)
