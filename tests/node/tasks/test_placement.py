from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from splitup_node.committee.presence import Presence
from splitup_node.tasks.placement import (
    DemandEntry,
    ModelTask,
    Trade,
    Trader,
    choose_task,
    choose_unlisted,
    merge_demand,
    parse_demand,
)

from splitup.core import limits, tuning
from splitup.core.errors import PeerFault, SplitUpError, StorageUnavailable, Unavailable
from splitup.crypto.keys import generate_identity
from tests.builders import HANG_S
from tests.parameters import some_of

MODEL = "0x" + "aa" * 32


def make_entry(
    task: int, *, holders: int = 0, operators: int = -1, vram: int = 10, price: int = 5
) -> DemandEntry:
    """Return a task; each of its holders is an operator's only one unless said otherwise."""
    return DemandEntry(
        model_id=MODEL,
        task=task,
        task_id=hashlib.sha256(bytes([task])).hexdigest(),
        vram_bytes=vram,
        weights_bytes=1,
        price_nano_usdc=price,
        holders=holders,
        operators=holders if operators < 0 else operators,
    )


def choose(
    entries: list[DemandEntry], node: str = "0xa", free: int = 100, **without: set[Any]
) -> int:
    resident, excluded = without.get("resident", set()), without.get("excluded", set())
    entry = choose_task(node, entries, resident, excluded, free)
    return -1 if entry is None else entry.task


def test_the_least_served_task_is_chosen_then_the_best_paid() -> None:
    entries = [
        make_entry(0, holders=1, price=100),
        make_entry(1, price=5),
        make_entry(2, price=7),
    ]
    assert choose(entries) == 2
    assert choose(entries, resident={entries[2].task_id}) == 1
    assert choose(entries, excluded={entries[2].key, entries[1].key}) == 0


def test_s101_models_in_use_have_enough_operators_before_others_are_loaded() -> None:
    """Who registers tasks, at any price that nobody pays, takes no memory from them."""
    strangers = [make_entry(task, price=10**9) for task in range(1, 5)]
    used = make_entry(0, holders=2).model_copy(update={"used": True})
    assert choose([*strangers, used]) == 0
    enough = make_entry(0, holders=limits.MIN_OPERATORS).model_copy(update={"used": True})
    assert choose([*strangers, enough]) != 0
    for liars in range(3):  # of four members one may lie
        said = [*[[make_entry(0, holders=2)]] * 2, *[[used]] * liars]
        (merged,) = merge_demand(said, members=4)
        assert (merged.holders, merged.used) == (2, liars > 1)


def test_s95_what_one_model_says_of_a_task_says_nothing_of_anothers_words() -> None:
    entry = make_entry(0)
    false = entry.model_copy(update={"model_id": "0x" + "99" * 32, "price_nano_usdc": 9**9})
    found = choose_task("0xa", [false, entry], (), {false.key}, 100)
    assert found == entry
    assert choose_unlisted([false, entry], {"ff" * 32}, {false.key}) == ("ff" * 32,)


def test_a_task_that_does_not_fit_is_not_chosen() -> None:
    assert choose([make_entry(0, vram=101), make_entry(1, vram=100, holders=9)]) == 1
    assert choose([make_entry(0, vram=101)]) == -1


def test_tasks_of_models_that_are_gone_make_room_for_others() -> None:
    entries = [make_entry(0), make_entry(1)]
    gone, held, wanted = "ff" * 32, entries[0].task_id, entries[1].task_id
    assert choose_unlisted(entries, {gone, held}, ()) == (gone,)
    assert choose_unlisted(entries, {gone, held, wanted}, ()) == (), "nothing lacks memory"
    failed = {entries[1].key}
    assert choose_unlisted(entries, {gone, held}, failed) == (), "it cannot be loaded here"
    assert choose_unlisted([], {gone, held}, ()) == (), "no member has answered"
    full = [make_entry(0)] * (limits.MAX_DEMAND_TASKS - 1) + [make_entry(1)]
    assert choose_unlisted(full, {gone, held}, ()) == (), "the list may leave tasks out"


