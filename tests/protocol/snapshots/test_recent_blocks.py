"""A sign of life names a block that did not exist long ago, on this chain and on no other."""

from __future__ import annotations

import pytest

from splitup.core import limits, tuning
from splitup.core.errors import BadSignature, PeerFault
from splitup.messages.base import ZERO_BYTES32
from splitup.messages.snapshots import Heartbeat
from splitup.protocol.committee.context import Activity
from splitup.protocol.committee.events import NodeRecord
from splitup.protocol.snapshots.liveness import NodeLiveness, RecentBlocks
from tests.builders import COMMON_CLASS
from tests.protocol.committees import make_identity
from tests.protocol.simulator import Simulation

NODE = make_identity(50)


def block(number: int, branch: int = 0) -> str:
    return f"0x{branch:032x}{number:032x}"


def beat(named: str, sequence: int = 1) -> Heartbeat:
    return Heartbeat(
        node=NODE.address,
        boot_id="ab" * 32,
        sequence=sequence,
        sent_at_ms=1,
        block_hash=named,
        queue_ms=0,
        resident=(),
        vram_free_bytes=0,
        determinism=COMMON_CLASS,
    )


@pytest.fixture
def activity() -> Activity:
    """A member that has nothing to do from second 0 on."""
    activity = Activity()
    activity.note(0.0)
    return activity


@pytest.fixture
def nodes(activity: Activity) -> NodeLiveness:
    """One known node, at block 1 since second 0."""
    nodes = NodeLiveness(activity=activity)
    nodes.process_nodes([NodeRecord(NODE.address, NODE.signing_key_hex, "http://n", 10**9)])
    nodes.process_rtt(NODE.address, 3)
    nodes.heads.process_head(block(1), 0.0)
    return nodes


def is_alive_after(nodes: NodeLiveness, heartbeat: Heartbeat, now: float) -> bool:
    nodes.process_heartbeat(heartbeat, NODE.signing_key_hex, now)
    return nodes.get_live(now) == [heartbeat]


def test_a_heartbeat_counts_under_the_key_of_the_registry_alone(nodes: NodeLiveness) -> None:
    with pytest.raises(BadSignature, match="signed by another key"):
        nodes.process_heartbeat(beat(block(1)), make_identity(51).signing_key_hex, 0.0)
    assert nodes.list_heard(0.0) == []


def test_a15_a_block_of_another_chain_or_of_none_is_refused(nodes: NodeLiveness) -> None:
    for named in (block(1, branch=7), block(2), ZERO_BYTES32):  # block 2: signed ahead of time
        with pytest.raises(PeerFault, match="name the block that this member's answers name"):
            nodes.process_heartbeat(beat(named), NODE.signing_key_hex, 0.0)
    assert nodes.list_heard(0.0) == []
    assert is_alive_after(nodes, beat(block(1)), 0.0), "what was refused left no trace"


def test_a15_a_beat_that_was_held_back_revives_nobody(nodes: NodeLiveness) -> None:
    nodes.heads.process_head(block(2), 1.0)
    held_back = beat(block(1))
    with pytest.raises(PeerFault):
        nodes.process_heartbeat(held_back, NODE.signing_key_hex, 1.1 + limits.HEAD_MEMORY_S)


def test_a_member_that_rests_knows_the_block_that_it_named_a_period_ago(
    nodes: NodeLiveness, activity: Activity
) -> None:
    """Else each heartbeat would be sent twice: the first one only to learn a younger block."""
    rests_at = limits.REST_AFTER_S
    nodes.heads.process_head(block(2), rests_at)
    assert is_alive_after(nodes, beat(block(1)), rests_at + limits.REST_HEARTBEAT_S)
    excess_s = limits.REST_HEARTBEAT_S - limits.HEARTBEAT_PERIOD_S
    latest = rests_at + limits.HEAD_MEMORY_S + 2 * excess_s
    assert nodes.may_name(block(1), latest) and not nodes.may_name(block(1), latest + 0.1)
    activity.note(latest)
    assert not nodes.may_name(block(1), latest), "rest is over"


def test_a_node_that_is_behind_by_some_blocks_lives(nodes: NodeLiveness) -> None:
    for number in range(2, 12):
        nodes.heads.process_head(block(number), number / 2)
    for number in range(1, 12):
        assert is_alive_after(nodes, beat(block(number), number), 6.0)


