"""The artifacts, the codec and the table of sentences agree with each other."""

from __future__ import annotations

import contextlib
import string

import pytest
from eth_abi.exceptions import DecodingError
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


def test_s54_a_string_that_is_referred_to_again_and_again_stays_small() -> None:
    """A page of nodes whose entries all have one endpoint, which stands there once."""
    abi, count, length = load_abi("nodes"), 1_000, 100_000
    [page] = abi.functions["nodesPage"]["outputs"]
    assert page["type"] == "tuple[]"
    names = [member["name"] for member in page["components"]]
    place = names.index("endpoint")
    words = [0] * len(names)
    words[place] = 32 * len(names)  # behind the struct's own words
    entry = b"".join(word.to_bytes(32, "big") for word in words)
    entry += length.to_bytes(32, "big") + b"a" * length
    pointers = (32 * count).to_bytes(32, "big") * count  # to the one entry
    data = (32).to_bytes(32, "big") + count.to_bytes(32, "big") + pointers + entry
    with pytest.raises(DecodingError, match="more than once"):
        abi.decode_result("nodesPage", data)
    single = data[:32] + (1).to_bytes(32, "big") + (32).to_bytes(32, "big") + entry
    [node] = abi.decode_result("nodesPage", single)
    assert node["endpoint"] == "a" * length


@given(st.binary(max_size=600), st.sampled_from(["nodesPage", "nodeOf", "isActive"]))
def test_s54_results_of_any_form_are_survived(data: bytes, function: str) -> None:
    with contextlib.suppress(DecodingError):
        load_abi("nodes").decode_result(function, data)
