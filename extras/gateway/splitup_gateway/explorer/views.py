"""What pages show: the index's events, and what the chain and the members say now.

Every view is a JSON object. Amounts are in micro-USDC, times in Unix seconds. Names, endpoints and
classes are whatever strangers wrote: pages show them as text.
"""

from __future__ import annotations

import asyncio
import datetime
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from splitup.chain.earnings import Day, get_begin_s, list_dates
from splitup.chain.event_stream import ChainEvent
from splitup.client.market.receipts import Receipt
from splitup.client.network import Network
from splitup.core.errors import Refused, SplitUpError, Unavailable
from splitup.crypto.quorum import unpack_word
from splitup.messages.snapshots import Snapshot, SnapshotEntry
from splitup_gateway.explorer.descriptions import (
    View,
    count_holders,
    describe_event,
    describe_execution,
    describe_model,
    describe_node,
    find_receipt,
    get_next,
    get_search_text,
    open_plan,
)
from splitup_gateway.explorer.event_index import PAGE, EventIndex, EventPlace, Total
from splitup_gateway.explorer.uptimes import Uptimes

SNAPSHOT_S: Final = 3.0  # that a list of live nodes is shown before the next one is asked for
SHOWN_S: Final = 15.0  # that it is shown while nobody gives a newer one
SAMPLE_S: Final = 30.0  # between two looks at who is live
DAYS: Final = 14  # of an account's earnings
MOST_TRANSACTIONS: Final = 64  # of an execution whose gas is shown
RANDOMNESS: Final = 10  # latest seeds that the committee's page shows
KEPT: Final = 256  # plans, verdicts and block times that are kept
MOST_LOOKUPS: Final = 4  # of plans and verdicts at once: each asks members, and computes
MODELS_SEARCHED: Final = 50  # latest ones, for the names of a node's tasks


