"""Both ends of an edge state another tensor: who is paid."""

from __future__ import annotations

import pytest

from splitup.messages.completions import EMPTY_DIGEST, TaskCommitment
from splitup.messages.verification import Ruling
from splitup.protocol.settlement.edge_faults import find_edge_faults
from splitup.protocol.settlement.proof_of_sampling import Outcome
from tests.builders import make_manifest
from tests.protocol.simulator import digest

MANIFEST = make_manifest([[], [0]])


def claim(task: int, read: str, sent: str) -> TaskCommitment:
    return TaskCommitment(task=task, inputs=(read,), outputs=(sent,), state=EMPTY_DIGEST)


def find(read: str, stored: str, *, executors: tuple[str, str]) -> dict[int, Outcome]:
    """Return the faults where the first task's executor says that it sent "said"."""
    claims = {0: claim(0, digest("x"), digest("said")), 1: claim(1, digest(read), digest("y"))}
    inputs = (digest(stored),)
    ruling = Ruling(task=1, inputs=inputs, outputs=(digest("y"),), state=EMPTY_DIGEST, error="")
    return find_edge_faults(MANIFEST, claims, {1: ruling}, executors, ())


@pytest.mark.parametrize("read", ["said", "stored", "another"])
def test_who_was_misled_by_another_is_paid(read: str) -> None:
    assert find(read, "stored", executors=("0xa", "0xb")) == {0: Outcome.WITHHELD}


@pytest.mark.parametrize("read", ["stored", "another"])
def test_who_reads_its_own_tensors_was_misled_by_nobody(read: str) -> None:
    """It commits to tensors that it did not send, and stores others: seed 95580."""
    faults = find(read, "stored", executors=("0xa", "0xa"))
    assert faults == {0: Outcome.WITHHELD, 1: Outcome.CONTRADICTED}


def test_neighbours_of_which_one_lies_are_both_unpaid() -> None:
    both = dict.fromkeys((0, 1), Outcome.CONTRADICTED)
    assert find("another", "said", executors=("0xa", "0xb")) == both
    assert find("said", "said", executors=("0xa", "0xb")) == {}
