"""What a member answers to a heartbeat beside what all nodes get."""

from __future__ import annotations

import math
from types import SimpleNamespace

from splitup_oracle.member.shell import Member

from splitup.core.codec import parse_json
from splitup.messages.completions import SignedTakeover, Takeover
from tests.protocol.machines import EXECUTION


def test_s69_a_node_that_was_replaced_hears_of_it_and_others_do_not() -> None:
    takeover = Takeover(execution_id=EXECUTION, task=0, candidate=1, first_step=0)
    signed = SignedTakeover(takeover=takeover, signature="0x" + "11" * 64)
    machine = SimpleNamespace(list_replaced=lambda node: [signed] if node == "0xa" else [])
    member = SimpleNamespace(machine=machine, _demand=(math.inf, b'{"block":"0x","tasks":[]}'))
    told = parse_json(Member.get_demand(member, "0xa"))  # type: ignore[arg-type]
    assert told.keys() == {"block", "tasks", "replaced"}
    assert [SignedTakeover.from_value(value) for value in told["replaced"]] == [signed]
    same = parse_json(Member.get_demand(member, "0xb"))  # type: ignore[arg-type]
    assert same.keys() == {"block", "tasks"}
