"""What follows from observations, and who is believed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from splitup.core.errors import BadSignature, PeerFault
from splitup.messages.snapshots import (
    Heartbeat,
    NodeView,
    Observation,
    Snapshot,
    TaskClasses,
    compute_classes,
)
from splitup.protocol.committee.events import NodeRecord
from splitup.protocol.planning.selection import compute_plan
from splitup.protocol.snapshots.liveness import NodeLiveness, quantise
from splitup.protocol.snapshots.pacemaker import compute_leader
from splitup.protocol.snapshots.snapshot_rules import compute_snapshot
from tests.builders import (
    COMMON_CLASS,
    FOREIGN_CLASS,
    address,
    make_chain_manifest,
    make_request,
    make_snapshot,
)
from tests.protocol.committees import make_identity

HEAD = "0x" + "0b" * 32
TASKS = [f"{n:064x}" for n in range(4)]


def record(number: int) -> NodeRecord:
    return NodeRecord(address(number), f"0x{number:064x}", f"http://n{number}", 10**9)


UNKNOWN_CLASSES = (
    "",
    "CPU",
    "tinygrad 0.14.0/PYTHON:PYTHON/None",
    "tinygrad 0.14.0/NULL:CLANG/None",
    "tinygrad 0.14.0/CPU:NULL/x86_64",
    "tinygrad 0.13.0/CPU:X86/x86_64",
    "tinygrad 0.14.0/CPU:X86",
    "tinygrad 0.14.0/CPU:X86/x86_64\n",
    "tinygrad 0.14.0/CPU:CLANG/" + "x" * 174,  # no room for the committee's mark
)


def observe(member: int, *views: NodeView, epoch: int = 3) -> Observation:
    return Observation(
        configuration=1, epoch=epoch, sequence=1, member=address(100 + member), views=views
    )


def view(number: int, *, rtt: int = 5, queue: int = 0, tasks: list[str] | None = None) -> NodeView:
    return NodeView(
        node=address(number),
        rtt_ms=rtt,
        queue_ms=queue,
        resident=tuple(TASKS if tasks is None else tasks),
        determinism=COMMON_CLASS,
    )


def test_a_node_is_in_when_more_observers_than_may_lie_list_it() -> None:
    observations = [observe(0, view(1), view(2)), observe(1, view(1)), observe(2, view(3))]
    records = {address(n): record(n) for n in (1, 2, 3)}
    snapshot = compute_snapshot(observations, records, None, sequence=7, tolerated=1)
    assert [entry.node for entry in snapshot.entries] == [address(1)]
    assert (snapshot.sequence, snapshot.epoch) == (7, 3)


@pytest.mark.parametrize("determinism", UNKNOWN_CLASSES)
def test_s05_a_class_that_is_not_on_the_list_reaches_no_snapshot(determinism: str) -> None:
    """f faulty observers may state anything, and one that is honest has heard another class."""
    other = view(1).model_copy(update={"determinism": determinism})
    records = {address(1): record(1)}
    observations = [observe(0, other), observe(1, other), observe(2, view(1)), observe(3, view(1))]
    snapshot = compute_snapshot(observations, records, None, sequence=1, tolerated=1)
    assert [entry.determinism for entry in snapshot.entries] == [COMMON_CLASS]
    snapshot = compute_snapshot(observations[:3], records, None, sequence=1, tolerated=1)
    assert snapshot.entries == (), "only one observer knows it by a class that exists"


def test_an_unregistered_node_is_out_whoever_lists_it() -> None:
    observations = [observe(n, view(1)) for n in range(3)]
    assert compute_snapshot(observations, {}, None, sequence=1, tolerated=1).entries == ()


def test_load_is_the_median_and_residence_needs_more_than_f_witnesses() -> None:
    observations = [
        observe(0, view(1, rtt=1, queue=90, tasks=TASKS[:2])),
        observe(1, view(1, rtt=5, queue=10, tasks=TASKS[1:3])),
        observe(2, view(1, rtt=900, queue=20, tasks=TASKS[1:2])),
    ]
    (entry,) = compute_snapshot(
        observations, {address(1): record(1)}, None, sequence=1, tolerated=1
    ).entries
    assert (entry.rtt_ms, entry.queue_ms) == (5, 20)
    assert entry.resident == (TASKS[1],)
    assert (entry.signing_key, entry.endpoint) == (record(1).signing_key, record(1).endpoint)


@pytest.mark.parametrize(
    ("unable", "determinism"), [(0, COMMON_CLASS), (1, COMMON_CLASS), (2, "?" + COMMON_CLASS)]
)
def test_a_class_that_more_than_f_members_cannot_recompute_is_not_sold_as_verified(
    unable: int, determinism: str
) -> None:
    marked = [view(n).model_copy(update={"determinism": "?" + COMMON_CLASS}) for n in (1, 2, 3)]
    known = [view(n) for n in (1, 2, 3)]
    observations = [observe(n, *(marked if n < unable else known)) for n in range(3)]
    records = {address(n): record(n) for n in (1, 2, 3)}
    snapshot = compute_snapshot(observations, records, None, sequence=1, tolerated=1)
    assert {entry.determinism for entry in snapshot.entries} == {determinism}
    classes = compute_classes(snapshot.entries)
    is_marked = determinism.startswith("?")
    expected = TaskClasses((), (determinism,)) if is_marked else TaskClasses((determinism,), ())
    assert set(classes.values()) == {expected}


@given(st.permutations(range(4)))
def test_the_order_of_observations_does_not_matter(order: list[int]) -> None:
    observations = [observe(n, view(1, rtt=n + 1), view(2, queue=n)) for n in range(4)]
    records = {address(n): record(n) for n in (1, 2)}
    expected = compute_snapshot(observations, records, None, sequence=1, tolerated=1)
    shuffled = [observations[n] for n in order]
    assert compute_snapshot(shuffled, records, None, sequence=1, tolerated=1) == expected


def test_every_member_leads_in_turn() -> None:
    accounts = [address(n) for n in range(4)]
    assert [compute_leader(accounts, epoch) for epoch in range(4, 8)] == accounts


class TestHeartbeats:
    node = make_identity(50)

    @pytest.fixture
    def layer(self) -> NodeLiveness:
        layer = NodeLiveness()
        layer.heads.process_head(HEAD, 0.0)
        known = NodeRecord(self.node.address, self.node.signing_key_hex, "http://n", 10**9)
        layer.process_nodes([known])
        return layer

    def beat(self, sequence: int, **fields: object) -> Heartbeat:
        values: dict[str, object] = {
            "node": self.node.address,
            "boot_id": "ab" * 32,
            "sequence": sequence,
            "sent_at_ms": sequence * 1000,
            "block_hash": HEAD,
            "queue_ms": 0,
            "resident": (),
            "vram_free_bytes": 0,
            "determinism": COMMON_CLASS,
        }
        return Heartbeat(**{**values, **fields})  # type: ignore[arg-type]

    def test_a_class_is_marked_that_we_cannot_recompute(self) -> None:
        nodes = NodeLiveness(lambda determinism: determinism == COMMON_CLASS)
        nodes.heads.process_head(HEAD, 0.0)
        known = NodeRecord(self.node.address, self.node.signing_key_hex, "http://n", 10**9)
        nodes.process_nodes([known])
        for sequence, claimed, seen in (
            (1, COMMON_CLASS, COMMON_CLASS),
            (2, FOREIGN_CLASS, "?" + FOREIGN_CLASS),
        ):
            beat = self.beat(sequence, determinism=claimed)
            nodes.process_heartbeat(beat, self.node.signing_key_hex, 10.0)
            nodes.process_rtt(self.node.address, 1)
            (view,) = nodes.observe(10.0)
            assert view.determinism == seen
        with pytest.raises(PeerFault, match="mark"):
            beat = self.beat(3, determinism="?" + COMMON_CLASS)
            nodes.process_heartbeat(beat, self.node.signing_key_hex, 10.0)

    @pytest.mark.parametrize("determinism", UNKNOWN_CLASSES)
    def test_s05_a_heartbeat_in_a_class_that_is_not_on_the_list_is_refused(
        self, layer: NodeLiveness, determinism: str
    ) -> None:
        beat = self.beat(1, determinism=determinism)
        with pytest.raises(PeerFault, match="none that the network knows"):
            layer.process_heartbeat(beat, self.node.signing_key_hex, 10.0)

    def test_a_node_lives_while_it_beats_and_answers(self, layer: NodeLiveness) -> None:
        layer.process_heartbeat(self.beat(1), self.node.signing_key_hex, 10.0)
        assert layer.is_unprobed(self.node.address)
        assert layer.get_live(10.0) == [], "not probed yet"
        layer.process_rtt(self.node.address, 3)
        assert layer.get_live(10.0) == [self.beat(1)]
        assert layer.get_live(15.0) == [], "silent for too long"
        layer.process_heartbeat(self.beat(2), self.node.signing_key_hex, 15.0)
        layer.process_rtt(self.node.address, None)
        assert layer.get_live(15.0) == [], "cannot be reached"
        assert layer.list_heard(15.0) == [(self.node.address, "http://n")]

    def test_an_old_heartbeat_does_not_revive_a_node(self, layer: NodeLiveness) -> None:
        layer.process_rtt(self.node.address, 3)
        layer.process_heartbeat(self.beat(9), self.node.signing_key_hex, 10.0)
        layer.process_heartbeat(self.beat(8), self.node.signing_key_hex, 20.0)
        layer.process_heartbeat(self.beat(9), self.node.signing_key_hex, 20.0)
        assert layer.get_live(20.0) == []

    def test_figures_are_quantised_and_follow_the_latest_beat(self, layer: NodeLiveness) -> None:
        figures = {"speed_mflops": 12_345, "bandwidth_kbps": 999, "vram_free_bytes": 2**30 + 7}
        layer.process_rtt(self.node.address, 3)
        layer.process_heartbeat(self.beat(1, **figures), self.node.signing_key_hex, 1.0)
        (view,) = layer.observe(1.0)
        assert (view.speed_mflops, view.bandwidth_kbps) == (12_288, 896)
        assert view.vram_free_bytes == 2**30
        assert layer.observe(2.0)[0] is view, "nothing changed"
        layer.process_rtt(self.node.address, 5)
        assert layer.observe(2.0)[0].rtt_ms == 5
        layer.process_heartbeat(self.beat(2, queue_ms=7), self.node.signing_key_hex, 2.0)
        assert layer.observe(2.0)[0].queue_ms == 7

    def test_a09_no_figure_is_beyond_what_hardware_can_do(self) -> None:
        for name in ("speed_mflops", "bandwidth_kbps"):
            with pytest.raises(ValidationError):
                self.beat(1, **{name: 2**52})

    def test_strangers_and_other_keys_are_refused(self, layer: NodeLiveness) -> None:
        with pytest.raises(BadSignature, match="another key"):
            layer.process_heartbeat(self.beat(1), make_identity(51).signing_key_hex, 1.0)
        stranger = self.beat(1, node=address(9))
        with pytest.raises(PeerFault, match="not active in the registry; stake it, stay if"):
            layer.process_heartbeat(stranger, self.node.signing_key_hex, 1.0)

    def test_residents_must_be_sorted_and_distinct(self, layer: NodeLiveness) -> None:
        for resident in [(TASKS[1], TASKS[0]), (TASKS[0], TASKS[0])]:
            with pytest.raises(PeerFault, match="out of order"):
                layer.process_heartbeat(
                    self.beat(1, resident=resident), self.node.signing_key_hex, 1.0
                )

    def test_a_node_that_leaves_the_registry_is_forgotten(self, layer: NodeLiveness) -> None:
        layer.process_heartbeat(self.beat(1), self.node.signing_key_hex, 1.0)
        layer.process_nodes(())
        assert layer.list_heard(1.0) == []


def test_work_assigned_since_the_last_snapshot_becomes_credit() -> None:
    """A liar's figure is no median; credit goes on from the snapshot before."""
    records = {address(n): record(n) for n in (1, 2)}

    def snapshot_after(sequence: int, previous: Snapshot | None, *assigned: int) -> Snapshot:
        views = [
            view(n).model_copy(update={"assigned_micro_usdc": sum_})
            for n, sum_ in enumerate(assigned, start=1)
        ]
        lie = [view(n).model_copy(update={"assigned_micro_usdc": 10**15}) for n in (1, 2)]
        observations = [observe(0, *views), observe(1, *views), observe(2, *lie)]
        return compute_snapshot(observations, records, previous, sequence=sequence, tolerated=1)

    first = snapshot_after(1, None, 300, 100)
    assert [entry.credit_milli for entry in first.entries] == [-500, 500]
    second = snapshot_after(2, first, 0, 0)
    assert [entry.credit_milli for entry in second.entries] == [-500, 500]
    third = snapshot_after(3, second, 100, 100)
    assert [entry.credit_milli for entry in third.entries] == [-438, 438]


