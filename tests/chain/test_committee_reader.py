"""The Committee contract and Python agree on the group key and on randomness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from eth_hash.auto import keccak

from splitup.chain.client import Chain
from splitup.chain.committee_reader import Committees, fetch_committee
from splitup.core.errors import BadSignature, ChainRejected, ChainUnavailable, PeerFault
from splitup.crypto import bls
from splitup.crypto.keys import Identity
from splitup.crypto.quorum import sign_quorum
from splitup.devnet.anvil import derive_key
from splitup.messages.plans import MemberSignature, Plan, PlanCertificate, PlanNode, Request
from splitup.messages.verification import Draw
from splitup.protocol.committee.certificates import (
    RANDOMNESS_DOMAIN,
    compute_plan_hash,
    draw_alpha,
    plan_alpha,
)
from tests.builders import find_free_port, make_request
from tests.chain.conftest import MNEMONIC, Network
from tests.chain.proxy import Proxy

SECRET = (12345).to_bytes(32)
KEY = bls.compute_public_key(SECRET)


async def confirm(network: Network, key: str = KEY) -> None:
    data = bls.encode_public_key_eip2537(key)
    for member in network.members[:3]:
        chain = await Chain.connect(network.url, network.deployment, private_key=member.private_key)
        async with chain:
            await chain.send("committee", "confirmGroupKey", keccak(data), data)


async def test_the_group_key_comes_back_as_it_was_confirmed(network: Network) -> None:
    assert (await fetch_committee(network.owner)).group_key == ""
    await confirm(network)
    view = await fetch_committee(network.owner)
    assert (view.configuration, view.group_key) == (1, KEY)


async def test_a17_randomness_is_judged_alike(network: Network) -> None:
    await confirm(network)
    messages = [b"", b"alpha", bytes(55), bytes(range(256)), plan_alpha(make_request())]
    signatures = [bls.sign_partial(SECRET, RANDOMNESS_DOMAIN, message) for message in messages]
    signatures.append(bls.sign_partial((7).to_bytes(32), RANDOMNESS_DOMAIN, messages[-1]))
    for message in messages:
        for signature in signatures:
            try:
                bls.verify_signature(KEY, RANDOMNESS_DOMAIN, message, signature)
                expected = bls.compute_seed(signature)
            except BadSignature:
                expected = None
            data = bls.encode_signature_eip2537(signature)
            try:
                seed = await network.owner.call("committee", "verifyRandomness", message, data)
            except ChainRejected as error:
                assert expected is None, str(error)
                assert error.error_name == "RandomnessInvalid"
            else:
                assert seed == expected


def make_certificate(
    network: Network,
    request: Request,
    configuration: int,
    members: Sequence[Identity],
    secret: bytes,
) -> PlanCertificate:
    signature = bls.sign_partial(secret, RANDOMNESS_DOMAIN, plan_alpha(request))
    node = PlanNode(node="0x" + "01" * 20, signing_key="0x" + "02" * 32, endpoint="http://n")
    plan = Plan(
        request=request,
        seed=bls.compute_seed(signature),
        tasks=((node.node,),),
        nodes=(node,),
    )
    domain, struct_hash = network.domain, compute_plan_hash(plan, configuration)
    return PlanCertificate(
        plan=plan,
        seed_signature=signature,
        signatures=tuple(
            MemberSignature(
                member=m.address,
                signature="0x" + sign_quorum(m.private_key, domain, struct_hash).hex(),
            )
            for m in members[:3]
        ),
    )


async def test_an_execution_keeps_the_configuration_of_its_request(network: Network) -> None:
    """Certificates of members that left are good for what was asked of them, and nothing else."""
    await confirm(network)
    early = Committees(network.client)
    assert (await early.fetch_current()).configuration == 1
    first = await network.request(nonce=1)
    keys = [derive_key(MNEMONIC, index) for index in range(5, 9)]
    members = sorted((Identity.from_private_key(key) for key in keys), key=lambda m: m.address)
    rows = [(m.address, m.signing_key_hex, "http://127.0.0.1:1") for m in members]
    await network.owner.send("committee", "resetMembers", rows)
    second = await network.request(nonce=2)
    other = (777).to_bytes(32)
    await confirm(replace(network, members=members), bls.compute_public_key(other))

    def certify(request: Request, *, is_new: bool) -> PlanCertificate:
        signers = (members, other) if is_new else (network.members, SECRET)
        return make_certificate(network, request, 1 + is_new, *signers)

    for committees in (early, Committees(network.client)):
        for request, is_new in ((first, False), (second, True)):
            view = await committees.check_certificate(certify(request, is_new=is_new))
            assert view.configuration == 1 + is_new
            assert (await committees.fetch_of(request.execution_id)) == view
            with pytest.raises(PeerFault):
                await committees.check_certificate(certify(request, is_new=not is_new))


async def test_what_a_committee_has_signed_is_checked_once_and_for_no_other_committee(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    await confirm(network)
    committees = Committees(network.client)
    request = await network.request(nonce=1)
    certificate = make_certificate(network, request, 1, network.members, SECRET)
    commitments = (("0x" + "01" * 20, "0x" + "02" * 32),)
    alpha = draw_alpha(request.execution_id, "0x" + "03" * 32, commitments, (), 1)
    draw = Draw(
        execution_id=request.execution_id,
        block_hash="0x" + "03" * 32,
        commitments=commitments,
        steps=1,
        signature=(signature := bls.sign_partial(SECRET, RANDOMNESS_DOMAIN, alpha)),
        seed=bls.compute_seed(signature),
    )
    checked: list[bytes] = []
    verify = bls.verify_signature

    def count(public_key: str, domain: bytes, message: bytes, signature: str) -> None:
        checked.append(message)
        verify(public_key, domain, message, signature)

    monkeypatch.setattr(bls, "verify_signature", count)
    for _ in range(2):
        view = await committees.check_certificate(certificate)
        await committees.check_draw(draw, view)
    assert checked == [plan_alpha(request), alpha]
    with pytest.raises(BadSignature):
        await committees.check_draw(draw.model_copy(update={"steps": 2}), view)
    with pytest.raises(BadSignature):
        await committees.check_draw(
            draw, replace(view, group_key=bls.compute_public_key((777).to_bytes(32)))
        )


async def test_f12_the_last_word_counts_while_the_chain_is_gone(network: Network) -> None:
    target = int(network.url.rpartition(":")[2])
    proxy = await Proxy.open(port := find_free_port(), target)
    async with await Chain.connect(f"http://127.0.0.1:{port}", network.deployment) as chain:
        committees = Committees(chain)
        view = await committees.fetch_current()
        await proxy.close()
        assert await committees.fetch_of("0x" + "77" * 32, max_age_s=-1) == view
        with pytest.raises(ChainUnavailable):
            await Committees(chain).fetch_current()


def test_a_plans_alpha_is_what_the_market_encodes() -> None:
    """abi.encode(bytes32, bytes32, bytes32), pinned."""
    request = make_request()
    assert plan_alpha(request).hex() == (
        keccak(b"splitup/plan-seed/v1").hex() + "ee" * 32 + request.hash()[2:]
    )


@pytest.mark.parametrize("data", [b"", bytes(256), bytes(255), b"\x01" + bytes(255), b"\0" * 257])
def test_a17_bad_keys_of_a_chain_are_refused(data: bytes) -> None:
    with pytest.raises(BadSignature):
        bls.decode_public_key_eip2537(data)
