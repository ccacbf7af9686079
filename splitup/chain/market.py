"""Arguments of the Market contract, and the distribution of settled payouts.

A settlement decides who is paid; ``Market.distribute`` credits the payouts of many executions in
one call and releases the stake that they locked. Its arguments are taken from contract events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from splitup.chain.client import Chain
from splitup.chain.event_stream import ChainEvent
from splitup.core import limits, tuning
from splitup.core.errors import ChainRejected
from splitup.crypto import bls
from splitup.crypto.quorum import (
    ExecutionHistory,
    request_struct_hash,
    unpack_word,
)
from splitup.messages.base import ZERO_BYTES32
from splitup.protocol.planning.exposure import Economics

REQUEST_FIELDS: Final = (
    "client",
    "modelId",
    "steps",
    "inputsDigest",
    "clientKey",
    "maxPrice",
    "deadline",
    "nonce",
    "snapshotSequence",
    "snapshotRoot",
    "verifyBps",
)


class Status(IntEnum):
    """The states of an execution in the Market contract."""

    UNKNOWN = 0
    REQUESTED = 1
    PLANNED = 2
    SETTLED = 3
    REFUNDED = 4


@dataclass(frozen=True, slots=True)
class Distribution:
    """The result of ``distribute``; the next call may start at ``next_block``."""

    executions: int
    next_block: int


def terms_to_abi(plan_root: str, seed_signature: str, executors: int) -> tuple[Any, ...]:
    """Return a plan's terms as the Market contract takes them."""
    return (plan_root, bls.encode_signature_eip2537(seed_signature), executors)


def find_dues(events: Sequence[ChainEvent]) -> list[ExecutionHistory]:
    """Return the executions to distribute according to all events of the market, in order."""
    requests: dict[str, Mapping[str, Any]] = {}
    plans: dict[str, Mapping[str, Any]] = {}
    commitments: dict[str, Mapping[str, Any]] = {}
    dues: dict[str, ExecutionHistory] = {}
    for event in events:
        args = event.args
        execution_id = args.get("executionId", "")
        match event.name:
            case "RequestNodeSelections":
                requests[execution_id] = args
            case "PlanAccepted":
                plans[execution_id] = args
            case "ExecutionCommitted":
                commitments[execution_id] = args
            case "Settled" | "Refunded" if execution_id in plans and execution_id in requests:
                plan, asked = plans[execution_id], requests[execution_id]
                agreed = commitments.get(execution_id, {})
                request_hash = request_struct_hash(*(asked[name] for name in REQUEST_FIELDS))
                dues[execution_id] = ExecutionHistory(
                    execution_id=execution_id,
                    request_hash="0x" + request_hash.hex(),
                    plan_root=plan["planRoot"],
                    seed=plan["seed"],
                    commitments=agreed.get("root", ZERO_BYTES32),
                    exposures=tuple(agreed.get("exposures", ())),
                    payouts=tuple(args.get("payouts", ())),
                )
            case "Distributed" if not args["remaining"]:
                dues.pop(execution_id, None)
    return list(dues.values())


def compute_locks(
    events: Sequence[ChainEvent], start: int, end: int
) -> tuple[dict[str, int], set[str]]:
    """Return the stake that was locked from block ``start`` to ``end``, from all market events.

    First the largest lock of every node in that time, in micro-USDC; then the executions that had
    a plan in that time and no root over all commitments yet.
    """
    locked: Counter[str] = Counter()
    most: dict[str, int] = {}
    waiting: set[str] = set()
    waited: set[str] = set()
    words: dict[str, list[tuple[str, int]]] = {}
    for event in events:
        if event.block_number > end:
            break
        if event.block_number < start:
            most, waited = {}, set()
        execution_id, args = event.args.get("executionId", ""), event.args
        added: list[tuple[str, int]] = []
        match event.name:
            case "PlanAccepted":
                waiting.add(execution_id)
            case "ExecutionCommitted":
                added = [unpack_word(word) for word in args["exposures"]]
                waiting.discard(execution_id)
            case "Settled" | "Refunded":
                waiting.discard(execution_id)
            case "Distributed":
                for node, amount in words.pop(execution_id, []):  # the first call releases all
                    locked[node] -= amount
        for node, amount in added:
            locked[node] += amount
            words.setdefault(execution_id, []).append((node, amount))
        waited |= waiting
        for node, amount in locked.items():
            most[node] = max(most.get(node, 0), amount)
    return most, waited


async def fetch_economics(chain: Chain) -> Economics:
    """Return the market parameters that settlements and exposures depend on."""
    parameters = await chain.call("market", "parameters")
    return Economics(
        sampling_bps=parameters["samplingBps"],
        reward_milli=parameters["rewardMilli"],
        slash_milli=parameters["slashMilli"],
        treasury_bps=parameters["treasuryBps"],
    )


