"""Weighted random selection of nodes for a task, in integers that the chain can recompute.

Each node has an exponential clock ``E = -log2(u) / weight``, with ``u`` from a hash of seed, role,
task and node. The smallest clock wins, with probability weight / sum of weights (Efraimidis and
Spirakis, Information Processing Letters 97, 2006). The weight is the product of capped stake,
squared relative speed and fairness. Every input is fixed before the seed exists.

The Solidity implementation is contracts/src/libraries/Selection.sol.
``splitup.protocol.planning.selection`` computes the same for whole plans at once.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

from splitup.core import limits
from splitup.core.errors import InvalidInput
from splitup.messages.plans import TaskTerms
from splitup.messages.snapshots import Reference, SnapshotEntry, get_operator

EXECUTOR: Final = 0
VALIDATOR: Final = 1

TAG: Final = b"splitup/select/v2"
STAKE_UNIT: Final = 1_000_000  # micro-USDC in a thousandth of weight: 1000 USDC weigh 1
MAX_STAKE_MILLI: Final = 4_000  # stake above four units on one node gets no more work
SPEED_MILLI: Final = (500, 2_000)  # relative speed counts between half and double, squared
MAX_FAIRNESS: Final = 4  # the smallest factor is its inverse, 1/4
MAX_ETA_MS: Final = 2**40  # 35 years; this bound keeps products within 64 bits


def neglog2_q32(value: int) -> int:
    """Return -log2((value + 1) / 2^64) in Q32 fixed point, rounded up, for a 64-bit ``value``.

    The fraction comes from repeated squaring, one bit each, as in the classic digit recurrence for
    binary logarithms; all intermediate values fit 128 bits, so that Solidity computes the same.
    """
    if not 0 <= value < 2**64:
        raise InvalidInput(f"neglog2 takes a 64-bit value, not {value}")
    x = value + 1
    whole = x.bit_length() - 1
    mantissa = (x << 63) >> whole  # in [2^63, 2^64): the value 1.0 … 2.0 in Q63
    fraction = 0
    for _ in range(32):
        mantissa = (mantissa * mantissa) >> 63
        fraction <<= 1
        if mantissa >= 2**64:
            mantissa >>= 1
            fraction |= 1
    return (64 << 32) - ((whole << 32) | fraction)


def derive_draw_key(seed: str, task: int, role: int) -> bytes:
    """Return the 32-byte hash key of all draws for a task and role."""
    data = TAG + bytes.fromhex(seed[2:]) + role.to_bytes(1) + task.to_bytes(4)
    return sha256(data).digest()


def compute_eta_ms(
    terms: TaskTerms, reference: Reference, node: Reference | SnapshotEntry, *, is_resident: bool
) -> int:
    """Return when a node would finish a task, in ms after its inputs exist elsewhere.

    Queueing and loading overlap with the tasks before it (``ready_ms``, the critical path up to
    this task). An unmeasured figure counts as the reference's, and as 0 when that is missing, too.
    """
    speed = node.speed_mflops or reference.speed_mflops
    bandwidth = node.bandwidth_kbps or reference.bandwidth_kbps
    compute_ms = terms.flops // (speed * 1000) if speed else 0
    transfer_ms = terms.input_bytes // bandwidth if bandwidth else 0
    load_ms = terms.weights_bytes // bandwidth if bandwidth and not is_resident else 0
    waiting_ms = max(0, node.queue_ms + load_ms - terms.ready_ms)
    return min(MAX_ETA_MS, 1 + node.rtt_ms + waiting_ms + transfer_ms + compute_ms)


def compute_reference_ms(terms: TaskTerms, reference: Reference) -> int:
    """Return the reference node's ETA, to which the speed of others is relative."""
    return compute_eta_ms(terms, reference, reference, is_resident=True)


def compute_fairness_milli(credit_milli: int) -> int:
    """Return the factor of a node's credit: 4 for the highest, 1 for none, ¼ for the lowest."""
    bound, stretch = limits.MAX_CREDIT_MILLI, (MAX_FAIRNESS - 1) * abs(credit_milli)
    if credit_milli >= 0:
        return 1000 * (bound + stretch) // bound
    return 1000 * bound // (bound + stretch)


def may_check(validator: SnapshotEntry, executor: SnapshotEntry) -> bool:
    """Return whether a node that holds a task may recompute it to check its executor."""
    return (
        get_operator(validator) != get_operator(executor)
        and validator.determinism == executor.determinism
    )