@given(st.permutations(range(8)))
def test_choice_does_not_depend_on_the_order_of_the_list(order: list[int]) -> None:
    assert choose([make_entry(n) for n in order]) == choose([make_entry(n) for n in range(8)])


def test_nodes_that_start_together_choose_different_tasks() -> None:
    entries = [make_entry(n) for n in range(8)]
    assert len({choose(entries, node=f"0x{n}") for n in range(20)}) >= 6


def test_s114_one_member_invents_no_tasks_and_understates_no_holders() -> None:
    """Nodes tried its tasks first, one after the other, so that no new model was ever loaded."""
    honest = [make_entry(0, holders=3), make_entry(1, holders=2)]
    false = make_entry(1, holders=0).model_copy(update={"vram_bytes": 1, "price_nano_usdc": 9**9})
    lie = [make_entry(2, price=9**9)] * 2 + [make_entry(0, holders=0), false]
    merged = merge_demand([lie, honest, honest, honest], 4)
    assert sorted(merged, key=lambda entry: entry.task) == honest
    assert merge_demand([lie], 4) == (), "it cannot be told from one that is honest"
    low = make_entry(0, holders=1)
    assert merge_demand([[low], [low], [make_entry(0, holders=3)]], 4) == (low,)
    assert merge_demand([[low]], 1) == (low,)


def test_malformed_demand_is_the_members_fault() -> None:
    good = make_entry(0).model_dump(mode="json")
    assert parse_demand([good]) == (make_entry(0),)
    many = [good] * (limits.MAX_DEMAND_TASKS + 1)
    for bad in (None, {}, [{}], [{**good, "holders": -1}], [{**good, "more": 1}], many):
        with pytest.raises(PeerFault):
            parse_demand(bad)


@pytest.mark.parametrize("seed", range(8))
def test_nodes_that_see_each_others_choices_cover_all_tasks(seed: int) -> None:
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


@pytest.mark.parametrize(
    ("others", "order"), [([make_entry(3, vram=101)], "blbblbbl"), ([], "blblbl")]
)
async def test_a_choice_waits_for_demand_that_includes_the_last_one(
    monkeypatch: pytest.MonkeyPatch, others: list[DemandEntry], order: str
) -> None:
    """A node with room for all takes a list that may be too old to know of the last load."""
    monkeypatch.setattr(tuning, "DEMAND_AGE_S", 0.01)
    monkeypatch.setattr(limits, "HEARTBEAT_PERIOD_S", HANG_S)
    happened: list[str] = []
    done = asyncio.Event()
    entries = [make_entry(task) for task in range(3)]
    resident: dict[str, int] = {}

    async def beat() -> None:
        happened.append("beat")
        presence._demand = (*entries, *others)
        presence._demand_changed.set()

    async def place(model_id: str, task: int) -> bool:
        happened.append("load")
        resident[entries[task].task_id] = task
        if len(resident) == len(entries):
            done.set()
        return True

    loaded_tasks = SimpleNamespace(
        programs=resident, free_bytes=100, place=place, is_waited_for=False
    )
    presence = make_presence(loaded_tasks)
    monkeypatch.setattr(presence, "_send_heartbeat", beat)
    working = [
        asyncio.create_task(presence.place_tasks()),
        asyncio.create_task(presence.send_heartbeats()),
    ]
    async with asyncio.timeout(HANG_S):
        await done.wait()
    for task in working:
        task.cancel()
    await asyncio.gather(*working, return_exceptions=True)
    assert "".join(word[0] for word in happened) == order


async def test_what_an_execution_waits_for_is_loaded_before_what_is_in_demand() -> None:
    loaded, entry = asyncio.Event(), make_entry(0)

    async def place(model_id: str, task: int) -> bool:
        loaded.set()
        return True

    loaded_tasks = SimpleNamespace(programs={}, free_bytes=100, place=place, is_waited_for=True)
    presence = make_presence(loaded_tasks)
    presence._demand = (entry,)
    placing = asyncio.create_task(presence.place_tasks())
    for _ in range(3):
        await asyncio.sleep(0)
        presence._demand_changed.set()
        while presence._demand_changed.is_set():  # noqa: ASYNC110 - until it was looked at
            await asyncio.sleep(0)
    assert not loaded.is_set()
    loaded_tasks.is_waited_for = False
    presence._demand_changed.set()
    async with asyncio.timeout(HANG_S):
        await loaded.wait()
    placing.cancel()
    await asyncio.gather(placing, return_exceptions=True)