async def distribute(chain: Chain, account: str, *, from_block: int = 0) -> Distribution:
    """Credit and release all executions that concern the account; refund those that nobody closed.

    Reads the market's events from ``from_block`` on. When another account distributes the same
    ones at the same time, it reads them again. Raises ChainRejected, ChainUnavailable.
    """
    for attempt in range(tuning.RPC_TRIES):
        events = await chain.fetch_events("market", from_block=from_block)
        if await refund_unclosed(chain, events, account):
            events = await chain.fetch_events("market", from_block=from_block)
        dues = [due for due in find_dues(events) if _concerns(due, account)]
        try:
            for batch in _make_batches(dues, account):
                await chain.send("market", "distribute", [due.to_abi() for due in batch])
        except ChainRejected as error:
            if error.error_name != "AlreadyDistributed" or attempt == tuning.RPC_TRIES - 1:
                raise
            continue
        break
    now_s = (await chain.fetch_head()).timestamp
    longest_s = await chain.call("market", "longestExecutionS")
    return Distribution(len(dues), _find_oldest_open(events, from_block, now_s - longest_s))


def _make_batches(dues: Iterable[ExecutionHistory], account: str) -> list[list[ExecutionHistory]]:
    """Group executions for calls that fit a transaction each.

    One that is too large for others beside it gets as many calls as it takes until ``account`` is
    credited: the Market credits payouts in the order of their accounts.
    """
    batches: list[list[ExecutionHistory]] = []
    words = 0
    for due in dues:
        size = len(due.exposures) + len(due.payouts)
        payees = [unpack_word(word)[0] for word in due.payouts]
        place = payees.index(account) if account in payees else 0
        for _ in range(place // limits.MAX_CREDITS + 1):
            is_large = words + size > limits.MAX_DISTRIBUTED_WORDS
            if not batches or is_large or len(batches[-1]) == limits.MAX_DISTRIBUTED:
                batches.append([])
                words = 0
            batches[-1].append(due)
            words += size
    return batches


async def refund_unclosed(chain: Chain, events: Iterable[ChainEvent], account: str) -> int:
    """Refund the executions that lock the account's money or stake, and that nobody closed.

    Their client is gone, and the committee did not settle them in time. Returns how many there
    were. Raises ChainRejected, ChainUnavailable.
    """
    now_s = (await chain.fetch_head()).timestamp
    unclosed = find_unclosed(events, account, now_s)
    return sum([await try_refund(chain, execution_id) for execution_id in unclosed])


def find_unclosed(events: Iterable[ChainEvent], account: str, now_s: int) -> list[str]:
    """Return the executions past their deadline that still lock money or stake of an account."""
    deadlines: dict[str, int] = {}
    unclosed: dict[str, None] = {}
    for event in events:
        execution_id, args = event.args.get("executionId", ""), event.args
        holders: list[str] = []
        match event.name:
            case "RequestNodeSelections":
                deadlines[execution_id] = args["deadline"]
                holders = [args["client"]]
            case "ExecutionCommitted":
                holders = [unpack_word(word)[0] for word in args["exposures"]]
            case "Settled" | "Refunded":
                unclosed.pop(execution_id, None)
        if account in holders and deadlines.get(execution_id, 0) <= now_s:
            unclosed[execution_id] = None
    return list(unclosed)


async def try_refund(chain: Chain, execution_id: str) -> bool:
    """Refund an execution if the chain allows it by now; return whether this did."""
    due = await chain.call("market", "refundableAt", execution_id)
    if (await chain.fetch_head()).timestamp < due:
        return False
    try:
        await chain.send("market", "refund", execution_id)
    except ChainRejected as error:
        # another caller's refund or a settlement came first
        if error.error_name not in ("StatusInvalid", "NotRefundable"):
            raise
        return False
    return True


def _concerns(due: ExecutionHistory, account: str) -> bool:
    """Return whether the account is paid or its stake released."""
    words = (*due.exposures, *due.payouts)
    return any(unpack_word(word)[0] == account for word in words)


def _find_oldest_open(events: Sequence[ChainEvent], from_block: int, since_s: int) -> int:
    """Return the block of the oldest request that can still be settled.

    Earlier events are not needed any more. Requests with a deadline before ``since_s`` can only be
    refunded: clients that left without that would have every node read events from then on.
    """
    asked: dict[str, int] = {}
    for event in events:
        if event.name == "RequestNodeSelections" and event.args["deadline"] >= since_s:
            asked[event.args["executionId"]] = event.block_number
        elif event.name in ("Settled", "Refunded"):
            asked.pop(event.args["executionId"], None)
    last = max((event.block_number for event in events), default=from_block)
    return min(asked.values(), default=last)
