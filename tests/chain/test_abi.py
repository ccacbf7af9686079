"""The artifacts, the codec and the table of sentences agree with each other."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.chain.abi import CONTRACTS, RevertReason, decode_revert, load_abi
from splitup.chain.rejections import SENTENCES, STATUS_NAMES, explain_revert

ERRORS = {
    entry["name"]: [item["name"] for item in entry["inputs"]]
    for contract in CONTRACTS
    for entry in load_abi(contract).errors.values()
}
LIBRARY_ERRORS = {"ECDSAInvalidSignature", "ECDSAInvalidSignatureLength", "ECDSAInvalidSignatureS"}


def test_every_error_of_the_contracts_has_a_sentence_and_none_is_left_over() -> None:
    assert set(ERRORS) - LIBRARY_ERRORS == set(SENTENCES)


def test_sentences_use_only_the_arguments_that_their_errors_have() -> None:
    for name, sentence in SENTENCES.items():
        used = {field for _, field, _, _ in string.Formatter().parse(sentence) if field}
        assert used <= set(ERRORS[name]), name


def test_statuses_are_named() -> None:
    reason = RevertReason("StatusInvalid", {"executionId": "0x1", "status": 3})
    assert str(explain_revert("market.refund", reason)) == (
        "market.refund was refused: execution 0x1 is settled"
    )
    assert len(STATUS_NAMES) == 5


def test_plain_reasons_and_panics_are_decoded() -> None:
    text = "08c379a0" + f"{32:064x}{2:064x}" + b"no".hex().ljust(64, "0")
    assert decode_revert("0x" + text) == RevertReason("Error", {"reason": "no"})
    panic = decode_revert("0x4e487b71" + f"{0x11:064x}")
    assert panic is not None
    assert str(explain_revert("x", panic)) == "x was refused: a number overflowed"


@given(st.binary(max_size=200))
def test_revert_data_of_any_form_is_survived(data: bytes) -> None:
    decode_revert("0x" + data.hex())
    for contract in CONTRACTS:
        for selector in load_abi(contract).errors:
            decode_revert("0x" + selector + data.hex())


@pytest.mark.parametrize("time", [0, 1_800_000_000, 2**64 - 1, 2**256 - 1])
def test_times_of_any_size_are_shown(time: int) -> None:
    reason = RevertReason("NotRefundable", {"executionId": "0x1", "refundableAt": time})
    assert "is refundable from" in str(explain_revert("x", reason))
