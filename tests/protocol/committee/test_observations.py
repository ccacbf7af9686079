"""A proposal as it travels: every claim of a node once, and just what its observers signed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.crypto.signature_scheme import REAL
from splitup.messages.snapshots import NodeView, Observation
from splitup.protocol.committee.observations import (
    OBSERVATION_DOMAIN,
    ObservationShare,
    SnapshotProposal,
    choose_fitting,
)
from splitup.protocol.committee.peer_messages import encode_gossip, parse_gossip
from tests.builders import address, task_id
from tests.protocol.committees import make_committee

RESIDENT = tuple(sorted(task_id(number) for number in range(12)))


def make_view(node: int, observer: int, **changes: object) -> NodeView:
    values: dict[str, Any] = {
        "node": address(node),
        "rtt_ms": 10 + observer,
        "queue_ms": 7 * node,
        "resident": RESIDENT,
        "determinism": "CPU:X86",
        "vram_free_bytes": node << 20,
        "assigned_micro_usdc": observer,
        "locked_micro_usdc": 2**53 - 1,
        **changes,
    }
    return NodeView(**values)


def make_share(observer: int, size: int = 4, nodes: int = 3, **changes: object) -> ObservationShare:
    identity = make_committee(size)[0][observer]
    observation = Observation(
        configuration=1,
        epoch=2,
        sequence=3,
        member=identity.address,
        views=tuple(make_view(n, observer, **changes) for n in range(1, nodes + 1)),
    )
    signature = REAL.sign(identity, OBSERVATION_DOMAIN, observation.canonical_bytes())
    return ObservationShare(observation=observation, signature="0x" + signature.hex())


def make_proposal(*shares: ObservationShare) -> SnapshotProposal:
    root = "0x" + "11" * 32
    return SnapshotProposal(configuration=1, sequence=3, epoch=2, root=root, observations=shares)


def test_a_proposal_comes_back_with_what_its_observers_signed() -> None:
    proposal = make_proposal(
        make_share(0), make_share(1, speed_mflops=5), make_share(2, nodes=2, resident=())
    )
    body = json.loads(json.dumps(encode_gossip(proposal, 1)))
    assert len(body["message"]["claims"]) == 3 + 3 + 2
    restored, _ = parse_gossip(body)
    assert restored == proposal
    assert isinstance(restored, SnapshotProposal)
    for identity, share in zip(make_committee()[0], restored.observations, strict=False):
        REAL.verify(
            identity.signing_key_hex,
            OBSERVATION_DOMAIN,
            share.observation.canonical_bytes(),
            bytes.fromhex(share.signature[2:]),
        )


def test_a_proposal_hardly_grows_with_the_members() -> None:
    def measure(size: int) -> int:
        quorum = make_committee(size)[1].quorum
        shares = (make_share(observer, size, nodes=50) for observer in range(quorum))
        return len(json.dumps(encode_gossip(make_proposal(*shares), 1)))

    few, many = measure(4), measure(31)
    assert many < 3 * few, "seven times the observations"


@pytest.mark.parametrize(
    "rows",
    [
        [[3, 1, 1, 1, 1, 1]],
        [[0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]],
        [[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]],
        [[0, 1, 1, 1, 1]],
        [[0, 1, 1, 1, 1, -1]],
        [[-1, 1, 1, 1, 1, 1]],
        [[0, 1, 1, 1, 1, 1]] * (limits.MAX_NODES + 1),
    ],
)
def test_a_proposal_with_other_rows_is_refused(rows: list[list[Any]]) -> None:
    body = encode_gossip(make_proposal(make_share(0)), 1)
    body["message"]["observations"][0]["rows"] = rows
    with pytest.raises(PeerFault):
        parse_gossip(body)


def test_a_member_that_invents_tasks_does_not_make_proposals_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "CHUNKED_MESSAGE_NODES", 0)
    shares = [make_share(observer) for observer in range(4)]
    own = shares[1].observation.member
    assert choose_fitting(own, shares[::-1]) == shares
    invented = tuple(sorted(task_id(number) for number in range(500, 1_500)))
    shares[0] = make_share(0, resident=invented)
    assert choose_fitting(own, shares) == shares
    monkeypatch.setattr(limits, "MAX_CHUNKED_MESSAGE_BYTES", 100_000)
    fitting = choose_fitting(own, shares)
    assert fitting == shares[1:]
    assert len(json.dumps(encode_gossip(make_proposal(*fitting), 1))) < 100_000
    assert len(json.dumps(encode_gossip(make_proposal(*shares), 1))) > 100_000
