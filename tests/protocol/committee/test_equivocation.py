"""Evidence against a member is two signatures of its own for one slot, and nothing else."""

from __future__ import annotations

import pytest

from splitup.core.errors import BadSignature
from splitup.protocol.committee.commands import SubmitEvidence
from splitup.protocol.committee.equivocation import EquivocationDetector, compute_vote_hash
from splitup.protocol.committee.peer_messages import Equivocation, SnapshotVote
from tests.protocol.machines import make_context


def make_vote(place: int, root: int) -> SnapshotVote:
    context = make_context(place)
    unsigned = SnapshotVote(
        configuration=1,
        sequence=1,
        epoch=0,
        root=f"0x{root:064x}",
        member=context.account,
        signature="0x" + "00" * 65,
    )
    signature = context.sign(compute_vote_hash(unsigned))
    return unsigned.model_copy(update={"signature": signature})


def test_a19_evidence_counts_only_with_both_signatures() -> None:
    first, second = make_vote(1, 1), make_vote(1, 2)
    for changed in (
        {"first": first.model_copy(update={"signature": second.signature})},
        {"second": second.model_copy(update={"signature": make_vote(2, 2).signature})},
    ):
        evidence = Equivocation(first=first, second=second).model_copy(update=changed)
        detector = EquivocationDetector(make_context())
        with pytest.raises(BadSignature):
            detector.process_evidence(evidence)
        assert detector.list_evidence() == []
    commands = EquivocationDetector(make_context()).process_evidence(
        Equivocation(first=first, second=second)
    )
    assert any(isinstance(command, SubmitEvidence) for command in commands)