@pytest.mark.parametrize("error", [StorageUnavailable, Unavailable, PeerFault])
async def test_s100_a_model_without_files_stops_nobody_from_loading_others(
    error: type[SplitUpError],
) -> None:
    other = "0x" + "bb" * 32
    dear = [make_entry(task, price=10**9) for task in (1, 2)]
    broken = [entry.model_copy(update={"model_id": other}) for entry in dear]
    tried: list[tuple[str, int]] = []
    loaded: dict[str, int] = {}

    async def place(model_id: str, task: int) -> bool:
        tried.append((model_id, task))
        if model_id == other:
            raise error("nobody has it")
        loaded[IDS[task]] = task
        return True

    presence = make_presence(
        SimpleNamespace(programs=loaded, free_bytes=100, place=place, is_waited_for=False)
    )
    presence._demand = (make_entry(0), *broken)
    placing = asyncio.create_task(presence.place_tasks())
    for _ in range(3):
        await asyncio.sleep(0)
        presence._demand_changed.set()
        while presence._demand_changed.is_set():  # noqa: ASYNC110 - until it was looked at
            await asyncio.sleep(0)
    placing.cancel()
    await asyncio.gather(placing, return_exceptions=True)
    assert len(tried) == 2 and tried[0][0] == other and tried[1] == (MODEL, 0)
    (problem,) = presence.list_problems()
    assert problem["reason"] == "nobody has it" and not problem["is_refused"]


def make_presence(loaded_tasks: SimpleNamespace) -> Presence:
    return Presence(
        generate_identity(),
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        loaded_tasks,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        get_committee=lambda: pytest.fail("nobody is asked"),
        get_determinism=lambda: "",
        is_leaving=lambda: pytest.fail("nobody is asked"),
    )


@dataclass
class Place:
    """One node of a simulated network, with its own moments and draws."""

    name: str
    operator: str
    slots: int
    held: set[int]
    trader: Trader = field(init=False)
    leaving: int | None = None  # the task that it has given notice of
    acts_s: float = 0.0  # when its notice, or its load, ends
    trade: Trade | None = None

    def __post_init__(self) -> None:
        self.trader = Trader(self.name)


class Made(NamedTuple):
    node: str
    given: int
    wanted: int


class World:
    """Nodes that trade tasks by lists that are a second old, in virtual time."""

    def __init__(self, seed: int, places: list[Place], tasks: int) -> None:
        self.random = random.Random(seed)
        self.places = places
        self.tasks = tasks
        self.now_s = 1e9 + seed
        self.trades: list[Made] = []
        self.left: list[int] = []  # operators of what was given, where there had been enough
        self.lists = [self.make_demand()]

    def make_demand(self) -> list[DemandEntry]:
        offers = [(p.operator, task) for p in self.places for task in p.held - {p.leaving}]
        who = {task: [o for o, held in offers if held == task] for task in range(self.tasks)}
        return [
            make_entry(task, holders=len(names), operators=len(set(names)))
            for task, names in who.items()
        ]

    @property
    def operators(self) -> list[int]:
        return [entry.operators for entry in self.make_demand()]

    def run(self, periods: int) -> int:
        """Advance the time; return how many trades were made."""
        before = len(self.trades)
        for _ in range(int(periods * tuning.TRADE_PERIOD_S)):
            self.now_s += 1
            self.lists = [*self.lists[-1:], self.make_demand()]
            for place in self.places:
                self.step(place, self.lists[0])
        return len(self.trades) - before

    def step(self, place: Place, demand: list[DemandEntry]) -> None:
        if place.trade is not None and self.now_s >= place.acts_s:
            if place.leaving is None:  # loaded
                place.held.add(place.trade.wanted.task)
                place.trade = None
            elif not place.trader.confirms(place.trade, demand):
                place.trader.note(place.trade, self.now_s, made=False)
                place.leaving = place.trade = None
            else:
                place.trader.note(place.trade, self.now_s, made=True)
                self.trades.append(Made(place.name, place.leaving, place.trade.wanted.task))
                place.held.remove(place.leaving)
                if place.trade.given.operators >= limits.MIN_OPERATORS:
                    self.left.append(self.operators[place.leaving])
                place.leaving = None
                place.acts_s = self.now_s + self.random.randint(1, 40)
        elif place.trade is None and len(place.held) < place.slots:
            resident = {IDS[task] for task in place.held}
            place.held.add(choose(demand, node=place.name, resident=resident))
        elif place.trade is None and place.trader.is_due(self.now_s):
            resident = {IDS[task] for task in place.held}
            trade = place.trader.choose(
                demand, resident, dict.fromkeys(resident, 10), (), self.now_s
            )
            if trade is not None:
                place.trade, place.leaving = trade, trade.given.task
                place.acts_s = self.now_s + tuning.TRADE_NOTICE_S