def test_nodes_live_while_the_chain_stands(nodes: NodeLiveness) -> None:
    """A head counts as long as it stands, and as long again as others once it is replaced."""
    standing_s = 1000 * limits.HEAD_MEMORY_S
    assert is_alive_after(nodes, beat(block(1)), standing_s)
    nodes.heads.process_head(block(1), standing_s)  # told again
    nodes.heads.process_head(block(2), standing_s + 1)
    assert is_alive_after(nodes, beat(block(1), 2), standing_s + 1 + limits.HEAD_MEMORY_S)


def test_f14_a_block_that_a_reorganisation_removed_counts_like_an_earlier_one(
    nodes: NodeLiveness,
) -> None:
    nodes.heads.process_head(block(2), 1.0)
    nodes.heads.process_head(block(2, branch=1), 2.0)
    assert is_alive_after(nodes, beat(block(2)), 3.0)
    assert is_alive_after(nodes, beat(block(2, branch=1), 2), 3.0)
    nodes.heads.process_head(block(2), 4.0)  # and back
    assert is_alive_after(nodes, beat(block(2), 3), 5.0 + limits.HEAD_MEMORY_S)


def test_a_member_that_has_seen_no_block_believes_nobody() -> None:
    assert not RecentBlocks().is_recent(ZERO_BYTES32, 0.0)


def test_a24_replaced_heads_are_bounded() -> None:
    heads = RecentBlocks()
    for number in range(1, 3 * tuning.MAX_HEADS):
        heads.process_head(block(number), 0.0)
    known = [n for n in range(3 * tuning.MAX_HEADS) if heads.is_recent(block(n), 0.0)]
    assert len(known) == tuning.MAX_HEADS + 1
    assert known[-1] == 3 * tuning.MAX_HEADS - 1, "the oldest are forgotten first"


def test_f13_a_member_whose_chain_lags_keeps_its_nodes() -> None:
    """It knows the blocks that it named itself, wherever the other members are."""
    network = Simulation(seed=3)
    network.run(10)
    behind = network.members[network.view.members[0].account]
    feed = network.feed

    def withhold(account: str, event: object) -> None:
        if account != behind.context.account or type(event).__name__ != "BlockSeen":
            feed(account, event)  # type: ignore[arg-type]

    network.feed = withhold  # type: ignore[method-assign,assignment]
    network.run(1)  # until what was under way has arrived
    stuck_at = behind.nodes.heads.head
    network.run(3 * limits.HEAD_MEMORY_S)
    assert behind.nodes.heads.head == stuck_at
    assert len({member.nodes.heads.head for member in network.members.values()}) == 2
    for member in network.members.values():
        assert len(member.nodes.list_heard(network.now)) == len(network.nodes)


def test_with_many_nodes_heartbeats_may_be_rarer() -> None:
    """The timeout and the age of a named block grow by what the period exceeds the shortest."""
    nodes = NodeLiveness()
    own = NodeRecord(NODE.address, NODE.signing_key_hex, "http://n", 10**9)
    count = 10 * limits.HEARTBEATS_PER_S
    others = [NodeRecord(f"0x{n:040x}", f"0x{n:064x}", "http://n", 10**9) for n in range(1, count)]
    nodes.process_nodes([own, *others])
    assert nodes.period_s == 10.0
    nodes.process_rtt(NODE.address, 3)
    nodes.heads.process_head(block(1), 0.0)
    assert is_alive_after(nodes, beat(block(1)), 0.0)
    nodes.process_nodes([own])  # the node was told the longer period
    assert nodes.period_s == limits.HEARTBEAT_PERIOD_S
    assert nodes.count_live(13.9) == 1 and nodes.count_live(14.1) == 0
    nodes.process_nodes([own, *others])
    nodes.heads.process_head(block(2), 20.0)
    assert is_alive_after(nodes, beat(block(1), 2), 20.0 + 2 * nodes.timeout_s)
    with pytest.raises(PeerFault):
        nodes.process_heartbeat(beat(block(1), 3), NODE.signing_key_hex, 20.1 + 2 * nodes.timeout_s)
    most = limits.MAX_NODES / limits.HEARTBEATS_PER_S
    assert most <= limits.MAX_HEARTBEAT_PERIOD_S, "nodes refuse a longer one"
