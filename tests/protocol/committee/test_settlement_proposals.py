"""Proposals of settlements survive the wire, where each statement of members stands once."""

from __future__ import annotations

import json

import pytest

from splitup.core import limits
from splitup.core.codec import encode_canonical
from splitup.core.errors import PeerFault
from splitup.messages.verification import (
    Attestation,
    Draw,
    Held,
    Ruling,
    SignedAttestation,
    Silence,
)
from splitup.protocol.committee.peer_messages import encode_gossip, parse_gossip
from splitup.protocol.committee.settlement_proposals import (
    SettlementProposal,
    pack_settlement,
    unpack_settlement,
)
from tests.builders import address

ID, ROOT, DIGEST = "0x" + "11" * 32, "0x" + "22" * 32, "33" * 32


def make_proposal(tasks: int = 3, members: int = 4) -> SettlementProposal:
    """Members held the same commitments; only half of them saw a silence, one ruled otherwise."""
    held = tuple(Held(task=task, validator=address(9), root=ROOT) for task in range(tasks))
    attestations = tuple(
        SignedAttestation(
            attestation=Attestation(
                execution_id=ID,
                member=address(member),
                steps=4,
                due=True,
                held=held[::-1] if member == 1 else held,
                silent=(Silence(node=address(7), task=None),) * (member % 2),
                rulings=(
                    Ruling(task=0, inputs=(), outputs=(DIGEST,), state=DIGEST, error="x" * member),
                ),
            ),
            signature="0x" + f"{member:0128x}",
        )
        for member in range(members)
    )
    draw = Draw(
        execution_id=ID, block_hash=ROOT, commitments=(), steps=4, signature="0x", seed=ROOT
    )
    return SettlementProposal(
        execution_id=ID,
        round=1,
        draw=draw,
        completions=(),
        results=("token",),
        attestations=attestations,
        settlement_hash=ROOT,
    )


def test_a_proposal_comes_back_as_it_was() -> None:
    proposal = make_proposal()
    assert parse_gossip(json.loads(json.dumps(encode_gossip(proposal, 7)))) == (proposal, 7)


def test_s42_statements_that_all_members_make_are_sent_once() -> None:
    few, many = (
        len(encode_canonical(encode_gossip(make_proposal(limits.MAX_TASKS, members), 1)))
        for members in (1, limits.MAX_COMMITTEE)
    )
    assert many < 2 * few


@pytest.mark.parametrize("numbers", [(0, 0), (3,), (0, 1, 2, 3)])
def test_s42_an_attestation_unpacks_to_no_more_than_its_proposal_holds(
    numbers: tuple[int, ...],
) -> None:
    packed = pack_settlement(make_proposal())
    row = packed.attestations[0].model_copy(update={"held": numbers})
    with pytest.raises(PeerFault, match="repeats a statement, or names one that it lacks"):
        unpack_settlement(packed.model_copy(update={"attestations": (row,)}))