def test_an_execution_counts_once_and_until_the_next_snapshot() -> None:
    nodes = NodeLiveness()
    nodes.heads.process_head(HEAD, 0.0)
    nodes.process_nodes([record(n) for n in (1, 2, 3)])
    manifest, live = make_chain_manifest(4), make_snapshot(3, 4)
    plan = compute_plan(make_request(steps=5), "0x" + "01" * 32, live, manifest)
    for number in (1, 2, 3):
        beat = Heartbeat(
            node=address(number),
            boot_id="ab" * 32,
            sequence=1,
            sent_at_ms=1,
            block_hash=HEAD,
            queue_ms=0,
            resident=(),
            vram_free_bytes=0,
            determinism=COMMON_CLASS,
        )
        nodes.process_heartbeat(beat, f"0x{number:064x}", 0.0)
        nodes.process_rtt(address(number), 1)

    def count() -> dict[str, int]:
        return {view.node: view.assigned_micro_usdc for view in nodes.observe(0.0)}

    for _ in range(2):
        nodes.process_plan(plan, manifest)
    wins = Counter(plan.executors())
    assert count() == {address(n): quantise(wins[address(n)] * 10 * 5) for n in (1, 2, 3)}
    nodes.process_snapshot()
    assert set(count().values()) == {0}
