"""Which snapshots a signed request may name."""

from __future__ import annotations

import pytest
from splitup_oracle.member.shell import check_snapshot

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.messages.base import ZERO_BYTES32
from tests.builders import make_request


def test_s47_a_request_names_one_of_the_latest_snapshots() -> None:
    request = make_request().model_copy(update={"snapshot_sequence": 100})
    check_snapshot(request, request.snapshot_root, 100 + limits.SNAPSHOTS_BACK)
    with pytest.raises(PeerFault, match="old snapshot"):
        check_snapshot(request, request.snapshot_root, 101 + limits.SNAPSHOTS_BACK)
    with pytest.raises(PeerFault, match="does not hold"):
        check_snapshot(request, ZERO_BYTES32, 100)
