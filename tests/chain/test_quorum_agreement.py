"""Python's certificates and Solidity's check agree, on good signatures and on bad ones."""

from __future__ import annotations

import random

import pytest

from splitup.core.errors import BadSignature, ChainRejected
from splitup.crypto.quorum import (
    Domain,
    check_quorum,
    pack_signatures,
    sign_quorum,
    snapshot_struct_hash,
)
from tests.chain.conftest import Network

ROOT = "0x" + "5a" * 32
ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141


async def agree(network: Network, struct_hash: bytes, signatures: bytes) -> bool:
    """Return the common verdict of both sides; fail when they differ."""
    members = {member.address for member in network.members}
    try:
        check_quorum(network.domain, struct_hash, signatures, members)
        accepted = True
    except BadSignature:
        accepted = False
    try:
        await network.owner.call("committee", "requireQuorum", struct_hash, signatures)
        assert accepted, "the contract accepts what Python refuses"
    except ChainRejected as error:
        assert not accepted, f"the contract refuses what Python accepts: {error}"
    return accepted


async def test_snapshots_are_accepted_in_sequence(network: Network) -> None:
    for sequence in (1, 2):
        signatures = network.certify(snapshot_struct_hash(1, sequence, 1, ROOT))
        await network.owner.send("committee", "submitSnapshot", sequence, 1, ROOT, signatures)
    latest = await network.owner.call("committee", "latestSnapshot")
    assert latest == {"sequence": 2, "root": ROOT}
    with pytest.raises(ChainRejected, match="snapshot 2 is not the next one; submit 3"):
        await network.owner.send("committee", "submitSnapshot", 2, 1, ROOT, signatures)


async def test_a15_certificate_counts_for_one_hash_one_chain_one_contract(
    network: Network,
) -> None:
    struct_hash = snapshot_struct_hash(1, 1, 1, ROOT)
    assert await agree(network, struct_hash, network.certify(struct_hash))
    assert await agree(network, struct_hash, network.certify(struct_hash, signers=4))
    for other in (
        snapshot_struct_hash(2, 1, 1, ROOT),
        snapshot_struct_hash(1, 2, 1, ROOT),
        snapshot_struct_hash(1, 1, 2, ROOT),
        snapshot_struct_hash(1, 1, 1, "0x" + "5b" * 32),
    ):
        assert not await agree(network, other, network.certify(struct_hash))
    for domain in (
        Domain(1, network.domain.committee),
        Domain(network.domain.chain_id, network.deployment.market),
    ):
        signatures = pack_signatures(
            (m.address, sign_quorum(m.private_key, domain, struct_hash)) for m in network.members
        )
        assert not await agree(network, struct_hash, signatures)


async def test_a16_high_s_bad_v_and_bad_order_are_refused_alike(network: Network) -> None:
    struct_hash = snapshot_struct_hash(1, 1, 1, ROOT)
    good = network.certify(struct_hash)
    first, second, third = good[:65], good[65:130], good[130:]
    high_s = (ORDER - int.from_bytes(third[32:64])).to_bytes(32)
    bad = [
        first + second,
        b"",
        good + b"\x00",
        good + good,
        second + first + third,
        first + first + second,
        first + second + third[:32] + high_s + bytes([55 - third[64]]),
        first + second + third[:64] + bytes([third[64] - 27]),
        first + second + third[:64] + b"\x1d",
        first + second + bytes(65),
        first + second + b"\xff" * 64 + b"\x1b",
    ]
    for signatures in bad:
        assert not await agree(network, struct_hash, signatures)


async def test_random_damage_is_judged_alike(network: Network) -> None:
    struct_hash = snapshot_struct_hash(1, 1, 1, ROOT)
    good = network.certify(struct_hash)
    source = random.Random(7)
    for _ in range(40):
        damaged = bytearray(good)
        damaged[source.randrange(len(good))] ^= 1 << source.randrange(8)
        assert not await agree(network, struct_hash, bytes(damaged))
