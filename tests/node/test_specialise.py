from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from splitup_node.presence import Presence
from splitup_node.specialise import DemandEntry, choose_task, merge_demand, parse_demand

from splitup import limits
from splitup.crypto.keys import generate_identity
from splitup.errors import PeerFault
from tests.builders import HANG_S

MODEL = "0x" + "aa" * 32


def make_entry(task: int, *, holders: int = 0, vram: int = 10, price: int = 5) -> DemandEntry:
    return DemandEntry(
        model_id=MODEL,
        task=task,
        task_id=hashlib.sha256(bytes([task])).hexdigest(),
        vram_bytes=vram,
        weights_bytes=1,
        price_micro_usdc=price,
        holders=holders,
    )


def choose(
    entries: list[DemandEntry], node: str = "0xa", free: int = 100, **without: set[str]
) -> int:
    resident, excluded = without.get("resident", set()), without.get("excluded", set())
    entry = choose_task(node, entries, resident, excluded, free)
    return -1 if entry is None else entry.task


def test_least_served_goes_first_then_the_best_paid() -> None:
    entries = [
        make_entry(0, holders=1, price=100),
        make_entry(1, price=5),
        make_entry(2, price=7),
    ]
    assert choose(entries) == 2
    assert choose(entries, resident={entries[2].task_id}) == 1
    assert choose(entries, excluded={entries[2].task_id, entries[1].task_id}) == 0


def test_what_does_not_fit_is_not_chosen() -> None:
    assert choose([make_entry(0, vram=101), make_entry(1, vram=100, holders=9)]) == 1
    assert choose([make_entry(0, vram=101)]) == -1


@given(st.permutations(range(8)))
def test_choice_does_not_depend_on_the_order_of_the_list(order: list[int]) -> None:
    assert choose([make_entry(n) for n in order]) == choose([make_entry(n) for n in range(8)])


def test_nodes_that_start_together_spread() -> None:
    entries = [make_entry(n) for n in range(8)]
    assert len({choose(entries, node=f"0x{n}") for n in range(20)}) >= 6


def test_lowest_count_of_all_members_counts() -> None:
    merged = merge_demand([[make_entry(0, holders=3)], [make_entry(0, holders=1)], []])
    assert [entry.holders for entry in merged] == [1]


def test_malformed_demand_is_the_members_fault() -> None:
    good = make_entry(0).model_dump(mode="json")
    assert parse_demand([good]) == (make_entry(0),)
    for bad in (None, {}, [{}], [{**good, "holders": -1}], [{**good, "more": 1}]):
        with pytest.raises(PeerFault):
            parse_demand(bad)


@pytest.mark.parametrize("seed", range(8))
def test_nodes_that_see_what_others_chose_leave_no_task_behind(seed: int) -> None:
    """Six nodes with room for nine of twelve tasks, all choosing at once, one per list."""
    nodes = [f"0x{seed}{n}" for n in range(6)]
    held: dict[str, set[int]] = {node: set() for node in nodes}
    for _ in range(9):
        count = Counter(task for tasks in held.values() for task in tasks)
        demand = [make_entry(task, holders=count[task]) for task in range(12)]
        ids = [entry.task_id for entry in demand]
        for node, tasks in held.items():
            tasks.add(choose(demand, node=node, resident={ids[task] for task in tasks}))
    assert min(Counter(task for tasks in held.values() for task in tasks).values()) >= 3


async def test_a_choice_waits_for_a_list_that_knows_of_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two loads a node tells that it has loaded, and asks once more."""
    monkeypatch.setattr(limits, "DEMAND_AGE_S", 0.01)
    monkeypatch.setattr(limits, "HEARTBEAT_PERIOD_S", HANG_S)
    happened: list[str] = []
    done = asyncio.Event()
    entries = [make_entry(task) for task in range(3)]
    resident: dict[str, int] = {}

    async def beat() -> None:
        happened.append("beat")
        presence._demand = tuple(entries)
        presence._demand_changed.set()

    async def ensure(model_id: str, task: int) -> None:
        happened.append("load")
        resident[entries[task].task_id] = task
        if len(resident) == len(entries):
            done.set()

    residents = SimpleNamespace(programs=resident, free_bytes=100, ensure=ensure)
    presence = Presence(
        generate_identity(),
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        residents,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        get_committee=lambda: pytest.fail("nobody is asked"),
        get_determinism=lambda: "",
    )
    monkeypatch.setattr(presence, "_send_heartbeat", beat)
    working = [asyncio.create_task(presence.specialise()), asyncio.create_task(presence.beat())]
    async with asyncio.timeout(HANG_S):
        await done.wait()
    for task in working:
        task.cancel()
    await asyncio.gather(*working, return_exceptions=True)
    assert "".join(word[0] for word in happened) == "b" + "lbb" * 2 + "l"
