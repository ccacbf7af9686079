"""The live nodes as one member sees them: registry, heartbeats and round trips."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from splitup.core import limits, tuning
from splitup.core.errors import BadSignature, PeerFault
from splitup.graph.manifest import Manifest
from splitup.messages.base import ZERO_BYTES32
from splitup.messages.determinism import describe_unknown
from splitup.messages.plans import Plan
from splitup.messages.snapshots import UNRULED, Heartbeat, NodeView
from splitup.protocol.committee.context import Activity
from splitup.protocol.committee.events import NodeRecord


@dataclass(slots=True)
class _Node:
    record: NodeRecord
    heartbeat: Heartbeat | None = None
    live_until: float = 0.0  # unless another heartbeat comes
    rtt_ms: int | None = None  # None: not reachable, or not probed yet
    probed: bool = False
    view: NodeView | None = None  # computed from ``basis``
    basis: tuple[Any, ...] = ()


class RecentBlocks:
    """The blocks that a member recently saw as the chain's head; a heartbeat names one of them.

    These are the head, and those before it for some time after they were replaced.

    Nobody knows a block's hash before the block exists, and it exists on one chain only. A
    signature over it is therefore recent and meant for this chain. Every member decides by the
    heads that it saw itself, so members need not agree about the head. The current head counts
    however old it is. A block that a reorganisation removed counts like any other replaced head.
    """

    def __init__(self) -> None:
        self.head = ZERO_BYTES32
        self._replaced: dict[str, float] = {}  # hash -> when it was replaced, in order

    def process_head(self, block_hash: str, now: float) -> None:
        """Record the chain's head (bytes32 in hex)."""
        if block_hash == self.head:
            return
        if self.head != ZERO_BYTES32:
            self._replaced[self.head] = now
        self._replaced.pop(block_hash, None)  # a reorganisation may return to it
        self.head = block_hash
        while len(self._replaced) > tuning.MAX_HEADS:
            del self._replaced[next(iter(self._replaced))]

    def is_recent(
        self, block_hash: str, now: float, memory_s: float = limits.HEAD_MEMORY_S
    ) -> bool:
        """Return whether a block is the head, or was until ``memory_s`` ago."""
        if block_hash == self.head:
            return block_hash != ZERO_BYTES32
        replaced_at = self._replaced.get(block_hash)
        return replaced_at is not None and now - replaced_at <= memory_s


def quantise(figure: int) -> int:
    """Round down to three significant bits, so that equal views have equal bytes."""
    shift = max(0, figure.bit_length() - 3)
    return figure >> shift << shift


def quantise_up(figure: int) -> int:
    """Round up to three significant bits, so that locked stake is never understated."""
    down = quantise(figure)
    return down if down == figure else down + (1 << max(0, figure.bit_length() - 3))


