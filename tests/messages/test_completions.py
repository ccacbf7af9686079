"""The size of a packed completion, and that it has only one encoding."""

from __future__ import annotations

import base64
import hashlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.core.errors import PeerFault
from splitup.messages.completions import (
    EMPTY_DIGEST,
    Completion,
    End,
    SignedEnd,
    SignedTakeover,
    Takeover,
    TaskCommitment,
    pack_completion,
    unpack_completion,
)
from tests.builders import address

ID = "0x" + "ee" * 32
TOKENS, BOUND_BYTES = 32, 258  # TOPLOC's commitment to as many tokens


def hash_number(number: int) -> str:
    return hashlib.sha256(number.to_bytes(4)).hexdigest()


def make_completion(
    tasks: int, inputs: int = 3, outputs: int = 1, *, steps: int = 1, has_state: bool = True
) -> Completion:
    return Completion(
        execution_id=ID,
        node=address(7),
        tasks=tuple(
            TaskCommitment(
                task=3 * task,
                inputs=tuple(hash_number(place) for place in range(inputs)),
                outputs=tuple(hash_number(100 + place) for place in range(outputs)),
                state=hash_number(999) if has_state else EMPTY_DIGEST,
            )
            for task in range(tasks)
        ),
        salt="0x" + "5a" * 32,
        end=make_end(steps),
    )


def make_end(steps: int) -> SignedEnd:
    return SignedEnd(end=End(execution_id=ID, steps=steps, inputs=()), signature="0x" + "ab" * 64)


END = make_end(1).model_dump(mode="json")


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 64, 65, 1_000, 65_536])
@pytest.mark.parametrize("tasks", [1, 2, 12])
def test_a_commitment_has_at_most_258_bytes_per_32_tokens_and_task(tokens: int, tasks: int) -> None:
    """Five ports are the most that tasks of the example have, in cuts from 1.3 to 5 MB."""
    for inputs, outputs in ((1, 1), (2, 2), (2, 3), (4, 1)):
        size = len(pack_completion(make_completion(tasks, inputs, outputs, steps=tokens)))
        assert size <= BOUND_BYTES * math.ceil(tokens / TOKENS) * tasks


@given(
    st.integers(0, 3), st.integers(0, 5), st.integers(0, 5), st.integers(0, 65_536), st.booleans()
)
def test_what_is_packed_comes_back(
    tasks: int, inputs: int, outputs: int, steps: int, has_state: bool
) -> None:
    completion = make_completion(tasks, inputs, outputs, steps=steps, has_state=has_state)
    assert Completion.from_value(completion.model_dump(mode="json")) == completion
    assert Completion.parse(completion.canonical_bytes()).root() == completion.root()


def test_takeovers_travel_with_it() -> None:
    takeover = Takeover(execution_id=ID, task=3, candidate=1, first_step=9)
    signed = SignedTakeover(takeover=takeover, signature="0x" + "ab" * 64)
    completion = make_completion(2).model_copy(update={"takeovers": (signed,)})
    assert Completion.from_value(completion.model_dump(mode="json")) == completion
    assert completion.root() != make_completion(2).root()


def test_every_field_is_in_the_root() -> None:
    whole = make_completion(2)
    first = whole.tasks[0]
    others = [
        whole.model_copy(update={"execution_id": "0x" + "ef" * 32}),
        whole.model_copy(update={"node": address(8)}),
        whole.model_copy(update={"end": make_end(2)}),
        whole.model_copy(update={"salt": "0x" + "5b" * 32}),
        *(
            whole.model_copy(update={"tasks": (first.model_copy(update=change), whole.tasks[1])})
            for change in (
                {"task": 1},
                {"inputs": first.inputs[:2], "outputs": (first.inputs[2], *first.outputs)},
                {"outputs": (hash_number(5),)},
                {"state": hash_number(5)},
            )
        ),
    ]
    assert len({other.root() for other in [whole, *others]}) == len(others) + 1


@given(st.binary(max_size=600))
def test_random_bytes_are_refused_or_the_only_spelling(data: bytes) -> None:
    packed = base64.b64encode(data).decode()
    value = {"execution_id": ID, "node": address(7), "packed": packed, "end": END}
    try:
        completion = Completion.from_value(value)
    except PeerFault:
        return
    assert pack_completion(completion) == data


def test_bytes_that_are_cut_off_or_go_on_are_refused() -> None:
    data = pack_completion(make_completion(2))
    for end in range(len(data)):
        with pytest.raises(ValueError, match="cut off"):
            unpack_completion(ID, data[:end])
    with pytest.raises(ValueError, match="bytes behind its end"):
        unpack_completion(ID, data + b"\0")
    empty = pack_completion(make_completion(1)).replace(
        bytes.fromhex(hash_number(999)), bytes.fromhex(EMPTY_DIGEST)
    )
    with pytest.raises(ValueError, match="empty state"):
        unpack_completion(ID, empty)
    owner = {"execution_id": ID, "node": address(7), "end": END}
    packed = base64.b64encode(data).decode()
    assert Completion.from_value({**owner, "packed": packed}) == make_completion(2)
    for odd in (7, "no base64!", "é"):
        with pytest.raises(PeerFault):
            Completion.from_value({**owner, "packed": odd})
    for without in (
        {},
        {"node": address(7), "end": END},
        {"execution_id": ID, "end": END},
        {"execution_id": ID, "node": address(7)},
        {**owner, "salt": "0x" + "00" * 32},
    ):
        with pytest.raises(PeerFault):
            Completion.from_value({**without, "packed": packed})