class Explorer:
    """Answers for one network; raises Refused for unknown objects, Unavailable in its silence."""

    def __init__(self, net: Network, index: EventIndex) -> None:
        self._net = net
        self._index = index
        self._snapshot: Snapshot | None = None
        self._snapshot_at = -math.inf  # monotonic, when it was given
        self._asked_at = -math.inf
        self._refreshing = asyncio.Lock()
        self._lookups = asyncio.Semaphore(MOST_LOOKUPS)
        self._found: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._uptimes = Uptimes()
        self._first_blocks: dict[datetime.date, int] = {}

    async def watch(self) -> None:
        """Note without end which nodes are live, for their uptimes."""
        while True:
            snapshot = await self._fetch_snapshot_or_none()
            if snapshot is not None:
                self._uptimes.add([entry.node for entry in snapshot.entries], time.time())
            await asyncio.sleep(SAMPLE_S)

    # ---- lists ---------------------------------------------------------------------------------

    async def show_status(self) -> View:
        """Return what is counted, and how far the index is."""
        last, models, executions, settled = await asyncio.gather(
            asyncio.to_thread(self._index.find_last_block),
            asyncio.to_thread(self._index.count, "ModelRegistered"),
            asyncio.to_thread(self._index.count, "RequestNodeSelections"),
            asyncio.to_thread(self._index.count, "Settled"),
        )
        deployment = self._net.chain.deployment
        snapshot = await self._fetch_snapshot_or_none()
        return {
            "chain_id": deployment.chain_id,
            "market": deployment.market,
            "last_event_block": last.number if last else None,
            "models": models,
            "executions": executions,
            "settled": settled,
            "live_nodes": len(snapshot.entries) if snapshot else None,
        }

    async def list_nodes(self, search: str = "", start: int = 0) -> View:
        """Return a page of live nodes; ``search`` is a part of an address, class or endpoint."""
        snapshot = await self._fetch_snapshot()
        text = search.lower()
        entries = [entry for entry in snapshot.entries if text in get_search_text(entry)]
        page = entries[start : start + PAGE]
        return {
            "sequence": snapshot.sequence,
            "total": len(entries),
            "nodes": [self._describe_live(entry) for entry in page],
            "next": start + PAGE if len(entries) > start + PAGE else None,
        }

    async def list_models(self, before: EventPlace | None = None) -> View:
        """Return a page of registered models, the latest first."""
        events = await self._list_events(names=["ModelRegistered"], before=before, limit=PAGE + 1)
        holders = count_holders(await self._fetch_snapshot_or_none())
        rows = [describe_model(event, holders) for event in events[:PAGE]]
        return {"models": rows, "next": get_next(events)}

    async def list_executions(self, subject: str = "", before: EventPlace | None = None) -> View:
        """Return a page of requests, the latest first: of all, or of one client or model."""
        events = await self._list_events(
            subject, names=["RequestNodeSelections"], before=before, limit=PAGE + 1
        )
        return {
            "executions": await self._describe_executions(events[:PAGE]),
            "next": get_next(events),
        }

    async def _describe_executions(self, requests: Sequence[ChainEvent]) -> list[View]:
        ids = [event.args["executionId"] for event in requests]
        model_ids = dict.fromkeys(event.args["modelId"] for event in requests)
        histories = await asyncio.to_thread(self._index.list_of_executions, ids)
        times = await self._fetch_times(requests)
        found = await asyncio.gather(*map(self._find_model_name, model_ids))
        names = dict(zip(model_ids, found, strict=True))
        return [
            {
                **describe_execution(histories[event.args["executionId"]] or [event]),
                "model": names[event.args["modelId"]],
                "time": times.get(event.block_hash),
            }
            for event in requests
        ]

    async def search(self, text: str) -> View:
        """Return what begins with ``text``: executions, models (also by name) and accounts."""
        if not text:
            return {"results": []}
        found = await asyncio.to_thread(self._index.find_subjects, text[:80])
        results = []
        for subject, role in found:
            kind = "account"
            if len(subject) == 66:
                kind = "model" if role == "model" else "execution"
            name = await self._find_model_name(subject) if kind == "model" else ""
            results.append({"kind": kind, "id": subject, "name": name})
        return {"results": results}

    # ---- single objects ------------------------------------------------------------------------

    async def show_model(self, model_id: str) -> View:
        """Return a model's tasks and edges, with the holders of each task."""
        event = await self._find_registration(model_id)
        if event is None:
            raise Refused(f"no model {model_id:.80} is registered", status=404)
        holders = count_holders(await self._fetch_snapshot_or_none())
        totals, revenue, retired, labels = await asyncio.gather(
            asyncio.to_thread(self._index.sum_roles, model_id),
            asyncio.to_thread(self._index.sum_costs, model_id),
            self._list_events(model_id, names=["ModelRetired"], limit=1),
            self._fetch_labels(model_id),
        )
        requests = totals["model"].count - 1 - len(retired) if "model" in totals else 0
        tasks = [
            {
                "id": task["taskId"][2:],
                "label": labels[place] if place < len(labels) else f"task {place}",
                "vram_bytes": task["vramBytes"],
                "flops": task["flops"],
                "price_nano_usdc": task["priceNanoUsdc"],
                "holders": holders[task["taskId"][2:]],
            }
            for place, task in enumerate(event.args["tasks"])
        ]
        return {
            **describe_model(event, holders),
            "tasks": tasks,
            "edges": [[edge >> 16, edge & 0xFFFF] for edge in event.args["edges"]],
            "requests": requests,
            "revenue": revenue,
            "is_retired": bool(retired),
        }

    async def show_execution(self, execution_id: str) -> View:
        """Return everything that the chain says about an execution."""
        events = await self._list_history(execution_id)
        times, name = await asyncio.gather(
            self._fetch_times(events), self._find_model_name(events[0].args.get("modelId", ""))
        )
        receipt = find_receipt(execution_id, events)
        committed = [event for event in events if event.name == "ExecutionCommitted"]
        return {
            **describe_execution(events),
            "model": name,
            "time": times.get(events[0].block_hash),
            "receipt": None if receipt is None else asdict(receipt),
            "exposures": [
                unpack_word(word) for event in committed for word in event.args["exposures"]
            ],
            "events": [describe_event(event, times) for event in events],
        }

    async def show_gas(self, execution_id: str) -> View:
        """Return the gas of the transactions about an execution; some serve others as well."""
        names: dict[str, list[str]] = {}
        for event in await self._list_history(execution_id):
            names.setdefault(event.transaction, []).append(event.name)
        first = list(names)[:MOST_TRANSACTIONS]
        gas = await asyncio.gather(*map(self._net.chain.fetch_gas, first))
        return {
            "total": sum(used or 0 for used in gas),
            "is_complete": len(first) == len(names) and None not in gas,
            "transactions": [
                {"transaction": transaction, "events": names[transaction], "gas": used}
                for transaction, used in zip(first, gas, strict=True)
            ],
        }

    async def show_plan(self, execution_id: str) -> View:
        """Return who was chosen for each task, computed again from the seed.

        Members keep only the plans of recent executions: raises Unavailable for older ones.
        """
        await self._list_history(execution_id)
        return await self._look_up("plan", execution_id, lambda: self._check_plan(execution_id))

    async def _check_plan(self, execution_id: str) -> View:
        checked = await self._net.check_plan(execution_id)
        plan = checked.certificate.plan
        model = await self._net.fetch_model(plan.request.model_id)
        executors = plan.executors()
        return {
            "root": plan.root(),
            "opening": open_plan(plan),
            "seed": plan.seed,
            "snapshot": plan.request.snapshot_sequence,
            "difference": checked.difference,
            "signers": list(checked.signers),
            "tasks": [
                {
                    "label": task.label,
                    "executor": executors[place],
                    "fallbacks": [node for node in plan.tasks[place] if node != executors[place]],
                    "verifiable": place not in plan.unverifiable,
                }
                for place, task in enumerate(model.manifest.tasks)
            ],
        }

    async def show_verification(self, execution_id: str) -> View:
        """Return which tasks were drawn, and what the validators found.

        Raises Unavailable before the settlement, and when no member keeps it any more.
        """
        receipt = find_receipt(execution_id, await self._list_history(execution_id))
        if receipt is None:
            raise Unavailable(f"execution {execution_id} is not settled yet")
        return await self._look_up("draw", execution_id, lambda: self._fetch_evidence(receipt))

    async def _fetch_evidence(self, receipt: Receipt) -> View:
        evidence = await self._net.evidence(receipt)
        return {
            "seed": evidence.draw.seed,
            "steps": evidence.draw.steps,
            "verdicts": [verdict.model_dump(mode="json") for verdict in evidence.verdicts],
        }

    async def show_account(self, address: str, before: EventPlace | None = None) -> View:
        """Return what an account is, earned and lost, and a page of its events."""
        totals, events, snapshot = await asyncio.gather(
            asyncio.to_thread(self._index.sum_roles, address),
            self._list_events(address, before=before, limit=PAGE + 1),
            self._fetch_snapshot_or_none(),
        )
        entries = snapshot.entries if snapshot else ()
        entry = next((entry for entry in entries if entry.node == address), None)
        if not totals and entry is None:
            raise Refused(f"nothing on the chain concerns account {address:.80}", status=404)
        registered = await self._net.chain.call("nodes", "nodeOf", address)
        times = await self._fetch_times(events)
        return {
            "address": address,
            "totals": {role: asdict(total) for role, total in totals.items()},
            "node": {
                "live": entry is not None,
                "stake": registered["stake"],
                "vram_gb": registered["vramGb"],
                **({} if entry is None else self._describe_live(entry)),
                "tasks": [] if entry is None else await self._name_tasks(entry.resident),
            }
            if registered["active"] or entry is not None
            else None,
            "events": [describe_event(event, times) for event in events[:PAGE]],
            "next": get_next(events),
        }

    def _describe_live(self, entry: SnapshotEntry) -> View:
        return describe_node(entry) | {"uptime": self._uptimes.get_share(entry.node, time.time())}

    async def show_earnings(self, address: str) -> View:
        """Return what an account was paid, and what it lost, on each of the last days."""
        dates = list_dates(DAYS, time.time())
        blocks = await asyncio.gather(*map(self._find_first_block, dates))
        totals = await asyncio.gather(
            *(
                asyncio.to_thread(self._index.sum_roles, address, first_block=first, end_block=end)
                for first, end in zip(blocks, [*blocks[1:], None], strict=True)
            )
        )
        days = []
        for date, roles in zip(dates, totals, strict=True):
            payout, reward, slashed = (
                roles.get(role, Total(0, 0)) for role in ("payout", "reward", "slashed")
            )
            day = Day(date, payout.count, payout.amount, reward.amount, slashed.amount)
            days.append(asdict(day) | {"date": date.isoformat()})
        return {"days": days}

    async def _find_first_block(self, date: datetime.date) -> int:
        if date not in self._first_blocks:
            self._first_blocks[date] = await self._net.chain.find_block(get_begin_s(date))
            while len(self._first_blocks) > 2 * DAYS:
                del self._first_blocks[min(self._first_blocks)]
        return self._first_blocks[date]

    async def show_committee(self) -> View:
        """Return members, bonds, and the committee's latest randomness and events."""
        committee = await self._net.fetch_committee()
        bonds, snapshot, events, plans = await asyncio.gather(
            asyncio.gather(
                *(
                    self._net.chain.call("bonds", "bondOf", member.account)
                    for member in committee.members
                )
            ),
            self._fetch_snapshot_or_none(),
            self._list_events("committee", limit=PAGE),
            self._list_events(names=["PlanAccepted"], limit=RANDOMNESS),
        )
        times = await self._fetch_times(events)
        return {
            "configuration": committee.configuration,
            "quorum": committee.quorum,
            "group_key": committee.group_key,
            "epoch": snapshot.epoch if snapshot else None,
            "snapshot": snapshot.sequence if snapshot else None,
            "randomness": [
                {
                    "seed": event.args["seed"],
                    "execution": event.args["executionId"],
                    "block": event.block_number,
                }
                for event in plans
            ],
            "members": [
                {"address": member.account, "endpoint": member.endpoint, "bond": bond}
                for member, bond in zip(committee.members, bonds, strict=True)
            ],
            "events": [describe_event(event, times) for event in events],
        }

    # ---- lookups -------------------------------------------------------------------------------

    async def _list_events(self, subject: str = "", **limits: Any) -> list[ChainEvent]:
        return await asyncio.to_thread(self._index.list_events, subject, **limits)

    async def _list_history(self, execution_id: str) -> list[ChainEvent]:
        found = await asyncio.to_thread(self._index.list_of_executions, [execution_id])
        if not found[execution_id]:
            raise Refused(f"the chain knows no execution {execution_id:.80}", status=404)
        return found[execution_id]

    async def _find_registration(self, model_id: str) -> ChainEvent | None:
        events = await self._list_events(model_id, names=["ModelRegistered"], limit=1)
        return events[0] if events else None

    async def _find_model_name(self, model_id: str) -> str:
        event = await self._find_registration(model_id) if model_id else None
        return event.args["name"] if event else ""

    async def _fetch_labels(self, model_id: str) -> list[str]:
        try:
            model = await self._net.fetch_model(model_id)
        except SplitUpError:
            return []  # nobody stores its manifest; the chain has no labels
        return [task.label for task in model.manifest.tasks]

    async def _name_tasks(self, resident: Iterable[str]) -> list[View]:
        events = await self._list_events(names=["ModelRegistered"], limit=MODELS_SEARCHED)
        names = {
            task["taskId"][2:]: {
                "model": event.args["name"],
                "model_id": event.args["modelId"],
                "task": place,
            }
            for event in events
            for place, task in enumerate(event.args["tasks"])
        }
        return [{"id": task, **names.get(task, {})} for task in resident]

    async def _fetch_snapshot(self) -> Snapshot:
        snapshot = await self._fetch_snapshot_or_none()
        if snapshot is None:
            raise Unavailable(
                "which nodes are live is not known: the chain or the committee does not answer, or "
                "has not agreed on a first list yet"
            )
        return snapshot

    async def _fetch_snapshot_or_none(self) -> Snapshot | None:
        async with self._refreshing:
            if time.monotonic() - self._asked_at >= SNAPSHOT_S:
                try:
                    self._snapshot = await self._net.fetch_snapshot()
                    self._snapshot_at = time.monotonic()
                except Unavailable:  # the previous list is shown for a while, with its number
                    if time.monotonic() - self._snapshot_at >= SHOWN_S:
                        self._snapshot = None
                self._asked_at = time.monotonic()
            return self._snapshot

    async def _fetch_times(self, events: Iterable[ChainEvent]) -> dict[str, int | None]:
        hashes = list(dict.fromkeys(event.block_hash for event in events))
        times = await asyncio.gather(*(self._fetch_time(block_hash) for block_hash in hashes))
        return dict(zip(hashes, times, strict=True))

    async def _fetch_time(self, block_hash: str) -> int | None:
        try:
            return await self._net.chain.fetch_timestamp(block_hash)
        except Unavailable:
            return None

    async def _look_up(
        self, kind: str, execution_id: str, fetch: Callable[[], Awaitable[View]]
    ) -> View:
        """Return what was fetched before, or fetch it; neither changes any more."""
        key = (kind, execution_id)
        if key not in self._found:
            async with self._lookups:
                self._found[key] = await fetch()
        self._found.move_to_end(key)
        while len(self._found) > KEPT:
            self._found.popitem(last=False)
        return dict(self._found[key])
