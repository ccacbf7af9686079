from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.core.errors import InvalidInput, PeerFault
from splitup.crypto.merkle import EMPTY, check_proof, compute_root, make_proof


def make_leaves(count: int) -> list[bytes]:
    return [sha256(bytes([number])).digest() for number in range(count)]


def test_small_trees_are_what_the_layout_says() -> None:
    a, b, c = make_leaves(3)
    assert compute_root([]) == EMPTY
    assert compute_root([a]) == a
    left, right = sha256(a + b).digest(), sha256(c + EMPTY).digest()
    assert compute_root([a, b, c]) == sha256(left + right).digest()
    assert make_proof([a, b, c], 2) == (EMPTY, left)
    with pytest.raises(InvalidInput):
        make_proof([a], 1)


@given(st.integers(1, 40), st.data())
def test_every_leaf_is_proved_at_its_place_only(count: int, data: st.DataObject) -> None:
    leaves = make_leaves(count)
    index = data.draw(st.integers(0, count - 1))
    root, proof = compute_root(leaves), make_proof(leaves, index)
    check_proof(root, count, index, leaves[index], proof)
    for wrong in range(count):
        if wrong != index:
            with pytest.raises(PeerFault):
                check_proof(root, count, wrong, leaves[index], proof)
    for bad in ((*proof, EMPTY), tuple(sha256(step).digest() for step in proof) or (EMPTY,)):
        with pytest.raises(PeerFault):
            check_proof(root, count, index, leaves[index], bad)
    with pytest.raises(PeerFault):
        check_proof(root, count, count, leaves[index], proof)
