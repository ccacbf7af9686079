"""What a proposal must rest on: observations of a quorum, each signed by its member."""

from __future__ import annotations

import pytest

from splitup.core.errors import BadSignature, PeerFault
from splitup.protocol.committee.context import MemberContext
from splitup.protocol.snapshots.observation_shares import check_proposal, check_share
from tests.protocol.committee.test_observations import make_proposal, make_share
from tests.protocol.committees import make_committee

IDENTITIES, VIEW = make_committee()
CONTEXT = MemberContext(IDENTITIES[0], VIEW)
SENDER = IDENTITIES[1].address


def test_a_proposal_rests_on_a_quorum() -> None:
    check_proposal(CONTEXT, SENDER, make_proposal(*map(make_share, range(3))))
    for observers in ((0, 1), (0, 1, 1), (2, 1, 0)):
        with pytest.raises(PeerFault, match="without a quorum"):
            check_proposal(CONTEXT, SENDER, make_proposal(*map(make_share, observers)))


def test_an_observation_counts_as_its_member_signed_it() -> None:
    share, other = make_share(0), make_share(0, nodes=2)
    check_share(CONTEXT, share)
    with pytest.raises(BadSignature):
        check_share(CONTEXT, share.model_copy(update={"observation": other.observation}))
    with pytest.raises(BadSignature):
        check_share(CONTEXT, share.model_copy(update={"signature": make_share(1).signature}))