class NodeLiveness:
    """The registry's active nodes with their latest heartbeats and round trips."""

    def __init__(
        self,
        can_recompute: Callable[[str], bool] = lambda determinism: True,
        activity: Activity | None = None,
    ) -> None:
        self._can_recompute = can_recompute
        self._activity = activity or Activity()
        self.heads = RecentBlocks()
        self._nodes: dict[str, _Node] = {}
        self.records: Mapping[str, NodeRecord] = {}
        self._assigned: Counter[str] = Counter()  # nano-USDC since the latest snapshot
        self._counted: OrderedDict[str, None] = OrderedDict()  # executions
        self._reserved: dict[str, Mapping[str, int]] = {}  # execution -> node -> micro-USDC
        self._committed: set[str] = set()  # reserved ones that the registry's next reading includes

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def period_s(self) -> float:
        """Return how often each node is to send a heartbeat: less often when there are many."""
        return max(limits.HEARTBEAT_PERIOD_S, len(self._nodes) / limits.HEARTBEATS_PER_S)

    def get_rest_s(self, now: float) -> float:
        """Return how long a node may wait with a heartbeat unless it is pinged before."""
        resting = self._activity.is_resting(now)
        return max(self.period_s, limits.REST_HEARTBEAT_S) if resting else self.period_s

    def may_name(self, block_hash: str, now: float) -> bool:
        """Return whether a heartbeat may name a block: two periods after it was told, at least."""
        excess_s = self.get_rest_s(now) - limits.HEARTBEAT_PERIOD_S
        return self.heads.is_recent(block_hash, now, limits.HEAD_MEMORY_S + 2 * excess_s)

    @property
    def timeout_s(self) -> float:
        """Return how long a node lives after a heartbeat while we do not rest."""
        return limits.HEARTBEAT_TIMEOUT_S + self.period_s - limits.HEARTBEAT_PERIOD_S

    def is_unprobed(self, node: str) -> bool:
        """Return whether a registered node sent a heartbeat but was never probed."""
        known = self._nodes.get(node)
        return known is not None and not known.probed

    def list_heard(self, now: float) -> list[tuple[str, str]]:
        """Return (node, endpoint) of the nodes that send heartbeats, reachable or not."""
        return [
            (node.record.node, node.record.endpoint)
            for node in self._nodes.values()
            if node.heartbeat and now < node.live_until
        ]

    def get_live(self, now: float) -> list[Heartbeat]:
        """Return the latest heartbeats of the live nodes, sorted by node."""
        return [node.heartbeat for node in self._iter_live(now) if node.heartbeat]

    def count_live(self, now: float) -> int:
        return len(self._iter_live(now))

    def observe(self, now: float) -> tuple[NodeView, ...]:
        """Return the live nodes with their figures quantised, sorted by node.

        The chain locks stake with the commitments; before that a plan's exposures are reserved
        here.
        """
        reserved: Counter[str] = Counter()
        for exposures in self._reserved.values():
            reserved.update(exposures)
        return tuple(
            self._view(node, node.heartbeat, reserved[node.record.node])
            for node in self._iter_live(now)
            if node.heartbeat
        )

    def _mark_class(self, determinism: str) -> str:
        """Return a determinism class, marked when we cannot recompute in it."""
        if self._can_recompute(determinism):
            return determinism
        return (UNRULED + determinism)[: limits.MAX_DETERMINISM_CHARS]

    def _view(self, node: _Node, heartbeat: Heartbeat, reserved: int) -> NodeView:
        """Return a node's view, made anew only after a change: up to 10,000 are needed a second."""
        record = node.record
        assigned = self._assigned[record.node]
        determinism = self._mark_class(heartbeat.determinism)  # may change with our own devices
        locked = record.locked_micro_usdc + reserved
        basis = (heartbeat, node.rtt_ms, assigned, record.locked_micro_usdc, reserved)
        if (
            node.view is None
            or node.view.determinism != determinism
            or any(a is not b for a, b in zip(basis, node.basis, strict=True))
        ):
            node.basis = basis
            node.view = NodeView.model_construct(  # the parts were checked
                node=record.node,
                rtt_ms=quantise(node.rtt_ms or 0),
                queue_ms=quantise(heartbeat.queue_ms),
                resident=heartbeat.resident,
                determinism=determinism,
                speed_mflops=quantise(heartbeat.speed_mflops),
                bandwidth_kbps=quantise(heartbeat.bandwidth_kbps),
                vram_free_bytes=quantise(heartbeat.vram_free_bytes),
                assigned_micro_usdc=quantise(assigned // limits.NANO_PER_MICRO),
                locked_micro_usdc=quantise_up(locked),
            )
        return node.view

    def get_operators(self) -> dict[str, str]:
        """Return the operator of each node."""
        return {name: record.operator or name for name, record in self.records.items()}

    def process_plan(self, plan: Plan, manifest: Manifest) -> None:
        """Count the work that a certified plan assigns, once."""
        execution_id = plan.request.execution_id
        if execution_id in self._counted or len(plan.tasks) != len(manifest.tasks):
            return
        self._counted[execution_id] = None
        while len(self._counted) > tuning.MAX_OPEN_EXECUTIONS:
            self._reserved.pop(self._counted.popitem(last=False)[0], None)
        self._reserved[execution_id] = dict(plan.exposures())
        for executor, task in zip(plan.executors(), manifest.tasks, strict=True):
            self._assigned[executor] += task.price_nano_usdc * plan.request.steps

    def process_committed(self, execution_id: str) -> None:
        """Record that the chain has locked an execution's exposures."""
        if execution_id in self._reserved:
            self._committed.add(execution_id)

    def process_end(self, execution_id: str) -> None:
        """Drop the reservations of an execution that ended or whose request was reverted."""
        self._reserved.pop(execution_id, None)
        self._committed.discard(execution_id)

    def process_snapshot(self) -> None:
        """Reset the count of assigned work, which the new snapshot includes in its credits."""
        self._assigned.clear()

    def process_nodes(self, records: Sequence[NodeRecord]) -> None:
        """Take over the registry's active nodes; drop all others."""
        for execution_id in self._committed:
            self._reserved.pop(execution_id, None)
        self._committed.clear()
        old = self._nodes
        self._nodes = {}
        for record in sorted(records, key=lambda r: r.node)[: limits.MAX_NODES]:
            known = old.get(record.node)
            if known and known.record.endpoint == record.endpoint:
                known.record = record
                self._nodes[record.node] = known
            else:
                self._nodes[record.node] = new = _Node(record)
                if known:  # its next heartbeat may be many seconds away
                    new.heartbeat, new.live_until = known.heartbeat, known.live_until
        self.records = {name: node.record for name, node in self._nodes.items()}

    def process_heartbeat(self, heartbeat: Heartbeat, signing_key: str, now: float) -> None:
        """Record a heartbeat unless a later one is known; raise PeerFault for an invalid one."""
        node = self._nodes.get(heartbeat.node)
        if node is None:
            raise PeerFault(
                f"node {heartbeat.node} is not active in the registry; stake it, stay if it is "
                "leaving, or wait for the block that holds its registration",
                peer=heartbeat.node,
            )
        if node.record.signing_key != signing_key:
            raise BadSignature(
                f"a heartbeat of {heartbeat.node} is signed by another key", peer=heartbeat.node
            )
        last = node.heartbeat
        if last and (heartbeat.sent_at_ms, heartbeat.sequence) <= (last.sent_at_ms, last.sequence):
            return
        if not self.may_name(heartbeat.block_hash, now):
            raise PeerFault(
                f"a heartbeat names block {heartbeat.block_hash}, which was not recently the head "
                "of the chain that we follow; name the block that this member's answers name",
                peer=heartbeat.node,
            )
        if heartbeat.determinism.startswith(UNRULED):
            raise PeerFault(
                "a heartbeat's determinism class carries the mark that only the committee sets",
                peer=heartbeat.node,
            )
        unknown = describe_unknown(heartbeat.determinism)
        if unknown:
            raise PeerFault(unknown, peer=heartbeat.node)
        if last is None or heartbeat.resident != last.resident:
            if any(a >= b for a, b in pairwise(heartbeat.resident)):
                raise PeerFault(
                    "a heartbeat lists its resident tasks out of order", peer=heartbeat.node
                )
        node.heartbeat = heartbeat
        node.live_until = now + self.timeout_s + self.get_rest_s(now) - self.period_s

    def process_rtt(self, node: str, rtt_ms: int | None) -> None:
        if node in self._nodes:
            self._nodes[node].rtt_ms, self._nodes[node].probed = rtt_ms, True

    def _iter_live(self, now: float) -> list[_Node]:
        return [
            node
            for node in self._nodes.values()  # sorted by node
            if node.heartbeat and node.rtt_ms is not None and now < node.live_until
        ]