IDS = [make_entry(task).task_id for task in range(100)]


def make_places(seed: int, count: int, tasks: int, operators: int = 0) -> list[Place]:
    """Return full nodes that all hold the same eight to ten tasks: the worst there is."""
    pick = random.Random(seed)
    places = []
    for n in range(count):
        slots = pick.choice((8, 9, 10))
        operator = f"o{n % operators}" if operators else f"o{n}"
        places.append(Place(f"0x{seed}-{n}", operator, slots, set(range(slots))))
    return places


@pytest.mark.parametrize("seed", some_of(range(6), 0))
def test_full_nodes_trade_until_no_task_lacks_operators_and_then_stop(seed: int) -> None:
    world = World(seed, make_places(seed, 6, 12), 12)
    lacking = sum(max(0, limits.MIN_OPERATORS - count) for count in world.operators)
    assert lacking >= 6
    world.run(20)
    assert min(world.operators) >= limits.MIN_OPERATORS
    assert lacking <= len(world.trades) <= lacking + 4  # some begin before others have ended
    assert world.run(20) == 0
    for place in world.places:
        own = [trade for trade in world.trades if trade.node == place.name]
        assert not {trade.given for trade in own} & {trade.wanted for trade in own}  # none back


@pytest.mark.parametrize("seed", some_of(range(3), 2))
def test_nodes_adapt_to_a_new_model_and_to_a_node_that_left(seed: int) -> None:
    world = World(seed, make_places(seed, 6, 12), 12)
    world.run(20)
    world.tasks += 1
    assert world.operators[-1] == 0
    assert 3 <= world.run(20) <= 5 and min(world.operators) == limits.MIN_OPERATORS
    world.places.pop()
    assert world.run(20) <= 8 and min(world.operators) == limits.MIN_OPERATORS
    assert world.run(20) == 0


def test_a_hundred_full_nodes_do_not_all_trade_at_once() -> None:
    world = World(1, make_places(1, 100, 40), 40)
    lacking = sum(max(0, limits.MIN_OPERATORS - count) for count in world.operators)
    assert lacking >= 90
    world.run(6)
    assert min(world.operators) >= 2 and len(world.trades) <= 1.3 * lacking


@pytest.mark.parametrize("operators", some_of((1, 3), 3))
def test_several_nodes_of_one_operator_count_once(operators: int) -> None:
    """A node learns only after it has withdrawn a task whether its operator still holds it."""
    world = World(operators, make_places(operators, 9, 12, operators), 12)
    world.run(30)
    assert min(world.operators) == operators
    assert min(entry.holders for entry in world.make_demand()) >= 3
    assert world.run(15) == 0


def test_where_memory_is_scarce_verifiable_tasks_stay_verifiable() -> None:
    """Twenty tasks need three nodes each, and there is memory for thirty-six."""
    world = World(5, make_places(5, 4, 20), 20)
    sold = sum(count >= limits.MIN_OPERATORS for count in world.operators)
    world.run(20)
    assert sum(count >= limits.MIN_OPERATORS for count in world.operators) >= sold
    assert all(count >= limits.MIN_OPERATORS for count in world.left)
    assert world.run(20) == 0


