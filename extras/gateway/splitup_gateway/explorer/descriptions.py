"""What pages show of single events, plans and nodes: JSON objects, made without I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from splitup.chain.event_stream import ChainEvent
from splitup.client.market.receipts import Receipt, make_receipt
from splitup.messages.plans import Plan
from splitup.messages.snapshots import Snapshot, SnapshotEntry
from splitup_gateway.explorer.event_index import PAGE

View = dict[str, Any]
_STATES: Final = {
    "RequestNodeSelections": "requested",
    "PlanAccepted": "running",
    "ExecutionCommitted": "committed",
    "Settled": "settled",
    "Refunded": "refunded",
}


def get_search_text(entry: SnapshotEntry) -> str:
    """Return what a search for a node looks through."""
    return "\n".join((entry.node, entry.operator, entry.endpoint, entry.determinism)).lower()


def describe_node(entry: SnapshotEntry) -> View:
    """Return a live node's figures, as the committee's list states them."""
    return {
        "address": entry.node,
        "operator": entry.operator or entry.node,
        "endpoint": entry.endpoint,
        "class": entry.determinism,
        "stake": entry.stake_micro_usdc,
        "locked": entry.locked_micro_usdc,
        "task_count": len(entry.resident),
        "vram_free_bytes": entry.vram_free_bytes,
        "queue_ms": entry.queue_ms,
        "rtt_ms": entry.rtt_ms,
    }


def open_plan(plan: Plan) -> View:
    """Return all that the plan's root is computed from.

    ``page/src/plan_root.ts`` computes the root of it, as ``compute_plan_root`` does.
    """
    return {
        "request_hash": plan.request.hash(),
        "execution_id": plan.request.execution_id,
        "model_id": plan.request.model_id,
        "snapshot_root": plan.request.snapshot_root,
        "seed": plan.seed,
        "nodes": [
            {
                "node": entry.node,
                "signing_key": entry.signing_key,
                "endpoint": entry.endpoint,
                "exposure": entry.exposure_micro_usdc,
            }
            for entry in plan.nodes
        ],
        "places": list(plan.places),
        "tasks": [
            {
                "candidates": list(candidates),
                "verifiable": place not in plan.unverifiable,
                "terms": plan.terms[place].model_dump() if plan.terms else None,
            }
            for place, candidates in enumerate(plan.tasks)
        ],
    }


def count_holders(snapshot: Snapshot | None) -> Counter[str]:
    """Return for each task how many live nodes hold it; counted once for each snapshot."""
    return snapshot.once(_count_residents) if snapshot else Counter()


def _count_residents(snapshot: Snapshot) -> Counter[str]:
    return Counter(task for entry in snapshot.entries for task in entry.resident)


def describe_model(event: ChainEvent, holders: Mapping[str, int]) -> View:
    """Return a model's main figures from its registration."""
    tasks = event.args["tasks"]
    return {
        "id": event.args["modelId"],
        "name": event.args["name"],
        "developer": event.args["developer"],
        "task_count": len(tasks),
        "price_nano_usdc": sum(task["priceNanoUsdc"] for task in tasks),
        "vram_bytes": sum(task["vramBytes"] for task in tasks),
        "least_holders": min((holders.get(task["taskId"][2:], 0) for task in tasks), default=0),
        "block": event.block_number,
    }


def describe_execution(events: Sequence[ChainEvent]) -> View:
    """Return the main figures of an execution from its events, in order."""
    by_name = {event.name: event for event in events}
    asked = by_name.get("RequestNodeSelections", events[0]).args
    plan = by_name.get("PlanAccepted")
    cost = None
    if closing := by_name.get("Settled"):
        cost = closing.args["paid"] + closing.args["fee"]
    elif closing := by_name.get("Refunded"):
        cost = closing.args["reservation"]
    states = [_STATES[event.name] for event in events if event.name in _STATES]
    return {
        "id": events[0].args["executionId"],
        "model_id": asked.get("modelId", ""),
        "client": asked.get("client", ""),
        "steps": asked.get("steps", 0),
        "max_price": asked.get("maxPrice", 0),
        "deadline": asked.get("deadline", 0),
        "block": events[0].block_number,
        "state": states[-1] if states else "requested",
        "executors": plan.args["executors"] if plan else None,
        "plan_root": plan.args["planRoot"] if plan else None,
        "seed": plan.args["seed"] if plan else None,
        "cost": cost,
    }


def find_receipt(execution_id: str, events: Sequence[ChainEvent]) -> Receipt | None:
    """Return the receipt of an execution, None while it is open."""
    is_closed = any(event.name in ("Settled", "Refunded") for event in events)
    return make_receipt(execution_id, events) if is_closed else None


def describe_event(event: ChainEvent, times: Mapping[str, int | None]) -> View:
    """Return an event for a table; ``times`` are those of blocks, by hash."""
    return {
        "name": event.name,
        "block": event.block_number,
        "time": times.get(event.block_hash),
        "transaction": event.transaction,
        "execution": event.args.get("executionId"),
        "amount": event.args.get("amount"),
    }


def get_next(events: Sequence[ChainEvent]) -> str | None:
    """Return where the next page begins, None when there is none."""
    if len(events) <= PAGE:
        return None
    last = events[PAGE - 1]
    return f"{last.block_number}.{last.log_index}"
