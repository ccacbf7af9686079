"""What members say survives the wire, and nothing else does."""

from __future__ import annotations

import json

import pytest

from splitup.core.errors import PeerFault
from splitup.protocol.committee.peer_messages import (
    DrawPartial,
    PlanPartial,
    encode_gossip,
    parse_gossip,
)

ID, PARTIAL = "0x" + "11" * 32, "0x" + "22" * 48
MESSAGE = {"execution_id": ID, "partial": PARTIAL}


def test_messages_come_back_as_they_were() -> None:
    for message in (
        PlanPartial(execution_id=ID, request_hash=ID, partial=PARTIAL),
        DrawPartial(execution_id=ID, partial=PARTIAL),
    ):
        assert parse_gossip(json.loads(json.dumps(encode_gossip(message, 7)))) == (message, 7)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"kind": "plan-partial"},
        {"kind": 3, "message": {}},
        {"kind": "unheard-of", "message": {}},
        {"kind": "plan-partial", "message": {}},
        {"kind": "plan-partial", "message": None},
        {"kind": "plan-partial", "message": {"execution_id": ID, "partial": "0x22"}},
        {"kind": "plan-partial", "message": MESSAGE, "more": 1},
        {"kind": "plan-partial", "message": {**MESSAGE, "more": 1}},
        {"kind": "plan-partial", "message": MESSAGE, "configuration": -1},
        {"kind": "plan-partial", "message": MESSAGE, "configuration": "1"},
        {"kind": "plan-partial", "message": MESSAGE, "configuration": None},
    ],
)
def test_anything_else_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(PeerFault):
        parse_gossip({"configuration": 1, **body} if body else body)


def test_a_message_belongs_to_a_configuration() -> None:
    with pytest.raises(PeerFault, match="unknown kind"):
        parse_gossip({"kind": "plan-partial", "message": MESSAGE})