def test_a_trade_needs_memory_a_gain_of_two_and_an_idle_task() -> None:
    mine, few = make_entry(0, holders=4), make_entry(1, holders=2, vram=11)

    def choose_trade(
        *demand: DemandEntry, room: int = 11, excluded: Collection[ModelTask] = ()
    ) -> Trade | None:
        trader = Trader("0xa")
        rooms = {entry.task_id: room for entry in demand if entry.task not in (1, 9)}
        found = [
            trader.choose(demand, {mine.task_id}, rooms, excluded, now_s)
            for now_s in range(int(100 * tuning.TRADE_PERIOD_S))
            if trader.is_due(now_s)
        ]
        assert 90 < len(found) <= 100  # once in a period
        return next((trade for trade in found if trade is not None), None)

    assert choose_trade(mine, few) == Trade(mine, few)
    assert choose_trade(mine, few, room=10) is None
    assert choose_trade(mine, few, excluded={few.key}) is None
    assert choose_trade(make_entry(9, holders=4), few) is None  # in use
    assert choose_trade(make_entry(0, holders=3), few) is None
    assert choose_trade(mine, make_entry(1, holders=3)) is None
    # the best served one goes, and of those in need the one that is worst off is chosen
    best, worst = make_entry(2, holders=9), make_entry(3, holders=1)
    assert choose_trade(mine, best, few) == Trade(best, few)
    rooms = {mine.task_id: 11}
    trader = Trader("0xa")
    drawn = [
        trader.choose([mine, few, worst], rooms, rooms, (), now_s)
        for now_s in range(int(50 * tuning.TRADE_PERIOD_S))
        if trader.is_due(now_s)
    ]
    assert {trade.wanted for trade in drawn if trade is not None} == {worst}


def test_s101_a_model_in_use_takes_the_memory_of_one_that_nobody_uses() -> None:
    """A node that is full of strangers' tasks, however few hold them, trades these."""
    strangers = [make_entry(task, holders=held) for task, held in ((1, 1), (2, 3))]
    used = make_entry(0, holders=2).model_copy(update={"used": True})
    rooms = dict.fromkeys((entry.task_id for entry in strangers), 10)
    trader = Trader("0xa")
    demand = [*strangers, make_entry(3), used]
    trade = None
    while trade is None:  # a third of its draws
        trader._epoch += 1
        assert trader._epoch < 100
        trade = trader.choose(demand, rooms, rooms, (), 1e9)
    assert (trade.given.task, trade.wanted.task) == (2, 0)
    left = [*strangers[:1], make_entry(2, holders=2), used]
    assert trader.confirms(trade, left)
    full = make_entry(0, holders=3).model_copy(update={"used": True})
    assert not trader.confirms(trade, [*strangers, full])


def test_a_trade_is_called_off_when_the_task_turns_out_to_be_needed() -> None:
    trader, trade = Trader("0xa"), Trade(make_entry(0, holders=4), make_entry(1, holders=1))
    assert trader.confirms(trade, [make_entry(0, holders=3), make_entry(1, holders=2)])
    assert not trader.confirms(trade, [make_entry(0, holders=2), make_entry(1, holders=1)])
    assert not trader.confirms(trade, [make_entry(0, holders=3), make_entry(1, holders=3)])
    assert not trader.confirms(trade, [make_entry(0, holders=3)])  # no longer registered
    scarce = Trade(make_entry(0, holders=2), make_entry(1))
    assert trader.confirms(scarce, [make_entry(0, holders=1), make_entry(1)])
    trader.note(trade, 100.0, made=True)
    rooms = {trade.given.task_id: 10}
    due = [t for t in range(100, 100 + int(tuning.TRADE_HOLD_S)) if trader.is_due(t)]
    assert len(due) >= 9
    for now_s in due:
        assert trader.choose([trade.given, trade.wanted], rooms, rooms, (), now_s) is None
