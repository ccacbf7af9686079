"""The weight and the clock of one node in plain integers, for what computes many at once."""

from __future__ import annotations

from hashlib import sha256

from splitup.messages.plans import TaskTerms
from splitup.messages.snapshots import Reference, SnapshotEntry
from splitup.protocol.planning.sampling_clocks import (
    MAX_STAKE_MILLI,
    SPEED_MILLI,
    STAKE_UNIT,
    compute_eta_ms,
    compute_fairness_milli,
    compute_reference_ms,
    derive_draw_key,
    neglog2_q32,
)


def compute_clock(seed: str, task: int, role: int, node: str, weight: int) -> int:
    """Return the node's exponential clock for a task and role; smaller is better."""
    digest = sha256(derive_draw_key(seed, task, role) + bytes.fromhex(node[2:])).digest()
    return (neglog2_q32(int.from_bytes(digest[:8])) << 64) // weight


def compute_weight(entry: SnapshotEntry, terms: TaskTerms, reference: Reference) -> int:
    """Return a node's weight for a task, in thousandths."""
    is_resident = terms.task_id in entry.resident
    eta_ms = compute_eta_ms(terms, reference, entry, is_resident=is_resident)
    low, high = SPEED_MILLI
    speed = max(low, min(high, compute_reference_ms(terms, reference) * 1000 // eta_ms))
    stake = min(entry.stake_micro_usdc // STAKE_UNIT, MAX_STAKE_MILLI)
    fairness = compute_fairness_milli(entry.credit_milli)
    return max(1, stake * speed * speed * fairness // 10**9)
