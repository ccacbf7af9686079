from __future__ import annotations

import pytest
from eth_account.messages import encode_typed_data
from eth_utils.crypto import keccak
from hypothesis import given
from hypothesis import strategies as st

from splitup.core.errors import BadSignature, InvalidInput
from splitup.crypto import quorum
from splitup.crypto.keys import Identity

DOMAIN = quorum.Domain(31_337, "0x" + "c0" * 20)
MEMBERS = sorted(
    (Identity.from_private_key(bytes([index]) * 32) for index in range(1, 5)),
    key=lambda member: member.address,
)
ADDRESSES = [member.address for member in MEMBERS]
HASH = quorum.snapshot_struct_hash(1, 1, 1, "0x" + "01" * 32)


def certify(members: list[Identity], struct_hash: bytes = HASH) -> bytes:
    return quorum.pack_signatures(
        (m.address, quorum.sign_quorum(m.private_key, DOMAIN, struct_hash)) for m in members
    )


ID, ROOT, SEED = ("0x" + byte * 32 for byte in ("0a", "0b", "0c"))


@pytest.mark.parametrize(
    ("struct_hash", "kind", "fields", "values"),
    [
        (
            quorum.snapshot_struct_hash(3, 7, 5, ROOT),
            "Snapshot",
            {
                "configuration": "uint64",
                "sequence": "uint64",
                "epoch": "uint64",
                "root": "bytes32",
            },
            (3, 7, 5, ROOT),
        ),
        (
            quorum.plan_struct_hash(3, ID, SEED, ROOT, SEED, 9),
            "Plan",
            {
                "configuration": "uint64",
                "executionId": "bytes32",
                "requestHash": "bytes32",
                "planRoot": "bytes32",
                "seed": "bytes32",
                "executors": "uint32",
            },
            (3, ID, SEED, ROOT, SEED, 9),
        ),
        (
            quorum.commitments_struct_hash(
                ID, ROOT, quorum.hash_exposures([(ADDRESSES[0], 9), (ADDRESSES[1], 2**96 - 1)])
            ),
            "Commitments",
            {"executionId": "bytes32", "root": "bytes32", "exposures": "bytes32[]"},
            (
                ID,
                ROOT,
                [quorum.pack_word(ADDRESSES[0], 9), quorum.pack_word(ADDRESSES[1], 2**96 - 1)],
            ),
        ),
        (
            quorum.request_struct_hash(ADDRESSES[0], ID, 3, ROOT, SEED, 5, 6, 7, 8, ROOT, 900),
            "Request",
            {
                "client": "address",
                "modelId": "bytes32",
                "steps": "uint32",
                "inputsDigest": "bytes32",
                "clientKey": "bytes32",
                "maxPrice": "uint96",
                "deadline": "uint64",
                "nonce": "uint64",
                "snapshotSequence": "uint64",
                "snapshotRoot": "bytes32",
                "verifyBps": "uint16",
            },
            (ADDRESSES[0], ID, 3, ROOT, SEED, 5, 6, 7, 8, ROOT, 900),
        ),
        (
            quorum.settlement_struct_hash(ID, ROOT),
            "Settlement",
            {"executionId": "bytes32", "settlementHash": "bytes32"},
            (ID, ROOT),
        ),
    ],
)
def test_digests_are_those_of_eip712(
    struct_hash: bytes, kind: str, fields: dict[str, str], values: tuple[object, ...]
) -> None:
    reference = encode_typed_data(
        domain_data={
            "name": "SplitUp",
            "version": "1",
            "chainId": DOMAIN.chain_id,
            "verifyingContract": DOMAIN.committee,
        },
        message_types={kind: [{"name": n, "type": t} for n, t in fields.items()]},
        message_data=dict(zip(fields, values, strict=True)),
    )
    assert reference.body == struct_hash
    digest = keccak(b"\x19\x01" + reference.header + reference.body)
    assert quorum.compute_signing_digest(DOMAIN, struct_hash) == digest


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_signer_is_recovered_for_the_signed_hash_only(signed: bytes, other: bytes) -> None:
    signature = quorum.sign_quorum(MEMBERS[0].private_key, DOMAIN, signed)
    assert quorum.recover_signer(DOMAIN, signed, signature) == ADDRESSES[0]
    if other != signed:
        assert quorum.recover_signer(DOMAIN, other, signature) != ADDRESSES[0]


def test_signing_twice_gives_the_same_bytes() -> None:
    assert certify(MEMBERS) == certify(MEMBERS)


def test_certificate_is_packed_by_ascending_signer_whatever_the_order() -> None:
    assert certify(MEMBERS[::-1]) == certify(MEMBERS)
    assert quorum.check_quorum(DOMAIN, HASH, certify(MEMBERS[1:]), ADDRESSES) == tuple(
        ADDRESSES[1:]
    )


def test_bad_certificates_are_refused_by_name() -> None:
    stranger = Identity.from_private_key(b"\x09" * 32)
    first, second, third = (certify([member]) for member in MEMBERS[:3])
    for signatures, words in (
        (first + second, "2 signatures; 3 are needed"),
        (first + second + third[:-1], "194 bytes are no certificate of 4 members"),
        (first * 5, "325 bytes are no certificate"),
        (first + first + second, "does not"),
        (second + first + third, f"{ADDRESSES[0]} does not"),
        (first + second + certify([stranger]), f"{stranger.address} signed, but is no member"),
        (first + second + third[:64] + b"\x00", "v = 27 or 28, not 0"),
        (first + second + bytes(64) + b"\x1b", "recovers to no public key"),
        (first + second + third[:32] + b"\xff" * 32 + b"\x1b", "lower half"),
    ):
        with pytest.raises(BadSignature, match=words):
            quorum.check_quorum(DOMAIN, HASH, signatures, ADDRESSES)


@pytest.mark.parametrize(("count", "size"), [(4, 3), (7, 5), (10, 7), (31, 21)])
def test_quorum_is_two_thirds_and_one(count: int, size: int) -> None:
    assert quorum.compute_quorum_size(count) == size


def test_values_of_another_length_are_refused() -> None:
    for value in ("0x12", "0x" + "zz" * 32, ""):
        with pytest.raises(InvalidInput, match="not a 32-byte value"):
            quorum.plan_struct_hash(1, value, value, value, value, 1)


def test_words_hold_account_and_amount() -> None:
    for amount in (0, 1, 2**96 - 1):
        word = quorum.pack_word(ADDRESSES[0], amount)
        assert quorum.unpack_word("0x" + word.hex()) == (ADDRESSES[0], amount)
    for amount in (-1, 2**96):
        with pytest.raises(InvalidInput, match="do not fit 96 bits"):
            quorum.pack_word(ADDRESSES[0], amount)


def test_payouts_of_a_settlement_are_one_ascending_word_per_account() -> None:
    a, b = ADDRESSES[:2]
    payments = (
        quorum.Payment(b, 1),
        quorum.Payment(a, 2),
        quorum.Payment(b, 4),
        quorum.Payment(a, 8, from_slash=True),
    )
    settlement = quorum.Settlement(1, ROOT, payments, (quorum.Slash(b, 16), quorum.Slash(a, 32)))
    _, _, payouts, rewards, slashes = settlement.to_abi()
    assert payouts == (quorum.pack_word(a, 2), quorum.pack_word(b, 5))
    assert rewards == ((a, 8),)
    assert slashes == (quorum.pack_word(a, 32), quorum.pack_word(b, 16))
