"""Which snapshot follows from the members' observations, and what makes a new one due."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median_low

from splitup.core import limits
from splitup.messages.determinism import find_device
from splitup.messages.snapshots import UNRULED, NodeView, Observation, Snapshot, SnapshotEntry
from splitup.protocol.committee.events import NodeRecord
from splitup.protocol.planning.sampling_clocks import MAX_STAKE_MILLI, STAKE_UNIT

# node, resident tasks, determinism class, (signing key, endpoint, stake)
StableFields = tuple[str, tuple[str, ...], str, tuple[str, str, int]]

_ROUND_MILLI = 1000  # one share
_FORGET = 8  # divisor: luck is forgotten after about eight snapshots


def compute_snapshot(
    observations: Sequence[Observation],
    records: Mapping[str, NodeRecord],
    previous: Snapshot | None,
    *,
    sequence: int,
    tolerated: int,
) -> Snapshot:
    """Return the snapshot that follows from observations of one epoch and the registry.

    A node is listed when more than ``tolerated`` observers list it, so at least one honest one.
    Load and round trip are medians, which keep their ``previous`` value while near it. A task
    is resident when more than ``tolerated`` observers say so. A class is marked when as many
    observers cannot recompute in it: its work is then not sold as verified. Credits continue from
    the ``previous`` ones.
    """
    before = {entry.node: entry for entry in previous.entries} if previous else {}
    views: dict[str, list[NodeView]] = {}
    for observation in sorted(observations, key=lambda o: o.member):
        for view in observation.views:
            if not find_device(view.determinism.removeprefix(UNRULED)):
                continue  # no honest observer lists it
            views.setdefault(view.node, []).append(view)
    live = sorted(n for n, seen in views.items() if len(seen) > tolerated and n in records)
    credits = compute_credits(
        {node: records[node].stake_micro_usdc for node in live},
        {node: entry.credit_milli for node, entry in before.items()},
        {node: median_low(view.assigned_micro_usdc for view in views[node]) for node in live},
    )
    entries = []
    for node in live:
        seen, record, old = views[node], records[node], before.get(node)
        held = Counter(task for view in seen for task in view.resident)
        classes = Counter(view.determinism.removeprefix(UNRULED) for view in seen)
        determinism = min(classes, key=lambda name: (-classes[name], name))
        if sum(view.determinism.startswith(UNRULED) for view in seen) > tolerated:
            determinism = (UNRULED + determinism)[: limits.MAX_DETERMINISM_CHARS]
        rtt_ms = median_low(view.rtt_ms for view in seen)
        queue_ms = median_low(view.queue_ms for view in seen)
        entries.append(
            SnapshotEntry(
                node=node,
                signing_key=record.signing_key,
                endpoint=record.endpoint,
                stake_micro_usdc=record.stake_micro_usdc,
                rtt_ms=_settle(old.rtt_ms, rtt_ms) if old else rtt_ms,
                queue_ms=_settle(old.queue_ms, queue_ms) if old else queue_ms,
                resident=tuple(sorted(t for t, count in held.items() if count > tolerated)),
                determinism=determinism,
                operator=record.operator,
                speed_mflops=median_low(view.speed_mflops for view in seen),
                bandwidth_kbps=median_low(view.bandwidth_kbps for view in seen),
                vram_free_bytes=median_low(view.vram_free_bytes for view in seen),
                credit_milli=credits[node],
                locked_micro_usdc=median_low(view.locked_micro_usdc for view in seen),
            )
        )
    first = observations[0]
    return Snapshot(
        configuration=first.configuration,
        sequence=sequence,
        epoch=first.epoch,
        entries=tuple(entries),
    )


def compute_credits(
    stakes_micro_usdc: Mapping[str, int],
    credit_milli: Mapping[str, int],
    assigned_micro_usdc: Mapping[str, int],
) -> dict[str, int]:
    """Return the credit of every node of ``stakes_micro_usdc``, in thousandths of a share.

    Deficit round robin over snapshots: a node that got less work than its share gains credit.

    With every snapshot a node's credit loses an eighth, then gains the node's share of the work
    assigned since the last snapshot, minus the work it got, in units of that share. The snapshot
    carries the credit, so it is agreed before any seed whose selection it influences. It is
    bounded, so a node that was idle for long is preferred for rounds, not for days.

    Source: Shreedhar and Varghese, Efficient Fair Queuing using Deficit Round Robin, SIGCOMM 1995.

    ``credit_milli`` is that of the snapshot before (a newcomer has none), ``assigned_micro_usdc``
    the price of the work assigned since. When no work was, credits stay as they are.
    """
    weights = {
        node: max(1, min(stake // STAKE_UNIT, MAX_STAKE_MILLI))
        for node, stake in stakes_micro_usdc.items()
    }
    whole = sum(weights.values())
    total = sum(assigned_micro_usdc.get(node, 0) for node in weights)
    credits = {}
    for node, weight in weights.items():
        credit = credit_milli.get(node, 0)
        if total:
            # got / share = got · whole / (total · weight)
            got = _ROUND_MILLI * assigned_micro_usdc.get(node, 0) * whole // (total * weight)
            credit = _forget(credit) + _ROUND_MILLI - got
        credits[node] = max(-limits.MAX_CREDIT_MILLI, min(limits.MAX_CREDIT_MILLI, credit))
    return credits


def _forget(credit: int) -> int:
    # towards zero on both sides: // would round a debt away from it
    return credit - credit // _FORGET if credit >= 0 else credit + -credit // _FORGET


def get_stable_fields(
    view: NodeView | SnapshotEntry, record: NodeRecord | SnapshotEntry
) -> StableFields:
    """Return the fields whose change is worth the gas of a new snapshot: all but the load."""
    registered = (record.signing_key, record.endpoint, record.stake_micro_usdc)
    return (view.node, view.resident, view.determinism, registered)


def get_load(view: NodeView | SnapshotEntry) -> tuple[str, int, int, int, int]:
    """Return the figures on which observers agree while the node does nothing."""
    figures = (view.speed_mflops, view.bandwidth_kbps, view.vram_free_bytes)
    return (view.node, *figures, view.locked_micro_usdc)


def list_stable_fields(snapshot: Snapshot) -> list[StableFields]:
    return [get_stable_fields(entry, entry) for entry in snapshot.entries]


def _settle(old: int, new: int) -> int:
    """Keep the old figure unless the new one clearly differs."""
    near = abs(new - old) * limits.MEDIAN_HYSTERESIS <= old
    return old if near else new
