"""The Committee contract and Python agree on the group key and on randomness."""

from __future__ import annotations

import pytest
from eth_hash.auto import keccak

from splitup.chain.client import Chain
from splitup.chain.committee import fetch_committee
from splitup.crypto import bls
from splitup.errors import BadSignature, ChainRejected
from splitup.protocol.certificates import RANDOMNESS_DOMAIN, plan_alpha
from tests.builders import make_request
from tests.chain.conftest import Network

SECRET = (12345).to_bytes(32)
KEY = bls.compute_public_key(SECRET)


async def confirm(network: Network) -> None:
    data = bls.encode_public_key_eip2537(KEY)
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


def test_a_plans_alpha_is_what_the_market_encodes() -> None:
    """abi.encode(bytes32, bytes32, bytes32, uint64, bytes32), pinned."""
    request = make_request()
    assert plan_alpha(request).hex() == (
        keccak(b"splitup/plan-seed/v1").hex() + "ee" * 32 + "dd" * 32 + f"{1:064x}" + "bb" * 32
    )


@pytest.mark.parametrize("data", [b"", bytes(256), bytes(255), b"\x01" + bytes(255), b"\0" * 257])
def test_a17_bad_keys_of_a_chain_are_refused(data: bytes) -> None:
    with pytest.raises(BadSignature):
        bls.decode_public_key_eip2537(data)
